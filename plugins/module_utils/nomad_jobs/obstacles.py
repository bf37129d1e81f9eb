# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Why a task did not run, or ended badly."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils.nomad_jobs.records import Pin
from ansible_collections.gpufarm.core.plugins.module_utils.problem import Finding
from ansible_collections.gpufarm.core.plugins.module_utils.text import one_line


@dataclasses.dataclass(frozen=True)
class Obstacle:
    """Why Nomad placed nothing."""

    finding: Finding
    exhausted: bool
    """Whether it would be placed if something else ended."""
    device: bool = False
    """Whether that is the GPU itself."""


_DRIVER_STEPS = {
    "docker": "check that Docker runs on the node, then 'nomad node status -verbose'",
    "raw_exec": "switch raw_exec on for the client (nomad_client_raw_exec), or use docker",
}


def explain_placement(metric: Mapping[str, Any], pin: Pin, driver: str) -> Obstacle:
    """Nomad's own account of a placement that failed, from C(FailedTGAllocs) of an evaluation."""
    filtered = dict(metric.get("ConstraintFiltered") or {})
    elsewhere = int(filtered.pop(f"${{node.unique.id}} = {pin.node_id}", 0))
    exhausted = sorted([*(metric.get("DimensionExhausted") or ()), *(metric.get("QuotaExhausted") or ())])
    evaluated = int(metric.get("NodesEvaluated") or 0)
    device = any(dimension.startswith("devices") for dimension in exhausted)
    if "missing drivers" in filtered:
        found = f"the task driver {driver} is missing or unhealthy on the node"
        next_step = _DRIVER_STEPS.get(driver, "check 'nomad node status -verbose'")
    elif "missing devices" in filtered:
        found = "it has no healthy GPU with this UUID on the node any more"
        next_step = "check nvidia-smi and the kernel log on the node, then restart Nomad there"
    elif filtered:
        found = ", ".join(sorted(filtered))
        next_step = "run 'nomad job plan' with a job of your own on that node to see the same"
    elif device:
        found = "the GPU is not free"
        next_step = "look for its holder with 'nomad node status'"
    elif exhausted:
        found = f"no room on the node, {', '.join(exhausted)} exhausted"
        next_step = "run the proof again when other work has ended, or lower cpu_mhz and memory_mib"
    elif elsewhere >= evaluated:
        found = "the node is not ready, not eligible, or not in its datacenter and pool"
        next_step = f"check 'nomad node status {pin.node_id}'"
    else:
        found = f"it does not say why ({evaluated} nodes evaluated)"
        next_step = "look at the server's log"
    held_up = bool(exhausted) and not filtered
    return Obstacle(
        Finding(
            "node_full" if held_up and not device else "not_placed",
            f"that Nomad did not place the job: {found}",
            f"a placement on node {pin.node_id} with this GPU",
            next_step,
        ),
        exhausted=held_up,
        device=held_up and device,
    )


def newest_failures(evaluations: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]] | None:
    """Task group to Nomad's account of why it was not placed; None while Nomad still evaluates.

    A blocked evaluation waits for something to change, which may be never.
    """
    failures: dict[str, Mapping[str, Any]] = {}
    decided = False
    for evaluation in sorted(evaluations, key=lambda each: int(each.get("ModifyIndex") or 0)):
        if evaluation.get("Status") == "pending":
            return None
        if evaluation.get("Status") in ("complete", "failed"):
            decided = True
            failures.update(evaluation.get("FailedTGAllocs") or {})
    return failures if decided else None


def telling_event(events: Iterable[Mapping[str, Any]]) -> str | None:
    """The event that says what went wrong; the last one often says only that there will be no other attempt."""
    told, rank = None, -1
    for event in events:
        kind, text = event.get("Type") or "", one_line(event.get("DisplayMessage") or "")
        details = event.get("Details") or {}
        if "Fail" in kind or details.get("oom_killed") == "true":
            weight = 3
        elif kind == "Terminated":
            weight = 2
        else:
            weight = 0 if kind in ("Not Restarting", "Killing", "Killed") else 1
        if text and weight >= rank:
            told, rank = text, weight
    return told


_OF_THE_GPU = re.compile(r"cdi|nvidia|nvml|prestart", re.IGNORECASE)


def not_started(events: Iterable[Mapping[str, Any]]) -> bool:
    """Whether Docker had the image and all else of a container, and then did not start it, for nothing of the GPU's.

    On a machine that is busy this happens to one in thousands.
    """
    texts = (event.get("DisplayMessage") or "" for event in events if event.get("Type") == "Driver Failure")
    return any(text.startswith("Failed to start container ") and not _OF_THE_GPU.search(text) for text in texts)


_FAILED_STEPS = (
    (
        re.compile(r"runtime .*not (found|allowed)|unknown.*runtime", re.IGNORECASE),
        "run 'nvidia-ctk runtime configure --runtime=docker' on the node, restart Docker, then Nomad",
    ),
    (
        re.compile(r"nvidia-smi:? .*not found", re.IGNORECASE),
        "check that the container toolkit is set up for Docker, because it brings nvidia-smi into the container",
    ),
    (
        re.compile(r"pull|manifest|no such image", re.IGNORECASE),
        "check the image's name, and that the node reaches its registry or has the image already",
    ),
    (
        re.compile(r"cdi|nvidia|nvml|prestart|oci", re.IGNORECASE),
        "check nvidia-smi, the container toolkit and its CDI specification on the node",
    ),
)


def failed_task(events: Iterable[Mapping[str, Any]], stderr: str, stopped: str | None) -> Finding:
    """Why a task ended badly, in Nomad's words and in its own."""
    parts = [stopped, telling_event(events)]
    end = one_line(stderr)
    if end:
        parts.append(f"its stderr ends with '{end}'")
    found = "; ".join(part for part in parts if part) or "a failed task without any event"
    # What the task itself says is nearer to the cause than the events are.
    steps = (step for pattern, step in _FAILED_STEPS for text in (end, found) if pattern.search(text))
    next_step = next(steps, "look at the task with 'nomad alloc status' and at the log of Nomad on the node")
    expected = "a task that lists its GPU and ends well"
    return Finding("task_failed", f"that the task failed ({found})", expected, next_step)
