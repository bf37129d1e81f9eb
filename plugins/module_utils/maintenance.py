# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""A node out of work: closed and empty for a change that would end what runs there, and back after it.

The mark is in the node's meta beside the gate's, which opens no node that has it. It says who took the node out, as
they alone know when it may come back; whether it was open before, as one that somebody else or the gate has closed is
emptied all the same and stays closed; and which drain was the last then, as who drains it later wants it closed.

What runs on a node is told twice. Nomad lists the allocations that its token may see; and what Nomad has started has
C(NOMAD_ALLOC_ID) in its environment, unless it takes that away, which holds as well while the agent is stopped.

What no scheduler has started nobody can move away. A change that would end what computes on a GPU is refused for it
too, and with consent it has the time that batch jobs have.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ansible_collections.gpufarm.core.plugins.module_utils import gate, gate_service, nomad
from ansible_collections.gpufarm.core.plugins.module_utils.nomad_programs import nomad_programs, strangers
from ansible_collections.gpufarm.core.plugins.module_utils.problem import FoundError, sentences
from ansible_collections.gpufarm.core.plugins.module_utils.text import first_of, in_utc, utc

CHANGE_KEY = gate.MAINTENANCE_KEY
OWNER_KEY = "gpufarm_maintenance_by"
SINCE_KEY = "gpufarm_maintenance_since"
OPENS_KEY = "gpufarm_maintenance_opens"
"""Whether the node was open before, V(yes) or V(no)."""
DRAIN_KEY = "gpufarm_maintenance_drain"
"""When the last drain began that is no reason to stay closed, that of the maintenance included."""
KEYS = (CHANGE_KEY, OWNER_KEY, SINCE_KEY, OPENS_KEY, DRAIN_KEY)

REFUSE = "refuse"
DRAIN = "drain"
ENDED = nomad.ENDED
STOPPED = ("stop", "evict")
"""What Nomad wants of an allocation that is to end."""
GRACE_S = 300
"""What tasks get to end after the deadline of a drain, before the maintenance gives up."""
START_S = 60
"""What an agent that is there gets until it answers."""
PATIENCE_S = 180
"""What servers get that elect a leader, or have too much to do."""
LOOKS = 2
"""So often a node is found closed and empty: Nomad may have placed something just before it was closed."""
PAUSE_S = 1.0
"""The first pause between two looks."""
LONGEST_PAUSE_S = 15.0
_LONGER = 1.5
TOLD = 5
_NANOSECONDS = 1_000_000_000


@dataclasses.dataclass(frozen=True)
class Work:
    """Something of Nomad's that runs on the node."""

    id: str
    """ID of the allocation."""
    name: str
    """Name of the allocation, or of a program where Nomad did not list it."""
    job: str | None = None
    ending: bool = False
    """Whether somebody has stopped it already."""

    def __str__(self) -> str:
        return f"{self.name} ({self.id[:8]})"


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a node is to be taken out."""

    change: str
    owner: str
    policy: str
    deadline_s: int
    check_mode: bool
    without_jobs_of: str = ""
    """Whose jobs are taken away next, so that their allocations are no work to this plan."""
    ends_gpu_work: bool = False
    """Whether the change ends what computes on a GPU, whoever has started it."""


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
    warning: str | None = None
    """That an earlier run may still be at it, and what of nobody's ends with the change."""


def programs(proc: Path = Path("/proc")) -> dict[str, str]:
    """IDs of allocations to a program that has been started for each and still runs, by name and PID."""
    return {program.allocation: program.name for program in nomad_programs(proc)}


def has_agent(proc: Path = Path("/proc")) -> bool:
    """Whether an agent of Nomad runs on this host, even one that does not answer yet."""
    for path in proc.glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if words[0].rpartition(b"/")[2] == b"nomad" and b"agent" in words[1:2]:
                return True
    return False


def work_of(
    allocations: Iterable[Mapping[str, Any]], running: Mapping[str, str], without_jobs_of: str = ""
) -> tuple[Work, ...]:
    """What runs, by the allocations of a node and the programs on it, but that of jobs of an owner."""
    listed = list(allocations)
    alive = {
        each["ID"]: Work(
            each["ID"], each.get("Name") or each["ID"], each.get("JobID"), each.get("DesiredStatus") in STOPPED
        )
        for each in listed
        if each.get("ClientStatus") not in ENDED
    }
    unseen = {key: Work(key, name) for key, name in running.items() if key not in alive}
    owned = {each["ID"]: nomad.owner_of(each.get("Job") or {}) for each in listed}
    left_out = [key for key, owner in owned.items() if owner and owner == without_jobs_of]
    work = [work for key, work in {**alive, **unseen}.items() if key not in left_out]
    return tuple(sorted(work, key=lambda work: (work.name, work.id)))


def told(work: Iterable[object]) -> str:
    """Names for people, the first few."""
    return first_of([str(each) for each in work], TOLD)


def at_it(marks: Mapping[str, str]) -> str:
    """Of a node that an earlier run took out and that is not out yet: it may have ended early, or goes on now."""
    return sentences(
        f"a node that {marks.get(OWNER_KEY)} has taken out of work for {marks.get(CHANGE_KEY)} at "
        f"{marks.get(SINCE_KEY)}, and that is not empty and closed",
        "one run at a time",
        "where that one still goes on, let it end before anything is changed here",
    )


def taken_over(plan: Plan, marks: Mapping[str, str]) -> FoundError:
    """Another run has put the node back, or has even taken it out anew, as its present marks tell."""
    by = f"taken out anew by {marks.get(OWNER_KEY)} at {marks[SINCE_KEY]}" if SINCE_KEY in marks else "put back"
    return FoundError(
        f"a node that was {by} while this run waited to have it empty for {plan.change}",
        "one that nobody else works on; it is left as it is",
        "let the other run end, and run this again if it is still to be done",
    )


T = TypeVar("T")


class Waiting:
    """One run's hold on a node, in either scheduler, as long as somebody waits for the answer.

    Who interrupts a run may put the node back at once, and so may another run.
    """

    def __init__(self, clock: Callable[[], float], pause: Callable[[float], None], gone: Callable[[], bool]) -> None:
        self._clock = clock
        self._pause = pause
        self._gone = gone
        self.closed = False
        """Whether the owner that was given has the node out, or may have, whatever came after that."""

    def _require(self, plan: Plan, since: str, found: Mapping[str, str]) -> None:
        """The marks that this run has set, or goes on with, among those that were found on the node."""
        if found.get(SINCE_KEY) != since:
            self.closed = found.get(OWNER_KEY) == plan.owner
            raise taken_over(plan, found)

    def _patiently(self, ask: Callable[[], T], patience_s: float) -> T:
        """What comes of it, done again where it may go well a moment later."""
        ends = self._clock() + patience_s
        pause_s = PAUSE_S
        while True:
            try:
                return ask()
            except FoundError as error:
                if not error.transient or self._clock() > ends:
                    raise
            pause_s = self._wait(pause_s, ends)

    def _wait(self, pause_s: float, ends: float) -> float:
        """Pause before another look, and not long beyond the end of all; how long the next pause is.

        Many nodes of a farm may be waited for at once, and for an hour.
        """
        self._pause(min(pause_s, max(ends - self._clock(), PAUSE_S)))
        if self._gone():
            raise FoundError(
                "nobody waits for the answer of this run any more",
                "the Ansible that began it; the node is left as it is, with its mark",
                "run it again, which goes on from there, or put the node back",
            )
        return min(pause_s * _LONGER, LONGEST_PAUSE_S)


class Maintenance(Waiting):
    """Takes the node of one agent out, and puts it back."""

    def __init__(
        self,
        client: nomad.Client,
        *,
        running: Callable[[], Mapping[str, str]] = programs,
        agent: Callable[[], bool] = has_agent,
        foreign: Callable[[], Sequence[str]] = strangers,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
        gone: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(clock, pause, gone)
        self.client = client
        self._running = running
        self._agent = agent
        self._foreign = foreign

    def _node_id(self, timeout_s: float) -> str | None:
        """The ID of this agent's node, empty where it is no client; None where no agent runs."""

        def known() -> str | None:
            try:
                return gate_service.own_node_id(self.client)
            except nomad.NomadError as error:
                if error.nobody and not self._agent():
                    return None
                raise

        return self._patiently(known, timeout_s)

    def _node(self, node_id: str, stale: bool = False) -> gate.GateNode:
        """The node, with the meta that its own agent has; servers learn of that seconds later."""
        path = gate.node_path(node_id)
        node = gate.gate_node((self.client.known(path)[0] if stale else self.client.call("GET", path)) or {})
        return dataclasses.replace(node, meta=self._meta())

    def _meta(self) -> dict[str, str]:
        """What the node's own agent has, which answers without a leader too."""
        return (self.client.call("GET", "/v1/client/metadata") or {}).get("Meta") or {}

    def _look(self, node_id: str, plan: Plan, stale: bool = False) -> tuple[gate.GateNode, tuple[Work, ...]]:
        """The node and what runs there, as the leader knows it, or with C(stale) any server."""
        node = self._node(node_id, stale)
        query = {"stale": "true"} if stale else {}
        allocations = self.client.items(f"{gate.node_path(node_id)}/allocations", query).items
        return node, work_of(allocations, self._running(), plan.without_jobs_of)

    # --- out ---

    def take_out(self, plan: Plan) -> Result:
        """Close the node and see it empty; NomadError where that may not be or does not come."""
        node_id = self._node_id(START_S)
        if not node_id:
            return self._without_client(plan, node_id)
        node, work = self._patiently(lambda: self._look(node_id, plan), PATIENCE_S)
        staying = _staying(work)
        change, owner = node.meta.get(CHANGE_KEY), node.meta.get(OWNER_KEY)
        if change and owner != plan.owner:
            raise nomad.NomadError(
                found=f"a node that {owner} took out of work for {change}",
                expected="one that nobody else works on",
                next_step="let that end, or put the node back with owner set to theirs",
            )
        self.closed = bool(change)
        if staying and plan.policy == REFUSE:
            raise _refused(plan, staying, change if node.draining and _drained_for_this(node) else None)
        foreign = self._others(plan)
        if change and not work and not node.eligible:
            late = self._empty(node, plan, drain=False) if foreign and not plan.check_mode else None
            return Result("none", f"already out for {change}", node, maintenance=change, warning=late)
        message = f"out for {plan.change}" + (f", after it was drained of {told(staying)}" if staying else "")
        late = None if plan.check_mode else self._empty(node, plan, drain=bool(staying))
        warnings = [at_it(node.meta) if change else None, late]
        return Result("out", message, node, staying, change or plan.change, " ".join(filter(None, warnings)) or None)

    def _others(self, plan: Plan) -> Sequence[str]:
        """What computes and no scheduler has, where the change would end it; FoundError where that may not be."""
        found = self._foreign() if plan.ends_gpu_work else ()
        if found and plan.policy == REFUSE:
            raise FoundError(
                f"GPU work that no scheduler has started, which {plan.change} would end: {told(found)}",
                "nothing that computes there; it goes on",
                "wait for its end or have its owner end it, or set policy (node_maintenance_policy of the roles) to "
                "drain, which gives it as much time as batch jobs",
            )
        return found

    def _wait_for_others(self, plan: Plan, found: Sequence[str]) -> str | None:
        """Give them the time that batch jobs have; what has not ended then, ends with the change."""
        ends, pause_s = self._clock() + plan.deadline_s, PAUSE_S
        while found and not plan.check_mode:
            if self._clock() > ends:
                return _late(plan, found)
            pause_s = self._wait(pause_s, ends)
            found = self._foreign()
        return None

    def _without_client(self, plan: Plan, node_id: str | None) -> Result:
        why = "no Nomad agent runs here" if node_id is None else "the agent of this host is no client"
        work = work_of((), self._running())
        if work:
            raise nomad.NomadError(
                found=f"{told(work)} of Nomad's, which {plan.change} would end, while {why}",
                expected="an agent that can move them away, or nothing that runs",
                next_step="start Nomad on this host (`systemctl start nomad`), or end them",
            )
        warning = self._wait_for_others(plan, self._others(plan))
        return Result("none", f"{why}, and nothing of Nomad's runs", warning=warning)

    def _empty(self, node: gate.GateNode, plan: Plan, drain: bool) -> str | None:
        """Mark and close the node, and look until it is empty; what of nobody's did not end in time, in words."""
        before = node.meta.get(CHANGE_KEY)
        # The gate's marks may be in the last drain alone, which a new one replaces.
        marks = {
            **{key: node.marks[key] for key in gate.KEYS if key in node.marks},
            CHANGE_KEY: before or gate.clean_reason(plan.change),
            OWNER_KEY: plan.owner,
            SINCE_KEY: node.meta.get(SINCE_KEY) or utc(),
            OPENS_KEY: "yes" if node.eligible else node.meta.get(OPENS_KEY, "no"),
            DRAIN_KEY: node.meta.get(DRAIN_KEY, node.drained_at),
        }
        self.closed = True
        # Marked before it is closed, so that whatever stops in between is put right by the next run.
        self._patiently(lambda: self._write(node, marks), PATIENCE_S)
        self._patiently(lambda: self._close(node, plan, marks, drain), PATIENCE_S)
        patience_s = GRACE_S + (plan.deadline_s if plan.policy == DRAIN else 0)
        deadline, others_end = self._clock() + patience_s, 0.0
        looks, opened, pause_s, late = 0, False, PAUSE_S, None
        while looks < LOOKS:
            try:
                waiting = drain and not looks and self._clock() <= deadline
                now, work = self._look(node.id, plan, stale=waiting)
                if waiting and (now.eligible or not work or _left_by_gate(now, work)):
                    # What is acted on, the leader says.
                    now, work = self._look(node.id, plan)
                self._require(plan, marks[SINCE_KEY], now.meta)
                staying = _staying(work)
                if staying and plan.policy == REFUSE:
                    # It was placed before the node was closed.
                    if not before:
                        self._undo(now, marks)
                    raise _refused(plan, staying, None)
                # Who puts it back opens it before the mark goes, and may be just at it.
                if (now.eligible and opened) or (staying and not drain) or (drain and _left_by_gate(now, work)):
                    drains = drain or bool(staying)
                    self._patiently(functools.partial(self._close, now, plan, marks, drains), PATIENCE_S)
                    drain = drains
                opened = now.eligible
                looks = 0 if work or now.eligible else looks + 1
                others = self._others_of(plan, now, {} if before or drain else marks) if looks else ()
                late = _late(plan, others) if others else None
                others_end = others_end or (self._clock() + plan.deadline_s if others else 0.0)
                looks = 0 if others and self._clock() <= others_end else looks
            except nomad.NomadError as error:
                if not error.transient or self._clock() > deadline:
                    raise
                looks = 0
            else:
                if now.eligible and self._clock() > deadline:
                    # Who opens it goes on; the next run finds by its mark what it was before.
                    raise nomad.NomadError(
                        found=f"a node that somebody opens, {patience_s} s after it was closed for {plan.change}",
                        expected="a node that is empty and closed by then; it keeps its mark",
                        next_step="end what opens it, and run this again",
                    )
                if work and self._clock() > deadline:
                    # A drain that was begun has ended work for this change; without one nothing was lost.
                    left = "it stays closed" if before or drain else "it is what it was before"
                    if not before and not drain:
                        self._undo(now, marks)
                    raise nomad.NomadError(
                        found=f"{told(work)}, {patience_s} s after the node was closed for {plan.change}",
                        expected=f"a node that is empty by then; {left}",
                        next_step="end them (`nomad alloc stop`, or the processes that Nomad no longer knows) and run "
                        "this again, or give them more time",
                    )
            if looks < LOOKS:
                pause_s = self._wait(PAUSE_S if looks or opened else pause_s, deadline)
        return late

    def _others_of(self, plan: Plan, node: gate.GateNode, marks: Mapping[str, str]) -> Sequence[str]:
        """What computes by now and no scheduler has; where that may not be, a node with these marks is given back."""
        try:
            return self._others(plan)
        except FoundError:
            if marks:
                self._undo(node, marks)
            raise

    def _undo(self, node: gate.GateNode, marks: Mapping[str, str]) -> None:
        """Give a node back on which nothing has been ended; servers may not know its marks yet."""
        marked = dataclasses.replace(node, meta={**node.meta, **marks})
        self._patiently(lambda: self.open(marked), PATIENCE_S)
        self.closed = False

    def _close(self, node: gate.GateNode, plan: Plan, marks: Mapping[str, str], drain: bool) -> None:
        # Until the servers have a leader, another run may have put it back.
        self._require(plan, marks[SINCE_KEY], self._meta())
        path = gate.node_path(node.id)
        if drain and not node.draining:
            spec = {"Deadline": plan.deadline_s * _NANOSECONDS, "IgnoreSystemJobs": False}
            # With the gate's marks it is no drain of somebody else's to the gate.
            self.client.call("POST", f"{path}/drain", {"NodeID": node.id, "DrainSpec": spec, "Meta": dict(marks)})
            began = gate.gate_node(self.client.call("GET", path) or {}).drained_at
            self._write(node, {DRAIN_KEY: began})
        elif node.eligible:
            self.client.call("POST", f"{path}/eligibility", {"NodeID": node.id, "Eligibility": "ineligible"})

    # --- in ---

    def marked_node(self, owner: str, timeout_s: float) -> gate.GateNode | None:
        """The node of this agent where this owner took it out, waiting for an agent that has just started; or None."""
        deadline, pause_s = self._clock() + timeout_s, PAUSE_S
        node_id = self._node_id(timeout_s)
        if not node_id:
            return None
        while True:
            try:
                node = self._node(node_id)
            except nomad.NomadError as error:
                if not error.transient or self._clock() > deadline:
                    raise
            else:
                if node.status == "ready" or self._clock() > deadline:
                    return node if node.meta.get(OWNER_KEY) == owner else None
            pause_s = self._wait(pause_s, deadline)

    def put_back(self, node_id: str) -> Result:
        """Give the node back what it was before, as it is now and not as it was when a probe began."""
        return self._patiently(lambda: self.open(self._node(node_id)), PATIENCE_S)

    def open(self, node: gate.GateNode) -> Result:
        path = gate.node_path(node.id)
        opens = node.meta.get(OPENS_KEY) == "yes"
        change = node.meta.get(CHANGE_KEY)
        # A drain of this maintenance has its marks, of which the last may not have been written.
        own = _drained_for_this(node)
        if not own and node.drained_at != in_utc(node.meta.get(DRAIN_KEY, "")):
            state = "still closed, because somebody else drains it" if not node.eligible else "open"
        elif node.draining and (opens or own):
            self.client.call("POST", f"{path}/drain", {"NodeID": node.id, "DrainSpec": None, "MarkEligible": opens})
            state = "open again" if opens else "still closed, as it was before"
        elif opens and not node.eligible:
            self.client.call("POST", f"{path}/eligibility", {"NodeID": node.id, "Eligibility": "eligible"})
            state = "open again"
        else:
            state = "open" if node.eligible else "still closed, as it was before"
        # Opened before the mark goes.
        self._write(node, dict.fromkeys(KEYS))
        return Result("in", f"{state}, after {change}", node)

    def _write(self, node: gate.GateNode, meta: Mapping[str, str | None]) -> None:
        self.client.call("POST", "/v1/client/metadata", {"NodeID": node.id, "Meta": dict(meta)})


def _staying(work: tuple[Work, ...]) -> tuple[Work, ...]:
    return tuple(each for each in work if not each.ending)


def _left_by_gate(node: gate.GateNode, work: tuple[Work, ...]) -> bool:
    """Whether a drain of the gate is over, which leaves the allocations of system jobs."""
    over = not node.eligible and not node.draining and not _drained_for_this(node)
    return over and bool(node.marks) and not node.drained_by_others and any(each.job for each in _staying(work))


def _drained_for_this(node: gate.GateNode) -> bool:
    """Whether the last drain is of the maintenance that the node is marked for."""
    return node.drain_meta.get(SINCE_KEY, "") == node.meta.get(SINCE_KEY)


def _late(plan: Plan, found: Sequence[str]) -> str:
    late = f"did not end in {plan.deadline_s} s and end with {plan.change}"
    return f"{told(found)}, which no scheduler has started, {late}"


def _refused(plan: Plan, work: tuple[Work, ...], drained_for: str | None) -> nomad.NomadError:
    number = f"{len(work)} running allocation{'s' * (len(work) > 1)}"
    found = f"{number}, which {plan.change} would end: {told(work)}"
    if drained_for:
        return nomad.NomadError(
            found=f"{found}; Nomad drains the node for {drained_for} of another run, which may have ended early",
            expected="a node on which none runs; that drain goes on, and ends batch jobs at its deadline",
            next_step="let both end and run this again, or keep them by `nomad node drain -disable`",
        )
    return nomad.NomadError(
        found=found,
        expected="a node on which none runs; they go on",
        next_step="wait for their end, or set policy (node_maintenance_policy of the roles) to drain, which moves "
        "services away and gives batch jobs time to end",
    )
