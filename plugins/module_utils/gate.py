# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The gate of a node: closed, Nomad places nothing new on it; and the gate opens only what it closed itself.

C(decide) is pure and says what has to be done, C(carry_out) does it. Who closed a node, why and since when is in the
node's meta, where jobs and people read it. A node that is down takes no meta, so there it is in the meta of a drain,
which Nomad's servers keep.

What came first is told by C(ModifyIndex), which Nomad raises with each change of a node, and never by a clock: who
probes reads it before the probe, and who judges a probe writes the one of that moment into the meta. So a probe that
may have begun before the last one was judged neither opens the node nor counts. How long a node is closed is told by
its own uptime.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
import urllib.parse
from collections.abc import Iterable, Mapping
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils import nomad
from ansible_collections.gpufarm.core.plugins.module_utils.problem import sentences

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

MAINTENANCE = "maintenance"
OTHERS = "others"
STATES = (OPEN, NODE, FARM, MAINTENANCE, OTHERS)
"""Open, or who keeps it closed."""

KEYS = (STATE_KEY, REASON_KEY, SINCE_KEY, CLOSED_BY_KEY, MEMORY_KEY)
MAINTENANCE_KEY = "gpufarm_maintenance"
"""For what the node is taken out of work, as C(maintenance) writes it; no gate opens it before that is over."""
MAX_REASON = 500
_NANOSECONDS = 1_000_000_000


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
    """When the last drain began, RFC 3339."""
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
        return not own and (self.draining or self.drained_at != Memory.of(marks).drain)


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
        drained_at=(node.get("LastDrain") or {}).get("StartedAt") or "",
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


def carry_out(client: nomad.Client, node: GateNode, decision: Decision, wish: Wish) -> None:
    """Do what was decided. A node is marked before it is closed, and opened before its mark goes.

    So whatever stops in between leaves a node that the next run puts right.
    """
    path = node_path(node.id)
    opening = decision.action == "open"
    if decision.meta and not opening and node.status == "ready":
        _write_meta(client, node, decision.meta)
    if decision.drain:
        spec = {"Deadline": wish.drain_deadline_s * _NANOSECONDS, "IgnoreSystemJobs": True}
        client.call("POST", f"{path}/drain", {"NodeID": node.id, "DrainSpec": spec, "Meta": decision.meta})
    if decision.cancel_drain:
        client.call("POST", f"{path}/drain", {"NodeID": node.id, "DrainSpec": None, "MarkEligible": True})
    if decision.eligible is not None:
        word = "eligible" if decision.eligible else "ineligible"
        client.call("POST", f"{path}/eligibility", {"NodeID": node.id, "Eligibility": word})
    if decision.meta and opening:
        _write_meta(client, node, decision.meta)


def _write_meta(client: nomad.Client, node: GateNode, meta: Mapping[str, str | None]) -> None:
    client.call("POST", "/v1/client/metadata", {"NodeID": node.id, "Meta": dict(meta)})


def find_nodes(client: nomad.Client, names: Iterable[str]) -> dict[str, GateNode | None]:
    """Names or IDs of nodes to what Nomad lists of them; None where it has no such node. The list tells no meta.

    A client that lost its data registers anew, so of several nodes with one name the youngest that lives counts.
    """
    wanted = set(names)
    found: dict[str, dict[str, Any]] = {}
    for node in client.items("/v1/nodes", {}).items:
        for key in (node.get("Name"), node.get("ID")):
            if key in wanted and (key not in found or _rank(node) > _rank(found[key])):
                found[key] = node
    return {name: gate_node(found[name]) if name in found else None for name in wanted}


def _rank(node: Mapping[str, Any]) -> tuple[bool, int]:
    return nomad.rank(nomad.describe_node(node))


def marked_nodes(client: nomad.Client) -> set[str]:
    """IDs of the nodes whose meta says that the gate closed them."""
    return _filtered(client, f'Meta.{STATE_KEY} == "{CLOSED}"')


def nodes_with_devices(client: nomad.Client) -> set[str]:
    """IDs of the nodes that have devices, most of which are GPUs."""
    return _filtered(client, "NodeResources.Devices is not empty")


def _filtered(client: nomad.Client, expression: str) -> set[str]:
    return {node.get("ID") or "" for node in client.items("/v1/nodes", {"filter": expression}).items}


def node_path(node_id: str) -> str:
    return f"/v1/node/{urllib.parse.quote(node_id)}"


def read_node(client: nomad.Client, node_id: str) -> GateNode:
    """One node as it is now, its meta included."""
    return with_meta(client, gate_node(client.call("GET", node_path(node_id)) or {}))


def with_meta(client: nomad.Client, node: GateNode) -> GateNode:
    """The node with the meta that its client has."""
    if node.status != "ready":
        return node
    try:
        # The servers learn of new meta seconds later; the client has it at once.
        answer = client.call("GET", "/v1/client/metadata", query={"node_id": node.id}) or {}
    except nomad.NomadError as error:
        if error.status not in (404, 500):
            raise
        return node
    return dataclasses.replace(node, meta=answer.get("Meta") or {})


def most_closed(text: str, nodes: int) -> int:
    """How many nodes C(max_closed) lets the gate close, of so many.

    Of a percentage it is the whole number below, and one at least: a farm of three nodes may close its sick one.
    """
    match = _MAX_CLOSED.match(text)
    if not match or (match[2] and int(match[1]) > 100):
        raise nomad.NomadError(
            found=f"max_closed is '{text}'",
            expected="a number of nodes such as 5, or a percentage such as 20%",
            next_step="correct the option",
        )
    number = int(match[1])
    return number if not match[2] else max(nodes * number // 100, min(number, 1))


def brake(closing: Iterable[GateNode], closed: Iterable[str], farm: int, max_closed: str) -> str:
    """Why none of these nodes may be closed; empty when they may. C(closed) are the IDs of those that stay closed."""
    new = {node.id for node in closing}
    before = set(closed) - new
    limit = most_closed(max_closed, farm)
    if not new or len(new) + len(before) <= limit:
        return ""
    return str(
        nomad.NomadError(
            found=f"{len(new)} to close beside {len(before)} that the gate has closed, of {farm} nodes; none is closed",
            expected=f"at most {limit} that the gate has closed (max_closed is {max_closed})",
            next_step="look for one cause of all in the reasons below, such as an update of the driver or of Nomad; if "
            "these nodes are all sick, raise max_closed for one run (gate_max_closed in playbooks/health.yml)",
        )
    )


# --- the node's own agent --------------------------------------------------------------------

AGENT_OK = "ok"
AGENT_STOPPED = "stopped"
AGENT_UNHEALTHY = "unhealthy"
PLUGIN_STOPPED = "plugin_stopped"

PLUGIN_AGE_MAX_S = 60.0
"""Nomad's agent collects statistics every second, or as its telemetry block says."""

_MAX_CLOSED = re.compile(r"([0-9]{1,6})(%?)\Z")
_TIME = re.compile(r"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.\d+)?(Z|[+-]\d\d:\d\d)$")


def agent_state(status: int | None, stats: Mapping[str, Any] | None, max_age_s: float = PLUGIN_AGE_MAX_S) -> str:
    """How a client agent is, by the HTTP status of C(/v1/agent/health) and by what C(/v1/client/stats) says.

    C(ok), C(stopped), C(unhealthy), or C(plugin_stopped): a device plugin that ends and cannot be started again, or
    hangs, leaves its devices in Nomad for ever, and only its statistics get no newer. An agent without statistics of
    devices tells nothing; with MIG the plugin has none.
    """
    if status is None or status < 100:
        return AGENT_STOPPED
    if status != 200:
        return AGENT_UNHEALTHY
    age = plugin_age_s(stats or {})
    return PLUGIN_STOPPED if age is not None and age > max_age_s else AGENT_OK


def plugin_age_s(stats: Mapping[str, Any]) -> float | None:
    """Seconds between the agent's own statistics and the newest of GPUs; None where there are none of GPUs."""
    times = [
        seconds
        for group in stats.get("DeviceStats") or []
        if group.get("Type") == nomad.GPU_DEVICE_TYPE
        for instance in (group.get("InstanceStats") or {}).values()
        if (seconds := _seconds((instance or {}).get("Timestamp"))) is not None
    ]
    taken = stats.get("Timestamp")
    return max(0.0, taken / _NANOSECONDS - max(times)) if times and isinstance(taken, int) else None


def _seconds(text: Any) -> float | None:
    match = _TIME.match(text) if isinstance(text, str) else None
    if not match:
        return None
    zone = "+00:00" if match[2] == "Z" else match[2]
    return datetime.datetime.fromisoformat(match[1] + zone).timestamp()


# --- a farm ----------------------------------------------------------------------------------

CRITICAL = "critical"
WARNING = "warning"
HARMLESS = ("driver_version_stale",)
"""What Nomad's view has wrong of a node that is well, as the report says too."""
WISHES = ("drain", "drain_deadline", "index", "uptime")
NOMAD = "nomad"
KUBERNETES = "kubernetes"
_PLAYBOOKS = {NOMAD: "playbooks/health.yml", KUBERNETES: "playbooks/kubernetes_health.yml"}
_UNKNOWN_NODE = {
    NOMAD: "run playbooks/site.yml for it, because Nomad cannot close a node that it does not know",
    KUBERNETES: "check that the kubelet runs there and has this name ('kubectl get nodes')",
}


def closes(verdict: str | None, close_on: str) -> bool:
    """Whether a probe with this verdict closes its node."""
    return verdict == CRITICAL or (verdict == WARNING and close_on == WARNING)


def judge_farm(
    probes: Iterable[Mapping[str, Any]],
    verdicts: Iterable[Mapping[str, Any]],
    close_on: str = CRITICAL,
    scheduler: str = NOMAD,
) -> dict[str, Any]:
    """What the probes on the nodes and the scheduler's view say together.

    C(probes) are C({"node": name in Nomad, "host": name of the host, "probe": what nvidia_gpu_health returned, "agent":
    what agent_state says}), where the probe can be a failed or an unreachable one; C(close_on), C(drain),
    C(drain_deadline), C(index) and C(uptime) are the node's own, if it has some. C(verdicts) are the C(nodes) of
    nomad_gpu_verify, or of kubernetes_gpu_verify where C(scheduler) says so. Returns

    - C(nodes): what nomad_gpu_gate and kubernetes_gpu_gate take, for every node that can be judged,
    - C(unprobed): node and C(message) of those that could not be probed and that the scheduler holds for well: they
      stay as they are, because a broken way to them says nothing about their GPUs,
    - C(missing): names of nodes that the scheduler does not know, and so cannot close,
    - C(sick): node, C(reason) and C(message) of all that are not healthy, the missing ones included,
    - C(warnings): node and C(reason) of those that are healthy with a warning.
    """
    by_name = {verdict["name"]: verdict for verdict in verdicts}
    judged: dict[str, list[Any]] = {"nodes": [], "unprobed": [], "missing": [], "sick": [], "warnings": []}
    for entry in probes:
        name, probe = entry["node"], entry.get("probe") or {}
        told_by_scheduler = [problem["code"] for problem in (by_name.get(name) or {}).get("problems") or []]
        codes = [code for code in told_by_scheduler if code not in HARMLESS]
        verdict = probe.get("verdict")
        agent = entry.get("agent") or AGENT_OK
        if agent != AGENT_OK and verdict is not None:
            codes.insert(0, agent if agent == PLUGIN_STOPPED else f"agent_{agent}")
        sick_by_probe = closes(verdict, entry.get("close_on") or close_on)
        told = ["not_probed"] if verdict is None else [probe["reason"]] if sick_by_probe else []
        reason = _reason(told, codes, scheduler)
        if verdict is None and not codes:
            judged["unprobed"].append(
                {"node": name, "message": _why_unprobed(entry.get("host") or name, probe, scheduler)}
            )
            continue
        sick = bool(codes) or sick_by_probe
        if sick:
            judged["sick"].append(
                {"node": name, "reason": reason, "message": _why_sick(name, reason, codes, scheduler)}
            )
        elif verdict == WARNING or told_by_scheduler:
            warned = [probe["reason"]] if verdict == WARNING else []
            judged["warnings"].append({"node": name, "reason": _reason(warned, told_by_scheduler, scheduler)})
        if "node_missing" in codes:
            judged["missing"].append(name)
        else:
            wishes = {key: entry[key] for key in WISHES if entry.get(key) is not None}
            judged["nodes"].append({"node": name, "healthy": not sick, "reason": reason if sick else None, **wishes})
    return judged


def _reason(told: list[str], codes: Iterable[str], scheduler: str) -> str:
    return clean_reason("; ".join(told + [f"{scheduler} {code}" for code in dict.fromkeys(codes)]))


def _why_sick(node: str, reason: str, codes: Iterable[str], scheduler: str) -> str:
    next_step = f"repair it and run {_PLAYBOOKS[scheduler]} again, which opens the node after a clean probe"
    if "node_missing" in codes:
        next_step = _UNKNOWN_NODE[scheduler]
    elif "agent_stopped" in codes:
        next_step = "read `journalctl -u nomad` there and start Nomad"
    elif PLUGIN_STOPPED in codes:
        next_step = "read `journalctl -u nomad` there, run playbooks/site.yml for it and restart Nomad"
    return f"Node {node}: found {sentences(reason, f'healthy GPUs that {scheduler.capitalize()} has', next_step)}"


def _why_unprobed(host: str, probe: Mapping[str, Any], scheduler: str) -> str:
    found = probe.get("msg") or "no answer"
    what = "cannot be reached" if probe.get("unreachable") else "could not be probed"
    return (
        f"{host}: {what} ({clean_reason(str(found))}). Expected: a host that Ansible reaches, with Python and root "
        f"rights. Next step: run `ansible {host} -m ansible.builtin.ping --become`. Its node stays as it is in "
        f"{scheduler.capitalize()}."
    )
