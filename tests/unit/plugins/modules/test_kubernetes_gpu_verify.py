# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gpufarm.core.plugins.modules import kubernetes_gpu_verify
from ansible_collections.gpufarm.core.tests.unit.patience import PATIENCE_S
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils import kubernetes_helper as farm
from ansible_collections.gpufarm.core.tests.unit.plugins.modules import release_helper as helper


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[farm.Cluster]:
    monkeypatch.setattr(kubernetes_gpu_verify, "PAUSE_S", 0.01)
    running = farm.Cluster(tmp_path)
    running.nodes = [farm.make_node(number, 2) for number in range(3)]
    yield running
    running.close()


def run(capsys: pytest.CaptureFixture[str], cluster: farm.Cluster, **arguments: Any) -> helper.Outcome:
    given = {**cluster.arguments, "timeout": 0, **arguments}
    return helper.run_module(kubernetes_gpu_verify.main, capsys, given)


def test_a_good_farm(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(capsys, cluster, expected=farm.make_expected(2, 2))
    assert "failed" not in result and result["changed"] is False and result["problems"] == []
    assert [node["verdict"] for node in result["nodes"]] == ["ok", "ok"]
    assert result["extra_nodes"] == ["node00002"] and result["nodes"][0]["product"] == farm.PRODUCT
    assert len(cluster.requests) == 1


def test_the_failure_says_everything(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.nodes[1] = farm.make_node(1, 2, 0)
    cluster.pods = [farm.plugin_pod("node00001")]
    expected = [*farm.make_expected(2, 2), {"node": "node00009", "count": 1}]
    expected[0]["count"] = 3
    result = run(capsys, cluster, expected=expected, allow_extra_nodes=False)
    assert result["failed"]
    lines = result["msg"].splitlines()
    assert lines[0].startswith(f"{platform.node()}: 4 of 4 nodes failed after ")
    assert lines[2].split() == ["NODE", "STATUS", "EXPECTED", "FOUND", "VERDICT", "PROBLEMS"]
    assert lines[3].split() == ["node00000", "ready", "3", "2", "failed", "count_mismatch"]
    assert [problem["code"] for problem in result["problems"]] == [
        "count_mismatch",
        "gpu_unhealthy",
        "node_missing",
        "node_unexpected",
    ]
    assert "delete pod nvidia-device-plugin-node00001'" in result["msg"] and result["table"] in result["msg"]
    assert [node["plugin"] for node in result["nodes"]] == [
        None,
        {"namespace": "nvidia-device-plugin", "name": "nvidia-device-plugin-node00001"},
        None,
        None,
    ]
    assert cluster.paths() == ["/api/v1/nodes", "/api/v1/pods", "/api/v1/pods"]


def test_no_plugin_is_to_be_restarted_for_gpus_that_may_be_shared(
    cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """A restart adds no label that tells it."""
    cluster.nodes = [farm.make_node(number, 4, well, labels={}) for number, well in enumerate((4, 0))]
    cluster.pods = [farm.plugin_pod(f"node{number:05d}") for number in range(2)]
    result = run(capsys, cluster, expected=farm.make_expected(2, 2))
    codes = [[problem["code"] for problem in node["problems"]] for node in result["nodes"]]
    assert codes == [["sharing_unknown"], ["sharing_unknown", "gpu_unhealthy"]]
    assert [node["plugin"] and node["plugin"]["name"] for node in result["nodes"]] == [
        None,
        "nvidia-device-plugin-node00001",
    ]


def test_waits_for_a_plugin_that_starts(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    complete = cluster.nodes
    cluster.nodes = [farm.make_node(0, 0), *complete[1:]]

    def comes_later(_request: Any) -> bool:
        if len(cluster.requests) == 3:
            cluster.nodes = complete
        return False

    cluster.answer = comes_later
    result = run(capsys, cluster, expected=farm.make_expected(3, 2), timeout=PATIENCE_S)
    assert "failed" not in result, result["msg"]
    assert len(cluster.requests) == 3


def test_waits_for_a_control_plane_that_starts(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    def first_without_etcd(request: Any) -> bool:
        if len(cluster.requests) > 1:
            return False
        request.refuse(500, "InternalError", "Internal error occurred: etcdserver: leader changed")
        return True

    cluster.answer = first_without_etcd
    assert "failed" not in run(capsys, cluster, expected=farm.make_expected(3, 2), timeout=PATIENCE_S)
    assert len(cluster.requests) == 2


def test_the_last_answer_counts_where_the_control_plane_ends(
    cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    def only_the_first(request: Any) -> bool:
        if len(cluster.requests) == 1:
            return False
        request.refuse(503, "ServiceUnavailable", "the server is currently unable to handle the request")
        return True

    cluster.answer = only_the_first
    result = run(capsys, cluster, expected=[{"node": "node00000", "count": 3}], timeout=1)
    assert [problem["code"] for problem in result["problems"]] == ["count_mismatch"]


def test_gives_up_when_the_time_is_over(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    started = time.monotonic()
    result = run(capsys, cluster, expected=[{"node": "node00000", "count": 3}], timeout=1)
    assert result["failed"] and time.monotonic() - started >= 1


@pytest.mark.parametrize(("status", "reason"), [(403, "Forbidden"), (401, "Unauthorized")])
def test_a_refused_user_is_not_asked_again(
    cluster: farm.Cluster, capsys: pytest.CaptureFixture[str], status: int, reason: str
) -> None:
    def refuse(request: Any) -> bool:
        request.refuse(status, reason, reason)
        return True

    cluster.answer = refuse
    result = run(capsys, cluster, expected=[{"node": "a"}], timeout=60)
    assert reason in result["msg"] and len(cluster.requests) == 1


def test_garbage_is_no_answer(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    def garbage(request: Any) -> bool:
        request.reply(200, b"\xff\xfe\x00<html>")
        return True

    cluster.answer = garbage
    assert "the answer of the apiserver is no JSON" in run(capsys, cluster, expected=[{"node": "a"}], timeout=60)["msg"]


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
    cluster: farm.Cluster, capsys: pytest.CaptureFixture[str], expected: list[dict[str, Any]], words: str
) -> None:
    result = run(capsys, cluster, expected=expected)
    assert words in result["msg"] and "Next step: " in result["msg"] and cluster.requests == []


def test_what_nobody_tells_is_not_compared(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.nodes = [farm.make_node(0, 2, labels={})]
    result = run(capsys, cluster, expected=farm.make_expected(1, 2))
    (node,) = result["nodes"]
    assert node["verdict"] == "ok" and node["product"] is None
    assert node["not_compared"] == ["models", "driver_version"]


def test_returned_keys_are_the_documented_ones(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    documented = yaml.safe_load(kubernetes_gpu_verify.RETURN)
    result = run(capsys, cluster, expected=[{"node": "lost"}])
    assert set(documented) == set(result) - {"changed", "failed", "msg", "invocation", "exception"}
    assert set(documented["nodes"]["contains"]) == set(result["nodes"][0])
    assert set(documented["problems"]["contains"]) == set(result["problems"][0])


def test_modules_are_of_the_action_group() -> None:
    root = Path(__file__).parents[4]
    runtime = yaml.safe_load((root / "meta" / "runtime.yml").read_text(encoding="utf-8"))
    names = sorted(path.stem for path in (root / "plugins" / "modules").glob("kubernetes_*.py"))
    assert runtime["action_groups"]["kubernetes"] == names
