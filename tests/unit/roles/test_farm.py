# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the role farm works out of a node that is to be upgraded."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ansible.parsing.dataloader import DataLoader
from ansible_collections.gpufarm.core.tests.unit.roles import role_helper

NO_RUN_BEFORE = {"rc": 1, "stdout": ""}


def gpus(*uuids: str | None) -> dict[str, Any]:
    found = [{"uuid": uuid, "status": "ok" if uuid else "lost", "status_message": f"{uuid} is"} for uuid in uuids]
    return {"nvidia_smi": {"available": True, "gpus": found}}


def value(name: str, **given: Any) -> Any:
    known = {**role_helper.variables("farm"), "inventory_hostname": "gpu1", "__farm_upgrade_left": NO_RUN_BEFORE}
    return role_helper.value(name, {**known, **given})


def before(key: str, **given: Any) -> Any:
    """Return what is noted of a node before it is changed."""
    path = role_helper.ROLES / "farm/tasks/upgrade_before.yml"
    tasks = DataLoader().load_from_file(str(path), trusted_as_template=True)
    (noted,) = [
        task["ansible.builtin.set_fact"]["__farm_upgrade_node"]
        for task in tasks[-1]["block"]
        if "__farm_upgrade_node" in task.get("ansible.builtin.set_fact", {})
    ]
    return value("noted", noted=noted[key], **given)


def test_a_lost_gpu_without_a_uuid_is_not_missed_for_ever() -> None:
    assert value("__farm_upgrade_gpus_now", ansible_facts=gpus("GPU-1", None)) == ["GPU-1"]
    noted = {"__farm_upgrade_node": {"gpus": ["GPU-1", "GPU-2"]}}
    assert value("__farm_upgrade_gpus_missing", ansible_facts=gpus("GPU-1", "GPU-2"), **noted) == []
    assert value("__farm_upgrade_gpus_missing", ansible_facts=gpus("GPU-1", None), **noted) == ["GPU-2"]


@pytest.mark.parametrize(
    ("left", "noted"),
    [
        (NO_RUN_BEFORE, ["GPU-2", "GPU-3"]),
        # A GPU has come since that run, and one of those is away.
        ({"rc": 0, "stdout": json.dumps({"gpus": ["GPU-1", "GPU-2"]})}, ["GPU-1", "GPU-2", "GPU-3"]),
    ],
)
def test_what_is_noted_of_a_node(left: dict[str, Any], noted: list[str]) -> None:
    assert before("gpus", ansible_facts=gpus("GPU-3", "GPU-2"), __farm_upgrade_left=left) == noted


def test_a_node_that_is_a_server_too() -> None:
    assert before("server", groups={"nomad_servers": ["s1", "gpu1"]}) is True
    assert before("server", groups={"nomad_servers": ["s1"]}) is False
    assert before("server", groups={}) is False
