# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The gate of a node in Kubernetes: cordoned, the scheduler places nothing new there.

What has to be done is decided by the same code as for Nomad. Who cordoned a node, why and since when is in its
annotations. Kubernetes takes them whether the node is up or not, and in one change with the cordon, which it refuses
where somebody else has changed the node meanwhile; so marks and cordon never part.
"""

from __future__ import annotations

import calendar
import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils import gate
from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes import (
    READY,
    Client,
    Node,
    change_node,
    evict,
    read_work,
)
from ansible_collections.gpufarm.core.plugins.module_utils.maintenance import told


def annotation(key: str) -> str:
    """C(gpufarm_gate_reason) in Nomad's meta is C(gpufarm.core/gate-reason) in Kubernetes' annotations."""
    return f"gpufarm.core/{key.partition('_')[2].replace('_', '-')}"


KEYS = {annotation(key): key for key in (*gate.KEYS, gate.MAINTENANCE_KEY)}


def gate_node(node: Node, closing: bool = False) -> gate.GateNode:
    """A node of Kubernetes as the gate has it. One that is down can be marked and cordoned like any other."""
    version = node["resource_version"]
    return gate.GateNode(
        id=node["id"],
        name=node["name"],
        status="ready" if closing or node["status"] == READY else node["status"],
        eligible=node["schedulable"],
        draining=False,
        meta={KEYS[name]: value for name, value in node["annotations"].items() if name in KEYS},
        drain_meta={},
        # Kubernetes raises it with each change of anything, and so of the node.
        index=int(version) if version.isdecimal() else 0,
    )


def is_marked(node: Node) -> bool:
    """Whether the gate has cordoned the node and it still is."""
    return bool(gate_node(node).marks) and not node["schedulable"]


def patch_of(marks: Mapping[str, str | None], schedulable: bool | None) -> dict[str, Any]:
    """One change of marks, by their keys in Nomad's meta, and of the cordon where that is given."""
    patch: dict[str, Any] = {"metadata": {"annotations": {annotation(key): value for key, value in marks.items()}}}
    if schedulable is not None:
        patch["spec"] = {"unschedulable": None if schedulable else True}
    return patch


def decide(node: Node, wish: gate.Wish, now: str) -> gate.Decision:
    """What has to be done with the node itself. Kubernetes drains none, so pods are evicted by C(drain)."""
    return gate.decide(gate_node(node, closing=not wish.healthy), dataclasses.replace(wish, drain=False), now)


def set_node(
    client: Client, name: str, wish: gate.Wish, now: Callable[[], str], check_mode: bool
) -> tuple[Node | None, gate.Decision]:
    """Do what a node's health asks for, by what the node is now. C(None) where Kubernetes knows no such node."""
    decision = gate.Decision("failed", "Kubernetes knows no such node")

    def change(node: Node) -> Mapping[str, Any] | None:
        nonlocal decision
        decision = decide(node, wish, now())
        return patch_of(decision.meta or {}, decision.eligible) if decision.changes and not check_mode else None

    return change_node(client, name, change), decision


def drain(client: Client, node: Node, decision: gate.Decision, wish: gate.Wish, *, check_mode: bool) -> str:
    """Evict what runs on a sick node that the gate has cordoned; what was done, empty where nothing was.

    C(node) is the node before the decision. Nothing waits for the pods: those of jobs, and those that nothing would
    start again, are evicted by the first run after the deadline, and those that a budget holds are asked again by the
    next one.
    """
    ours = decision.action == "close" or (is_marked(node) and not gate_node(node).meta.get(gate.MAINTENANCE_KEY))
    if wish.healthy or not wish.drain or not ours:
        return ""
    work = [each for each in read_work(client, node["name"]) if not each.ending]
    since = None if decision.action == "close" else gate_node(node).marks.get(gate.SINCE_KEY)
    leaving = [each for each in work if not each.ends or 0 < wish.drain_deadline_s <= _seconds_since(since)]
    if not leaving:
        return ""
    return f"evicting {told(leaving)}" + ("" if check_mode else evict(client, leaving))


def _seconds_since(since: str | None) -> float:
    """By the clock of whoever asks the cluster, who has written the mark as well; a spoiled one tells nothing."""
    try:
        return time.time() - calendar.timegm(time.strptime(since or "", "%Y-%m-%dT%H:%M:%SZ"))
    except ValueError:
        return 0.0
