# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The job of a node: a task for each GPU, and its mark by which one that was left behind is known."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils import nomad
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_proof.script import compute, payload_of_task, script
from ansible_collections.gpufarm.core.plugins.module_utils.nomad_jobs.records import Pin, Settings

PREFIX = "gpufarm-verify-"


CREATED_BY = "gpufarm.core.nomad_gpu_job_verify"


META_CREATED_BY = "created_by"


META_DEADLINE = "gives_up_at"


TASK = "see"


LEFTOVER_AGE_S = 3600.0


DRIVERS = ("docker", "raw_exec")


# In the meta of the job, which all of its tasks have in their environment: so it is sent once for each node.
META_PAYLOAD = "measuring"


def compute_on(pin: Pin, settings: Settings) -> tuple[str, ...]:
    """What a task runs to have its GPU compute."""
    uuid = shlex.quote(pin.uuid)
    # Without a container every GPU is in reach, and one that Nomad gave to another is left alone.
    own = "" if settings.driver == "docker" else f' && [ "$NVIDIA_VISIBLE_DEVICES" = {uuid} ]'
    return compute(f"NOMAD_META_{META_PAYLOAD}", settings, f"--devices {uuid}", only_if=own)


def group_name(number: int) -> str:
    return f"gpu-{number}"


def job_of(
    name: str, node: nomad.Node, pins: Sequence[Pin], settings: Settings, *, gives_up_at: int, linger: int
) -> dict[str, Any]:
    """What C(POST /v1/jobs) takes, for all chosen GPUs of one node."""
    job: dict[str, Any] = {
        "ID": name,
        "Name": name,
        "Type": "batch",
        "Priority": settings.priority,
        "Datacenters": [node["datacenter"]],
        "Constraints": [{"LTarget": "${node.unique.id}", "Operand": "=", "RTarget": node["id"]}],
        "Meta": {META_CREATED_BY: CREATED_BY, META_DEADLINE: str(gives_up_at)},
        "TaskGroups": [_group(number, pin, settings, linger) for number, pin in enumerate(pins)],
    }
    if settings.computes:
        job["Meta"][META_PAYLOAD] = payload_of_task()
    if node["node_pool"]:
        job["NodePool"] = node["node_pool"]
    if settings.namespace:
        job["Namespace"] = settings.namespace
    return {"Job": job}


def _group(number: int, pin: Pin, settings: Settings, linger: int) -> dict[str, Any]:
    runs = script(linger, compute_on(pin, settings))
    config: dict[str, Any] = {"command": "/bin/sh", "args": ["-c", runs]}
    if settings.driver == "docker":
        # An entry point of the image could print anything, or run something else.
        config = {
            "image": settings.image_to_run,
            "network_mode": "none",
            "entrypoint": ["/bin/sh"],
            "command": "-c",
            "args": [runs],
        }
    # An image that says nothing of it may get no libcuda.
    environment = {"Env": {"NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}} if settings.computes else {}
    device = {
        "Name": "nvidia/gpu",
        "Count": 1,
        "Constraints": [{"LTarget": "${device.ids}", "Operand": "set_contains", "RTarget": pin.uuid}],
    }
    return {
        "Name": group_name(number),
        "Count": 1,
        "RestartPolicy": {"Attempts": 0, "Mode": "fail"},
        "ReschedulePolicy": {"Attempts": 0, "Unlimited": False},
        "EphemeralDisk": {"SizeMB": 10},
        "Tasks": [
            {
                "Name": TASK,
                "Driver": settings.driver,
                "Config": config,
                **environment,
                "KillTimeout": 1_000_000_000,
                "LogConfig": {"MaxFiles": 1, "MaxFileSizeMB": 1},
                "Resources": {"CPU": settings.cpu_mhz, "MemoryMB": settings.memory_to_have_mib, "Devices": [device]},
            }
        ],
    }


def leftovers(jobs: Iterable[Mapping[str, Any]], now: float) -> list[str]:
    """IDs of jobs that a killed run left behind, from C(GET /v1/jobs?meta=true); those of a running one stay."""
    found = []
    for job in jobs:
        meta = job.get("Meta") or {}
        if not str(job.get("ID") or "").startswith(PREFIX) or meta.get(META_CREATED_BY) != CREATED_BY:
            continue
        try:
            gives_up_at = float(meta.get(META_DEADLINE) or 0)
        except ValueError:
            gives_up_at = 0
        if max(float(job.get("SubmitTime") or 0) / 1e9 + LEFTOVER_AGE_S, gives_up_at) < now:
            found.append(str(job["ID"]))
    return sorted(found)
