from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml
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
    result = run(capsys, nomad, [*sick, {**SICK, "node": "nobody"}])
    assert result["failed"] and result["changed"]
    assert [node["action"] for node in result["nodes"]] == ["failed", "close", "failed"]
    assert nomad.nodes["id-1"]["SchedulingEligibility"] == "ineligible"
    for words in ("2 of 3 nodes", "Node gpu0: ", "Node nobody: Nomad knows no such node", "Expected: ", "Next step: "):
        assert words in result["msg"]


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
        if len(asked) == 6:
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
    nomad.nodes["id-1"]["Status"] = "ready"
    result = run(capsys, nomad, [{**SICK, "node": "gpu1"}])
    assert result["failed"] and nomad.nodes["id-1"]["SchedulingEligibility"] == "eligible"


def test_drain_without_limit(capsys: pytest.CaptureFixture[str], nomad: Farm) -> None:
    run(capsys, nomad, [SICK], drain=True, drain_deadline=0)
    assert nomad.agent.writes[-1][1]["DrainSpec"] == {"Deadline": 0, "IgnoreSystemJobs": True}


@pytest.mark.parametrize(
    ("nodes", "more", "words"),
    [
        ([SICK, WELL], {}, "node gpu0 is twice"),
        ([{"node": "gpu0", "healthy": False}], {}, "no reason is given"),
        ([WELL], {"drain_deadline": -1}, "drain_deadline is -1"),
    ],
)
def test_bad_options_change_nothing(
    capsys: pytest.CaptureFixture[str], nomad: Farm, nodes: Any, more: dict[str, Any], words: str
) -> None:
    result = run(capsys, nomad, nodes, **more)
    assert result["failed"] and words in result["msg"] and "Next step: " in result["msg"]
    assert nomad.agent.requests == [] and nomad.agent.writes == []


def test_returned_keys_are_the_documented_ones(capsys: pytest.CaptureFixture[str], nomad: Farm) -> None:
    documented = yaml.safe_load(nomad_gpu_gate.RETURN)
    result = run(capsys, nomad, [SICK])
    assert set(documented) == set(result) - {"changed", "diff", "invocation"}
    assert set(documented["nodes"]["contains"]) == set(result["nodes"][0])
    assert result["table"].splitlines()[0].split() == ["NODE", "STATUS", "ELIGIBLE", "ACTION", "WHY"]
