# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where metrics were, none is left."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest
from ansible_collections.gpufarm.core.tests.unit.roles.role_helper import tasks_of, value, variables

IMPORT = "ansible.builtin.import_tasks"


def names(file: str) -> Iterator[str]:
    for task in tasks_of(f"gpu_health/tasks/{file}"):
        if IMPORT in task:
            yield from names(task[IMPORT])
        else:
            yield task["name"]


@pytest.mark.parametrize(
    ("file", "before"),
    [("install.yml", "Have the configuration of the gate"), ("absent.yml", "Have no timer running")],
)
def test_no_run_of_the_timer_writes_old_metrics_after_they_were_removed(file: str, before: str) -> None:
    """A run that has read the former configuration ends by writing where that says, and the timer begins another."""
    order = list(names(file))
    gone = "Have no metrics in a folder that is not wanted"
    wanted = [before, "Have no run of the gate going on", gone]
    # What is cut off behind the new configuration knows the former folder no more.
    earlier = [gone] if file == "install.yml" else []
    assert [name for name in order if name in wanted] == earlier + wanted
    known = order.index("Know where the gate writes metrics")
    assert all(known < order.index(name) for name in order if name.startswith(("Have the config", "Have nothing of")))


@pytest.mark.parametrize(
    ("state", "before", "wanted", "left"),
    [
        ("present", None, "/new", []),
        ("present", "", "/new", []),
        ("present", "/new", "/new", []),
        ("present", "/old", "/new", ["/old"]),
        ("present", "/old", "", ["/old"]),
        ("absent", "/old", "/new", ["/old", "/new"]),
        ("absent", None, "", []),
    ],
)
def test_folders_whose_metrics_nobody_writes_any_more(state: str, before: str | None, wanted: str, left: Any) -> None:
    read = {} if before is None else {"content": base64.b64encode(json.dumps({"textfile_dir": before}).encode())}
    given = {"gpu_health_state": state, "gpu_health_textfile_dir": wanted, "__gpu_health_before": read}
    assert sorted(value("__gpu_health_metrics_left", {**variables("gpu_health"), **given})) == sorted(left)


def test_a_removal_spares_no_metrics_whatever_the_state_is_that_was_wanted() -> None:
    (found,) = (
        task
        for task in tasks_of("gpu_health/tasks/absent.yml")
        if task.get("ansible.builtin.import_tasks") == "old_metrics.yml"
    )
    given = {"gpu_health_state": "present", "gpu_health_textfile_dir": "/srv/metrics", "__gpu_health_before": {}}
    told = value("__gpu_health_metrics_left", {**variables("gpu_health"), **given, **found["vars"]})
    assert told == ["/srv/metrics"]


def test_a_second_run_stops_nothing() -> None:
    (stop,) = [
        task for task in tasks_of("gpu_health/tasks/install.yml") if task["name"] == "Have no run of the gate going on"
    ]
    assert stop["when"] == "__gpu_health_metrics_left | length > 0"
