# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which GPUs are to be proven."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils import nomad
from ansible_collections.gpufarm.core.plugins.module_utils.nomad_jobs.records import JobResult, Pin, result_of
from ansible_collections.gpufarm.core.plugins.module_utils.problem import Finding, Problem, problem_of


def select_nodes(
    nodes: Iterable[Mapping[str, Any]], wanted: Sequence[str] | None
) -> tuple[list[nomad.Node], list[Problem]]:
    """The nodes to prove, from C(GET /v1/nodes?resources=true), and what is wrong with those that were named.

    Without names these are all ready nodes with GPUs. A node that lost its data registers anew, and its former self
    stays listed as down; of several with one name the newest living one is meant.
    """
    described = map(nomad.describe_node, nodes)
    if wanted is None:
        return [node for node in described if node["gpus"] and node["status"] == "ready"], []
    names = list(dict.fromkeys(wanted))
    known = set(names)
    newest: dict[str, nomad.Node] = {}
    for node in described:
        for key in {node["name"], node["id"]} & known:
            newest[key] = max(newest.get(key, node), node, key=nomad.rank)
    selected: dict[str, nomad.Node] = {}
    problems = []
    for name in names:
        if name not in newest:
            problems.append(
                problem_of(
                    name,
                    "node_missing",
                    "no such node in Nomad",
                    "a node of this name or ID",
                    "check that the Nomad client runs there, reaches the servers and has this name "
                    "('nomad node status')",
                )
            )
            continue
        node = newest[name]
        if node["status"] != "ready":
            problems.append(
                problem_of(
                    name,
                    "node_down",
                    f"status {node['status'] or 'unknown'}",
                    "status ready",
                    "look at the Nomad client on the node ('journalctl -u nomad') and at its way to the servers",
                )
            )
        elif not node["gpus"]:
            problems.append(
                problem_of(
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


def pins_of(node: nomad.Node) -> list[Pin]:
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


def closed_to_work(node: nomad.Node) -> str | None:
    """Why Nomad would not place anything on a ready node; None when it would."""
    if node["drain"]:
        return "the node is being drained"
    if node["eligibility"] != "eligible":
        return f"the node is {node['eligibility'] or 'of unknown eligibility'}"
    return None


def closed_finding(node: nomad.Node, reason: str) -> Finding:
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


def unhealthy_finding(gpu: nomad.Gpu) -> Finding:
    """Nomad places nothing on such a GPU, and says that it is not free."""
    return Finding(
        "gpu_unhealthy",
        f"that its device plugin calls it unhealthy ({gpu['health_description'] or 'no reason given'})",
        "a healthy GPU",
        "check the GPU with nvidia-smi and the kernel log, and drain the node if it is sick",
    )


def skipped(pin: Pin, code: str, found: str, next_step: str) -> JobResult:
    return result_of(pin, Finding(code, found, "a proof of every GPU", next_step), "skipped")
