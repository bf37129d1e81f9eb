# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A node of Kubernetes out of work: C(maintenance) for the other scheduler, with the same marks among its annotations.

Pods are evicted, so disruption budgets hold. Kubernetes does not tell who cordons a node that is cordoned already; so
one that was open before is open again after the maintenance, whoever cordoned it meanwhile.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils import gate
from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes import (
    Client,
    KubernetesError,
    Node,
    Work,
    change_node,
    evict,
    read_work,
)
from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes_gate import annotation, patch_of
from ansible_collections.gpufarm.core.plugins.module_utils.maintenance import (
    CHANGE_KEY,
    GRACE_S,
    LOOKS,
    OPENS_KEY,
    OWNER_KEY,
    PATIENCE_S,
    REFUSE,
    SINCE_KEY,
    Plan,
    Waiting,
    at_it,
    told,
)
from ansible_collections.gpufarm.core.plugins.module_utils.text import utc

PAUSE_S = 2.0
GPUS_KEY = "gpufarm_maintenance_gpus"
"""How many GPUs the node had for pods before; without any it need not have them afterwards."""
KEYS = {key: annotation(key) for key in (CHANGE_KEY, OWNER_KEY, SINCE_KEY, OPENS_KEY, GPUS_KEY)}


@dataclasses.dataclass(frozen=True)
class Result:
    """What became of the node."""

    action: str
    """V(out), V(in), or V(none)"""
    message: str
    work: tuple[Work, ...] = ()
    """What was there before, and was moved away."""
    maintenance: str | None = None
    """What the node is out for now."""
    gpus: int | None = None
    """How many GPUs it had for pods when it was taken out."""
    warning: str | None = None
    """That an earlier run may still be at it."""


def marks_of(node: Node) -> dict[str, str]:
    return {key: node["annotations"][name] for key, name in KEYS.items() if name in node["annotations"]}


class Maintenance(Waiting):
    """Takes one node out, and puts it back."""

    def __init__(
        self,
        client: Client,
        name: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
        gone: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(clock, pause, gone)
        self.client = client
        self.name = name

    def _change(self, patch: Callable[[Node], Mapping[str, Any] | None]) -> Node:
        node = change_node(self.client, self.name, patch)
        if node is None:
            raise KubernetesError(
                f"no node {self.name} in the cluster",
                "one of this name",
                "compare it with 'kubectl get nodes', and check which cluster the kubeconfig means",
            )
        return node

    def _node(self) -> Node:
        return self._change(lambda _node: None)

    # --- out ---

    def take_out(self, plan: Plan) -> Result:
        """Cordon the node and see it empty; KubernetesError where that may not be or does not come."""
        node, work = self._patiently(lambda: (self._node(), read_work(self.client, self.name)), PATIENCE_S)
        marks = marks_of(node)
        change = marks.get(CHANGE_KEY)
        if change and marks.get(OWNER_KEY) != plan.owner:
            raise KubernetesError(
                f"a node that {marks.get(OWNER_KEY, 'somebody else')} took out of work for {change}",
                "one that nobody else works on",
                "let that end, or put the node back with owner set to theirs; where nobody is at it any more, remove "
                f"the annotation ('kubectl annotate node {self.name} {KEYS[CHANGE_KEY]}-')",
            )
        self.closed = bool(change)
        if work and plan.policy == REFUSE:
            raise _refused(plan, work)
        if change and not work and not node["schedulable"]:
            return Result("none", f"already out for {change}", maintenance=change)
        if not plan.check_mode:
            self._empty(plan, bool(change))
        message = f"out for {plan.change}" + (f", after it was drained of {told(work)}" if work else "")
        warning = at_it(marks) if change else None
        return Result("out", message, tuple(work), change or plan.change, warning=warning)

    def _close(self, plan: Plan, began: str, since: str = "") -> str:
        """Mark and cordon the node, in one change; since when it is marked, C(began) where nobody has marked it before.

        With C(since) nothing is changed unless it has been marked since then.
        """
        marks: dict[str, str] = {}

        def patch(node: Node) -> dict[str, Any] | None:
            nonlocal marks
            before = marks_of(node)
            if since and before.get(SINCE_KEY) != since:
                return None
            marks = {
                CHANGE_KEY: gate.clean_reason(plan.change),
                SINCE_KEY: began,
                GPUS_KEY: str(node["gpus_capacity"]),
                **before,
                OWNER_KEY: plan.owner,
                OPENS_KEY: "yes" if node["schedulable"] else before.get(OPENS_KEY, "no"),
            }
            return patch_of(marks, False if node["schedulable"] else None)

        self.closed = True
        self._change(patch)
        return marks.get(SINCE_KEY, "")

    def _empty(self, plan: Plan, marked: bool) -> None:
        """Close the node, and look until it is empty."""
        began = utc()
        since = self._patiently(lambda: self._close(plan, began), PATIENCE_S)
        # The node itself does not tell: where an answer was lost, it has this run's own marks at the next try.
        before = marked or since != began
        ends = self._clock() + plan.deadline_s
        looks, held, pause_s = 0, "", PAUSE_S
        while looks < LOOKS:
            try:
                node, work = self._node(), read_work(self.client, self.name)
                self._require(plan, since, marks_of(node))
                if work and plan.policy == REFUSE:
                    # It was placed before the node was cordoned.
                    if not before:
                        self.put_back(plan.owner)
                        self.closed = False
                    raise _refused(plan, work)
                if node["schedulable"]:
                    self._close(plan, began, since)
                held = evict(self.client, [each for each in work if not (each.ends and self._clock() < ends)])
                looks = 0 if work or node["schedulable"] else looks + 1
            except KubernetesError as error:
                if not error.transient or self._clock() > ends + GRACE_S:
                    raise
                looks = 0
            else:
                if (work or node["schedulable"]) and self._clock() > ends + GRACE_S:
                    left = told(work) or "a node that somebody uncordons"
                    raise KubernetesError(
                        f"{left}, {plan.deadline_s + GRACE_S} s after the drain for {plan.change} began{held}",
                        "a node that is empty by then; it stays cordoned",
                        "end them ('kubectl delete pod'), or let their disruption budgets allow it, and run this "
                        "again, or give them more time",
                    )
            if looks < LOOKS:
                # At the deadline jobs are evicted.
                until = ends if self._clock() < ends else ends + GRACE_S
                pause_s = self._wait(PAUSE_S if looks else pause_s, until)

    # --- in ---

    def put_back(self, owner: str, check_mode: bool = False) -> Result:
        """Give the node back what it was before, as it is now; in check mode say so."""
        result = Result("none", f"{owner} has not taken this node out")

        def patch(node: Node) -> dict[str, Any] | None:
            nonlocal result
            marks = marks_of(node)
            if marks.get(OWNER_KEY) != owner:
                return None
            opens = marks.get(OPENS_KEY) == "yes" and not node["schedulable"]
            state = "open again" if opens else "open" if node["schedulable"] else "still cordoned, as it was before"
            gpus = marks.get(GPUS_KEY, "")
            result = Result(
                "in", f"{state}, after {marks.get(CHANGE_KEY)}", gpus=int(gpus) if gpus.isdecimal() else None
            )
            return None if check_mode else patch_of(dict.fromkeys(KEYS), True if opens else None)

        self._patiently(lambda: self._change(patch), PATIENCE_S)
        return result


def _refused(plan: Plan, work: Sequence[Work]) -> KubernetesError:
    number = f"{len(work)} running pod{'s' * (len(work) > 1)}"
    return KubernetesError(
        f"{number}, which {plan.change} would end: {told(work)}",
        "a node on which none runs but those of DaemonSets and of the kubelet itself; they go on",
        "wait for their end, or set policy (node_maintenance_policy of the roles) to drain, which evicts them and "
        "gives those of jobs time to end",
    )
