# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Proof by a job: a task pinned to each GPU says what it sees, and that is compared with the GPU it was pinned to.

A node gets one batch job with one task group for each GPU. C(${device.ids}) of a device holds the IDs of its whole
group; Nomad's scheduler (1.11.3) also checks such a constraint against every single ID before it assigns one, so
C(set_contains) with one UUID leaves no choice. The node is pinned by a constraint of the job, not of the groups: Nomad
remembers for a class of nodes that a group does not fit, and would skip the right node after a look at a similar one.

The pure functions come first. C(prove) runs the jobs, at most so many nodes at once, and always purges them.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils import nomad
from ansible_collections.gpufarm.core.plugins.module_utils.text import clean

PREFIX = "gpufarm-verify-"
CREATED_BY = "gpufarm.core.nomad_gpu_job_verify"
META_CREATED_BY = "created_by"
META_DEADLINE = "gives_up_at"
TASK = "see"
LEFTOVER_AGE_S = 3600.0

DRIVERS = ("docker", "raw_exec")
# Nomad preempts only what is at least ten below, and nothing is below 1.
PRIORITY_MAX = 10

# Within a run only; what is still lost at its end has the code log_unreadable.
LOG_LOST = "log_lost"

VERDICTS = ("ok", "failed", "busy", "skipped")

# Seconds. The log comes to the disk of the node some time after the task has ended.
LOG_WAIT_S = 10.0
# How long a task stays after its last word. The log of a container that ends before Nomad's logger has begun to read is
# lost (hashicorp/nomad#6931); a lost log is no verdict on a GPU, so a second task on it stays longer.
LINGER_S = (2, 15)
# How long a GPU or memory may need to become free after another task of this job has ended.
FREE_WAIT_S = 5.0
LOOK_S = 2.0
PAUSE_S = 0.3
ATTEMPTS = 4

_MARK = "gpufarm-verify:"


def script(linger: int) -> str:
    """What the task runs: its environment, the platform, the GPUs, and how nvidia-smi ended as the last line."""
    return "\n".join(
        (
            # WSL's folder is not on the PATH of services.
            "PATH=$PATH:/usr/bin:/bin:/usr/lib/wsl/lib",
            "export PATH",
            # No braces around the variable: Nomad would put its own value there, whatever the task has.
            f'echo "{_MARK} visible $NVIDIA_VISIBLE_DEVICES"',
            f'case "$(uname -r)" in *[Mm]icrosoft*) echo "{_MARK} wsl";; esac',
            f'if [ -e /dev/dxg ]; then echo "{_MARK} wsl"; fi',
            "nvidia-smi -L",
            "code=$?",
            f'echo "{_MARK} end $code"',
            f"sleep {linger}",
            "exit $code",
        )
    )


# --- records ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Settings:
    """How the jobs run."""

    driver: str = "docker"
    image: str = "nvidia/cuda:12.8.1-base-ubuntu24.04"
    namespace: str | None = None
    priority: int = PRIORITY_MAX
    cpu_mhz: int = 100
    memory_mib: int = 256
    timeout: float = 600
    parallel: int = 50
    skip_busy: bool = True


@dataclasses.dataclass(frozen=True)
class Pin:
    """One GPU that a task is pinned to."""

    node_id: str
    node: str
    uuid: str
    model: str


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of one GPU. C(message) is for people, and None where all is well."""

    node: str
    uuid: str
    model: str
    verdict: str
    code: str | None = None
    assigned: Sequence[str] | None = None
    seen: Sequence[str] | None = None
    isolated: bool | None = None
    allocation_id: str | None = None
    duration_s: float | None = None
    expected: str | None = None
    found: str | None = None
    message: str | None = None


@dataclasses.dataclass(frozen=True)
class Problem:
    """One thing that is wrong; C(uuid) is None where it is the node's."""

    node: str
    uuid: str | None
    code: str
    expected: str
    found: str
    message: str


@dataclasses.dataclass(frozen=True)
class Finding:
    """What is wrong with a GPU, before it is put into words for people."""

    code: str
    found: str
    expected: str
    next_step: str


def problem_of_node(node: str, code: str, found: str, expected: str, next_step: str) -> Problem:
    text = f"Node {node}: found {found}. Expected: {expected}. Next step: {next_step}."
    return Problem(node, None, code, expected, found, text)


def result_of(pin: Pin, finding: Finding | None, verdict: str | None = None, **more: Any) -> Result:
    if finding is None:
        return Result(pin.node, pin.uuid, pin.model, verdict or "ok", **more)
    text = (
        f"Node {pin.node}, GPU {pin.uuid}: found {finding.found}. Expected: {finding.expected}. "
        f"Next step: {finding.next_step}."
    )
    return Result(
        pin.node,
        pin.uuid,
        pin.model,
        verdict or "failed",
        finding.code,
        expected=finding.expected,
        found=finding.found,
        message=text,
        **more,
    )


def problems_of(results: Iterable[Result]) -> list[Problem]:
    return [
        Problem(each.node, each.uuid, each.code or "", each.expected or "", each.found or "", each.message or "")
        for each in results
        if each.verdict == "failed"
    ]


# --- which GPUs ------------------------------------------------------------------------------


def select_nodes(
    nodes: Iterable[Mapping[str, Any]], wanted: Sequence[str] | None
) -> tuple[list[dict[str, Any]], list[Problem]]:
    """The nodes to prove, from C(GET /v1/nodes?resources=true), and what is wrong with those that were named.

    Without names these are all ready nodes with GPUs. A node that lost its data registers anew, and its former self
    stays listed as down; of several with one name the newest living one is meant.
    """
    if wanted is None:
        described = (nomad.describe_node(node) for node in nodes)
        return [node for node in described if node["gpus"] and node["status"] == "ready"], []
    names = list(dict.fromkeys(wanted))
    known = set(names)
    candidates: dict[str, list[tuple[bool, int, dict[str, Any]]]] = {}
    for node in nodes:
        for key in {str(node.get("Name")), str(node.get("ID"))} & known:
            living = node.get("Status") != "down"
            candidates.setdefault(key, []).append(
                (living, int(node.get("CreateIndex") or 0), nomad.describe_node(node))
            )
    selected: dict[str, dict[str, Any]] = {}
    problems = []
    for name in names:
        if name not in candidates:
            problems.append(
                problem_of_node(
                    name,
                    "node_missing",
                    "no such node in Nomad",
                    "a node of this name or ID",
                    "check that the Nomad client runs there, reaches the servers and has this name "
                    "('nomad node status')",
                )
            )
            continue
        node = max(candidates[name], key=lambda candidate: candidate[:2])[2]
        if node["status"] != "ready":
            problems.append(
                problem_of_node(
                    name,
                    "node_down",
                    f"status {node['status'] or 'unknown'}",
                    "status ready",
                    "look at the Nomad client on the node ('journalctl -u nomad') and at its way to the servers",
                )
            )
        elif not node["gpus"]:
            problems.append(
                problem_of_node(
                    name,
                    "no_devices",
                    "no GPU device at all",
                    "at least one GPU to run a job on",
                    "check nvidia-smi and the device plugin on the node, then restart Nomad there",
                )
            )
        else:
            selected[node["id"]] = node
    return list(selected.values()), problems


def pins_of(node: Mapping[str, Any]) -> list[Pin]:
    return [Pin(node["id"], node["name"], gpu["uuid"], gpu["model"]) for gpu in node["gpus"]]


def take_sample(
    pins: Sequence[Pin], sample: int | None, busy: Callable[[Pin], bool], choose: Callable[[Sequence[Pin], int], Any]
) -> list[Pin]:
    """So many of a node's GPUs, free ones first, in the order of the node."""
    if sample is None or sample >= len(pins):
        return list(pins)
    free = [pin for pin in pins if not busy(pin)]
    taken = set(choose(free, min(sample, len(free))))
    if len(taken) < sample:
        taken |= set(choose([pin for pin in pins if pin not in taken], sample - len(taken)))
    return [pin for pin in pins if pin in taken]


def closed_to_work(node: Mapping[str, Any]) -> str | None:
    """Why Nomad would not place anything on a ready node; None when it would."""
    if node["drain"]:
        return "the node is being drained"
    if node["eligibility"] != "eligible":
        return f"the node is {node['eligibility'] or 'of unknown eligibility'}"
    return None


def closed_finding(node: Mapping[str, Any], reason: str) -> Finding:
    return Finding(
        "not_placed",
        reason,
        "a node that takes work",
        f"find out why it was taken out, then run 'nomad node eligibility -enable {node['id']}'",
    )


def busy_finding(holder: Mapping[str, Any] | None) -> Finding:
    if holder is None:
        found = "held by an allocation that the token may not see"
    else:
        found = f"held by allocation {holder['id']} of job {holder['job_id']} in namespace {holder['namespace']}"
    return Finding("gpu_busy", found, "a free GPU", "run the proof again when that allocation has ended")


# --- the job ---------------------------------------------------------------------------------


def group_name(number: int) -> str:
    return f"gpu-{number}"


def job_of(
    name: str, node: Mapping[str, Any], pins: Sequence[Pin], settings: Settings, *, gives_up_at: int, linger: int
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
    if node["node_pool"]:
        job["NodePool"] = node["node_pool"]
    if settings.namespace:
        job["Namespace"] = settings.namespace
    return {"Job": job}


def _group(number: int, pin: Pin, settings: Settings, linger: int) -> dict[str, Any]:
    config: dict[str, Any] = {"command": "/bin/sh", "args": ["-c", script(linger)]}
    if settings.driver == "docker":
        # An entry point of the image could print anything, or run something else.
        config = {
            "image": settings.image,
            "network_mode": "none",
            "entrypoint": ["/bin/sh"],
            "command": "-c",
            "args": [script(linger)],
        }
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
                "KillTimeout": 1_000_000_000,
                "LogConfig": {"MaxFiles": 1, "MaxFileSizeMB": 1},
                "Resources": {"CPU": settings.cpu_mhz, "MemoryMB": settings.memory_mib, "Devices": [device]},
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


# --- what the task saw -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Listing:
    """What a task printed: each GPU with its MIG devices, its environment, and how nvidia-smi ended."""

    gpus: Sequence[tuple[str, tuple[str, ...]]]
    visible: str | None
    wsl: bool
    exit_code: int | None
    """None where the end of the log is missing."""


_GPU_LINE = re.compile(r"^GPU [0-9]+: .*\(UUID: (GPU-[^)\s]+)\)")
_MIG_LINE = re.compile(r"^\s*MIG .*\(UUID: (MIG-[^)\s]+)\)")
_END_LINE = re.compile(rf"^{_MARK} end ([0-9]+)$")


def read_listing(text: str) -> Listing:
    gpus: list[tuple[str, tuple[str, ...]]] = []
    visible, wsl, code = None, False, None
    for raw in text.splitlines():
        line = clean(raw.rstrip())
        gpu, mig, end = _GPU_LINE.match(line), _MIG_LINE.match(line), _END_LINE.match(line)
        if gpu:
            gpus.append((gpu.group(1), ()))
        elif mig and gpus:
            gpus[-1] = (gpus[-1][0], (*gpus[-1][1], mig.group(1)))
        elif line.startswith(f"{_MARK} visible"):
            visible = line[len(f"{_MARK} visible") :].strip()
        elif line == f"{_MARK} wsl":
            wsl = True
        elif end:
            code = int(end.group(1))
    return Listing(gpus, visible, wsl, code)


def devices_seen(listing: Listing, uuid: str) -> list[str]:
    """What of the listing competes with this device: MIG devices stand for their GPU where one of them is meant."""
    if not uuid.startswith("MIG-"):
        return [gpu for gpu, _migs in listing.gpus]
    return [device for gpu, migs in listing.gpus for device in (migs or (gpu,))]


def judge_listing(
    pin: Pin, assigned: Sequence[str], listing: Listing, driver: str
) -> tuple[Finding | None, list[str], bool | None]:
    """What is wrong, which devices were seen, and whether the task was kept to its own."""
    seen = devices_seen(listing, pin.uuid)
    wanted = pin.uuid.lower()
    there = {uuid.lower() for uuid in seen}
    separates = driver == "docker" and not listing.wsl
    isolated = separates and there == {wanted} if seen else None
    task = "the container" if driver == "docker" else "the task"
    if [uuid.lower() for uuid in assigned] != [wanted]:
        finding = Finding(
            "wrong_gpu",
            f"that Nomad assigned {', '.join(assigned) or 'no GPU'}",
            f"GPU {pin.uuid}, which the job is pinned to",
            "check with 'nomad node status -verbose' for two nodes or devices with the same ID",
        )
    elif not seen:
        finding = Finding(
            "gpu_not_seen",
            f"no GPU that nvidia-smi lists in {task}",
            f"GPU {pin.uuid} alone" if separates else f"GPU {pin.uuid}",
            "run nvidia-smi on the node, then check the container toolkit's mode and its CDI specification"
            if driver == "docker"
            else "run nvidia-smi on the node as the user of the Nomad client",
        )
    elif wanted not in there:
        finding = Finding(
            "wrong_gpu" if separates else "gpu_not_seen",
            f"that {task} sees {', '.join(seen)}",
            f"GPU {pin.uuid} alone" if separates else f"GPU {pin.uuid} among them",
            "restart Nomad on the node, and write the CDI specification anew, because GPUs changed after it was made",
        )
    elif separates and there != {wanted}:
        others = [uuid for uuid in seen if uuid.lower() != wanted]
        finding = Finding(
            "extra_gpus_seen",
            f"that {task} also sees {', '.join(others)}",
            f"GPU {pin.uuid} alone",
            "check that the image does not set NVIDIA_VISIBLE_DEVICES, that the container is not privileged, and the "
            "mode of the container toolkit",
        )
    elif driver != "docker" and (listing.visible or "").lower() != wanted:
        finding = Finding(
            "wrong_gpu",
            f"NVIDIA_VISIBLE_DEVICES={listing.visible or ''} in the task",
            f"NVIDIA_VISIBLE_DEVICES={pin.uuid}",
            "check the version of the device plugin, and that nothing else sets this variable",
        )
    else:
        return None, seen, isolated
    return finding, seen, isolated


# --- why a task did not run ------------------------------------------------------------------


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


def one_line(text: str, limit: int = 400) -> str:
    """The end of a text, because that is where programs say why they gave up."""
    flat = " ".join(clean(text).split()).rstrip(".")
    return flat if len(flat) <= limit else "..." + flat[-limit:]


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


# --- running ---------------------------------------------------------------------------------


class Stopped(Exception):
    """Somebody wants an end; what was registered is purged on the way out."""


@dataclasses.dataclass(frozen=True)
class Run:
    """What all threads of one run share."""

    client: nomad.Client
    settings: Settings
    name: str
    deadline: float
    stop: threading.Event = dataclasses.field(default_factory=threading.Event)
    left: list[Problem] = dataclasses.field(default_factory=list)
    """Jobs that could not be purged."""

    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def pause(self, seconds: float) -> None:
        if self.stop.wait(seconds):
            raise Stopped


def held_devices(client: nomad.Client, node_id: str | None = None) -> dict[tuple[str, str], dict[str, Any]]:
    """Node and UUID to the allocation that holds it, in every namespace that the token may see."""
    query = {**nomad.ALLOCATIONS_QUERY, "namespace": "*"}
    if node_id:
        query["filter"] = f'NodeID == "{node_id}" and ({query["filter"]})'
    return nomad.devices_in_use(client.items("/v1/allocations", query).items)


def prove(run: Run, work: Sequence[tuple[Mapping[str, Any], Sequence[Pin]]]) -> dict[Pin, Result]:
    """Run the jobs of all nodes and judge every pin. Whatever happens, the jobs are purged."""
    if not work:
        return {}
    with concurrent.futures.ThreadPoolExecutor(max_workers=min(run.settings.parallel, len(work))) as pool:
        # A signal can come as soon as the first thread works, so the guard is there before.
        try:
            futures = [pool.submit(prove_node, run, node, pins) for node, pins in work]
            # The first error that concerns the whole run ends it; Nomad would answer the same for every node.
            for future in concurrent.futures.as_completed(futures):
                future.result()
        except BaseException:
            # Leaving the pool waits for all of them, and so until every job is purged.
            run.stop.set()
            raise
    return {pin: result for future in futures for pin, result in future.result().items()}


def prove_node(run: Run, node: Mapping[str, Any], pins: Sequence[Pin]) -> dict[Pin, Result]:
    """One node's job from its registration to its end, and another one for logs that were lost."""
    results: dict[Pin, Result] = {}
    for attempt, linger in enumerate(LINGER_S, start=1):
        again = [pin for pin in pins if pin not in results or results[pin].code == LOG_LOST]
        if again and (not results or run.seconds_left() > linger):
            results.update(_prove_once(run, f"{PREFIX}{run.name}-{node['id']}-{attempt}", node, again, linger))
    return {pin: _settled(result) for pin, result in results.items()}


def _settled(result: Result) -> Result:
    return dataclasses.replace(result, code="log_unreadable") if result.code == LOG_LOST else result


def _prove_once(run: Run, name: str, node: Mapping[str, Any], pins: Sequence[Pin], linger: int) -> dict[Pin, Result]:
    if run.stop.is_set():
        raise Stopped
    if run.seconds_left() <= 0:
        return {pin: result_of(pin, _timeout(run, "that no job of this node had begun")) for pin in pins}
    gives_up_at = int(time.time() + run.seconds_left()) + 60
    try:
        _register(run, job_of(name, node, pins, run.settings, gives_up_at=gives_up_at, linger=linger))
        return _watch(run, name, pins)
    finally:
        # A request that failed may have arrived all the same.
        error = purge(run.client, name)
        if error:
            run.left.append(
                problem_of_node(
                    node["name"],
                    "job_left",
                    f"that job {name} could not be purged ({error})",
                    "no job of this proof to be left",
                    f"run 'nomad job stop -purge {name}'; a later proof does it too, an hour from now",
                )
            )


def _register(run: Run, body: Mapping[str, Any]) -> None:
    for attempt in range(1, ATTEMPTS + 1):
        try:
            run.client.call("POST", "/v1/jobs", body)
            return
        except nomad.NomadError as error:
            if not error.transient or attempt == ATTEMPTS:
                raise
        run.pause(attempt * PAUSE_S)


def purge(client: nomad.Client, name: str) -> str | None:
    """Stop a job and forget it. Why that did not work, or None; Nomad calls it done where there is no such job."""
    found = ""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            client.call("DELETE", f"/v1/job/{name}", query={"purge": "true"})
            return None
        except nomad.NomadError as error:
            found = error.found
            if not error.transient:
                break
        # Also when the run was stopped: this is the one thing that still has to be done.
        time.sleep(attempt * PAUSE_S)
    return found


def _timeout(run: Run, found: str) -> Finding:
    return Finding(
        "timeout",
        f"{found} when the {run.settings.timeout:g} s were over",
        f"a verdict within {run.settings.timeout:g} s",
        "look at the node with 'nomad node status', and raise 'timeout' where images are large or nodes are many",
    )


@dataclasses.dataclass
class _Watched:
    """What is known of one job while it runs."""

    pending: dict[str, Pin]
    stubs: dict[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    ended: dict[str, float] = dataclasses.field(default_factory=dict)
    obstacles: dict[str, Obstacle] = dataclasses.field(default_factory=dict)
    quiet_since: float | None = None
    index: int = 0


def _watch(run: Run, name: str, pins: Sequence[Pin]) -> dict[Pin, Result]:
    """Wait for every task group of a job and judge each as soon as it has ended."""
    began = time.monotonic()
    job = _Watched({group_name(number): pin for number, pin in enumerate(pins)})
    results: dict[Pin, Result] = {}
    while True:
        trouble: nomad.NomadError | None = None
        verdicts: dict[str, Result] = {}
        try:
            verdicts = _look(run, name, job)
        except nomad.NomadError as error:
            if not error.transient:
                raise
            trouble, job.index = error, 0
        if run.seconds_left() <= 0:
            for group in job.pending.keys() - verdicts.keys():
                verdicts[group] = _judge_late(run, job, group, trouble)
        for group, result in verdicts.items():
            results[job.pending.pop(group)] = dataclasses.replace(result, duration_s=round(time.monotonic() - began, 1))
        if not job.pending:
            return results
        run.pause(PAUSE_S)


def _look(run: Run, name: str, job: _Watched) -> dict[str, Result]:
    """The verdicts that one look at a job gives, by task group."""
    answer = run.client.items(f"/v1/job/{name}/allocations", {}, job.index, min(LOOK_S, max(0.0, run.seconds_left())))
    job.stubs = {stub.get("TaskGroup") or "": stub for stub in answer.items}
    # A log may still grow when nothing else changes.
    job.index = 0 if job.ended.keys() & job.pending.keys() else answer.index
    verdicts: dict[str, Result] = {}
    for group, pin in job.pending.items():
        if _ended(job.stubs.get(group)):
            waited = time.monotonic() - job.ended.setdefault(group, time.monotonic())
            result = _judge_allocation(run, pin, job.stubs[group], waited >= LOG_WAIT_S)
            if result:
                verdicts[group] = result
    unplaced = {group: pin for group, pin in job.pending.items() if group not in job.stubs}
    job.obstacles = _obstacles(run, name, unplaced) if unplaced else {}
    waiting = []
    for group, obstacle in job.obstacles.items():
        if obstacle.exhausted:
            waiting.append(group)
        else:
            verdicts[group] = result_of(unplaced[group], obstacle.finding)
    # What another task of this very job holds is free when it ends, and Nomad then tries again.
    running = any(not _ended(stub) for stub in job.stubs.values())
    job.quiet_since = None if running or not waiting else job.quiet_since or time.monotonic()
    if job.quiet_since and time.monotonic() - job.quiet_since > FREE_WAIT_S:
        verdicts.update((group, _judge_exhausted(run, unplaced[group], job.obstacles[group])) for group in waiting)
    return verdicts


def _ended(stub: Mapping[str, Any] | None) -> bool:
    return stub is not None and stub.get("ClientStatus") in ("complete", "failed", "lost")


def _obstacles(run: Run, name: str, unplaced: Mapping[str, Pin]) -> dict[str, Obstacle]:
    failures = newest_failures(run.client.call("GET", f"/v1/job/{name}/evaluations") or ())
    if failures is None:
        return {}
    return {
        group: explain_placement(failures[group], pin, run.settings.driver)
        for group, pin in unplaced.items()
        if group in failures
    }


def _judge_exhausted(run: Run, pin: Pin, obstacle: Obstacle) -> Result:
    verdict = "busy" if run.settings.skip_busy else "failed"
    if obstacle.device:
        holder = held_devices(run.client, pin.node_id).get((pin.node_id, pin.uuid))
        return result_of(pin, busy_finding(holder), verdict)
    return result_of(pin, obstacle.finding, verdict)


def _judge_late(run: Run, job: _Watched, group: str, trouble: nomad.NomadError | None) -> Result:
    pin, stub, obstacle = job.pending[group], job.stubs.get(group), job.obstacles.get(group)
    if stub is not None:
        event = telling_event(_state_of(stub).get("Events") or ())
        found = f"that the allocation was still {stub.get('ClientStatus')}" + (f" ({event})" if event else "")
        if _ended(stub):
            found = "no end of the task's log"
    elif trouble:
        found = f"no usable answer ({trouble.found})"
    elif obstacle:
        found = obstacle.finding.found
    else:
        found = "that Nomad had not placed the job"
    return result_of(pin, _timeout(run, found), allocation_id=stub.get("ID") if stub else None)


def _state_of(allocation: Mapping[str, Any]) -> Mapping[str, Any]:
    state: Mapping[str, Any] = (allocation.get("TaskStates") or {}).get(TASK) or {}
    return state


def assigned_devices(allocation: Mapping[str, Any]) -> list[str]:
    """UUIDs of the devices that an allocation's task was given."""
    resources = ((allocation.get("AllocatedResources") or {}).get("Tasks") or {}).get(TASK) or {}
    return [uuid for device in resources.get("Devices") or () for uuid in device.get("DeviceIDs") or ()]


def _judge_allocation(run: Run, pin: Pin, stub: Mapping[str, Any], last: bool) -> Result | None:
    """The verdict on a task that has ended; None while its log is not complete, unless this is the last look."""
    name = str(stub["ID"])
    # The list of a job's allocations does not tell their devices.
    allocation = run.client.call("GET", f"/v1/allocation/{name}") or {}
    assigned = assigned_devices(allocation)
    if allocation.get("AllocatedResources") and not assigned:
        # Older Nomad counts free GPUs before it looks for the one that was asked for (hashicorp/nomad#18364).
        holder = held_devices(run.client, pin.node_id).get((pin.node_id, pin.uuid))
        return result_of(pin, busy_finding(holder), "busy" if run.settings.skip_busy else "failed", allocation_id=name)
    state = _state_of(allocation)
    listing, stderr = read_listing(""), ""
    if state.get("StartedAt"):
        try:
            listing = read_listing(_log(run, name, "stdout"))
            if listing.exit_code is None and not last:
                return None
            stderr = "" if listing.exit_code == 0 else _log(run, name, "stderr")
        except nomad.NomadError as error:
            # 404: the file is not there yet.
            if (error.transient or error.status == 404) and not last:
                return None
            return result_of(pin, _unreadable(error), allocation_id=name, assigned=assigned)
    stopped = _why_stopped(allocation)
    finding, seen, isolated = None, None, None
    # nvidia-smi ends with 6 where it finds no device; any other failure is one of nvidia-smi itself.
    if listing.exit_code in (0, 6):
        finding, seen, isolated = judge_listing(pin, assigned, listing, run.settings.driver)
    elif listing.exit_code is None and state.get("StartedAt") and not (stopped or state.get("Failed")):
        found = f"a log of the task without its end, {LOG_WAIT_S:g} s after the task"
        finding = dataclasses.replace(_unreadable(None), code=LOG_LOST, found=found)
    else:
        finding = failed_task(state.get("Events") or (), stderr, stopped)
    return result_of(pin, finding, allocation_id=name, assigned=assigned, seen=seen, isolated=isolated)


def _why_stopped(allocation: Mapping[str, Any]) -> str | None:
    """Why a task ended that somebody else ended."""
    if allocation.get("ClientStatus") == "lost":
        return "the node was lost"
    wish = allocation.get("DesiredStatus") or "run"
    if wish == "run":
        return None
    reason = one_line(allocation.get("DesiredDescription") or "")
    return f"Nomad wanted it to {wish}" + (f", {reason}" if reason else "")


def _unreadable(error: nomad.NomadError | None) -> Finding:
    return Finding(
        "log_unreadable",
        error.found if error else "",
        "the log of the task, as 'nomad alloc logs' shows it",
        "give the token read-logs in the namespace"
        if error and error.status == 403
        else "check that the servers reach the Nomad client of the node, and that its disk is not full",
    )


def _log(run: Run, allocation: str, stream: str) -> str:
    """The task's whole stdout, or the end of its stderr."""
    query = {"task": TASK, "type": stream, "plain": "true", "follow": "false", "origin": "start"}
    if stream == "stderr":
        query.update(origin="end", offset="2000")
    return run.client.text(f"/v1/client/fs/logs/{allocation}", query)


def purge_leftovers(client: nomad.Client, now: float, check_mode: bool) -> tuple[list[str], list[str]]:
    """Jobs of killed runs: those that are (or would be) purged, and why others could not be."""
    names = leftovers(client.items("/v1/jobs", {"prefix": PREFIX, "meta": "true"}).items, now)
    if check_mode:
        return names, []
    purged, failed = [], []
    for name in names:
        error = purge(client, name)
        if error:
            failed.append(f"job {name} of a killed run could not be purged: {error}")
        else:
            purged.append(name)
    return purged, failed


# --- for people ------------------------------------------------------------------------------


def counts(results: Iterable[Result]) -> dict[str, int]:
    numbers = Counter(result.verdict for result in results)
    return {verdict: numbers[verdict] for verdict in VERDICTS}


def table(results: Iterable[Result], problems: Iterable[Problem], limit: int | None = None) -> str:
    """A line for each node in columns, failed nodes first; C(limit) counts those lines."""
    by_node: dict[str, list[Result]] = {}
    codes: dict[str, Counter[str]] = {}
    for result in results:
        by_node.setdefault(result.node, []).append(result)
        # Those of failures are among the problems.
        if result.code and result.verdict != "failed":
            codes.setdefault(result.node, Counter())[result.code] += 1
    failed = set()
    for problem in problems:
        by_node.setdefault(problem.node, [])
        codes.setdefault(problem.node, Counter())[problem.code] += 1
        failed.add(problem.node)
    ordered = sorted(by_node, key=lambda node: (node not in failed, node))
    rows = [("NODE", "GPUS", *(verdict.upper() for verdict in VERDICTS), "REASONS")]
    for node in ordered[:limit]:
        numbers = counts(by_node[node])
        reasons = (code if number == 1 else f"{code} ({number}x)" for code, number in codes.get(node, {}).items())
        figures = (str(numbers[verdict]) for verdict in VERDICTS)
        rows.append((node, str(len(by_node[node])), *figures, ", ".join(reasons) or "-"))
    last = len(rows[0]) - 1
    widths = [max(len(row[column]) for row in rows) for column in range(last)]
    lines = ["  ".join([*(row[column].ljust(widths[column]) for column in range(last)), row[last]]) for row in rows]
    if limit is not None and len(ordered) > limit:
        lines.append(f"... and {len(ordered) - limit} more nodes")
    return "\n".join(lines)
