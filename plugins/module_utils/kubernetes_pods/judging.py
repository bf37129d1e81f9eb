# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a pod and its log say of the GPU that it was given."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils.gpu_proof.listing import (
    MARK,
    Listing,
    devices_in,
    own_device,
)
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_proof.work import empty_gpu, judge_work
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_verdicts import may_be
from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes import (
    Node,
    PodUse,
    listing,
    mapping,
    text_of,
)
from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes_pods.choice import busy, closed
from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes_pods.podspec import CONTAINER
from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes_pods.records import (
    PodResult,
    Settings,
    Slot,
    result_of,
)
from ansible_collections.gpufarm.core.plugins.module_utils.problem import Finding, Problem, problem_of
from ansible_collections.gpufarm.core.plugins.module_utils.text import one_line


@dataclasses.dataclass(frozen=True)
class State:
    """How far a pod is."""

    phase: str
    started: bool
    """Whether its container has been started, so that there may be a log."""
    ended: bool
    waiting: str
    """Why its container waits, in Kubernetes' words."""
    why: str
    """What went wrong, as far as the pod itself tells it."""
    unscheduled: str
    """Why the scheduler has no place for it."""


# Which Kubernetes tries again without end, and which the next try does not mend within a proof.
STUCK = frozenset(
    (
        "ImagePullBackOff",
        "ErrImageNeverPull",
        "InvalidImageName",
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
    )
)


def read_state(pod: Mapping[str, Any]) -> State:
    status = mapping(pod.get("status"))
    phase = text_of(status.get("phase"))
    states = [mapping(each) for each in listing(status.get("containerStatuses"))]
    # A service mesh may have put containers of its own before and beside it.
    state = next((mapping(each.get("state")) for each in states if each.get("name") == CONTAINER), {})
    waiting, running, ended = (mapping(state.get(key)) for key in ("waiting", "running", "terminated"))
    told = [
        text_of(each.get(key))
        for each in (waiting, ended, status)
        for key in ("reason", "message")
        # A container that ended by itself says nothing by this.
        if each.get(key) not in (None, "", "Completed", "Error")
    ]
    unscheduled = ""
    for condition in map(mapping, listing(status.get("conditions"))):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            unscheduled = text_of(condition.get("message")) or text_of(condition.get("reason"))
    started = bool(running) or bool(ended.get("startedAt"))
    # With StartError the runtime never came to it.
    started = started and text_of(ended.get("reason")) not in ("StartError", "ContainerCannotRun")
    return State(
        phase,
        started,
        phase in ("Succeeded", "Failed") or bool(ended),
        text_of(waiting.get("reason")),
        ": ".join(dict.fromkeys(one_line(part) for part in told)),
        one_line(unscheduled),
    )


_STEPS = (
    (re.compile(r"OOMKilled"), "raise memory_mib"),
    (
        re.compile(r"no runtime for|RuntimeHandler|runtime handler|unknown.*runtime", re.IGNORECASE),
        "run 'nvidia-ctk runtime configure' for the container engine of the node and restart it",
    ),
    (
        re.compile(r"nvidia-smi:? .*not found", re.IGNORECASE),
        "set runtime_class (mostly nvidia), or make NVIDIA's runtime the engine's default, because it brings "
        "nvidia-smi into the container",
    ),
    (
        re.compile(r"pull|manifest|image", re.IGNORECASE),
        "check the image's name, and that the node reaches its registry or has the image already",
    ),
    (
        re.compile(r"UnexpectedAdmissionError|Allocate failed|device plugin|unhealthy", re.IGNORECASE),
        "read the log of the device plugin's pod on the node and check nvidia-smi there, then restart the pod",
    ),
    (
        re.compile(r"cdi|nvidia|nvml|prestart|oci", re.IGNORECASE),
        "check nvidia-smi, the container toolkit and its CDI specification on the node",
    ),
)


def failed_pod(why: str) -> Finding:
    found = why or "a pod that failed without a word"
    step = next((step for pattern, step in _STEPS if pattern.search(found)), "look at it with 'kubectl describe pod'")
    return Finding("task_failed", f"that the pod failed ({found})", "a pod that lists its GPU and ends well", step)


def refused_pod(found: str) -> Finding:
    return Finding(
        "not_placed",
        f"that Kubernetes took no pod: {found}",
        "a pod with this GPU in the namespace",
        "look at the namespace's quota and policies, or set another 'namespace'",
    )


def unplaced(
    slot: Slot, settings: Settings, why: str, pod: str, *, node: Node | None, uses: Iterable[PodUse] | None
) -> PodResult:
    """The scheduler's own account of a pod for which it has no place, and the node and what pods hold there by now.

    C(None) is a node that is gone, and pods that the user may not see.
    """
    if node is not None and not node["schedulable"]:
        return closed(slot, pod=pod)
    if f"Insufficient {slot.resource}" in why:
        now = sum(each["allocatable"] for each in node["resources"] if each["name"] == slot.resource) if node else 0
        if now < slot.total:
            finding = Finding(
                "gpu_unhealthy",
                f"{now} of {slot.total} {slot.resource} left that pods can get ({why})",
                "a GPU that stays well during the proof",
                "look for a lost GPU with nvidia-smi and in the kernel log, and at the device plugin's pod on the node",
            )
            return result_of(slot, finding, pod=pod)
        own = f"{pod.rpartition('-')[0]}-"
        if uses is None or any(slot.resource in use["gpus"] and not use["name"].startswith(own) for use in uses):
            return busy(slot, settings, f"that another pod was faster ({why})", more={"pod": pod})
    if re.search(r"Insufficient (cpu|memory|ephemeral-storage)|Too many pods", why):
        return busy(slot, settings, f"no room on the node ({why})", "node_full", {"pod": pod})
    step = (
        f"look at 'kubectl describe node {slot.node}', and set 'tolerations' where its taints are meant to be tolerated"
    )
    finding = Finding("not_placed", f"that Kubernetes did not place the pod ({why})", f"a place on {slot.node}", step)
    return result_of(slot, finding, pod=pod)


def seen_by(said: Listing | None) -> dict[str, Any]:
    """What a list of GPUs tells of a result, whatever became of its pod."""
    if said is None:
        return {}
    seen = devices_in(said)
    isolated = len(seen) == 1 and not said.wsl if seen else None
    return {"seen": tuple(seen), "isolated": isolated, "uuid": own_device(said) or ""}


_OF_THE_SCRIPT = re.compile(rf"{MARK}|GPU [0-9]+: |\s+MIG |\s*$")


def judge_log(slot: Slot, said: Listing, text: str, *, state: State, pod: str, settings: Settings) -> PodResult | None:
    """The verdict on what a container printed; None while it has not said all."""
    if said.exit_code is None:
        return None
    settings = settings.on(slot)
    seen, own = devices_in(said), own_device(said)
    # What was said on its stderr is in the log as well.
    words = [one_line(line) for line in text.splitlines() if not _OF_THE_SCRIPT.match(line)]
    finding, benchmark = None, None
    # nvidia-smi ends with 6 where it finds no device; any other failure is one of nvidia-smi itself.
    if said.exit_code not in (0, 6):
        told = [f"nvidia-smi -L ended with {said.exit_code}", *words[-1:], state.why]
        finding = failed_pod("; ".join(part for part in told if part))
    elif not seen:
        finding = Finding(
            "gpu_not_seen",
            "no GPU that nvidia-smi lists in the container",
            f"one {slot.resource}",
            "set runtime_class if NVIDIA's runtime is not the engine's default, then check the container toolkit's "
            "mode and its CDI specification on the node",
        )
    elif len(seen) > 1 and not said.wsl:
        finding = Finding(
            "extra_gpus_seen",
            f"that the container sees {', '.join(seen)}",
            f"one {slot.resource} alone",
            "check that the image does not set NVIDIA_VISIBLE_DEVICES, the device plugin's list strategy, and the mode "
            "of the container toolkit",
        )
    elif own in said.empty:
        finding = empty_gpu(str(own))
    elif settings.computes and own is None:
        finding = Finding(
            "no_answer",
            f"that the container sees {', '.join(seen)}, and nothing says which is its own",
            "one GPU to compute on",
            "run nvidia_gpu_benchmark on the node, and prove it here at level list",
        )
    elif settings.computes and own is not None:
        image, stderr = settings.image_to_run, "\n".join(words)
        finding, benchmark = judge_work(own, said, settings, stderr, image=image)
    return result_of(slot, finding, **seen_by(said), pod=pod, ended=state.ended, benchmark=benchmark)


# Of a result whose code becomes another.
KEPT = ("uuid", "seen", "isolated", "pod", "duration_s", "benchmark", "ended")


def judge_together(
    slots: Mapping[Slot, PodResult], own: Mapping[str, Collection[str]], unknown: Mapping[str, Collection[str]]
) -> tuple[dict[Slot, PodResult], list[Problem]]:
    """What only all pods of a node together show: a GPU that two have, one of another node, one that nobody has.

    What else is wrong with a pod or its GPU makes no difference. C(own) are the UUIDs that nvidia-smi lists on a node,
    where they are known; C(unknown), in small letters, those whose MIG devices nobody tells: both may be there.
    """
    judged = dict(slots)
    problems: list[Problem] = []
    by_node: dict[str, list[Slot]] = {}
    for slot in slots:
        by_node.setdefault(slot.node, []).append(slot)
    for node, here in by_node.items():
        known = {uuid.lower(): uuid for uuid in own.get(node, ())}
        # Of a GPU that is shared on purpose several pods see the same, and what a pod has that ended others may get.
        times = Counter(slots[slot].uuid for slot in here if not (slot.shared or slots[slot].ended))
        for slot in here:
            result = slots[slot]
            if not result.uuid:
                continue
            finding = None
            if times[result.uuid] > 1 and not result.ended:
                finding = Finding(
                    "wrong_gpu",
                    f"GPU {result.uuid} in {times[result.uuid]} pods at once",
                    "a GPU of its own for each",
                    "restart the device plugin's pod on the node, and look whether two plugins run there",
                )
            elif known and not may_be(result.uuid, known, unknown.get(node, ())):
                finding = Finding(
                    "wrong_gpu",
                    f"GPU {result.uuid} in a pod",
                    f"one of the {len(known)} that nvidia-smi lists on the node",
                    "look whether the host and the node of this name are the same machine, and write the CDI "
                    "specification anew",
                )
            if finding:
                judged[slot] = result_of(slot, finding, **{key: getattr(result, key) for key in KEPT})
        problems += _never_seen(node, [judged[slot] for slot in here], known)
    return judged, problems


def _never_seen(node: str, results: Sequence[PodResult], known: Mapping[str, str]) -> Iterable[Problem]:
    """GPUs that no pod was given though all that Kubernetes has were handed out."""
    if any(result.code == "wrong_gpu" or result.ended or not result.uuid for result in results):
        return []
    seen = {result.uuid.lower() for result in results}
    return [
        problem_of(
            node,
            "gpu_not_seen",
            f"{len(results)} pods without it",
            f"a pod that is given GPU {uuid}",
            "restart the device plugin's pod on the node, because it looks for GPUs only when it starts",
            uuid=uuid,
        )
        for key, uuid in known.items()
        if key not in seen
    ]
