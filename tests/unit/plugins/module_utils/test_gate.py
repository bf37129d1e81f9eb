"""The gate's decisions, and what reaches Nomad because of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest
from ansible_collections.gpufarm.core.plugins.module_utils import gate, nomad, text
from ansible_collections.gpufarm.core.plugins.module_utils.gate import Decision, GateNode, Wish
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils.gate_helper import Farm

NOW = "2026-11-21T12:00:00Z"
BEFORE = "2026-11-21T11:00:00Z"
SICK = Wish(healthy=False, reason="gpu_lost GPU-1")
HEALTHY = Wish(healthy=True)


def node(**changes: Any) -> GateNode:
    plain = GateNode(
        "id-1", "gpu01", "ready", eligible=True, draining=False, meta={"rack": "7"}, drain_meta={}, index=500
    )
    return dataclasses.replace(plain, **changes)


def memory(**known: Any) -> str:
    """What the gate remembers of a node that it closed when its index was 500."""
    return json.dumps({"index": 500, "clean": 0, "uptime": None, "drain": "", **known}, separators=(",", ":"))


def marks(
    reason: str = "gpu_lost GPU-1", since: str = BEFORE, closed_by: str = gate.FARM, **known: Any
) -> dict[str, str]:
    return {
        "gpufarm_gate_memory": memory(**known),
        "gpufarm_gate": "closed",
        "gpufarm_gate_reason": reason,
        "gpufarm_gate_since": since,
        "gpufarm_gate_closed_by": closed_by,
    }


class Recorder(nomad.Client):
    """A client that keeps what it is told to do, in the order of telling."""

    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__(nomad.Connection())
        self.calls: list[tuple[str, Any]] = []
        self.fail_at = fail_at

    def call(self, method: str, path: str, body: Any = None, query: Any = None) -> Any:
        assert (method, query) == ("POST", None)
        if self.fail_at == len(self.calls):
            raise nomad.NomadError("no", "yes", "again")
        self.calls.append((path, body))


def done(at: GateNode, wish: Wish) -> list[tuple[str, Any]]:
    client = Recorder()
    gate.carry_out(client, at, gate.decide(at, wish, NOW), wish)
    return client.calls


def test_sick_node_is_marked_and_then_closed() -> None:
    assert done(node(), SICK) == [
        ("/v1/client/metadata", {"NodeID": "id-1", "Meta": marks(since=NOW)}),
        ("/v1/node/id-1/eligibility", {"NodeID": "id-1", "Eligibility": "ineligible"}),
    ]


def test_sick_node_is_drained_on_request() -> None:
    wish = dataclasses.replace(SICK, drain=True, drain_deadline_s=60)
    spec = {"Deadline": 60_000_000_000, "IgnoreSystemJobs": True}
    assert done(node(), wish) == [
        ("/v1/client/metadata", {"NodeID": "id-1", "Meta": marks(since=NOW)}),
        ("/v1/node/id-1/drain", {"NodeID": "id-1", "DrainSpec": spec, "Meta": marks(since=NOW)}),
    ]


def test_drain_is_asked_for_once() -> None:
    wish = dataclasses.replace(SICK, drain=True)
    closed = node(eligible=False, meta=marks())
    assert [path for path, _body in done(closed, wish)] == ["/v1/client/metadata", "/v1/node/id-1/drain"]
    assert done(dataclasses.replace(closed, draining=True), wish) == []
    assert done(dataclasses.replace(closed, drain_meta=marks()), wish) == []


def test_node_that_is_down_is_marked_by_a_drain() -> None:
    ((path, body),) = done(node(status="down"), SICK)
    assert path == "/v1/node/id-1/drain"
    assert body["Meta"] == marks(since=NOW)


@pytest.mark.parametrize("where", ["meta", "drain_meta"])
def test_closed_node_stays_as_it_is(where: str) -> None:
    closed = node(eligible=False, **{where: marks()})
    assert gate.decide(closed, SICK, NOW).action == "none"
    assert done(closed, SICK) == []


def test_another_reason_keeps_the_time_of_closing() -> None:
    closed = node(eligible=False, meta=marks())
    ((path, body),) = done(closed, Wish(healthy=False, reason="xid_79 0000:3b:00.0"))
    assert path == "/v1/client/metadata"
    assert body["Meta"] == marks("xid_79 0000:3b:00.0", BEFORE)


def test_healthy_node_is_opened_and_then_its_mark_goes() -> None:
    calls = done(node(eligible=False, meta=marks()), HEALTHY)
    assert [path for path, _body in calls] == ["/v1/node/id-1/eligibility", "/v1/client/metadata"]
    assert calls[0][1] == {"NodeID": "id-1", "Eligibility": "eligible"}
    assert calls[1][1]["Meta"] == {
        "gpufarm_gate": "open",
        "gpufarm_gate_reason": None,
        "gpufarm_gate_since": NOW,
        "gpufarm_gate_closed_by": None,
        "gpufarm_gate_memory": memory(),
    }


def test_drain_of_a_node_that_is_healthy_again_is_cancelled() -> None:
    calls = done(node(eligible=False, draining=True, meta=marks(), drain_meta=marks()), HEALTHY)
    assert calls[0] == ("/v1/node/id-1/drain", {"NodeID": "id-1", "DrainSpec": None, "MarkEligible": True})
    assert len(calls) == 2


@pytest.mark.parametrize("wish", [HEALTHY, SICK])
@pytest.mark.parametrize("draining", [True, False])
def test_what_an_operator_closed_is_left_alone(wish: Wish, draining: bool) -> None:
    closed = node(eligible=False, draining=draining)
    assert gate.decide(closed, wish, NOW).action == "none"
    assert "somebody else" in gate.decide(closed, wish, NOW).message


def test_drain_of_an_operator_on_a_closed_node_is_left_alone() -> None:
    """By the name of that drain, whatever the clock of the server says that began it."""
    earlier = "2020-01-01T00:00:00Z"
    closed = node(eligible=False, draining=True, meta=marks(), drain_meta={"message": "new riser"})
    drained = [
        node(eligible=False, meta=marks(drain=earlier), drained_at=at) for at in ("2027-01-01T00:00:00Z", "2019")
    ]
    for each in (closed, *drained):
        assert gate.decide(each, HEALTHY, NOW).action == "none"
        assert "drained by somebody else" in gate.decide(each, HEALTHY, NOW).message
    for known in (
        node(eligible=False, meta=marks(drain=earlier), drained_at=earlier),
        # As an earlier release has noted what a leader in another zone said.
        node(eligible=False, meta=marks(drain="2020-01-01T01:00:00+01:00"), drained_at=earlier),
        node(eligible=False, meta=marks()),
    ):
        assert gate.decide(known, HEALTHY, NOW).action == "open"


def test_last_drain_before_the_closing_is_remembered() -> None:
    ((_path, body), _close) = done(node(drained_at=BEFORE), SICK)
    assert body["Meta"]["gpufarm_gate_memory"] == memory(drain=BEFORE)


@pytest.mark.parametrize("status", ["disconnected", "initializing"])
def test_node_that_nomad_waits_for_is_not_drained(status: str) -> None:
    assert done(node(status=status), SICK) == []


def test_node_that_somebody_opened_again_loses_its_old_mark() -> None:
    """Otherwise the mark of a drain would let the gate open what an operator closes later."""
    opened = node(drain_meta=marks(index=499))
    assert gate.decide(opened, HEALTHY, NOW).action == "update"
    ((path, body),) = done(opened, HEALTHY)
    assert path == "/v1/client/metadata"
    closed_later = node(eligible=False, meta=body["Meta"], drain_meta=marks(index=499))
    assert gate.decide(closed_later, HEALTHY, "2027-01-01T00:00:00Z").action == "none"


def test_operator_who_closes_after_the_gate_has_opened_is_left_alone() -> None:
    """The meta of the last drain is still there, and is older than the opening."""
    opened = {"gpufarm_gate": "open", "gpufarm_gate_since": "1999", "gpufarm_gate_memory": memory(index=501)}
    assert gate.decide(node(eligible=False, meta=opened, drain_meta=marks()), HEALTHY, NOW).action == "none"
    drained_later = node(eligible=False, meta=opened, drain_meta=marks(index=502))
    assert gate.decide(drained_later, HEALTHY, NOW).action == "open"


def test_closed_node_that_is_down_is_not_opened() -> None:
    assert gate.decide(node(status="down", eligible=False, drain_meta=marks()), HEALTHY, NOW).action == "none"


def test_node_opened_by_hand_loses_its_old_reason() -> None:
    decision = gate.decide(node(meta=marks()), HEALTHY, NOW)
    assert (decision.action, decision.eligible) == ("update", None)
    assert decision.meta and decision.meta["gpufarm_gate"] == "open"


def test_node_opened_by_hand_while_sick_is_closed_again() -> None:
    assert gate.decide(node(meta=marks()), SICK, NOW).action == "close"


def test_the_node_itself_opens_only_what_it_closed() -> None:
    own = dataclasses.replace(HEALTHY, closed_by=gate.NODE)
    assert gate.decide(node(eligible=False, meta=marks(closed_by=gate.FARM)), own, NOW).action == "none"
    assert gate.decide(node(eligible=False, meta=marks(closed_by=gate.NODE)), own, NOW).action == "open"


def test_the_node_itself_does_not_replace_the_farms_reason() -> None:
    own = Wish(healthy=False, reason="xid_79", closed_by=gate.NODE)
    assert gate.decide(node(eligible=False, meta=marks(closed_by=gate.FARM)), own, NOW).action == "none"


def test_the_farm_keeps_what_the_node_closed_for_the_same_reason() -> None:
    assert gate.decide(node(eligible=False, meta=marks(closed_by=gate.NODE)), SICK, NOW).action == "none"


def test_closing_that_stops_halfway_is_put_right_by_the_next_run() -> None:
    client = Recorder(fail_at=1)
    with pytest.raises(nomad.NomadError):
        gate.carry_out(client, node(), gate.decide(node(), SICK, NOW), SICK)
    ((path, body),) = client.calls
    assert path == "/v1/client/metadata"
    halfway = node(meta=body["Meta"])
    assert gate.decide(halfway, SICK, NOW).action == "close"
    assert gate.decide(halfway, HEALTHY, NOW).action == "update"


def test_reason_fits_nomads_meta() -> None:
    assert gate.clean_reason("GPU\nlost \x1b[31m \u2026 é") == "GPU lost [31m"
    assert gate.clean_reason(None) == "no reason given"
    assert len(gate.clean_reason("x" * 2000)) == 500


def test_nomads_answer_is_read() -> None:
    answer = {
        "ID": "id-1", "Name": "gpu01", "Status": "ready", "SchedulingEligibility": "ineligible", "DrainStrategy": {},
        "Meta": None, "LastDrain": {"Meta": {"gpufarm_gate": "closed"}},
    }  # fmt: skip
    read = gate.gate_node({**answer, "DrainStrategy": {"Deadline": 1}})
    assert (read.eligible, read.draining, read.drain_meta) == (False, True, {"gpufarm_gate": "closed"})
    assert gate.gate_node({**answer, "DrainStrategy": None, "LastDrain": None}).draining is False


def test_decision_that_changes_nothing_calls_nothing() -> None:
    client = Recorder()
    gate.carry_out(client, node(), Decision("none", ""), HEALTHY)
    assert client.calls == []


# --- older and newer probes -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "action"),
    [(499, "none"), (500, "none"), (501, "open"), (None, "open"), (-1, "none")],
)
@pytest.mark.parametrize("now", [NOW, "1970-01-01T00:00:00Z", "2099-01-01T00:00:00Z"])
def test_older_probe_does_not_open_what_a_newer_one_closed(index: int | None, action: str, now: str) -> None:
    """Whatever the clocks say: the node was closed at index 500, and changed since."""
    closed = node(eligible=False, meta=marks(), index=502)
    decision = gate.decide(closed, dataclasses.replace(HEALTHY, index=index), now)
    assert decision.action == action
    if action == "none":
        assert (
            decision.message
            == "this probe may be older than the last one; closed for gpu_lost GPU-1 until the next one"
        )
        assert not decision.changes


def test_older_probe_does_not_take_the_mark_of_a_node_that_is_just_being_closed() -> None:
    """It is marked first and then closed; in between it is still eligible."""
    halfway = node(meta=marks(), index=500)
    assert gate.decide(halfway, dataclasses.replace(HEALTHY, index=500), NOW).action == "none"


def test_newer_sick_probe_of_a_closed_node_is_written_down() -> None:
    """Or a clean probe between the closing and this one would open the node."""
    closed = node(eligible=False, meta=marks(clean=2, uptime=7, drain=BEFORE), index=502)
    wish = dataclasses.replace(SICK, index=501)
    ((path, body),) = done(closed, wish)
    assert path == "/v1/client/metadata"
    assert body["Meta"] == marks(index=502, uptime=7, drain=BEFORE)
    decision = gate.decide(closed, wish, NOW)
    assert decision.message == f"closed since {BEFORE}, still sick: gpu_lost GPU-1"
    again = dataclasses.replace(closed, meta=body["Meta"])
    assert gate.decide(again, wish, NOW).action == "none"
    between = dataclasses.replace(HEALTHY, index=501)
    assert gate.decide(again, between, NOW).action == "none"


def test_sick_probe_of_the_node_keeps_the_farms_reason_and_blocks_older_probes_too() -> None:
    closed = node(eligible=False, meta=marks("duplicate_uuid"), index=502)
    ((_path, body),) = done(closed, Wish(False, "xid_79", closed_by=gate.NODE, index=502))
    assert body["Meta"] == marks("duplicate_uuid", index=502)


def test_closed_without_a_time_of_the_probe_is_written_once() -> None:
    assert done(node(eligible=False, meta=marks(), index=502), SICK) == []


def test_index_of_another_cluster_does_not_close_for_ever() -> None:
    """After a restore from a backup, and for a client that has other servers now, the numbers begin lower."""
    closed = node(eligible=False, meta=marks(index=9000), index=502)
    assert gate.decide(closed, dataclasses.replace(HEALTHY, index=10), NOW).action == "open"


@pytest.mark.parametrize(
    "spoiled", ["", "7", "[]", "{", '{"index": "9"}', '{"index": 1, "colour": 2}', '{"index": true}']
)
def test_spoiled_memory_is_none(spoiled: str) -> None:
    assert gate.Memory.of({"gpufarm_gate_memory": spoiled}) == gate.Memory(-1, 0, None, "")
    closed = node(eligible=False, meta={**marks(), "gpufarm_gate_memory": spoiled})
    assert gate.decide(closed, dataclasses.replace(HEALTHY, index=0), NOW).action == "open"


def test_memory_is_what_was_written() -> None:
    for known in (gate.Memory(7, 2, 3600, BEFORE), gate.Memory(7), gate.Memory()):
        assert gate.Memory.of({"gpufarm_gate_memory": str(known)}) == known


# --- how long it stays closed ----------------------------------------------------------------


def probed(index: int, uptime: int | None = None, **more: Any) -> Wish:
    return dataclasses.replace(HEALTHY, index=index, uptime=uptime, **more)


def test_clean_probes_in_a_row_are_counted_in_the_meta() -> None:
    closed = node(eligible=False, meta={"rack": "7", **marks()}, index=502)
    wish = probed(502, open_after=3)
    ((path, body),) = done(closed, wish)
    assert (path, body["Meta"]) == ("/v1/client/metadata", marks(index=502, clean=1))
    decision = gate.decide(closed, wish, NOW)
    assert (decision.action, decision.changes) == ("wait", True)
    assert decision.message == (
        "healthy, and stays closed until 3 probes in a row are clean, this was number 1; "
        "it was closed for gpu_lost GPU-1"
    )
    # The same probe once more, and then the next ones.
    closed = dataclasses.replace(closed, meta=body["Meta"], index=503)
    assert gate.decide(closed, wish, NOW).action == "none"
    second = gate.decide(closed, probed(503, open_after=3), NOW)
    assert second.meta == marks(index=503, clean=2)
    closed = dataclasses.replace(closed, meta=marks(index=503, clean=2), index=504)
    assert gate.decide(closed, probed(504, open_after=3), NOW).action == "open"


def test_mark_of_a_drain_is_copied_when_probes_are_counted() -> None:
    back = node(eligible=False, drain_meta=marks(), index=502)
    ((_path, body),) = done(back, probed(502, open_after=2))
    assert body["Meta"] == marks(index=502, clean=1)
    counted = dataclasses.replace(back, meta=body["Meta"], index=503)
    assert gate.decide(counted, probed(503, open_after=2), NOW).action == "open"


@pytest.mark.parametrize(
    ("closed_at", "uptime", "action", "words"),
    [
        (1000, 1299, "wait", "for 300 s, of which 299 are over"),
        (1000, 1300, "open", "opened after a clean probe; it was closed for gpu_lost GPU-1"),
        (None, 1300, "wait", "for 300 s, of which 0 are over"),
        (1000, 30, "wait", "for 300 s, of which 0 are over"),
        (1000, None, "wait", "for 300 s, which nobody can tell without the node's uptime"),
        (None, None, "wait", "for 300 s, which nobody can tell without the node's uptime"),
    ],
)
def test_shortest_time_closed_is_told_by_the_nodes_uptime(
    closed_at: int | None, uptime: int | None, action: str, words: str
) -> None:
    """It was closed when it was down, and so at nobody knows what uptime; or it was restarted since."""
    closed = node(eligible=False, meta=marks(uptime=closed_at), index=502)
    decision = gate.decide(closed, probed(502, uptime, closed_min_s=300), NOW)
    assert decision.action == action
    assert words in decision.message
    if action == "wait":
        known = uptime if uptime is not None and (closed_at is None or closed_at > uptime) else closed_at
        assert decision.meta == marks(index=502, clean=1, uptime=known)


def test_waiting_for_time_alone_writes_nothing() -> None:
    closed = node(eligible=False, meta=marks(clean=1, uptime=1000), index=502)
    decision = gate.decide(closed, probed(502, 1100, closed_min_s=300), NOW)
    assert (decision.action, decision.changes) == ("wait", False)
    assert done(closed, probed(502, 1100, closed_min_s=300)) == []
    assert gate.decide(closed, probed(502, 1000, closed_min_s=0), NOW).action == "open"


def test_closing_remembers_the_uptime_and_the_index() -> None:
    ((_path, body), _close) = done(node(index=77), dataclasses.replace(SICK, index=76, uptime=1000))
    assert body["Meta"] == marks(since=NOW, index=77, uptime=1000)
    ((_path, body),) = done(node(status="down", index=78), SICK)
    assert body["Meta"] == marks(since=NOW, index=78)


# --- the brake -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "nodes", "most"),
    [("20%", 5000, 1000), ("20%", 9, 1), ("20%", 10, 2), ("20%", 3, 1), ("20%", 0, 1), ("0%", 100, 0), ("100%", 7, 7),
     ("0", 9, 0), ("12", 9, 12), ("1%", 5000, 50)],
)  # fmt: skip
def test_how_many_nodes_may_be_closed(text: str, nodes: int, most: int) -> None:
    assert gate.most_closed(text, nodes) == most


@pytest.mark.parametrize("text", ["", "-1", "101%", "20 %", "1.5", "all", "20%x", "1234567", "²"])
def test_brake_that_is_no_number(text: str) -> None:
    with pytest.raises(nomad.NomadError) as raised:
        gate.most_closed(text, 10)
    assert str(raised.value) == (
        f"max_closed is '{text}'. Expected: a number of nodes such as 5, or a percentage such as 20%. "
        "Next step: correct the option."
    )


def test_brake_counts_what_is_closed_already() -> None:
    new = [node(id=f"id-{number}") for number in range(2)]
    assert gate.brake(new, {"id-8"}, 15, "20%") == ""
    assert gate.brake(new, {"id-0", "id-8"}, 15, "20%") == ""
    told = gate.brake(new, {"id-8", "id-9"}, 15, "20%")
    assert told == (
        "2 to close beside 2 that the gate has closed, of 15 nodes; none is closed. Expected: at most 3 that the gate "
        "has closed (max_closed is 20%). Next step: look for one cause of all in the reasons below, such as an update "
        "of the driver or of Nomad; if these nodes are all sick, raise max_closed for one run (gate_max_closed in "
        "playbooks/health.yml)."
    )
    assert gate.brake([], {"id-8", "id-9"}, 15, "1") == ""
    with pytest.raises(nomad.NomadError):
        gate.brake([], (), 15, "some")


# --- a farm ----------------------------------------------------------------------------------


def entry(name: str, **probe: Any) -> dict[str, Any]:
    return {"node": name, "host": f"host-{name}", "probe": probe}


def verdict(name: str, *codes: str) -> dict[str, Any]:
    return {"name": name, "problems": [{"code": code} for code in codes]}


def judge(*probes: dict[str, Any], verdicts: Any = (), close_on: str = "critical") -> dict[str, Any]:
    return gate.judge_farm(probes, verdicts, close_on)


def test_probe_and_nomad_together_make_the_reason() -> None:
    judged = judge(
        entry("a", verdict="critical", reason="gpu_lost GPU-1"),
        entry("b", verdict="warning", reason="persistence_off GPU-1"),
        entry("c", verdict="ok", reason=None),
        verdicts=[verdict("a", "no_devices", "no_devices"), verdict("b", "duplicate_uuid"), verdict("c")],
    )
    assert judged["nodes"] == [
        {"node": "a", "healthy": False, "reason": "gpu_lost GPU-1; nomad no_devices"},
        {"node": "b", "healthy": False, "reason": "nomad duplicate_uuid"},
        {"node": "c", "healthy": True, "reason": None},
    ]
    assert [sick["node"] for sick in judged["sick"]] == ["a", "b"]
    assert "found gpu_lost GPU-1; nomad no_devices. Expected: " in judged["sick"][0]["message"]


def test_warning_closes_on_request_only() -> None:
    warned = entry("a", verdict="warning", reason="pcie_width GPU-1")
    judged = judge(warned, verdicts=[verdict("a")])
    assert judged["nodes"][0]["healthy"] and judged["sick"] == []
    assert judged["warnings"] == [{"node": "a", "reason": "pcie_width GPU-1"}]
    judged = judge(warned, verdicts=[verdict("a")], close_on="warning")
    assert not judged["nodes"][0]["healthy"] and judged["warnings"] == []


@pytest.mark.parametrize("close_on", ["critical", "warning"])
def test_driver_that_nomad_has_not_noticed_is_a_warning(close_on: str) -> None:
    well, warned = entry("a", verdict="ok", reason=None), entry("b", verdict="warning", reason="persistence_off GPU-1")
    judged = judge(well, verdicts=[verdict("a", "driver_version_stale", "driver_version_stale")], close_on=close_on)
    assert judged["nodes"] == [{"node": "a", "healthy": True, "reason": None}]
    assert judged["sick"] == []
    assert judged["warnings"] == [{"node": "a", "reason": "nomad driver_version_stale"}]
    judged = judge(warned, verdicts=[verdict("b", "driver_version_stale")])
    assert judged["warnings"] == [{"node": "b", "reason": "persistence_off GPU-1; nomad driver_version_stale"}]
    judged = judge(well, verdicts=[verdict("a", "driver_version_stale", "gpu_missing")])
    assert judged["nodes"] == [{"node": "a", "healthy": False, "reason": "nomad gpu_missing"}]
    judged = gate.judge_farm([well], [verdict("a", "sharing_unknown")], close_on, "kubernetes")
    assert judged["sick"] == [] and judged["warnings"] == [{"node": "a", "reason": "kubernetes sharing_unknown"}]
    judged = judge(entry("c", unreachable=True), verdicts=[verdict("c", "driver_version_stale")])
    assert [each["node"] for each in judged["unprobed"]] == ["c"]


def test_time_of_the_probe_travels_with_the_wish() -> None:
    probed = {**entry("a", verdict="ok", reason=None), "index": 7, "uptime": 3600, "drain": False, "drain_deadline": 0}
    assert judge(probed)["nodes"] == [
        {"node": "a", "healthy": True, "reason": None, "index": 7, "uptime": 3600, "drain": False, "drain_deadline": 0}
    ]


def test_node_that_was_not_probed_is_judged_by_nomad_alone() -> None:
    gone, failed = entry("a", unreachable=True, msg="timed out"), entry("b", failed=True, msg="no python")
    judged = judge(gone, failed, verdicts=[verdict("a"), verdict("b", "node_down")])
    assert judged["nodes"] == [{"node": "b", "healthy": False, "reason": "not_probed; nomad node_down"}]
    ((unprobed),) = judged["unprobed"]
    assert unprobed["node"] == "a"
    for words in ("host-a: cannot be reached (timed out)", "Expected: ", "Next step: ", "stays as it is"):
        assert words in unprobed["message"]


def test_stopped_agent_is_told_before_nomad_misses_it() -> None:
    judged = judge({**entry("a", verdict="ok", reason=None), "agent": "stopped"}, verdicts=[verdict("a")])
    assert judged["nodes"] == [{"node": "a", "healthy": False, "reason": "nomad agent_stopped"}]
    assert "start Nomad" in judged["sick"][0]["message"]


def test_node_that_nomad_does_not_know_is_sick_and_not_gated() -> None:
    judged = judge(entry("a", verdict="ok", reason=None), verdicts=[verdict("a", "node_missing")])
    assert (judged["nodes"], judged["missing"]) == ([], ["a"])
    assert "run playbooks/site.yml" in judged["sick"][0]["message"]


def test_what_kubernetes_has_wrong_is_told_in_its_words() -> None:
    probes = [entry("a", verdict="ok", reason=None), entry("b", verdict="ok", reason=None), entry("c", msg="no python")]
    verdicts = [verdict("a", "gpu_unhealthy"), verdict("b", "node_missing"), verdict("c")]
    judged = gate.judge_farm(probes, verdicts, scheduler=gate.KUBERNETES)
    assert judged["nodes"] == [{"node": "a", "healthy": False, "reason": "kubernetes gpu_unhealthy"}]
    assert [sick["message"] for sick in judged["sick"]] == [
        "Node a: found kubernetes gpu_unhealthy. Expected: healthy GPUs that Kubernetes has. Next step: repair it and "
        "run playbooks/kubernetes_health.yml again, which opens the node after a clean probe.",
        "Node b: found kubernetes node_missing. Expected: healthy GPUs that Kubernetes has. Next step: check that the "
        "kubelet runs there and has this name ('kubectl get nodes').",
    ]
    assert judged["unprobed"][0]["message"].endswith("Its node stays as it is in Kubernetes.")


def test_a_host_that_nobody_reaches_cannot_say_what_kubernetes_calls_its_node() -> None:
    """A reachable one has said it, and Nomad's name is the farm's own."""
    away, failed = {"unreachable": True, "msg": "timed out"}, {"msg": "no python"}
    for probe, scheduler, judged_as in (
        (away, "kubernetes", "unprobed"), (failed, "kubernetes", "sick"), (away, "nomad", "sick"),
    ):  # fmt: skip
        judged = gate.judge_farm([entry("a", **probe)], [verdict("a", "node_missing")], scheduler=scheduler)
        assert [each["node"] for each in judged[judged_as]] == ["a"], judged
        assert judged["missing"] == (["a"] if judged_as == "sick" else []) and judged["nodes"] == []
    (told,) = gate.judge_farm([entry("a", **away)], [verdict("a", "node_missing")], scheduler="kubernetes")["unprobed"]
    assert told["message"] == (
        "host-a: cannot be reached (timed out), and Kubernetes has no node a. Expected: a host that says what its node "
        "is called. Next step: mend the connection to it, or set kubernetes_node_name to what 'kubectl get nodes' "
        "calls it. Its node stays as it is in Kubernetes."
    )


# --- the node's own agent --------------------------------------------------------------------


def stats(*times: str, kind: str = "gpu") -> dict[str, Any]:
    """Client statistics of Nomad 1.11.3, taken at 15:11:02 UTC, as far as they are read."""
    instances = {f"GPU-{number}": {"Timestamp": time} for number, time in enumerate(times)}
    group = {"Vendor": "nvidia", "Type": kind, "Name": "Tesla T4", "InstanceStats": instances}
    return {"Timestamp": 1795273862748802872, "DeviceStats": [group]}


@pytest.mark.parametrize(
    ("status", "answer", "state"),
    [
        (200, stats("2026-11-21T15:11:01.461937591Z"), "ok"),
        (200, stats("2026-11-21T16:11:01.461937591+01:00", "2026-11-21T15:00:00Z"), "ok"),
        (200, stats("2026-11-21T15:09:29.461937591Z"), "plugin_stopped"),
        (200, stats("2026-11-21T15:09:29Z", kind="fpga"), "ok"),
        (200, {"DeviceStats": []}, "ok"),
        (200, None, "ok"),
        (200, stats("yesterday"), "ok"),
        (500, None, "unhealthy"),
        (-1, None, "stopped"),
        (None, None, "stopped"),
    ],
)
def test_state_of_the_agent(status: int | None, answer: dict[str, Any] | None, state: str) -> None:
    assert gate.agent_state(status, answer) == state


def test_stopped_plugin_is_named() -> None:
    judged = judge({**entry("a", verdict="ok", reason=None), "agent": "plugin_stopped"}, verdicts=[verdict("a")])
    assert judged["nodes"][0]["reason"] == "nomad plugin_stopped"
    assert "restart Nomad" in judged["sick"][0]["message"]


# --- word for word ---------------------------------------------------------------------------

OWN_WELL = Wish(healthy=True, closed_by=gate.NODE)
LATER_DRAIN = {"message": "new riser"}


@pytest.mark.parametrize(
    ("at", "wish", "words"),
    [
        (node(), HEALTHY, "healthy and open"),
        (node(eligible=False), HEALTHY, "healthy, but is ineligible by somebody else; left as it is"),
        (node(eligible=False, draining=True), HEALTHY, "healthy, but is drained by somebody else; left as it is"),
        (
            node(status="down", eligible=False, meta=marks()),
            HEALTHY,
            "its status is down; it stays closed until it is ready",
        ),
        (
            node(eligible=False, meta=marks()),
            OWN_WELL,
            "closed by the farm for gpu_lost GPU-1; only the farm's run opens it",
        ),
        # The farm's probe lets no GPU compute.
        (
            node(eligible=False, meta=marks(closed_by=gate.NODE, reason="benchmark_wrong_results GPU-1")),
            HEALTHY,
            "closed by its own gate for benchmark_wrong_results GPU-1, which no run of the farm measures; that gate "
            "opens it after a clean check",
        ),
        (
            node(eligible=False, meta=marks(closed_by=gate.NODE)),
            HEALTHY,
            "opened after a clean probe; it was closed for gpu_lost GPU-1",
        ),
        (
            node(eligible=False, meta=marks(closed_by=gate.NODE, reason="benchmark_wrong_results GPU-1")),
            OWN_WELL,
            "opened after a clean probe; it was closed for benchmark_wrong_results GPU-1",
        ),
        (
            node(eligible=False, draining=True, meta=marks(), drain_meta=LATER_DRAIN),
            HEALTHY,
            "healthy, but drained by somebody else; left as it is",
        ),
        (node(meta=marks()), HEALTHY, "opened by somebody else before; its old reason is removed"),
        (
            node(eligible=False, meta=marks()),
            HEALTHY,
            "opened after a clean probe; it was closed for gpu_lost GPU-1",
        ),
        (
            node(eligible=False, meta=marks()),
            dataclasses.replace(HEALTHY, closed_min_s=60),
            "healthy, and stays closed for 60 s, which nobody can tell without the node's uptime; "
            "it was closed for gpu_lost GPU-1",
        ),
        (node(eligible=False), SICK, "already ineligible by somebody else; its health: gpu_lost GPU-1"),
        (
            node(eligible=False, draining=True),
            SICK,
            "already drained by somebody else; its health: gpu_lost GPU-1",
        ),
        (node(), SICK, "closed: gpu_lost GPU-1"),
        (node(status="down"), SICK, "closed, down: gpu_lost GPU-1"),
        (
            node(status="disconnected"),
            SICK,
            "not closed, Nomad holds it for disconnected; its health: gpu_lost GPU-1",
        ),
        (node(eligible=False, meta=marks()), SICK, f"closed since {BEFORE} for gpu_lost GPU-1"),
        (node(eligible=False, meta=marks("x")), SICK, f"closed since {BEFORE}, now for gpu_lost GPU-1"),
        (
            node(eligible=False, meta=marks()),
            dataclasses.replace(SICK, drain=True),
            f"closed since {BEFORE}, now drained: gpu_lost GPU-1",
        ),
        (node(eligible=False), Wish(healthy=False), "already ineligible by somebody else; its health: no reason given"),
    ],
)
def test_what_is_told(at: GateNode, wish: Wish, words: str) -> None:
    assert gate.decide(at, wish, NOW).message == words


def test_closed_node_that_is_down_takes_no_other_reason() -> None:
    closed = node(status="down", eligible=False, drain_meta=marks("xid_79"))
    wish = dataclasses.replace(SICK, drain=True, index=500)
    assert gate.decide(closed, wish, NOW) == Decision("none", f"closed since {BEFORE} for xid_79")


def test_decisions_are_as_small_as_they_can_be() -> None:
    assert gate.decide(node(), SICK, NOW) == Decision(
        "close", "closed: gpu_lost GPU-1", marks(since=NOW), drain=False, eligible=False
    )
    assert gate.decide(node(), dataclasses.replace(SICK, drain=True), NOW) == Decision(
        "close", "closed: gpu_lost GPU-1", marks(since=NOW), drain=True, eligible=None
    )
    opening = gate.decide(node(eligible=False, meta=marks()), HEALTHY, NOW)
    assert (opening.action, opening.eligible, opening.drain, opening.cancel_drain) == ("open", True, False, False)
    drained = gate.decide(node(eligible=False, draining=True, meta=marks(), drain_meta=marks()), HEALTHY, NOW)
    assert (drained.action, drained.eligible, drained.drain, drained.cancel_drain) == ("open", None, False, True)


def test_wishes_are_those_of_a_farm_without_drain() -> None:
    wish = Wish(True)
    assert (wish.reason, wish.drain, wish.drain_deadline_s, wish.closed_by) == (None, False, 3600, "farm")
    assert (wish.index, wish.uptime, wish.open_after, wish.closed_min_s) == (None, None, 1, 0)


def test_marks_without_an_author_are_the_farms() -> None:
    """As those are that somebody wrote by hand."""
    plain = {"gpufarm_gate": "closed", "gpufarm_gate_reason": "by hand"}
    assert gate.decide(node(eligible=False, meta=plain), OWN_WELL, NOW).action == "none"
    sick = Wish(False, "xid_79", closed_by=gate.NODE)
    assert gate.decide(node(eligible=False, meta=plain), sick, NOW).message == f"closed since {NOW} for by hand"


def test_whole_answer_of_nomad_is_read() -> None:
    answer = {
        "ID": "id-1", "Name": "gpu01", "Status": "ready", "SchedulingEligibility": "eligible", "Meta": {"rack": "7"},
        "ModifyIndex": 12, "LastDrain": {"StartedAt": BEFORE, "Meta": {"a": "b"}},
    }  # fmt: skip
    assert gate.gate_node(answer) == GateNode(
        "id-1", "gpu01", "ready", True, False, {"rack": "7"}, {"a": "b"}, drained_at=BEFORE, index=12
    )
    elsewhere = {"LastDrain": {"StartedAt": "2020-01-01T01:00:00+01:00"}}
    assert gate.gate_node(elsewhere).drained_at == "2020-01-01T00:00:00Z"
    assert gate.gate_node({}) == GateNode("", "", "", False, False, {}, {}, drained_at="", index=0)
    assert gate.gate_node({"Drain": True}).draining


@pytest.mark.parametrize(
    ("status", "state"), [(99, "stopped"), (100, "unhealthy"), (199, "unhealthy"), (201, "unhealthy")]
)
def test_border_of_an_answer(status: int, state: str) -> None:
    assert gate.agent_state(status, None) == state


@pytest.mark.parametrize(("age", "state"), [(60.0, "ok"), (59.999, "plugin_stopped")])
def test_border_of_the_age(age: float, state: str) -> None:
    """The statistics are 60 seconds old to the nanosecond."""
    old = {"Timestamp": 1795273862000000000, "DeviceStats": stats("2026-11-21T15:10:02Z")["DeviceStats"]}
    assert gate.plugin_age_s(old) == 60.0
    assert gate.agent_state(200, old, age) == state
    assert gate.agent_state(200, old) == "ok"


def test_reason_has_five_hundred_characters_at_most() -> None:
    assert gate.clean_reason("x" * 500) == "x" * 500
    assert gate.clean_reason("x" * 501) == "x" * 497 + "..."
    assert gate.clean_reason(" a~ \x7fb ") == "a~ b"


def test_time_is_that_of_greenwich() -> None:
    assert text.utc(0) == "1970-01-01T00:00:00Z"


NEXT = {
    "agent_stopped": "read `journalctl -u nomad` there and start Nomad",
    "plugin_stopped": "read `journalctl -u nomad` there, run playbooks/site.yml for it and restart Nomad",
    "agent_unhealthy": "repair it and run playbooks/health.yml again, which opens the node after a clean probe",
}


@pytest.mark.parametrize("code", sorted(NEXT))
def test_sick_node_has_a_next_step(code: str) -> None:
    agent = code.replace("agent_", "")
    (sick,) = judge({**entry("a", verdict="ok", reason=None), "agent": agent}, verdicts=[verdict("a")])["sick"]
    assert (
        sick["message"]
        == f"Node a: found nomad {code}. Expected: healthy GPUs that Nomad has. Next step: {NEXT[code]}."
    )


def test_node_without_nomad_has_a_next_step() -> None:
    (sick,) = judge(entry("a", verdict="ok", reason=None), verdicts=[verdict("a", "node_missing")])["sick"]
    assert sick["message"].endswith(
        "Next step: run playbooks/site.yml for it, because Nomad cannot close a node that it does not know."
    )


@pytest.mark.parametrize(
    ("probe", "words"),
    [
        ({"unreachable": True, "msg": "timed out"}, "host-a: cannot be reached (timed out)"),
        ({"failed": True, "msg": "no python"}, "host-a: could not be probed (no python)"),
        ({}, "host-a: could not be probed (no answer)"),
    ],
)
def test_unprobed_node_has_a_next_step(probe: dict[str, Any], words: str) -> None:
    (told,) = judge(entry("a", **probe), verdicts=[verdict("a")])["unprobed"]
    assert told["message"] == (
        f"{words}. Expected: a host that Ansible reaches, with Python and root rights. "
        "Next step: run `ansible host-a -m ansible.builtin.ping --become`. Its node stays as it is in Nomad."
    )
    # One that Ansible has by the name of its node.
    (told,) = judge({"node": "host-a", "probe": probe}, verdicts=[verdict("host-a")])["unprobed"]
    assert told["message"].startswith(f"{words}. Expected: ")


# --- asking Nomad ----------------------------------------------------------------------------


@pytest.fixture
def farm() -> Iterator[Farm]:
    running = Farm(3)
    yield running
    running.agent.close()


def client_of(farm: Farm) -> nomad.Client:
    return nomad.Client(nomad.Connection(address=farm.agent.url))


def test_of_several_nodes_with_one_name_the_youngest_that_lives_counts(farm: Farm) -> None:
    for number, (created, status) in enumerate([(30, "down"), (20, "ready"), (10, "ready")]):
        farm.nodes[f"id-{number}"].update(Name="gpu0", CreateIndex=created, Status=status)
    found = gate.find_nodes(client_of(farm), ["gpu0", "id-2", "nobody"])
    assert {name: each and each.id for name, each in found.items()} == {"gpu0": "id-1", "id-2": "id-2", "nobody": None}
    farm.nodes["id-1"]["Status"] = farm.nodes["id-2"]["Status"] = "down"
    known = gate.find_nodes(client_of(farm), ["gpu0"])["gpu0"]
    assert known is not None and known.id == "id-0"


def test_a_node_of_which_nothing_is_said_is_none_that_is_ready() -> None:
    class Silent(nomad.Client):
        def call(self, *_arguments: Any, **_options: Any) -> None:
            return None

    silent = Silent(nomad.Connection(address="http://127.0.0.1:1"), frozenset())
    assert gate.read_node(silent, "id-1").status != "ready"


def test_meta_is_that_of_the_client_and_that_of_the_servers_where_nobody_reaches_it(farm: Farm) -> None:
    farm.nodes["id-1"]["Meta"] = {"from": "servers"}
    farm.clients["id-1"] = {"from": "client"}
    assert gate.read_node(client_of(farm), "id-1").meta == {"from": "client"}
    farm.refuse = "/v1/client/metadata"
    assert gate.read_node(client_of(farm), "id-1").meta == {"from": "servers"}
    farm.refuse = None
    farm.agent.requests.clear()
    farm.nodes["id-1"]["Status"] = "down"
    assert gate.read_node(client_of(farm), "id-1").meta == {"from": "servers"}
    assert farm.asked == ["/v1/node/id-1"]


def test_client_that_may_not_be_asked_is_an_error(farm: Farm) -> None:
    answer = farm.agent.answer

    def forbidden(request: Any) -> bool:
        if "/v1/client/metadata" not in request.path:
            return answer(request)
        request.reply(403, b"Permission denied", {})
        return True

    farm.agent.answer = forbidden
    with pytest.raises(nomad.NomadError, match="HTTP 403"):
        gate.read_node(client_of(farm), "id-1")


def test_sets_of_nodes(farm: Farm) -> None:
    farm.nodes["id-1"]["Meta"] = {"gpufarm_gate": "closed"}
    farm.nodes["id-2"]["NodeResources"] = {"Devices": None}
    assert gate.marked_nodes(client_of(farm)) == {"id-1"}
    assert gate.nodes_with_devices(client_of(farm)) == {"id-0", "id-1"}
    # One that is off counts, and one whose machine has registered anew does not.
    farm.set_status("id-1", "down")
    assert gate.marked_nodes(client_of(farm)) == {"id-1"}
    farm.nodes["id-2"]["Name"] = farm.nodes["id-1"]["Name"]
    assert gate.marked_nodes(client_of(farm)) == set()
    assert gate.nodes_with_devices(client_of(farm)) == {"id-0"}


def test_identity_is_quoted_in_a_path() -> None:
    assert gate.node_path("a b?c") == "/v1/node/a%20b%3Fc"
