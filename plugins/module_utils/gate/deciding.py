# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What the gate does with one node, by what it has found of it and what Nomad has of it.

C(decide) is pure. Who closed a node, why and since when is in the node's meta, where jobs and people read it. A node
that is down takes no meta, so there it is in the meta of a drain, which Nomad's servers keep.

What came first is told by C(ModifyIndex), which Nomad raises with each change of a node, and never by a clock: who
probes reads it before the probe, and who judges a probe writes the one of that moment into the meta. So a probe that
may have begun before the last one was judged neither opens the node nor counts. How long a node is closed is told by
its own uptime.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils.text import in_utc

STATE_KEY = "gpufarm_gate"
REASON_KEY = "gpufarm_gate_reason"
SINCE_KEY = "gpufarm_gate_since"
CLOSED_BY_KEY = "gpufarm_gate_closed_by"
MEMORY_KEY = "gpufarm_gate_memory"
CLOSED = "closed"
OPEN = "open"

FARM = "farm"
"""Closed from outside, with a view of the whole farm."""
NODE = "node"
"""Closed by the node's own timer, which may open again only what it closed."""

MEASURED = "benchmark_"
"""With what codes begin that only the node's own timer finds, because it lets GPUs compute."""

MAINTENANCE = "maintenance"
OTHERS = "others"
STATES = (OPEN, NODE, FARM, MAINTENANCE, OTHERS)
"""Open, or who keeps it closed."""

KEYS = (STATE_KEY, REASON_KEY, SINCE_KEY, CLOSED_BY_KEY, MEMORY_KEY)
MAINTENANCE_KEY = "gpufarm_maintenance"
"""For what the node is taken out of work, as C(maintenance) writes it; no gate opens it before that is over."""
MAX_REASON = 500


@dataclasses.dataclass(frozen=True)
class Memory:
    """What the gate itself has to know of earlier runs."""

    index: int = -1
    """ModifyIndex of the node when the last probe that counts was judged."""
    clean: int = 0
    """Clean probes in a row."""
    uptime: int | None = None
    """Seconds that the node had been up when it was closed, or when that was first known."""
    drain: str = ""
    """When the last drain before the closing began; a name of that drain, which nobody compares with a clock."""

    @classmethod
    def of(cls, meta: Mapping[str, str]) -> Memory:
        """What was remembered, and nothing where somebody has spoiled it."""
        try:
            memory = cls(**json.loads(meta[MEMORY_KEY]))
        except (KeyError, TypeError, ValueError):
            return cls()
        kinds = [type(value) for value in dataclasses.astuple(memory)]
        return memory if kinds in ([int, int, int, str], [int, int, type(None), str]) else cls()

    def __str__(self) -> str:
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))


@dataclasses.dataclass(frozen=True)
class GateNode:
    """One node as Nomad has it now."""

    id: str
    name: str
    status: str
    eligible: bool
    draining: bool
    meta: Mapping[str, str]
    drain_meta: Mapping[str, str]
    drained_at: str = ""
    """When the last drain began, RFC 3339 in UTC."""
    index: int = 0
    """ModifyIndex, as the servers had it when the node was read."""

    @property
    def marks(self) -> Mapping[str, str]:
        """What the gate wrote when it closed the node; empty when it did not, or when the node is open again."""
        if self.meta.get(STATE_KEY) == CLOSED:
            return self.meta
        # A drain's meta stays for ever, so it counts only until the gate finds or makes the node open the next time.
        newer = Memory.of(self.drain_meta).index > Memory.of(self.meta).index
        if self.drain_meta.get(STATE_KEY) == CLOSED and newer:
            return self.drain_meta
        return {}

    @property
    def drained_by_others(self) -> bool:
        """Whether somebody has drained the node after the gate has closed it; a new drain has its own meta, or none."""
        marks = self.marks
        own = self.drain_meta.get(SINCE_KEY) == marks.get(SINCE_KEY)
        return not own and (self.draining or self.drained_at != in_utc(Memory.of(marks).drain))


@dataclasses.dataclass(frozen=True)
class Wish:
    """What the gate should do with a node."""

    healthy: bool
    reason: str | None = None
    drain: bool = False
    drain_deadline_s: int = 3600
    closed_by: str = FARM
    index: int | None = None
    """ModifyIndex of the node, read before its probe began; C(None) is a probe that nobody knows the time of."""
    uptime: int | None = None
    """Seconds that the node had been up when it was probed."""
    open_after: int = 1
    """Clean probes in a row after which the node is opened."""
    closed_min_s: int = 0
    """The shortest time closed."""


@dataclasses.dataclass(frozen=True)
class Decision:
    """What has to be done, in this order; C(None) and C(False) are nothing."""

    action: str
    """close, open, wait, update, none"""
    message: str
    meta: Mapping[str, str | None] | None = None
    drain: bool = False
    eligible: bool | None = None
    cancel_drain: bool = False

    @property
    def changes(self) -> bool:
        return bool(self.meta or self.drain or self.cancel_drain or self.eligible is not None)


def gate_node(node: Mapping[str, Any]) -> GateNode:
    """The answer of C(GET /v1/node/:id)."""
    return GateNode(
        id=node.get("ID") or "",
        name=node.get("Name") or "",
        status=node.get("Status") or "",
        eligible=node.get("SchedulingEligibility") == "eligible",
        draining=bool(node.get("DrainStrategy") or node.get("Drain")),
        meta=node.get("Meta") or {},
        drain_meta=(node.get("LastDrain") or {}).get("Meta") or {},
        drained_at=in_utc((node.get("LastDrain") or {}).get("StartedAt") or ""),
        index=int(node.get("ModifyIndex") or 0),
    )


def closed_for(meta: Mapping[str, str]) -> str | None:
    """Why a maintenance or the gate has taken a node out of work, by its marks."""
    change = meta.get(MAINTENANCE_KEY)
    return f"maintenance: {change}" if change else meta.get(REASON_KEY)


def clean_reason(text: str | None) -> str:
    """A reason fit for Nomad's meta: one line of printable ASCII."""
    plain = "".join(letter if " " <= letter <= "~" else " " for letter in text or "")
    plain = " ".join(plain.split()) or "no reason given"
    return plain if len(plain) <= MAX_REASON else f"{plain[: MAX_REASON - 3]}..."


def decide(node: GateNode, wish: Wish, now: str) -> Decision:
    """What has to be done so that the node is as its health says; C(now) is the time for the node's meta."""
    maintained = node.meta.get(MAINTENANCE_KEY)
    if maintained and not node.eligible:
        return Decision("none", f"in maintenance ({maintained}); who took it out puts it back when that is done")
    return _decide_open(node, wish, now) if wish.healthy else _decide_close(node, wish, now)


def _decide_open(node: GateNode, wish: Wish, now: str) -> Decision:
    marks = node.marks
    closed_by = marks.get(CLOSED_BY_KEY, FARM)
    why_not = None
    if not marks:
        why = "is drained" if node.draining else "is ineligible"
        why_not = "healthy and open" if node.eligible else f"healthy, but {why} by somebody else; left as it is"
    elif node.status != "ready":
        why_not = f"its status is {node.status}; it stays closed until it is ready"
    elif wish.closed_by == NODE and closed_by != NODE:
        why_not = f"closed by the farm for {marks.get(REASON_KEY)}; only the farm's run opens it"
    elif wish.closed_by == FARM and closed_by == NODE and MEASURED in marks.get(REASON_KEY, ""):
        why_not = (
            f"closed by its own gate for {marks.get(REASON_KEY)}, which no run of the farm measures; that gate opens "
            "it after a clean check"
        )
    elif not node.eligible and node.drained_by_others:
        why_not = "healthy, but drained by somebody else; left as it is"
    elif not _counts(node, wish):
        why_not = f"this probe may be older than the last one; closed for {marks.get(REASON_KEY)} until the next one"
    if why_not:
        return Decision("none", why_not)
    meta = {**dict.fromkeys(KEYS), STATE_KEY: OPEN, SINCE_KEY: now, MEMORY_KEY: str(Memory(index=node.index))}
    if node.eligible:
        return Decision("update", "opened by somebody else before; its old reason is removed", meta=meta)
    memory = _with_clean_probe(Memory.of(marks), node, wish)
    waits = _waits(memory, wish)
    if waits:
        counted = {**{key: marks[key] for key in KEYS if key in marks}, MEMORY_KEY: str(memory)}
        told = f"healthy, and stays closed {waits}; it was closed for {marks.get(REASON_KEY)}"
        return Decision("wait", told, None if memory == Memory.of(marks) else counted)
    return Decision(
        "open",
        f"opened after a clean probe; it was closed for {marks.get(REASON_KEY)}",
        meta=meta,
        eligible=None if node.draining else True,
        cancel_drain=node.draining,
    )


def _counts(node: GateNode, wish: Wish) -> bool:
    """Whether this probe began after the last one that counts was judged."""
    last = Memory.of(node.marks).index
    # Higher than the node's own: Nomad was restored from a backup, or the client has other servers now.
    return wish.index is None or wish.index > last or last > node.index


def _with_clean_probe(memory: Memory, node: GateNode, wish: Wish) -> Memory:
    started = memory.uptime
    if wish.uptime is not None and (started is None or started > wish.uptime):
        # Nobody could ask it when it was closed, or it has been restarted.
        started = wish.uptime
    if memory.clean >= wish.open_after and started == memory.uptime:
        # Only time is missing.
        return memory
    return dataclasses.replace(memory, index=node.index, clean=memory.clean + 1, uptime=started)


def _waits(memory: Memory, wish: Wish) -> str:
    """For what a healthy node has to wait; empty when for nothing."""
    if memory.clean < wish.open_after:
        return f"until {wish.open_after} probes in a row are clean, this was number {memory.clean}"
    if wish.closed_min_s <= 0:
        return ""
    if wish.uptime is None or memory.uptime is None:
        return f"for {wish.closed_min_s} s, which nobody can tell without the node's uptime"
    closed_s = wish.uptime - memory.uptime
    return f"for {wish.closed_min_s} s, of which {closed_s} are over" if closed_s < wish.closed_min_s else ""


def _decide_close(node: GateNode, wish: Wish, now: str) -> Decision:
    reason = clean_reason(wish.reason)
    if node.eligible:
        return _close(node, wish, _marks(reason, now, wish, node))
    marks = node.marks
    if not marks:
        why = "drained" if node.draining else "ineligible"
        return Decision("none", f"already {why} by somebody else; its health: {reason}")
    since, closed_by, memory = marks.get(SINCE_KEY, now), marks.get(CLOSED_BY_KEY, FARM), Memory.of(marks)
    drain = wish.drain and not node.draining and node.drain_meta.get(SINCE_KEY) != since
    # The node alone cannot see whether the farm's reason is gone.
    others = wish.closed_by == NODE and closed_by == FARM
    known = others or marks.get(REASON_KEY) == reason
    # Otherwise a clean probe that is older than this one would open the node.
    newer = wish.index is not None and (memory.clean > 0 or memory.index != node.index)
    if node.status != "ready" or (known and not drain and not newer):
        return Decision("none", f"closed since {since} for {marks.get(REASON_KEY)}")
    told = f"closed since {since}, now for {reason}"
    if known:
        told = f"closed since {since}, {'now drained' if drain else 'still sick'}: {marks.get(REASON_KEY)}"
    meta = {
        STATE_KEY: CLOSED,
        REASON_KEY: marks.get(REASON_KEY) or reason if known else reason,
        SINCE_KEY: since,
        CLOSED_BY_KEY: closed_by if known else wish.closed_by,
        MEMORY_KEY: str(dataclasses.replace(memory, index=node.index, clean=0)),
    }
    return Decision("update", told, meta, drain)


def _close(node: GateNode, wish: Wish, marks: Mapping[str, str]) -> Decision:
    if node.status not in ("ready", "down"):
        # Nomad waits for it: it places nothing there, and a drain would end what may still run.
        return Decision("none", f"not closed, Nomad holds it for {node.status}; its health: {marks[REASON_KEY]}")
    if node.status != "ready":
        # Nothing runs there any more that a drain could move; it is the only mark that a node without agent takes.
        return Decision("close", f"closed, {node.status}: {marks[REASON_KEY]}", marks, drain=True)
    return Decision(
        "close", f"closed: {marks[REASON_KEY]}", marks, drain=wish.drain, eligible=None if wish.drain else False
    )


def _marks(reason: str, since: str, wish: Wish, node: GateNode) -> dict[str, str]:
    memory = Memory(index=node.index, uptime=wish.uptime, drain=node.drained_at)
    return {
        STATE_KEY: CLOSED,
        REASON_KEY: reason,
        SINCE_KEY: since,
        CLOSED_BY_KEY: wish.closed_by,
        MEMORY_KEY: str(memory),
    }


def state_after(node: GateNode, decision: Decision, wish: Wish) -> str:
    """Open, or who keeps the node closed, once the decision is carried out."""
    if decision.action == "close":
        return wish.closed_by
    if decision.action == "open" or node.eligible:
        return OPEN
    if node.meta.get(MAINTENANCE_KEY):
        return MAINTENANCE
    marks = node.marks
    if not marks or node.drained_by_others:
        return OTHERS
    return (decision.meta or {}).get(CLOSED_BY_KEY) or marks.get(CLOSED_BY_KEY, FARM)
