# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import platform
import time
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from ansible_collections.gpufarm.core.plugins.modules import nomad_gpu_verify
from ansible_collections.gpufarm.core.tests.unit.patience import PATIENCE_S
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils import nomad_helper as farm
from ansible_collections.gpufarm.core.tests.unit.plugins.modules import release_helper as helper


@pytest.fixture
def agent() -> Iterator[farm.Agent]:
    running = farm.Agent()
    running.nodes = [farm.make_node(number, 2) for number in range(3)]
    yield running
    running.close()


def run(capsys: pytest.CaptureFixture[str], agent: farm.Agent, **arguments: Any) -> helper.Outcome:
    return helper.run_module(nomad_gpu_verify.main, capsys, {"address": agent.url, "timeout": 0, **arguments})


def test_a_good_farm(agent: farm.Agent, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(capsys, agent, expected=farm.make_expected(2, 2))
    assert "failed" not in result and result["changed"] is False and result["problems"] == []
    assert [node["verdict"] for node in result["nodes"]] == ["ok", "ok"]
    assert result["extra_nodes"] == ["node00002"]
    assert len(agent.requests) == 1


def test_the_failure_says_everything(agent: farm.Agent, capsys: pytest.CaptureFixture[str]) -> None:
    expected = [*farm.make_expected(2, 3), {"node": "node00009", "count": 1}]
    result = run(capsys, agent, expected=expected, allow_extra_nodes=False)
    assert result["failed"]
    lines = result["msg"].splitlines()
    assert lines[0].startswith(f"{platform.node()}: 4 of 4 nodes failed after ")
    # An empty line stands before the table and behind it.
    assert lines[1] == "" and lines[lines.index(result["table"].splitlines()[-1]) + 1] == ""
    assert lines[2].split() == ["NODE", "STATUS", "EXPECTED", "FOUND", "VERDICT", "PROBLEMS"]
    assert lines[3].split() == ["node00000", "ready", "3", "2", "failed", "gpu_missing,", "model_mismatch"]
    uuid = farm.uuid_of(0, 2)
    assert f"Node node00000: found 2 GPUs without it. Expected: GPU {uuid}. Next step: " in result["msg"]
    assert [problem["code"] for problem in result["problems"]] == [
        "gpu_missing",
        "model_mismatch",
        "gpu_missing",
        "model_mismatch",
        "node_missing",
        "node_unexpected",
    ]
    assert set(result["problems"][0]) == {"node", "uuid", "code", "expected", "found", "message"}
    assert result["table"] in result["msg"]


def test_long_failures_are_cut_in_the_message_only(agent: farm.Agent, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(capsys, agent, expected=[{"node": f"lost{number}"} for number in range(100)])
    assert "... and 70 more nodes" in result["msg"] and "... and 80 more problems" in result["msg"]
    assert len(result["problems"]) == 100 and len(result["table"].splitlines()) == 101


def test_waits_for_a_gpu_that_comes(agent: farm.Agent, capsys: pytest.CaptureFixture[str]) -> None:
    complete = agent.nodes
    agent.nodes = [farm.make_node(0, 1), *complete[1:]]

    def comes_while_somebody_waits(request: Any) -> bool:
        if "index=" in request.path:
            agent.change(complete)
        return False

    agent.answer = comes_while_somebody_waits
    result = run(capsys, agent, expected=farm.make_expected(3, 2), timeout=PATIENCE_S)
    assert "failed" not in result, result["msg"]
    assert [query.get("index") for _path, query, _headers in agent.requests] == [None, "10"]


def test_waits_for_an_agent_that_has_no_leader_yet(agent: farm.Agent, capsys: pytest.CaptureFixture[str]) -> None:
    def first_without_leader(request: Any) -> bool:
        if len(agent.requests) > 1:
            return False
        request.reply(500, b"No cluster leader", {})
        return True

    agent.answer = first_without_leader
    assert "failed" not in run(capsys, agent, expected=farm.make_expected(3, 2), timeout=PATIENCE_S)
    assert len(agent.requests) == 2


def test_an_index_that_goes_backwards_starts_anew(agent: farm.Agent, capsys: pytest.CaptureFixture[str]) -> None:
    complete = agent.nodes
    agent.nodes = []

    def restored_while_somebody_waits(request: Any) -> bool:
        if "index=" not in request.path:
            return False
        request.reply(200, b"[]", {"X-Nomad-Index": "3"})
        agent.nodes = complete
        return True

    agent.answer = restored_while_somebody_waits
    assert "failed" not in run(capsys, agent, expected=farm.make_expected(3, 2), timeout=PATIENCE_S)
    assert [query.get("index") for _path, query, _headers in agent.requests] == [None, "10", None]


def test_gives_up_when_the_time_is_over(agent: farm.Agent, capsys: pytest.CaptureFixture[str]) -> None:
    started = time.monotonic()
    result = run(capsys, agent, expected=[{"node": "node00000", "count": 3}], timeout=1)
    assert result["failed"] and time.monotonic() - started >= 1


def test_a_refused_token_is_not_asked_again(agent: farm.Agent, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(request: Any) -> bool:
        request.reply(403, b"Permission denied", {})
        return True

    agent.answer = refuse
    result = run(capsys, agent, expected=[{"node": "a"}], timeout=60)
    assert "HTTP 403" in result["msg"] and len(agent.requests) == 1


@pytest.mark.parametrize(
    ("expected", "words"),
    [
        ([], "the option 'expected' is empty, so nothing would be compared. Expected: at least one node."),
        ([{"node": "a"}, {"node": "a"}], "node a is twice"),
        ([{"node": "a", "models": {"T4": "many"}}], "'models' of node a is"),
        ([{"node": "a", "mig_profiles": {"1g.10gb": []}}], "'mig_profiles' of node a is"),
    ],
)
def test_what_cannot_be_expected(
    agent: farm.Agent, capsys: pytest.CaptureFixture[str], expected: list[dict[str, Any]], words: str
) -> None:
    result = run(capsys, agent, expected=expected)
    assert words in result["msg"] and "Next step: " in result["msg"]
    assert agent.requests == []


def test_models_as_list_as_text_and_as_dictionary(agent: farm.Agent, capsys: pytest.CaptureFixture[str]) -> None:
    for models in ([farm.MODEL], [farm.MODEL, farm.MODEL], farm.MODEL, {farm.MODEL: 2}, {farm.MODEL: "2", "T4": 0}):
        assert "failed" not in run(capsys, agent, expected=[{"node": "node00000", "models": models}])


@pytest.mark.parametrize(
    ("wanted", "options", "code"),
    [
        ({"count": 3}, {}, "count_mismatch"),
        ({"uuids": [farm.uuid_of(0, 0)]}, {}, "gpu_unexpected"),
        ({"models": ["Tesla T4"]}, {}, "model_mismatch"),
        ({"models": "Tesla T4"}, {}, "model_mismatch"),
        ({"models": {farm.MODEL: 1}}, {}, "model_mismatch"),
        ({"memory_mib_min": 81560}, {}, "memory_too_small"),
        ({"driver_version": "1"}, {}, "driver_version_stale"),
        ({"mig": True}, {}, "mig_mismatch"),
        ({"mig_profiles": {"1g.10gb": 1}}, {}, "mig_mismatch"),
        ({}, {"require_eligible": True}, "node_ineligible"),
        ({}, {"allow_extra_nodes": False}, "node_unexpected"),
        ({}, {}, None),
    ],
)
def test_every_option_is_compared(
    agent: farm.Agent, capsys: pytest.CaptureFixture[str], wanted: dict[str, Any], options: dict[str, bool], code: str
) -> None:
    agent.nodes[0]["SchedulingEligibility"] = "ineligible"
    result = run(capsys, agent, expected=[{"node": "node00000", **wanted}], **options)
    assert {problem["code"] for problem in result["problems"]} == ({code} if code else set())
    assert bool(result.get("failed")) is bool(code)


def test_returned_keys_are_the_documented_ones(agent: farm.Agent, capsys: pytest.CaptureFixture[str]) -> None:
    documented = yaml.safe_load(nomad_gpu_verify.RETURN)
    result = run(capsys, agent, expected=[{"node": "lost"}])
    assert set(documented) == set(result) - {"changed", "failed", "msg", "invocation", "exception"}
    assert set(documented["nodes"]["contains"]) == set(result["nodes"][0])
    assert set(documented["problems"]["contains"]) == set(result["problems"][0])


def test_a_large_farm_in_little_memory() -> None:
    """Half of the 500 MB that are promised for ten times the nodes; `make bench` measures those, and the time."""
    figures = farm.measure(500, 8, cores=192)
    assert figures["failed_nodes"] == 0
    assert figures["peak_mib"] < 250
