# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml
from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes import client as kubernetes_client
from ansible_collections.gpufarm.core.plugins.modules import kubernetes_gpu_info
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils import kubernetes_helper as farm
from ansible_collections.gpufarm.core.tests.unit.plugins.modules import release_helper as helper


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[farm.Cluster]:
    for name in ("KUBECONFIG", "K8S_AUTH_KUBECONFIG", "K8S_AUTH_CONTEXT"):
        monkeypatch.delenv(name, raising=False)
    running = farm.Cluster(tmp_path)
    running.nodes = [farm.make_node(0, 4), farm.make_node(1, 2, 0), farm.make_node(2, 0)]
    running.pods = [farm.make_pod("b", "node00000", 2), farm.make_pod("a", "node00000", 1, phase="Pending")]
    yield running
    running.close()


def run(capsys: pytest.CaptureFixture[str], cluster: farm.Cluster, **arguments: Any) -> helper.Outcome:
    return helper.run_module(kubernetes_gpu_info.main, capsys, {**cluster.arguments, **arguments})


def test_nodes_with_their_pods(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(capsys, cluster)
    assert "failed" not in result, result["msg"]
    assert result["changed"] is False and result["gpu_count"] == 6
    one, sick, none = result["nodes"]
    assert (one["gpus_used"], one["gpus_allocatable"]) == (3, 4) and one["resources"][0]["used"] == 3
    assert [(pod["name"], pod["phase"], pod["gpus"]) for pod in one["pods"]] == [
        ("a", "Pending", {"nvidia.com/gpu": 1}),
        ("b", "Running", {"nvidia.com/gpu": 2}),
    ]
    assert (sick["gpus_capacity"], sick["gpus_allocatable"], sick["pods"]) == (2, 0, [])
    assert none["resources"] == [] and none["gpus_used"] == 0


def test_without_pods_nobody_asks_for_them(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(capsys, cluster, gather_pods=False, only_gpu_nodes=True, node_name=["node00000", "node00002", "none"])
    (node,) = result["nodes"]
    assert node["gpus_used"] is None and node["pods"] is None and node["resources"][0]["used"] is None
    assert cluster.paths() == ["/api/v1/nodes"]


def test_the_selector_is_the_apiservers(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, cluster, label_selector="nvidia.com/gpu.present=true", gather_pods=False)
    assert cluster.requests[0][2]["labelSelector"] == "nvidia.com/gpu.present=true"


def test_a_large_cluster_is_read_in_pages(
    cluster: farm.Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_client, "PAGE", 10)
    cluster.nodes = [farm.make_node(number, 8) for number in range(35)]
    result = run(capsys, cluster)
    assert result["gpu_count"] == 280
    assert cluster.paths() == ["/api/v1/nodes"] * 4 + ["/api/v1/pods"]
    assert [query.get("continue") for _method, _path, query in cluster.requests[:4]] == [None, "10", "20", "30"]


def test_who_may_not_list_pods_is_told(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(request: Any) -> bool:
        if "/pods" not in request.path:
            return False
        request.refuse(403, "Forbidden", 'pods is forbidden: User "viewer" cannot list resource "pods"')
        return True

    cluster.answer = refuse
    result = run(capsys, cluster)
    assert 'Forbidden: pods is forbidden: User "viewer" cannot list resource "pods"' in result["msg"]
    assert "Next step: change what is named: a right of the user" in result["msg"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"context": "nope"}, 'context "nope" does not exist'),
        ({"kubeconfig": "/no/such/file"}, "/no/such/file: no such file or directory"),
        ({"kubectl": "/no/kubectl"}, "/no/kubectl cannot be run (No such file or directory)"),
        ({"request_timeout": 0}, "request_timeout is 0"),
    ],
)
def test_ways_that_lead_nowhere(
    cluster: farm.Cluster, capsys: pytest.CaptureFixture[str], arguments: dict[str, Any], words: str
) -> None:
    result = run(capsys, cluster, **arguments)
    assert words in result["msg"] and "Next step: " in result["msg"] and cluster.requests == []


def test_the_environment_says_which_cluster(
    cluster: farm.Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("K8S_AUTH_KUBECONFIG", str(cluster.kubeconfig))
    monkeypatch.setenv("K8S_AUTH_CONTEXT", "farm")
    assert helper.run_module(kubernetes_gpu_info.main, capsys, {"kubectl": farm.KUBECTL})["gpu_count"] == 6


def test_an_apiserver_that_hangs(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    ended = threading.Event()

    def hang(_request: Any) -> bool:
        return ended.wait(farm.HANGS_S)

    cluster.answer = hang
    result = run(capsys, cluster, request_timeout=1)
    ended.set()
    assert "Unable to connect to the server: " in result["msg"]


def test_the_example_tells_of_no_less_than_nothing(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    example = yaml.safe_load(kubernetes_gpu_info.EXAMPLES)[1]["ansible.builtin.debug"]["msg"]
    # Two GPUs, each offered four times, and one that is lost under a pod.
    cluster.nodes = [farm.make_node(0, 8), farm.make_node(1, 2, 0)]
    cluster.nodes[0]["metadata"]["labels"]["nvidia.com/gpu.replicas"] = "4"
    cluster.pods = [farm.make_pod(f"pod{number}", f"node0000{number % 4 // 3}", 1) for number in range(4)]
    nodes = run(capsys, cluster)["nodes"]
    assert nodes[0]["gpus_used"] == 3 > nodes[0]["gpus_allocatable"] == 2
    told = [jinja2.Environment(autoescape=True).from_string(example).render(item=node) for node in nodes]
    assert told == ["node00000: 5", "node00001: 0"]


def test_returned_keys_are_the_documented_ones(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.nodes[0]["spec"]["taints"] = [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]
    documented = yaml.safe_load(kubernetes_gpu_info.RETURN)
    result = run(capsys, cluster)
    assert set(documented) == set(result) - {"changed", "failed", "msg", "invocation"}
    node, described = result["nodes"][0], documented["nodes"]["contains"]
    assert set(described) == set(node)
    for name in ("taints", "resources", "pods"):
        assert set(described[name]["contains"]) == set(node[name][0])
