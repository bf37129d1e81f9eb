# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The pods of a farm, at most so many nodes at once, from their creation to their removal."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils import signals
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_proof.listing import Listing, read_listing
from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes import (
    Client,
    KubernetesError,
    Node,
    PodUse,
    in_parts,
    mapping,
    path_of,
    read_nodes,
    read_uses,
    text_of,
)
from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes_pods.choice import skipped
from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes_pods.judging import (
    STUCK,
    State,
    failed_pod,
    judge_log,
    read_state,
    refused_pod,
    seen_by,
    unplaced,
)
from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes_pods.podspec import (
    CONTAINER,
    GRACE_S,
    LABEL,
    leftovers,
    pod_name,
    pod_of,
)
from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes_pods.records import (
    PodResult,
    Settings,
    Slot,
    result_of,
)
from ansible_collections.gpufarm.core.plugins.module_utils.problem import Finding, Problem, problem_of

PAUSE_S = 1.0
ATTEMPTS = 4
# How long a GPU or memory may need to become free after another pod has ended.
FREE_WAIT_S = 10.0
# The log of a container comes to the disk of the node some time after it was written.
LOG_WAIT_S = 10.0
# After so long without an answer of the kubelet there is none to be waited for.
UNREADABLE_WAIT_S = 60.0
# After so long without a container the events of a pod are asked for the cause.
EVENTS_AFTER_S = 15.0
# How long the kubelet may take to end a container.
REMOVE_WAIT_S = 60.0
LOG_BYTES = 65536


@dataclasses.dataclass(frozen=True)
class Run:
    """What belongs to one run."""

    client: Client
    settings: Settings
    name: str
    deadline: float
    left: list[Problem] = dataclasses.field(default_factory=list)
    """Pods that could not be removed."""
    unproven: list[Problem] = dataclasses.field(default_factory=list)
    """Nodes to which the proof did not come."""

    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    @property
    def pods(self) -> tuple[str, ...]:
        return ("api", "v1", "namespaces", self.settings.namespace, "pods")

    @property
    def selector(self) -> str:
        return f"{LABEL}={self.name}"


@dataclasses.dataclass
class _Watched:
    """What is known of one pod while it runs."""

    slot: Slot
    name: str
    began: float
    since: dict[str, float] = dataclasses.field(default_factory=dict)
    """When something was first seen."""
    state: State | None = None
    unreadable: KubernetesError | None = None
    """Why its log could not be read the last time."""
    said: Listing | None = None
    """What it had said when its log was last read, once its GPUs were among it."""

    def lasts(self, what: str, seconds: float) -> bool:
        """Whether this has been so for so long; every look has to say it."""
        return time.monotonic() - self.since.setdefault(what, time.monotonic()) >= seconds

    def failed(self, finding: Finding) -> PodResult:
        """Its result without a word of its own about the end, but with the GPU that it had."""
        ended = self.state is None or self.state.ended
        return result_of(self.slot, finding, pod=self.name, ended=ended, **seen_by(self.said))


def prove(run: Run, nodes: Sequence[Sequence[Slot]]) -> dict[Slot, PodResult]:
    """Run the pods of all nodes and judge every GPU. Whatever happens, the pods are removed."""
    results: dict[Slot, PodResult] = {}
    number, refused = 0, False
    for begin in range(0, len(nodes), run.settings.parallel):
        slots = [slot for node in nodes[begin : begin + run.settings.parallel] for slot in node]
        watched = [_Watched(slot, pod_name(run.name, number + place), 0.0) for place, slot in enumerate(slots)]
        number += len(slots)
        if refused:
            found = "that no pod of this node began, because others could not be removed"
            results.update(_not_begun(run, slots, found, "remove the pods that are named, and run the proof again"))
            continue
        if run.seconds_left() <= 0:
            found = f"that no pod of this node had begun when the {run.settings.timeout:g} s were over"
            results.update(_not_begun(run, slots, found, "raise 'timeout' or 'parallel', or prove fewer nodes at once"))
            continue
        # Before the first pod, because a signal can come in between.
        try:
            try:
                results.update(_watch(run, _create(run, watched, results)))
            finally:
                # In a try of its own, because one can come here too.
                came = signals.hold()
        finally:
            left, refused = _remove(run, watched)
            run.left.extend(left)
        signals.release(came)
    return results


def _not_begun(run: Run, slots: Sequence[Slot], found: str, step: str) -> dict[Slot, PodResult]:
    """Nothing is known of these GPUs, so none has failed; but their nodes are not proven."""
    for node in dict.fromkeys(slot.node for slot in slots):
        run.unproven.append(problem_of(node, "not_begun", found, "a proof of every GPU", step))
    return {slot: skipped(slot, "not_begun", found, step) for slot in slots}


def _create(run: Run, watched: Sequence[_Watched], results: dict[Slot, PodResult]) -> list[_Watched]:
    """Those pods that Kubernetes took; why it took others not is their result."""
    path = path_of(*run.pods)
    seconds = int(run.seconds_left()) + GRACE_S
    gives_up_at = int(time.time()) + seconds
    taken: list[_Watched] = []
    waiting = list(watched)
    for attempt in range(1, ATTEMPTS + 1):
        again = []
        for part in in_parts(waiting):
            refused: list[tuple[_Watched, KubernetesError]] = []
            bodies = [
                pod_of(each.name, run.name, each.slot, run.settings, seconds=seconds, gives_up_at=gives_up_at)
                for each in part
            ]
            for each, answer in zip(part, run.client.create([(path, body) for body in bodies])):
                each.began = time.monotonic()
                # A request that failed may have arrived all the same.
                if not isinstance(answer, KubernetesError) or answer.reason == "AlreadyExists":
                    taken.append(each)
                # A quota that was changed at the same moment is a conflict (kubernetes/kubernetes#67761).
                elif (answer.transient or answer.reason == "Conflict") and attempt < ATTEMPTS:
                    again.append(each)
                else:
                    refused.append((each, answer))
            # What holds for all; a quota takes some of them, whichever come first.
            if len(refused) == len(part) and not taken and not results:
                raise refused[0][1]
            results.update({each.slot: result_of(each.slot, refused_pod(error.found)) for each, error in refused})
        waiting = again
        if not waiting:
            break
        time.sleep(attempt * PAUSE_S)
    return taken


def _watch(run: Run, watched: Sequence[_Watched]) -> dict[Slot, PodResult]:
    """Wait until every pod has said what it sees. None is removed before all have, so that each has another GPU."""
    results: dict[Slot, PodResult] = {}
    pending = list(watched)
    while pending:
        trouble = ""
        try:
            verdicts = _look(run, pending)
        except KubernetesError as error:
            if not error.transient:
                raise
            verdicts, trouble = {}, error.found
        late = run.seconds_left() <= 0
        warnings = _warnings(run) if late and not trouble and len(verdicts) < len(pending) else {}
        for each in list(pending):
            result = verdicts.get(each.name)
            if result is None and late:
                result = _late(run, each, trouble, warnings.get(each.name, ""))
            if result is not None:
                took = round(time.monotonic() - each.began, 1)
                results[each.slot] = dataclasses.replace(result, duration_s=took)
                pending.remove(each)
        if pending:
            time.sleep(max(0.05, min(PAUSE_S, run.seconds_left())))
    return results


def _pods(run: Run) -> dict[str, Mapping[str, Any]]:
    """The pods of this run that are there, by name."""

    def by_name(items: Iterator[dict[str, Any]]) -> dict[str, Mapping[str, Any]]:
        return {text_of(mapping(pod.get("metadata")).get("name")): pod for pod in items}

    return run.client.read(by_name, *run.pods, labelSelector=run.selector)


def _look(run: Run, pending: Sequence[_Watched]) -> dict[str, PodResult]:
    """The verdicts that one look gives, by pod."""
    pods = _pods(run)
    verdicts: dict[str, PodResult] = {}
    to_read: list[_Watched] = []
    silent: list[_Watched] = []
    now: dict[str, tuple[Node | None, list[PodUse] | None]] = {}
    for each in pending:
        pod = pods.get(each.name)
        each.state = read_state(pod) if pod is not None else None
        if each.state is not None and each.state.started:
            to_read.append(each)
            continue
        result = _judge_unstarted(run, each, now)
        if result is not None:
            verdicts[each.name] = result
        elif _silent(each):
            silent.append(each)
    # Where the engine cannot even begin with a pod, only its events say so.
    warnings = _warnings(run, "FailedCreatePodSandBox") if silent else {}
    for each in silent:
        if each.name in warnings:
            verdicts[each.name] = each.failed(failed_pod(warnings[each.name]))
    for part in in_parts(to_read):
        logs = run.client.calls([run.client.raw("get", _log_path(run, each.name)) for each in part])
        for each, log in zip(part, logs):
            result = _judge_started(run, each, log)
            if result is not None:
                verdicts[each.name] = result
    return verdicts


def _log_path(run: Run, pod: str) -> str:
    return path_of(*run.pods, pod, "log", container=CONTAINER, limitBytes=LOG_BYTES)


def _now(run: Run, name: str) -> tuple[Node | None, list[PodUse] | None]:
    """A node and what pods hold there, each as far as it is there and may be seen."""
    node = next(iter(read_nodes(run.client, name=name)), None)
    try:
        return node, read_uses(run.client, [name])[name]
    except KubernetesError as error:
        if error.reason != "Forbidden":
            raise
        return node, None


def _judge_unstarted(
    run: Run, each: _Watched, now: dict[str, tuple[Node | None, list[PodUse] | None]]
) -> PodResult | None:
    state, slot, pod = each.state, each.slot, each.name
    if state is None:
        # A list may be a little older than the answer to who created it.
        return each.failed(failed_pod("somebody else has removed it")) if each.lasts("gone", FREE_WAIT_S) else None
    if state.ended or state.waiting in STUCK:
        return each.failed(failed_pod(state.why))
    if state.unscheduled:
        if not each.lasts("unplaced", FREE_WAIT_S):
            return None
        if slot.node not in now:
            now[slot.node] = _now(run, slot.node)
        node, uses = now[slot.node]
        result = unplaced(slot, run.settings, state.unscheduled, pod, node=node, uses=uses)
        # Who held the GPU may have ended between the two looks, and then the pod has a place at once.
        just_free = result.code == "not_placed" and f"Insufficient {slot.resource}" in state.unscheduled
        return result if not just_free or each.lasts("just free", FREE_WAIT_S) else None
    return None


def _silent(each: _Watched) -> bool:
    """Whether a pod has a place and for so long no container; it is so once in that time."""
    if each.state is None or each.state.unscheduled or not each.lasts("unstarted", EVENTS_AFTER_S):
        return False
    each.since["unstarted"] = time.monotonic()
    return True


def _warnings(run: Run, reason: str | None = None) -> dict[str, str]:
    """Pods of the namespace to the last warning among their events, as far as the user may see them."""
    selector = "type=Warning" + (f",reason={reason}" if reason else "")

    def last(events: Iterator[dict[str, Any]]) -> dict[str, str]:
        found: dict[str, str] = {}
        for event in events:
            told = f"{text_of(event.get('reason'))}: {text_of(event.get('message'))}"
            found[text_of(mapping(event.get("involvedObject")).get("name"))] = " ".join(told.split())[-400:].rstrip(".")
        return found

    parts = ("api", "v1", "namespaces", run.settings.namespace, "events")
    try:
        return run.client.read(last, *parts, fieldSelector=selector)
    except KubernetesError:
        return {}


def _judge_started(run: Run, each: _Watched, log: str | KubernetesError) -> PodResult | None:
    state = each.state
    if state is None:
        return None
    each.unreadable = log if isinstance(log, KubernetesError) else None
    if not isinstance(log, KubernetesError):
        each.since.pop("unreadable", None)
        said = read_listing(log)
        if said.visible is not None:
            each.said = said
        result = judge_log(each.slot, said, log, state=state, pod=each.name, settings=run.settings)
        if result is None and len(log.encode("utf-8", "replace")) >= LOG_BYTES:
            result = each.failed(endless())
        if result is not None:
            return result
    elif log.reason == "Forbidden" or (not state.ended and each.lasts("unreadable", UNREADABLE_WAIT_S)):
        return each.failed(unreadable(log))
    if not state.ended or not each.lasts("ended", LOG_WAIT_S):
        return None
    if state.why or not isinstance(log, KubernetesError):
        computes = each.said and run.settings.on(each.slot).computes
        why = state.why or f"its log ends before {'its GPU has computed' if computes else 'nvidia-smi has'}"
        return each.failed(failed_pod(why))
    return each.failed(unreadable(log))


def unreadable(error: KubernetesError) -> Finding:
    step = "check that the apiserver reaches the kubelet of the node (port 10250)"
    if error.reason == "Forbidden":
        step = "give the user of the kubeconfig the right to get pods/log in the namespace"
    return Finding("log_unreadable", error.found, "the log of the pod, as 'kubectl logs' shows it", step)


def endless() -> Finding:
    found = f"a log without its end in the first {LOG_BYTES} bytes"
    step = "look at it with 'kubectl logs', and name an image whose programs say less"
    return Finding("log_unreadable", found, "what the pod has to say, and little else", step)


def _late(run: Run, each: _Watched, trouble: str, warning: str) -> PodResult:
    state = each.state
    if each.unreadable and not trouble:
        return each.failed(unreadable(each.unreadable))
    if trouble:
        found = f"no usable answer ({trouble})"
    elif state is None:
        found = "that the pod was not there"
    elif state.unscheduled:
        found = f"that Kubernetes had not placed the pod ({state.unscheduled})"
    else:
        why = "; ".join(filter(None, (state.why, warning)))
        found = f"that the pod was still {state.phase or 'in no phase'}" + (f" ({why})" if why else "")
    seconds, node = f"{run.settings.timeout:g} s", each.slot.node
    step = f"look at 'kubectl describe node {node}', and raise 'timeout' where images are large or nodes are many"
    return each.failed(Finding("timeout", f"{found} when the {seconds} were over", f"a verdict within {seconds}", step))


# --- removal ---------------------------------------------------------------------------------


def _remove(run: Run, watched: Sequence[_Watched]) -> tuple[list[Problem], bool]:
    """Remove the pods of this run and see them gone. Those that stay are problems; and whether it was not allowed."""
    deadline = time.monotonic() + REMOVE_WAIT_S
    left: dict[str, str] = {each.name: each.slot.node for each in watched}
    error, refused = "", False
    while True:
        try:
            _delete(run, list(left))
            left, error = _those_there(run, left), ""
        except KubernetesError as failure:
            error = failure.found
            # Of all else nobody knows how long it lasts, and a pod that is left holds a GPU.
            if failure.reason in ("Forbidden", "Unauthorized"):
                with contextlib.suppress(KubernetesError):
                    left = _those_there(run, left)
                refused = bool(left)
                break
        if not left or time.monotonic() >= deadline:
            break
        time.sleep(PAUSE_S)
    problems = [
        problem_of(
            node,
            "job_left",
            f"that pod {run.settings.namespace}/{name} could not be removed" + (f" ({error})" if error else ""),
            "no pod of this proof to be left",
            f"run 'kubectl -n {run.settings.namespace} delete pod {name}'; a later proof does it too, and it ends by "
            "itself unless it still waits for a place",
        )
        for name, node in left.items()
    ]
    return problems, refused


def _those_there(run: Run, left: Mapping[str, str]) -> dict[str, str]:
    there = _pods(run)
    return {name: node for name, node in left.items() if name in there}


def _delete(run: Run, names: Sequence[str]) -> None:
    try:
        run.client.delete(path_of(*run.pods, labelSelector=run.selector))
    except KubernetesError as error:
        if error.reason != "Forbidden":
            raise
        # Who may delete pods may not always delete all of a list.
        failed = delete_pods(run.client, run.settings.namespace, names)
        if len(failed) == len(names):
            raise failed[names[0]] from None


def delete_pods(client: Client, namespace: str, names: Sequence[str]) -> dict[str, KubernetesError]:
    """Delete pods by name; those that could not be."""
    failed: dict[str, KubernetesError] = {}
    for part in in_parts(names):
        paths = [path_of("api", "v1", "namespaces", namespace, "pods", name) for name in part]
        for name, answer in zip(part, client.calls([client.raw("delete", path) for path in paths])):
            if isinstance(answer, KubernetesError) and answer.reason != "NotFound":
                failed[name] = answer
    return failed


def remove_leftovers(
    client: Client, settings: Settings, now: float, check_mode: bool
) -> tuple[list[str], Mapping[str, KubernetesError]]:
    """Pods of killed runs: those that are (or would be) removed, and why others could not be."""
    parts = ("api", "v1", "namespaces", settings.namespace, "pods")
    names = client.read(lambda pods: leftovers(pods, now), *parts, labelSelector=LABEL)
    if check_mode:
        return names, {}
    failed = delete_pods(client, settings.namespace, names)
    return [name for name in names if name not in failed], failed
