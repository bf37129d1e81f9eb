# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""A node out of work: closed and empty for a change that would end what runs there, and back after it.

The mark is in the node's meta beside the gate's, which opens no node that has it. It says whether the node was open
before: one that somebody else or the gate has closed is emptied all the same, and stays closed when it is put back.

What runs on a node is told twice. Nomad lists the allocations that its token may see; and whatever Nomad has started
has C(NOMAD_ALLOC_ID) in its environment, which holds as well while the agent is stopped.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils import gate, gate_service, nomad
from ansible_collections.gpufarm.core.plugins.module_utils.text import clean

CHANGE_KEY = gate.MAINTENANCE_KEY
SINCE_KEY = "gpufarm_maintenance_since"
OPENS_KEY = "gpufarm_maintenance_opens"
"""Whether the node was open before, V(yes) or V(no)."""
KEYS = (CHANGE_KEY, SINCE_KEY, OPENS_KEY)

REFUSE = "refuse"
DRAIN = "drain"
ENDED = ("complete", "failed", "lost")
GRACE_S = 300
"""What tasks get to end after the deadline of a drain, before the maintenance gives up."""
PAUSE_S = 1.0
TOLD = 5
_NANOSECONDS = 1_000_000_000


@dataclasses.dataclass(frozen=True)
class Work:
    """Something of Nomad's that runs on the node."""

    id: str
    """ID of the allocation."""
    name: str
    """Name of the allocation, or of the program where Nomad did not list it."""
    job: str | None = None
    wanted: bool = False
    """Whether Nomad means it to run; what a drain has reached, it does not."""

    def __str__(self) -> str:
        return f"{self.name} ({self.id[:8]})"


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a node is to be taken out."""

    change: str
    policy: str = REFUSE
    deadline_s: int = 3600
    check_mode: bool = False


@dataclasses.dataclass(frozen=True)
class Result:
    """What became of the node."""

    action: str
    """V(out), V(in), or V(none)"""
    message: str
    node: gate.GateNode | None = None
    work: tuple[Work, ...] = ()
    """What was there before, and was moved away."""
    maintenance: str | None = None
    """What the node is out for now."""


def programs(proc: Path = Path("/proc")) -> dict[str, str]:
    """IDs of allocations to the name of a program that has been started for each and still runs."""
    found: dict[str, str] = {}
    for folder in proc.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
            name = (folder / "comm").read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            # It has ended meanwhile.
            continue
        for entry in environment:
            if entry.startswith(b"NOMAD_ALLOC_ID="):
                found[clean(entry.partition(b"=")[2].decode("utf-8", "replace"))] = clean(name)
    return found


def work_of(allocations: Iterable[Mapping[str, Any]], running: Mapping[str, str]) -> tuple[Work, ...]:
    """What runs, by the allocations of a node and the programs on it."""
    alive = {
        each["ID"]: Work(
            each["ID"], each.get("Name") or each["ID"], each.get("JobID"), each.get("DesiredStatus") == "run"
        )
        for each in allocations
        if each.get("ClientStatus") not in ENDED
    }
    unseen = {key: Work(key, name) for key, name in running.items() if key not in alive}
    return tuple(sorted([*alive.values(), *unseen.values()], key=lambda work: (work.name, work.id)))


def told(work: Iterable[Work]) -> str:
    """Names for people, the first few."""
    names = [str(each) for each in work]
    more = f" and {len(names) - TOLD} more" if len(names) > TOLD else ""
    return ", ".join(names[:TOLD]) + more


def away(error: nomad.NomadError) -> bool:
    """Whether nobody answered at all, which is how an agent that is stopped or not there yet looks."""
    return error.transient and error.status is None


class Maintenance:
    """Takes the node of one agent out, and puts it back."""

    def __init__(
        self,
        client: nomad.Client,
        *,
        running: Callable[[], Mapping[str, str]] = programs,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.client = client
        self._running = running
        self._clock = clock
        self._pause = pause

    def work(self, node: gate.GateNode) -> tuple[Work, ...]:
        return work_of(self.client.items(f"{gate.node_path(node.id)}/allocations", {}).items, self._running())

    # --- out ---

    def take_out(self, plan: Plan) -> Result:
        """Close the node and see it empty; NomadError where that may not be or does not come."""
        try:
            node_id = gate_service.own_node_id(self.client)
        except nomad.NomadError as error:
            if not away(error):
                raise
            return self._without_agent(plan)
        if not node_id:
            return Result("none", "the agent of this host is no client, so no allocation can be here")
        node = gate.read_node(self.client, node_id)
        work = self.work(node)
        if work and plan.policy == REFUSE:
            raise self._refused(plan, work)
        marked = bool(node.meta.get(CHANGE_KEY))
        if marked and not work and not node.eligible:
            before = node.meta[CHANGE_KEY]
            return Result("none", f"already out for {before}", node, maintenance=before)
        message = f"out for {plan.change}" + (f", after it was drained of {told(work)}" if work else "")
        if not plan.check_mode:
            self._close(node, plan, marked, drain=bool(work))
            self._wait_until_empty(node, plan, marked)
        return Result("out", message, node, work, node.meta.get(CHANGE_KEY) or plan.change)

    def _without_agent(self, plan: Plan) -> Result:
        work = work_of((), self._running())
        if work:
            raise nomad.NomadError(
                found=f"{told(work)} of Nomad's, which {plan.change} would end, and no agent that answers",
                expected="an agent that can move them away, or nothing that runs",
                next_step="start Nomad on this host (`systemctl start nomad`), or end them",
            )
        return Result("none", "no Nomad agent answers here, and nothing of Nomad's runs")

    def _refused(self, plan: Plan, work: tuple[Work, ...]) -> nomad.NomadError:
        number = f"{len(work)} running allocation{'s' * (len(work) > 1)}"
        return nomad.NomadError(
            found=f"{number}, which {plan.change} would end: {told(work)}",
            expected="a node on which none runs; nothing was changed",
            next_step="wait for their end, or set node_maintenance_policy to drain, which moves them away before it",
        )

    def _close(self, node: gate.GateNode, plan: Plan, marked: bool, drain: bool) -> None:
        """Mark the node before it is closed, so that whatever stops in between is put right by the next run."""
        path = gate.node_path(node.id)
        mark: dict[str, str] = {}
        if not marked:
            mark = {
                CHANGE_KEY: gate.clean_reason(plan.change),
                SINCE_KEY: gate.timestamp(),
                OPENS_KEY: "yes" if node.eligible else "no",
            }
            self._write(node, mark)
        if drain and not node.draining:
            spec = {"Deadline": plan.deadline_s * _NANOSECONDS, "IgnoreSystemJobs": False}
            # With the gate's marks it is no drain of somebody else's to the gate.
            meta = {key: value for key, value in {**node.meta, **mark}.items() if key in (*gate.KEYS, *KEYS)}
            self.client.call("POST", f"{path}/drain", {"NodeID": node.id, "DrainSpec": spec, "Meta": meta})
        elif node.eligible:
            self.client.call("POST", f"{path}/eligibility", {"NodeID": node.id, "Eligibility": "ineligible"})

    def _wait_until_empty(self, node: gate.GateNode, plan: Plan, marked: bool) -> None:
        deadline = self._clock() + plan.deadline_s + GRACE_S
        while True:
            work = self.work(node)
            if not work:
                return
            if plan.policy == REFUSE:
                # It was placed before the node was closed.
                if not marked:
                    self.open(gate.read_node(self.client, node.id))
                raise self._refused(plan, work)
            if self._clock() > deadline:
                raise nomad.NomadError(
                    found=f"{told(work)}, {plan.deadline_s + GRACE_S} s after the drain for {plan.change} began",
                    expected="a node that is empty by then; it stays closed",
                    next_step="end them (`nomad alloc stop`) and run this again, or give them more time",
                )
            current = gate.read_node(self.client, node.id)
            if current.eligible or (not current.draining and any(each.wanted for each in work)):
                # Somebody has opened it, or something was placed just before it was closed.
                self._close(current, plan, marked=True, drain=True)
            self._pause(PAUSE_S)

    # --- in ---

    def marked_node(self, timeout_s: float) -> gate.GateNode | None:
        """The node of this agent if it is in maintenance, waiting for an agent that has just started; or else None."""
        deadline = self._clock() + timeout_s
        while True:
            try:
                node = gate.read_node(self.client, gate.gate_node(gate_service.own_node(self.client)).id)
            except nomad.NomadError as error:
                if not error.transient or self._clock() > deadline:
                    raise
            else:
                if node.status == "ready" or self._clock() > deadline:
                    return node if node.meta.get(CHANGE_KEY) else None
            self._pause(PAUSE_S)

    def open(self, node: gate.GateNode) -> Result:
        """Give the node back what it was before, and take the mark away last."""
        path = gate.node_path(node.id)
        opens = node.meta.get(OPENS_KEY) == "yes"
        if node.draining:
            self.client.call("POST", f"{path}/drain", {"NodeID": node.id, "DrainSpec": None, "MarkEligible": opens})
        elif opens and not node.eligible:
            self.client.call("POST", f"{path}/eligibility", {"NodeID": node.id, "Eligibility": "eligible"})
        self._write(node, dict.fromkeys(KEYS))
        state = "open again" if opens or node.eligible else "still closed, as it was before"
        return Result("in", f"{state}, after {node.meta.get(CHANGE_KEY)}", node)

    def _write(self, node: gate.GateNode, meta: Mapping[str, str | None]) -> None:
        self.client.call("POST", "/v1/client/metadata", {"NodeID": node.id, "Meta": dict(meta)})
