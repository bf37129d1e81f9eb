from __future__ import annotations

import platform
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from ansible_collections.gpufarm.core.plugins.doc_fragments import gate as gate_fragment
from ansible_collections.gpufarm.core.plugins.modules import nomad_gpu_gate
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils.gate_helper import Farm
from ansible_collections.gpufarm.core.tests.unit.plugins.modules import release_helper as helper


@pytest.fixture
def nomad() -> Iterator[Farm]:
    running = Farm(3)
    yield running
    running.agent.close()


def run(capsys: pytest.CaptureFixture[str], nomad: Farm, nodes: Any, **arguments: Any) -> helper.Outcome:
    return helper.run_module(nomad_gpu_gate.main, capsys, {"address": nomad.agent.url, "nodes": nodes, **arguments})


SICK = {"node": "gpu0", "healthy": False, "reason": "gpu_lost GPU-1"}
WELL = {"node": "gpu0", "healthy": True}


def test_closed_once_and_opened_once(capsys: pytest.CaptureFixture[str], nomad: Farm) -> None:
    others = [{"node": "gpu1", "healthy": True}, {"node": "id-2", "healthy": True}]
    result = run(capsys, nomad, [SICK, *others])
    assert result["changed"] and "failed" not in result
    assert [node["action"] for node in result["nodes"]] == ["close", "none", "none"]
    assert [node["eligible"] for node in result["nodes"]] == [False, True, True]
    node = nomad.nodes["id-0"]
    assert node["SchedulingEligibility"] == "ineligible"
    assert node["Meta"]["gpufarm_gate_reason"] == "gpu_lost GPU-1"
    assert nomad.nodes["id-1"]["SchedulingEligibility"] == "eligible"
    assert "gpu0: eligible\n" in result["diff"]["before"]
    assert "gpu0: ineligible\n" in result["diff"]["after"]

    assert not run(capsys, nomad, [SICK, *others])["changed"]
    assert len(nomad.agent.writes) == 2

    result = run(capsys, nomad, [WELL, *others])
    assert result["nodes"][0]["action"] == "open"
    assert node["SchedulingEligibility"] == "eligible" and node["Meta"]["gpufarm_gate"] == "open"
    assert not run(capsys, nomad, [WELL, *others])["changed"]


def test_check_mode_says_the_same_and_does_nothing(capsys: pytest.CaptureFixture[str], nomad: Farm) -> None:
    result = run(capsys, nomad, [SICK], _ansible_check_mode=True)
    assert result["changed"] and result["nodes"][0]["action"] == "close"
    assert result["nodes"][0]["eligible"] is False
    assert nomad.agent.writes == []


def test_healthy_farm_costs_two_requests(capsys: pytest.CaptureFixture[str], nomad: Farm) -> None:
    run(capsys, nomad, [{"node": f"gpu{number}", "healthy": True} for number in range(3)])
    assert [path for path, _query, _headers in nomad.agent.requests] == ["/v1/nodes", "/v1/nodes"]


def test_one_node_that_fails_does_not_stop_the_others(capsys: pytest.CaptureFixture[str], nomad: Farm) -> None:
    nomad.refuse = "/v1/node/id-0/eligibility"
    sick = [{**SICK, "node": f"gpu{number}"} for number in range(2)]
    result = run(capsys, nomad, [*sick, {**SICK, "node": "nobody"}], max_closed="100%")
    assert result["failed"] and result["changed"]
    assert [node["action"] for node in result["nodes"]] == ["failed", "close", "failed"]
    assert nomad.nodes["id-1"]["SchedulingEligibility"] == "ineligible"
    first, refused, unknown = result["msg"].splitlines()
    assert first == f"{platform.node()}: 2 of 3 nodes could not be set:"
    assert refused == result["nodes"][0]["message"] and unknown == result["nodes"][2]["message"]


def test_agent_that_has_just_stopped_is_waited_for(
    capsys: pytest.CaptureFixture[str], nomad: Farm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until Nomad's servers miss it, it is ready and takes no meta."""
    monkeypatch.setattr(nomad_gpu_gate, "PAUSE_S", 0.01)
    answer, asked = nomad.agent.answer, []

    def without_path(request: Any) -> bool:
        if "/v1/client/metadata" not in request.path:
            return answer(request)
        asked.append(request.command)
        if len(asked) == 7:
            nomad.nodes["id-0"]["Status"] = "down"
        request.reply(404, b"No path to node", {})
        return True

    nomad.agent.answer = without_path
    result = run(capsys, nomad, [SICK])
    assert result["nodes"][0]["action"] == "close"
    node = nomad.nodes["id-0"]
    assert node["SchedulingEligibility"] == "ineligible"
    assert node["LastDrain"]["Meta"]["gpufarm_gate_reason"] == "gpu_lost GPU-1"
    monkeypatch.setattr(nomad_gpu_gate, "HEARTBEAT_S", 0)
    result = run(capsys, nomad, [{**SICK, "node": "gpu1"}], max_closed="2")
    assert result["failed"] and nomad.nodes["id-1"]["SchedulingEligibility"] == "eligible"


def test_agent_of_a_node_to_open_is_not_waited_for(
    capsys: pytest.CaptureFixture[str], nomad: Farm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever probes next opens it."""
    monkeypatch.setattr(nomad_gpu_gate, "PAUSE_S", 0.01)
    run(capsys, nomad, [SICK])
    answer, asked = nomad.agent.answer, []

    def without_path(request: Any) -> bool:
        if "/v1/client/metadata" not in request.path:
            return answer(request)
        asked.append(request.command)
        request.reply(404, b"No path to node", {})
        return True

    nomad.agent.answer = without_path
    result = run(capsys, nomad, [WELL])
    assert result["nodes"][0]["action"] == "failed" and "No path to node" in result["msg"]
    assert asked.count("POST") == 1


def test_drain_without_limit(capsys: pytest.CaptureFixture[str], nomad: Farm) -> None:
    run(capsys, nomad, [SICK], drain=True, drain_deadline=0)
    assert nomad.agent.writes[-1][1]["DrainSpec"] == {"Deadline": 0, "IgnoreSystemJobs": True}


@pytest.mark.parametrize(
    ("nodes", "more", "told"),
    [
        (
            [{"node": "a", "healthy": True}, WELL, SICK], {},
            "node gpu0 is twice in the option 'nodes'. Expected: one entry a node. Next step: merge the entries.",
        ),
        *(
            (
                [{**SICK, "reason": reason}], {},
                "node gpu0 is not healthy and no reason is given. Expected: a reason, because somebody will ask. "
                "Next step: set 'nodes[].reason'.",
            )
            for reason in (None, "", "  ")
        ),
        (
            [WELL], {"drain_deadline": -1},
            "drain_deadline is -1. Expected: seconds, 0 or more. Next step: correct the option.",
        ),
        (
            [{**WELL, "drain_deadline": -2}], {},
            "drain_deadline is -2. Expected: seconds, 0 or more. Next step: correct the option.",
        ),
        ([WELL], {"open_after": 0}, "open_after is 0. Expected: probes, 1 or more. Next step: correct the option."),
        ([WELL], {"closed_min": -1}, "closed_min is -1. Expected: seconds, 0 or more. Next step: correct the option."),
        (
            [WELL], {"max_closed": "many"},
            "max_closed is 'many'. Expected: a number of nodes such as 5, or a percentage such as 20%. Next step: "
            "correct the option.",
        ),
    ],
)  # fmt: skip
def test_bad_options_change_nothing(
    capsys: pytest.CaptureFixture[str], nomad: Farm, nodes: Any, more: dict[str, Any], told: str
) -> None:
    assert run(capsys, nomad, nodes, **more)["msg"] == f"{platform.node()}: {told}"
    assert nomad.agent.requests == [] and nomad.agent.writes == []


def test_returned_keys_are_the_documented_ones(capsys: pytest.CaptureFixture[str], nomad: Farm) -> None:
    documented = yaml.safe_load(nomad_gpu_gate.RETURN)
    result = run(capsys, nomad, [SICK])
    assert set(documented) == set(result) - {"changed", "diff", "invocation"}
    assert set(documented["nodes"]["contains"]) == set(result["nodes"][0])
    assert result["table"].splitlines()[0].split() == ["NODE", "STATUS", "ELIGIBLE", "ACTION", "WHY"]


def test_brake_closes_none_and_opens_all_the_same(capsys: pytest.CaptureFixture[str], nomad: Farm) -> None:
    assert "failed" not in run(capsys, nomad, [{**SICK, "node": "gpu2"}])
    sick = [SICK, {**SICK, "node": "gpu1", "reason": "plugin_stopped"}]
    for check_mode in (True, False):
        result = run(capsys, nomad, [*sick, {"node": "gpu2", "healthy": True}], _ansible_check_mode=check_mode)
        assert result["failed"] and result["changed"]
        assert [node["action"] for node in result["nodes"]] == ["held", "held", "open"]
        assert [node["eligible"] for node in result["nodes"]] == [True, True, True]
        assert result["nodes"][0]["message"] == "not closed: gpu_lost GPU-1"
    assert result["msg"].splitlines() == [
        f"{platform.node()}: found 2 to close beside 0 that the gate has closed, of 3 nodes; none is closed. Expected: "
        "at most 1 that the gate has closed (max_closed is 20%). Next step: look for one cause of all in the reasons "
        "below, such as an update of the driver or of Nomad; if these nodes are all sick, raise max_closed for one "
        "run (gate_max_closed in playbooks/health.yml).",
        "1 x closed: gpu_lost GPU-1",
        "1 x closed: plugin_stopped",
    ]
    assert [node["SchedulingEligibility"] for node in nomad.nodes.values()] == ["eligible"] * 3
    assert "gpu0" not in result["diff"]["after"] and "gpu2: eligible" in result["diff"]["after"]

    assert "failed" not in run(capsys, nomad, sick, max_closed="2")
    assert nomad.nodes["id-0"]["SchedulingEligibility"] == nomad.nodes["id-1"]["SchedulingEligibility"] == "ineligible"


def test_brake_counts_what_the_gate_closed_before_and_nobody_else_closed(
    capsys: pytest.CaptureFixture[str], nomad: Farm
) -> None:
    run(capsys, nomad, [SICK])
    assert run(capsys, nomad, [{**SICK, "node": "gpu1"}])["failed"]
    # Nor does a second run with the first one in it go further.
    both = [SICK, {**SICK, "node": "gpu1"}]
    result = run(capsys, nomad, both)
    assert [node["action"] for node in result["nodes"]] == ["none", "held"]
    assert "1 to close beside 1 that the gate has closed, of 3" in result["msg"]
    # What stays closed is no reason to fail.
    assert "failed" not in run(capsys, nomad, [SICK], max_closed="0")
    run(capsys, nomad, [WELL])
    nomad.nodes["id-0"]["SchedulingEligibility"] = "ineligible"
    assert "failed" not in run(capsys, nomad, both)
    assert nomad.nodes["id-1"]["SchedulingEligibility"] == "ineligible"


def test_brake_counts_nodes_that_are_down_and_closed_by_a_drain(
    capsys: pytest.CaptureFixture[str], nomad: Farm
) -> None:
    nomad.set_status("id-0", "down")
    run(capsys, nomad, [SICK])
    assert nomad.nodes["id-0"]["LastDrain"]["Meta"]["gpufarm_gate"] == "closed"
    result = run(capsys, nomad, [SICK, {**SICK, "node": "gpu1"}])
    assert "1 to close beside 1 that the gate has closed, of 3" in result["msg"]


def test_percentage_is_of_nodes_with_devices_and_of_those_named(
    capsys: pytest.CaptureFixture[str], nomad: Farm
) -> None:
    for node_id in ("id-0", "id-2"):
        nomad.nodes[node_id]["NodeResources"] = {"Devices": None}
    result = run(capsys, nomad, [SICK, {**SICK, "node": "gpu1"}], max_closed="50%")
    assert "closed, of 2 nodes" in result["msg"]
    filters = [query["filter"] for _path, query, _headers in nomad.agent.requests if "filter" in query]
    assert filters == ['Meta.gpufarm_gate == "closed"', "NodeResources.Devices is not empty"]


def test_older_probe_does_not_open_what_a_newer_one_closed(capsys: pytest.CaptureFixture[str], nomad: Farm) -> None:
    before = nomad.nodes["id-0"]["ModifyIndex"]
    run(capsys, nomad, [{**SICK, "index": before}])
    result = run(capsys, nomad, [{**WELL, "index": before}])
    assert result["nodes"][0]["action"] == "none" and "may be older" in result["nodes"][0]["message"]
    assert not result["changed"] and nomad.nodes["id-0"]["SchedulingEligibility"] == "ineligible"
    between = nomad.nodes["id-0"]["ModifyIndex"]
    assert run(capsys, nomad, [{**SICK, "index": between}])["nodes"][0]["action"] == "update"
    assert run(capsys, nomad, [{**WELL, "index": between}])["nodes"][0]["action"] == "none"
    assert run(capsys, nomad, [{**WELL, "index": nomad.nodes["id-0"]["ModifyIndex"]}])["nodes"][0]["action"] == "open"


def test_servers_that_learn_of_the_meta_later_change_nothing(capsys: pytest.CaptureFixture[str], nomad: Farm) -> None:
    nomad.slow_registration = True
    run(capsys, nomad, [{**SICK, "index": nomad.nodes["id-0"]["ModifyIndex"]}])
    index = nomad.nodes["id-0"]["ModifyIndex"]
    nomad.register("id-0")
    assert run(capsys, nomad, [{**WELL, "index": index}])["nodes"][0]["action"] == "open"


def test_hysteresis(capsys: pytest.CaptureFixture[str], nomad: Farm) -> None:
    run(capsys, nomad, [{**SICK, "uptime": 1000}])
    wish = {"open_after": 2, "closed_min": 60}

    def probed(uptime: int, **more: Any) -> tuple[str, bool]:
        result = run(capsys, nomad, [{**WELL, "uptime": uptime}], **wish, **more)
        assert "failed" not in result
        return result["nodes"][0]["action"], result["changed"]

    assert probed(1010, _ansible_check_mode=True) == ("wait", True)
    assert probed(1010) == ("wait", True)
    assert probed(1059) == ("wait", True)
    assert probed(1059) == ("wait", False)
    assert probed(1060) == ("open", True)


def test_defaults_are_documented() -> None:
    own, shared = nomad_gpu_gate.DOCUMENTATION, gate_fragment.ModuleDocFragment.DOCUMENTATION
    options = {name: option for text in (shared, own) for name, option in yaml.safe_load(text)["options"].items()}
    assert {name: option.get("default") for name, option in options.items()} == {
        "nodes": None, "drain": False, "drain_deadline": 3600, "max_closed": "20%", "open_after": 1, "closed_min": 0,
    }  # fmt: skip


def test_words_for_people(capsys: pytest.CaptureFixture[str], nomad: Farm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nomad_gpu_gate, "utc", lambda: "2026-11-21T12:00:00Z")
    nomad.nodes["id-1"]["SchedulingEligibility"] = "ineligible"
    items = [SICK, {"node": "gpu1", "healthy": True}, {"node": "gpu2", "healthy": True}, {**SICK, "node": "nobody"}]
    result = run(capsys, nomad, items, drain=True)
    unknown = (
        "Node nobody: Nomad knows no such node. Expected: its name or ID in Nomad. "
        "Next step: check that the Nomad client runs there ('nomad node status')"
    )
    assert result["table"].splitlines() == [
        "NODE    STATUS  ELIGIBLE  ACTION  WHY",
        "gpu0    ready   no        close   closed: gpu_lost GPU-1",
        "gpu1    ready   no        none    healthy, but is ineligible by somebody else; left as it is",
        "gpu2    ready   yes       none    healthy and open",
        f"nobody  -       -         failed  {unknown}",
    ]
    assert result["msg"] == f"{platform.node()}: 1 of 4 nodes could not be set:\n{unknown}"
    memory = '{"index":10,"clean":0,"uptime":null,"drain":""}'
    assert result["diff"] == {
        "before": "gpu0: eligible\n",
        "after": "gpu0: ineligible, draining\n"
        "  gpufarm_gate = closed\n"
        "  gpufarm_gate_reason = gpu_lost GPU-1\n"
        "  gpufarm_gate_since = 2026-11-21T12:00:00Z\n"
        "  gpufarm_gate_closed_by = farm\n"
        f"  gpufarm_gate_memory = {memory}\n",
    }
    assert result["nodes"][0] == {
        "name": "gpu0", "id": "id-0", "status": "ready", "eligible": False, "draining": False, "action": "close",
        "message": "closed: gpu_lost GPU-1",
    }  # fmt: skip
    assert result["nodes"][3] == {
        "name": "nobody", "id": None, "status": None, "eligible": None, "draining": False, "action": "failed",
        "message": unknown,
    }  # fmt: skip
    opened = run(capsys, nomad, [WELL])
    assert opened["nodes"][0]["draining"] is True
    assert opened["diff"]["before"].startswith("gpu0: ineligible, draining\n")
    assert opened["diff"]["after"].startswith("gpu0: eligible\n  gpufarm_gate = open\n")


def test_refusal_names_the_node_and_what_nomad_said(capsys: pytest.CaptureFixture[str], nomad: Farm) -> None:
    nomad.refuse = "/v1/node/id-0/eligibility"
    message = run(capsys, nomad, [SICK])["nodes"][0]["message"]
    assert message.startswith(
        f"Node gpu0: {nomad.agent.url}/v1/node/id-0/eligibility answered HTTP 500: rpc error: no path"
    )


def test_wish_of_a_node_goes_before_that_of_all(capsys: pytest.CaptureFixture[str], nomad: Farm) -> None:
    items = [{**SICK, "drain": True, "drain_deadline": 7}, {**SICK, "node": "gpu1"}]
    diff = run(capsys, nomad, items, max_closed="2", drain_deadline=60)["diff"]
    assert diff["before"] == "gpu0: eligible\ngpu1: eligible\n"
    heads = [line for line in diff["after"].splitlines() if not line.startswith("  ")]
    assert heads == ["gpu0: ineligible, draining", "gpu1: ineligible"]
    assert nomad.nodes["id-0"]["DrainStrategy"] == {"Deadline": 7_000_000_000, "IgnoreSystemJobs": True}
    assert nomad.nodes["id-1"]["DrainStrategy"] is None


def test_five_reasons_are_told_and_the_most_frequent_first(capsys: pytest.CaptureFixture[str]) -> None:
    farm = Farm(9)
    try:
        reasons = ["a", "b", "b", "c", "d", "e", "f", "g"]
        sick = [{"node": f"gpu{number}", "healthy": False, "reason": reason} for number, reason in enumerate(reasons)]
        lines = run(capsys, farm, sick)["msg"].splitlines()
    finally:
        farm.agent.close()
    assert [line.split(" closed: ")[0] for line in lines[1:]] == ["2 x", "1 x", "1 x", "1 x", "1 x"]
    assert lines[1] == "2 x closed: b"
