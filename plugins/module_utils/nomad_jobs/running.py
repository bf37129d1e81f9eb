# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The jobs of a farm, at most so many nodes at once, from their registration to their end."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils import nomad
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_proof.listing import read_listing
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_proof.work import judge_work
from ansible_collections.gpufarm.core.plugins.module_utils.nomad_jobs.choice import (
    busy_finding,
    skipped,
    unhealthy_finding,
)
from ansible_collections.gpufarm.core.plugins.module_utils.nomad_jobs.jobspec import (
    PREFIX,
    TASK,
    group_name,
    job_of,
    leftovers,
)
from ansible_collections.gpufarm.core.plugins.module_utils.nomad_jobs.listing import judge_listing
from ansible_collections.gpufarm.core.plugins.module_utils.nomad_jobs.obstacles import (
    Obstacle,
    explain_placement,
    failed_task,
    newest_failures,
    not_started,
    telling_event,
)
from ansible_collections.gpufarm.core.plugins.module_utils.nomad_jobs.records import (
    JobResult,
    Pin,
    Settings,
    result_of,
)
from ansible_collections.gpufarm.core.plugins.module_utils.problem import Finding, Problem, problem_of
from ansible_collections.gpufarm.core.plugins.module_utils.text import one_line

# Within a run only: what says nothing of a GPU and is tried once more, and the code that it has where it is so again.
LOG_LOST = "log_lost"
NOT_STARTED = "not_started"
TRIED_AGAIN = {LOG_LOST: "log_unreadable", NOT_STARTED: "task_failed"}

# What a second attempt may say without a word on the task: who waits for a GPU has it as soon as the first has ended.
NO_WORD = ("gpu_busy", "node_full", "not_begun", "not_placed", "timeout")


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
    unproven: list[Problem] = dataclasses.field(default_factory=list)
    """Nodes to which the proof did not come."""

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


def prove(run: Run, work: Sequence[tuple[nomad.Node, Sequence[Pin]]]) -> dict[Pin, JobResult]:
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


def prove_node(run: Run, node: nomad.Node, pins: Sequence[Pin]) -> dict[Pin, JobResult]:
    """One node's job from its registration to its end, and another one for what says nothing of a GPU."""
    results: dict[Pin, JobResult] = {}
    for attempt, linger in enumerate(LINGER_S, start=1):
        again = [pin for pin in pins if pin not in results or results[pin].code in TRIED_AGAIN]
        if again and (not results or run.seconds_left() > linger):
            found = _prove_once(run, f"{PREFIX}{run.name}-{node['id']}-{attempt}", node, again, linger)
            for pin, result in found.items():
                if pin not in results or results[pin].code != NOT_STARTED or result.code not in NO_WORD:
                    results[pin] = result
    settled = {pin: TRIED_AGAIN.get(result.code or "", result.code) for pin, result in results.items()}
    return {pin: dataclasses.replace(result, code=settled[pin]) for pin, result in results.items()}


def _prove_once(run: Run, name: str, node: nomad.Node, pins: Sequence[Pin], linger: int) -> dict[Pin, JobResult]:
    if run.stop.is_set():
        raise Stopped
    if run.seconds_left() <= 0:
        return _not_begun(run, node, pins)
    gives_up_at = int(time.time() + run.seconds_left()) + 60
    refusal = None
    try:
        refusal = _register(run, job_of(name, node, pins, run.settings, gives_up_at=gives_up_at, linger=linger))
        if refusal:
            raise refusal
        return _watch(run, name, pins)
    finally:
        # A request that failed may have arrived all the same.
        error = purge(run.client, name)
        # Whose token may not run jobs may not purge them.
        if error and not refusal:
            run.left.append(
                problem_of(
                    node["name"],
                    "job_left",
                    f"that job {name} could not be purged ({error})",
                    "no job of this proof to be left",
                    f"run 'nomad job stop -purge {name}'; a later proof does it too, an hour from now",
                )
            )


def _not_begun(run: Run, node: nomad.Node, pins: Sequence[Pin]) -> dict[Pin, JobResult]:
    """Nothing is known of these GPUs, so none has failed; but their node is not proven."""
    found = f"that no job of this node had begun when the {run.settings.timeout:g} s were over"
    step = "raise 'timeout' or 'parallel', or prove fewer nodes at once"
    run.unproven.append(problem_of(node["name"], "not_begun", found, "a proof of every GPU", step))
    return {pin: skipped(pin, "not_begun", found, step) for pin in pins}


def _register(run: Run, body: Mapping[str, Any]) -> nomad.NomadError | None:
    """Nomad's refusal of the first request, after which there is no job."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            run.client.call("POST", "/v1/jobs", body)
            return None
        except nomad.NomadError as error:
            if attempt == 1 and error.status in (400, 403):
                return error
            if not error.transient or attempt == ATTEMPTS:
                raise
        run.pause(attempt * PAUSE_S)
    return None


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


def _out_of_time(run: Run, found: str) -> Finding:
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


def _watch(run: Run, name: str, pins: Sequence[Pin]) -> dict[Pin, JobResult]:
    """Wait for every task group of a job and judge each as soon as it has ended."""
    began = time.monotonic()
    job = _Watched({group_name(number): pin for number, pin in enumerate(pins)})
    results: dict[Pin, JobResult] = {}
    while True:
        trouble: nomad.NomadError | None = None
        verdicts: dict[str, JobResult] = {}
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


def _look(run: Run, name: str, job: _Watched) -> dict[str, JobResult]:
    """The verdicts that one look at a job gives, by task group."""
    answer = run.client.items(f"/v1/job/{name}/allocations", {}, job.index, min(LOOK_S, max(0.0, run.seconds_left())))
    job.stubs = {stub.get("TaskGroup") or "": stub for stub in answer.items}
    # A log may still grow when nothing else changes.
    job.index = 0 if job.ended.keys() & job.pending.keys() else answer.index
    verdicts: dict[str, JobResult] = {}
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


def _judge_exhausted(run: Run, pin: Pin, obstacle: Obstacle) -> JobResult:
    if obstacle.device:
        return _not_free(run, pin)
    return result_of(pin, obstacle.finding, "busy" if run.settings.skip_busy else "failed")


def _not_free(run: Run, pin: Pin, **more: Any) -> JobResult:
    """Why Nomad does not give this GPU; one that got sick meanwhile is as little free as one that somebody holds."""
    node: Mapping[str, Any] = {}
    with contextlib.suppress(nomad.NomadError):
        node = run.client.call("GET", f"/v1/node/{pin.node_id}") or {}
    for gpu in nomad.gpus_of_node(node):
        if gpu["uuid"] == pin.uuid and not gpu["healthy"]:
            return result_of(pin, unhealthy_finding(gpu), **more)
    holder = held_devices(run.client, pin.node_id).get((pin.node_id, pin.uuid))
    return result_of(pin, busy_finding(holder), "busy" if run.settings.skip_busy else "failed", **more)


def _judge_late(run: Run, job: _Watched, group: str, trouble: nomad.NomadError | None) -> JobResult:
    pin, stub, obstacle = job.pending[group], job.stubs.get(group), job.obstacles.get(group)
    if stub is not None and run.settings.computes:
        # What hangs in the driver is beyond any signal, and so its task may never end, though it has said all.
        with contextlib.suppress(nomad.NomadError):
            result = _judge_allocation(run, pin, stub, True)
            if result and result.benchmark:
                return result
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
    return result_of(pin, _out_of_time(run, found), allocation_id=stub.get("ID") if stub else None)


def _state_of(allocation: Mapping[str, Any]) -> Mapping[str, Any]:
    state: Mapping[str, Any] = (allocation.get("TaskStates") or {}).get(TASK) or {}
    return state


def assigned_devices(allocation: Mapping[str, Any]) -> list[str]:
    """UUIDs of the devices that an allocation's task was given."""
    resources = ((allocation.get("AllocatedResources") or {}).get("Tasks") or {}).get(TASK) or {}
    return [uuid for device in resources.get("Devices") or () for uuid in device.get("DeviceIDs") or ()]


def _judge_allocation(run: Run, pin: Pin, stub: Mapping[str, Any], last: bool) -> JobResult | None:
    """The verdict on a task that has ended; None while its log is not complete, unless this is the last look."""
    name = str(stub["ID"])
    try:
        return _judge(run, pin, name, last)
    except nomad.NomadError:
        raise
    except Exception as error:
        # What one task or its node says decides on no other.
        what = one_line(f"{type(error).__name__}: {error}")
        found = f"that what is told of the task could not be judged ({what})"
        finding = Finding("failed", found, "what Nomad and its tasks tell", "report it with this message")
        return result_of(pin, finding, allocation_id=name)


def _judge(run: Run, pin: Pin, name: str, last: bool) -> JobResult | None:
    # The list of a job's allocations does not tell their devices.
    allocation = run.client.call("GET", f"/v1/allocation/{name}") or {}
    assigned = assigned_devices(allocation)
    if allocation.get("AllocatedResources") and not assigned:
        # Older Nomad counts free GPUs before it looks for the one that was asked for (hashicorp/nomad#18364).
        return _not_free(run, pin, allocation_id=name)
    state = _state_of(allocation)
    listing, stderr = read_listing(""), ""
    if state.get("StartedAt"):
        try:
            listing = read_listing(_log(run, name, "stdout"))
            if listing.exit_code is None and not last:
                return None
            stderr = "" if listing.exit_code == 0 and listing.computed in (None, 0) else _log(run, name, "stderr")
        except nomad.NomadError as error:
            # 404: the file is not there yet.
            if (error.transient or error.status == 404) and not last:
                return None
            return result_of(pin, _unreadable(error), allocation_id=name, assigned=assigned)
    stopped = _why_stopped(allocation)
    finding, seen, isolated, benchmark = None, None, None, None
    # nvidia-smi ends with 6 where it finds no device; any other failure is one of nvidia-smi itself.
    if listing.exit_code in (0, 6):
        finding, seen, isolated = judge_listing(pin, assigned, listing, run.settings.driver)
        if finding is None and run.settings.computes:
            image = run.settings.image_to_run if run.settings.driver == "docker" else None
            finding, benchmark = judge_work(pin.uuid, listing, run.settings, stderr, image=image)
    elif listing.exit_code is None and state.get("StartedAt") and not (stopped or state.get("Failed")):
        found = f"a log of the task without its end, {LOG_WAIT_S:g} s after the task"
        finding = dataclasses.replace(_unreadable(None), code=LOG_LOST, found=found)
    else:
        events = state.get("Events") or ()
        finding = failed_task(events, stderr, stopped)
        if not stopped and not_started(events):
            finding = dataclasses.replace(finding, code=NOT_STARTED)
    return result_of(
        pin, finding, allocation_id=name, assigned=assigned, seen=seen, isolated=isolated, benchmark=benchmark
    )


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
