# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which GPUs are to be proven."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes import (
    READY,
    Node,
    PodUse,
    Resource,
    may_be_shared,
    unhealthy,
)
from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes_pods.records import (
    PodResult,
    Settings,
    Slot,
    result_of,
)
from ansible_collections.gpufarm.core.plugins.module_utils.problem import Finding, Problem, problem_of
from ansible_collections.gpufarm.core.plugins.module_utils.text import first_of

TOLD_PODS = 5


def select_nodes(nodes: Iterable[Node], named: Sequence[str], others: bool) -> tuple[list[Node], list[Problem]]:
    """The nodes to prove, and what is wrong with nodes before any pod.

    Those are the named ones; with C(others) also all that have GPUs and take work, and those that are cordoned, of
    which only what they have is told.
    """
    by_name = {node["name"]: node for node in nodes}
    more = [name for name, node in by_name.items() if others and node["gpus_capacity"]]
    selected: list[Node] = []
    problems: list[Problem] = []
    for name in dict.fromkeys([*named, *more]):
        node = by_name.get(name)
        problem = _why_not(name, node)
        # Somebody has taken it out of work, so its state surprises nobody.
        told = name in named or bool(node and node["schedulable"])
        if node and not problem:
            selected.append(node)
            sick = [each for each in node["resources"] if each["allocatable"] < each["capacity"]]
            problems += [unhealthy(name, each) for each in sick if told]
        elif problem and told:
            problems.append(problem)
    return selected, problems


def _why_not(name: str, node: Node | None) -> Problem | None:
    if node is None:
        step = "check that the kubelet runs there and has this name ('kubectl get nodes')"
        return problem_of(name, "node_missing", "no such node in Kubernetes", "a node of this name", step)
    if node["status"] != READY:
        step = f"look at the kubelet on the node ('journalctl -u kubelet') and at 'kubectl describe node {name}'"
        return problem_of(name, "node_down", f"status {node['status']}", f"status {READY}", step)
    if not node["gpus_allocatable"]:
        found = "no GPU at all"
        if node["gpus_capacity"]:
            found = f"none of its {node['gpus_capacity']} GPUs allocatable"
        step = "run kubernetes_gpu_verify for this node, which tells the cause"
        return problem_of(name, "no_devices", found, "at least one GPU to run a pod on", step)
    return None


def plan(
    node: Node, uses: Sequence[PodUse], settings: Settings, *, own: int, named: bool, check_mode: bool
) -> list[tuple[Slot, PodResult | None]]:
    """Every GPU of a node, and what is known of it without a pod; None where one has to run.

    C(own) is how many nvidia-smi lists there, 0 where nobody knows.
    """
    planned: list[tuple[Slot, PodResult | None]] = []
    held = [[use for use in uses if resource["name"] in use["gpus"]] for resource in node["resources"]]
    frees = [
        max(0, resource["allocatable"] - sum(use["gpus"][resource["name"]] for use in holders))
        for resource, holders in zip(node["resources"], held)
    ]
    totals = [resource["allocatable"] for resource in node["resources"]]
    for resource, holders, free, chosen in zip(node["resources"], held, frees, _shares(frees, totals, settings.sample)):
        for slot in _slots(node, resource, own, named):
            known: PodResult | None = None
            if slot.number >= chosen:
                known = skipped(slot, "not_sampled", "that it is not part of the sample", "run without 'sample'")
            elif not node["schedulable"]:
                known = closed(slot)
            elif slot.number >= free:
                known = busy(slot, settings, _held(holders))
            elif check_mode:
                known = skipped(slot, "check_mode", "check mode, so no pod ran", "run without check mode")
            planned.append((slot, known))
    return planned


def _shares(frees: Sequence[int], totals: Sequence[int], sample: int | None) -> list[int]:
    """How many GPUs of each kind are in the sample: those that are free of all kinds first, then others."""
    if sample is None:
        return list(totals)
    shares = [0] * len(totals)
    for limits in (frees, totals):
        for place, limit in enumerate(limits):
            shares[place] += min(limit - shares[place], sample - sum(shares))
    return shares


def _slots(node: Node, resource: Resource, own: int, named: bool) -> list[Slot]:
    model, total = node["product"] or "", resource["allocatable"]
    shared = resource["shared"] or may_be_shared(node, own)
    return [Slot(node["name"], resource["name"], number, model, shared, total, named) for number in range(total)]


def _held(holders: Sequence[PodUse]) -> str:
    names = [f"{use['namespace']}/{use['name']}" for use in holders]
    return f"held by {'one of the pods ' if len(names) > 1 else 'pod '}{first_of(names, TOLD_PODS)}"


def busy(
    slot: Slot, settings: Settings, found: str, code: str = "gpu_busy", more: Mapping[str, str] | None = None
) -> PodResult:
    finding = Finding(code, found, "a free GPU", "run the proof again when other work has ended")
    return result_of(slot, finding, "busy" if settings.skip_busy else "failed", **(more or {}))


def closed(slot: Slot, **more: str) -> PodResult:
    if not slot.named:
        return skipped(slot, "node_closed", "that the node is cordoned", "name the node in 'nodes' to insist", **more)
    step = f"find out why it was taken out, then run 'kubectl uncordon {slot.node}'"
    return result_of(slot, Finding("not_placed", "that the node is cordoned", "a node that takes work", step), **more)


def skipped(slot: Slot, code: str, found: str, next_step: str, **more: str) -> PodResult:
    return result_of(slot, Finding(code, found, "a proof of every GPU", next_step), "skipped", **more)
