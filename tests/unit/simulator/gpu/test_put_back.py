# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""When a node that was taken out of work is let work again, with a Nomad of its own and the doubles of its GPUs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gpufarm.core.tests.unit.playbooks import playbook_helper
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils import kubernetes_helper

from .conftest import Node
from .test_accept import OPEN, Machine

MARKS = {
    "gpufarm_maintenance": "driver branch 580", "gpufarm_maintenance_by": "gpufarm.core",
    "gpufarm_maintenance_since": "2026-11-21T12:00:00Z", "gpufarm_maintenance_opens": "yes",
}  # fmt: skip


def enter(
    folder: Path, machine: Machine, part: str, host: dict[str, Any], variables: dict[str, Any], *groups: str
) -> tuple[int, str]:
    """Enter a part of the role node_maintenance on this machine, which has a folder /etc and units of its own."""
    role = {"name": "gpufarm.core.node_maintenance", "tasks_from": part}
    variables = {**variables, "node_maintenance_owner": "gpufarm.core"}
    play = {
        "hosts": "a", "gather_facts": False, "vars": variables, "tasks": [{"ansible.builtin.include_role": role}],
    }  # fmt: skip
    (folder / "parts.yml").write_text(yaml.safe_dump([play]), encoding="utf-8")
    hosts = {"hosts": {"a": {**machine.variables, **host}}}
    inventory = {"all": {"vars": OPEN, "children": dict.fromkeys(("gpu_nodes", *groups), hosts)}}
    extra = {"__nomad_local_url": "{{ agent_url }}", "__farm_upgrade_policy": "drain"}
    try:
        done = playbook_helper.run_playbook(
            folder, inventory, str(folder / "parts.yml"), "--extra-vars", json.dumps(extra),
            under=playbook_helper.of_its_own(folder / "inside"),
        )  # fmt: skip
    finally:
        machine.farm.agent.close()
    return done.returncode, " ".join((done.stdout + done.stderr).split())


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
    host = {"__farm_upgrade_node": {"gpus": machine.uuids[:before]}, **given}
    code, said = enter(tmp_path, machine, "put_back.yml", host, play["vars"])
    assert (code == 0) is opened, said
    assert machine.state == (("eligible", None) if opened else ("ineligible", "driver branch 580")), said
    assert ("found 1 GPUs. Expected: 2 GPUs." in said) is not opened, said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has a machine of its own")
@pytest.mark.parametrize(
    ("gpus", "marked", "opened"),
    [
        (2, False, True),
        # A probe has the last word.
        (3, False, False),
        # An earlier run has cordoned it for this, and it stays cordoned.
        (2, True, False),
    ],
)
def test_a_pod_that_comes_in_between_leaves_nothing_closed(
    node: Callable[[str], Node], tmp_path: Path, gpus: int, marked: bool, opened: bool
) -> None:
    machine, cluster = Machine("a", 0, node("h200-x2"), tmp_path), kubernetes_helper.Cluster(tmp_path)
    (device,) = machine.mine["NodeResources"]["Devices"]
    device["Attributes"] = {"driver_version": {"String": machine.node.profile["driver"]["version"]}}
    cluster.nodes = [kubernetes_helper.make_node(0, 2)]
    if marked:
        names = {"": "a new driver", "-by": "gpufarm.core", "-since": "2026-11-21T12:00:00Z", "-opens": "yes"}
        marks = {f"gpufarm.core/maintenance{name}": text for name, text in names.items()}
        cluster.nodes[0]["metadata"]["annotations"].update(marks)
        cluster.nodes[0]["spec"]["unschedulable"] = True

    def place(_request: Any) -> bool:
        if machine.state[0] == "ineligible" and not cluster.pods:
            cluster.pods = [kubernetes_helper.make_pod("late", "node00000", 1)]
        return False

    cluster.answer = place
    host = {"kubernetes_node_name": "node00000", "gpu_node_gpus": gpus, **playbook_helper.asked_of(cluster, tmp_path)}
    variables = {"node_maintenance_change": "a new driver"}
    try:
        code, said = enter(
            tmp_path, machine, "take_out.yml", host, variables, "kubernetes_nodes", "kubernetes_control_plane"
        )
    finally:
        cluster.close()
    refused = "Node node00000: 1 running pod, which a new driver would end: default/late (1 GPU). Expected: a node"
    assert code == 2 and refused in said.rpartition("fatal: [a]")[2], said
    assert machine.state == (("eligible", None) if opened else ("ineligible", "a new driver")), said
    assert ("In Nomad the node stays out of work: Could not find the requested service" in said) is (gpus == 3), said
    assert cluster.nodes[0]["spec"].get("unschedulable", False) is marked, said
