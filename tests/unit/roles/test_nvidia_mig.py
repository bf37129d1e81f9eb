# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which of the servers of Nomad wait for their turn before their GPUs are divided."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.gpufarm.core.tests.unit.roles import role_helper

DUE = {"__nvidia_mig_plan": {"gpus": [{"index": 0, "changes": []}, {"index": 1, "changes": ["enable MIG"]}]}}
DONE = {"__nvidia_mig_plan": {"gpus": [{"index": 0, "changes": []}]}}


@pytest.mark.parametrize(
    ("servers", "playing", "turns"),
    [
        (["s1", "s2", "s3"], ["s3", "s2", "s1", "gpu1"], ["s1", "s3"]),
        # One that has failed, or that --limit leaves out, is not waited for.
        (["s1", "s2", "s3"], ["s3", "s2", "gpu1"], ["s3"]),
        # Nobody is left to wait for.
        (["s1"], ["s1", "gpu1"], []),
        (["other1", "other2"], ["s1", "gpu1"], []),
    ],
)
def test_servers_take_turns(servers: list[str], playing: list[str], turns: list[str]) -> None:
    known: dict[str, Any] = {
        "groups": {"nomad_servers": servers}, "ansible_play_hosts": playing,
        "hostvars": {"s1": DUE, "s2": DONE, "s3": DUE, "gpu1": DUE, "other1": {}, "other2": {}},
    }  # fmt: skip
    assert role_helper.value("__nvidia_mig_turns", {**role_helper.variables("nvidia_mig"), **known}) == turns
    renamed = {**known, "groups": {"masters": servers}, "nomad_servers_group": "masters"}
    assert role_helper.value("__nvidia_mig_turns", {**role_helper.variables("nvidia_mig"), **renamed}) == turns
    none = {**known, "groups": {}}
    assert role_helper.value("__nvidia_mig_turns", {**role_helper.variables("nvidia_mig"), **none}) == []
