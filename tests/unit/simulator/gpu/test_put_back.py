# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How many GPUs a node must have that upgrade.yml lets work again."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gpufarm.core.tests.unit.playbooks import playbook_helper

from .conftest import Node
from .test_accept import OPEN, Machine

MARKS = {
    "gpufarm_maintenance": "driver branch 580", "gpufarm_maintenance_by": "gpufarm.core",
    "gpufarm_maintenance_since": "2026-11-21T12:00:00Z", "gpufarm_maintenance_opens": "yes",
}  # fmt: skip


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has a machine of its own")
@pytest.mark.parametrize(
    ("before", "given", "opened"),
    [
        (2, {}, False),
        # There was no driver.
        (0, {}, True),
        (2, {"gpu_node_gpus": 1}, True),
    ],
)
def test_a_node_that_comes_back_with_fewer_gpus_stays_out(
    node: Callable[[str], Node], tmp_path: Path, before: int, given: dict[str, Any], opened: bool
) -> None:
    machine = Machine("a", 0, node("h200-x2"), tmp_path)
    machine.node.hide("nvidia1")
    (device,) = machine.mine["NodeResources"]["Devices"]
    device["Instances"].pop()
    device["Attributes"] = {"driver_version": {"String": machine.node.profile["driver"]["version"]}}
    machine.mine["SchedulingEligibility"] = "ineligible"
    machine.farm.clients["id-0"].update(MARKS)
    machine.farm.register("id-0")
    (play,) = (
        play
        for play in yaml.safe_load((playbook_helper.ROOT / "playbooks/upgrade.yml").read_text(encoding="utf-8"))
        if play.get("name") == "GPU nodes"
    )
    back = {"name": "gpufarm.core.node_maintenance", "tasks_from": "put_back.yml"}
    tasks = [{"ansible.builtin.include_role": back, "vars": {"node_maintenance_owner": "gpufarm.core"}}]
    parts = tmp_path / "parts.yml"
    parts.write_text(
        yaml.safe_dump([{"hosts": "a", "gather_facts": False, "vars": play["vars"], "tasks": tasks}]), encoding="utf-8"
    )
    host = machine.variables | {"__farm_upgrade_node": {"gpus": machine.uuids[:before]}, **given}
    inventory = {"all": {"vars": OPEN, "children": {"gpu_nodes": {"hosts": {"a": host}}}}}
    extra = {"__nomad_local_url": "{{ agent_url }}", "__farm_upgrade_policy": "drain"}
    try:
        done = playbook_helper.run_playbook(
            tmp_path, inventory, str(parts), "--extra-vars", json.dumps(extra),
            under=playbook_helper.of_its_own(tmp_path / "inside"),
        )  # fmt: skip
    finally:
        machine.farm.agent.close()
    said = " ".join((done.stdout + done.stderr).split())
    assert (done.returncode == 0) is opened, said
    assert machine.state == (("eligible", None) if opened else ("ineligible", "driver branch 580")), said
    assert ("found 1 GPUs. Expected: 2 GPUs." in said) is not opened, said
