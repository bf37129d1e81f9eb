"""The gate's decisions, and what reaches Nomad because of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from ansible_collections.gpufarm.core.plugins.module_utils import gate, nomad
from ansible_collections.gpufarm.core.plugins.module_utils.gate import Decision, GateNode, Wish

NOW = "2026-11-21T12:00:00Z"
BEFORE = "2026-11-21T11:00:00Z"
SICK = Wish(healthy=False, reason="gpu_lost GPU-1")
HEALTHY = Wish(healthy=True)


def node(**changes: Any) -> GateNode:
    plain = GateNode("id-1", "gpu01", "ready", eligible=True, draining=False, meta={"rack": "7"}, drain_meta={})
    return dataclasses.replace(plain, **changes)


def marks(reason: str = "gpu_lost GPU-1", since: str = BEFORE, closed_by: str = gate.FARM) -> dict[str, str]:
    return {
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
    closed = node(eligible=False, draining=True, meta=marks(), drain_meta={"message": "new riser"})
    later = "2027-01-01T00:00:00.123456789Z"
    drained = node(eligible=False, meta=marks(), drained_at=later)
    for each in (closed, drained):
        assert gate.decide(each, HEALTHY, NOW).action == "none"
        assert "drained by somebody else" in gate.decide(each, HEALTHY, NOW).message
    assert (
        gate.decide(node(eligible=False, meta=marks(), drained_at="2020-01-01T00:00:00Z"), HEALTHY, NOW).action
        == "open"
    )


@pytest.mark.parametrize("status", ["disconnected", "initializing"])
def test_node_that_nomad_waits_for_is_not_drained(status: str) -> None:
    assert done(node(status=status), SICK) == []


def test_node_that_somebody_opened_again_loses_its_old_mark() -> None:
    """Otherwise the mark of a drain would let the gate open what an operator closes later."""
    opened = node(drain_meta=marks())
    assert gate.decide(opened, HEALTHY, NOW).action == "update"
    ((path, body),) = done(opened, HEALTHY)
    assert path == "/v1/client/metadata"
    closed_later = node(eligible=False, meta=body["Meta"], drain_meta=marks())
    assert gate.decide(closed_later, HEALTHY, "2027-01-01T00:00:00Z").action == "none"


def test_operator_who_closes_after_the_gate_has_opened_is_left_alone() -> None:
    """The meta of the last drain is still there, and is older than the opening."""
    opened = {"gpufarm_gate": "open", "gpufarm_gate_since": NOW}
    assert gate.decide(node(eligible=False, meta=opened, drain_meta=marks()), HEALTHY, NOW).action == "none"


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
