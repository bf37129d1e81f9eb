# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import dataclasses
import platform
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gpufarm.core.plugins.module_utils import gpu_proof
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_benchmark import judging as gpu_judging
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_proof import listing, script, work
from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes import client as kubernetes_client
from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes_pods import choice, judging, podspec, running
from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes_pods.records import PodResult, Settings, Slot
from ansible_collections.gpufarm.core.plugins.modules import kubernetes_gpu_job_verify, nomad_gpu_job_verify
from ansible_collections.gpufarm.core.tests.unit.patience import PATIENCE_S, wait_for
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils import kubernetes_helper as farm
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils.kubernetes_helper import Fate
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils.nomad_jobs_helper import (
    CODES_OF_WORK,
    answer_of,
    codes_in,
    lines_that_say,
)
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils.recorded import assert_recorded
from ansible_collections.gpufarm.core.tests.unit.plugins.modules import program_helper
from ansible_collections.gpufarm.core.tests.unit.plugins.modules import release_helper as helper
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
GPU = "nvidia.com/gpu"


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[farm.Cluster]:
    waits = {"PAUSE_S": 0.02, "FREE_WAIT_S": 0.1, "LOG_WAIT_S": 0.1, "EVENTS_AFTER_S": 0.1}
    for name, value in waits.items():
        monkeypatch.setattr(running, name, value)
    monkeypatch.setattr(kubernetes_client, "run_commands", farm.kubectl_inside())
    before = {number: signal.getsignal(number) for number in SIGNALS}
    started = farm.Cluster(tmp_path)
    started.nodes = [farm.make_node(0, 2), farm.make_node(1, 2)]
    yield started
    started.close()
    for number, handler in before.items():
        signal.signal(number, handler)


def run(
    capsys: pytest.CaptureFixture[str], cluster: farm.Cluster, check_mode: bool = False, **arguments: Any
) -> helper.Outcome:
    given = {**cluster.arguments, "timeout": PATIENCE_S, **arguments}
    return helper.run_module(kubernetes_gpu_job_verify.main, capsys, given, check_mode=check_mode)


def verdicts(result: helper.Outcome) -> list[tuple[str, str | None]]:
    return [(gpu["verdict"], gpu["code"]) for gpu in result["gpus"]]


def all_end(cluster: farm.Cluster) -> None:
    """No pod of a proof is left."""
    assert sorted(cluster.created) == sorted(cluster.removed)
    assert not [pod for pod in cluster.pods if pod["metadata"]["name"].startswith(podspec.PREFIX)]


def test_a_good_farm(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(capsys, cluster, expected=farm.make_expected(2, 2))
    assert "failed" not in result, result["msg"]
    assert result["changed"] is False and result["problems"] == []
    assert result["counts"] == {"ok": 4, "failed": 0, "busy": 0, "skipped": 0}
    assert {gpu["uuid"] for gpu in result["gpus"]} == {farm.uuid_of(node, gpu) for node in (0, 1) for gpu in (0, 1)}
    for gpu in result["gpus"]:
        assert gpu["seen"] == [gpu["uuid"]] and gpu["isolated"] is True and gpu["message"] is None
    all_end(cluster)


def test_a_cluster_behind_rancher(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.serve_under("/k8s/clusters/c-m-abc")
    result = run(capsys, cluster)
    assert "failed" not in result, result["msg"]
    assert result["counts"]["ok"] == 4
    all_end(cluster)


def test_each_kind_of_gpu_is_proven(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.nodes = [farm.make_node(0, 1, **{"nvidia.com/mig-1g.10gb": 2})]
    result = run(capsys, cluster)
    assert [(gpu["resource"], gpu["uuid"][:4]) for gpu in result["gpus"]] == [
        (GPU, "GPU-"),
        ("nvidia.com/mig-1g.10gb", "MIG-"),
        ("nvidia.com/mig-1g.10gb", "MIG-"),
    ]
    assert result["counts"]["ok"] == 3


def test_no_pod_ends_before_all_have_spoken(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    """Otherwise the last would be given the GPU of the first."""
    started: list[str] = []

    def late(pod: dict[str, Any], _node: str, _resource: str) -> Fate:
        # The second pod of a node begins when the first has long been judged.
        started.append(pod["metadata"]["name"])
        if pod["metadata"]["name"].endswith("-1") and started.count(pod["metadata"]["name"]) < 5:
            return Fate(status={"phase": "Pending"})
        return Fate()

    cluster.nodes = cluster.nodes[:1]
    cluster.fate_of = late
    result = run(capsys, cluster, expected=farm.make_expected(1, 2))
    assert "failed" not in result, result["msg"]
    assert len({gpu["uuid"] for gpu in result["gpus"]}) == 2


def test_nodes_take_turns(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, cluster, parallel=1)["counts"]["ok"] == 4
    methods = [method for method, path, _query in cluster.requests if method in ("POST", "DELETE")]
    assert methods == ["POST", "POST", "DELETE", "POST", "POST", "DELETE"]


def test_the_pod_is_as_written(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    given: dict[str, Any] = {
        "runtime_class": "nvidia",
        "priority_class": "low",
        "namespace": "proofs",
        "image": "example.com/cuda:1",
        "tolerations": [{"operator": "Exists"}],
    }
    run(capsys, cluster, nodes=["node00001"], sample=1, **given)
    (pod,) = [body for body in cluster.bodies if body and body.get("kind") == "Pod"]
    spec = pod["spec"]
    assert (spec["runtimeClassName"], spec["priorityClassName"], spec["tolerations"]) == (
        "nvidia",
        "low",
        [{"operator": "Exists"}],
    )
    assert spec["containers"][0]["image"] == "example.com/cuda:1" and pod["metadata"]["namespace"] == "proofs"
    assert spec["containers"][0]["resources"]["limits"][GPU] == "1" and "nodeName" not in spec
    assert spec["securityContext"]["runAsNonRoot"] and spec["restartPolicy"] == "Never"
    assert spec["activeDeadlineSeconds"] > PATIENCE_S
    assert {path for path in cluster.paths("POST")} == {"/api/v1/namespaces/proofs/pods"}


def test_the_default_pod_tolerates_the_taint_of_gpus() -> None:
    pod = podspec.pod_of("a", "run", Slot("n", GPU, 0), Settings(), seconds=10, gives_up_at=20)
    assert pod["spec"]["tolerations"] == [{"key": GPU, "operator": "Exists"}]
    assert "runtimeClassName" not in pod["spec"] and "priorityClassName" not in pod["spec"]


def test_pods_as_recorded() -> None:
    """By the cluster's own words they fit the pod standard `restricted`, which scenario kubernetes enforces."""
    given = {"namespace": "gpu", "runtime_class": "nvidia", "priority_class": "low"}
    computes = podspec.pod_of("b", "run", Slot("n", GPU, 0), Settings(level="quick", **given), seconds=9, gives_up_at=8)
    computes["spec"]["containers"][0]["env"][1]["value"] = "the program"
    assert_recorded(
        "pods",
        [podspec.pod_of("a", "run", Slot("n", GPU, 0), Settings(), seconds=10, gives_up_at=20), computes],
    )


# --- what computes ---------------------------------------------------------------------------


def does(**changes: Any) -> Any:
    """What a GPU does that did what a real H100 did, but for these changes."""
    return lambda uuid: lines_that_say(answer_of(uuid, **changes))


WRONG = does(wrong_results={"fp32": 3})
SLOW = does(figures={"memory_read_gb_per_s": 1000.0, "fp32_tflop_per_s": 9.0, "fp16_tensor_tflop_per_s": 9.0,
                     "bf16_tensor_tflop_per_s": 9.0})  # fmt: skip


@pytest.mark.parametrize("level", ["start", "quick"])
def test_a_good_farm_computes(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str], level: str) -> None:
    cluster.fate_of = lambda _pod, _node, _resource: Fate(does=does())
    result = run(capsys, cluster, level=level, expected=farm.make_expected(2, 2))
    assert "failed" not in result, result["msg"]
    assert result["counts"]["ok"] == 4
    for gpu in result["gpus"]:
        assert gpu["benchmark"]["percent"]["memory"] > 90 and gpu["uuid"]
    documented = yaml.safe_load(nomad_gpu_job_verify.RETURN)["gpus"]["contains"]["benchmark"]["contains"]
    assert set(result["gpus"][0]["benchmark"]) == set(documented)
    assert run(capsys, cluster)["gpus"][0]["benchmark"] is None
    all_end(cluster)


def test_a_gpu_that_computes_wrongly_and_its_sibling(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.nodes = cluster.nodes[:1]
    cluster.fate_of = lambda pod, _node, _resource: Fate(
        does=WRONG if pod["metadata"]["name"].endswith("-1") else does()
    )
    result = run(capsys, cluster, level="quick", expected=farm.make_expected(1, 2))
    assert verdicts(result) == [("ok", None), ("failed", "wrong_results")]
    (problem,) = result["problems"]
    assert problem["uuid"] == farm.uuid_of(0, 1)
    assert problem["message"] == (
        f"Node node00000, GPU {farm.uuid_of(0, 1)}: found 3 wrong results of fp32. Expected: the same result as worked "
        "out on the host. Next step: drain the node and run nvidia_gpu_benchmark at level full; if it stays so, reset "
        "the GPU, then have the card replaced."
    )
    assert [line.split() for line in result["table"].splitlines()] == [
        ["NODE", "GPUS", "OK", "FAILED", "BUSY", "SKIPPED", "MEMORY%", "FP32%", "TENSOR%", "REASONS"],
        ["node00000", "2", "1", "1", "0", "0", "94", "96", "61", "wrong_results"],
    ]
    assert result["gpus"][1]["benchmark"]["wrong_results"]["fp32"] == 3


@pytest.mark.parametrize("strategy", ["time-slicing", "mps"])
def test_shared_gpus_are_only_listed(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str], strategy: str) -> None:
    """And what is not shared on the same node computes."""
    labels = {"nvidia.com/gpu.replicas": "2", "nvidia.com/gpu.sharing-strategy": strategy}
    cluster.nodes = [farm.make_node(0, 2, labels=labels, **{"nvidia.com/mig-1g.10gb": 1})]
    cluster.fate_of = lambda _pod, _node, resource: (
        Fate(sees=[farm.uuid_of(0, 0)]) if resource == GPU else Fate(does=SLOW)
    )
    result = run(capsys, cluster, level="quick")
    assert verdicts(result) == [("ok", None)] * 2 + [("failed", "slow_fp32")], result["msg"]
    assert [gpu["benchmark"] is None for gpu in result["gpus"]] == [True, True, False]
    pods = [body for body in cluster.bodies if body and body.get("kind") == "Pod"]
    containers = [container for pod in pods for container in pod["spec"]["containers"]]
    assert [bool(container["env"]) for container in containers] == [False, False, True]
    assert ["--level quick" in container["command"][-1] for container in containers] == [False, False, True]


def test_a_pod_that_said_nothing_of_its_work(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    said = "Traceback (most recent call last):\nMemoryError\n"
    cluster.fate_of = lambda _pod, _node, _resource: Fate(does=lambda _uuid: f"{said}gpufarm-verify: computed 1\n")
    result = run(capsys, cluster, level="start")
    assert verdicts(result) == [("failed", "no_answer")] * 4 and result["gpus"][0]["uuid"]
    assert (
        "ended with 1 and without an answer; its stderr ends with 'Traceback (most recent call last): MemoryError'"
        in (result["gpus"][0]["message"])
    )


OUT_OF_MEMORY = farm.ended("OOMKilled", 137)
STILL_RUNS = {"phase": "Running", "containerStatuses": [{"name": "see", "ready": True, "state": farm.RUNNING}]}


def test_a_pod_that_ran_out_of_memory_names_its_gpu(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.nodes = [farm.make_node(0, 1)]
    cluster.fate_of = lambda _pod, _node, _resource: Fate(after=OUT_OF_MEMORY)
    result = run(capsys, cluster, level="quick", expected=farm.make_expected(1, 1))
    assert verdicts(result) == [("failed", "task_failed")]
    (gpu,), uuid = result["gpus"], farm.uuid_of(0, 0)
    assert (gpu["uuid"], gpu["seen"], gpu["isolated"]) == (uuid, [uuid], True)
    assert gpu["message"].startswith(f"Node node00000, GPU {uuid}: found that the pod failed (OOMKilled). ")
    assert gpu["message"].endswith("Next step: raise memory_mib.") and result["problems"][0]["uuid"] == uuid


def test_what_a_pod_had_that_has_ended_another_may_have(
    cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where a node has no room for two at once, the second gets the GPU of the first, and that is well."""
    cluster.nodes = cluster.nodes[:1]

    def one_after_the_other(pod: dict[str, Any], _node: str, _resource: str) -> Fate:
        first = next(each for each in cluster.pods if each["metadata"]["name"].endswith("-0"))
        if pod is first:
            return Fate(after=OUT_OF_MEMORY)
        return Fate(does=does()) if first["status"]["phase"] == "Failed" else Fate(status={"phase": "Pending"})

    cluster.fate_of = one_after_the_other
    result = run(capsys, cluster, level="quick", expected=farm.make_expected(1, 2))
    assert verdicts(result) == [("failed", "task_failed"), ("ok", None)], result["msg"]
    assert [gpu["uuid"] for gpu in result["gpus"]] == [farm.uuid_of(0, 0)] * 2 and len(result["problems"]) == 1


@pytest.mark.parametrize(
    ("level", "replicas", "words"),
    [("quick", 1, "its GPU has computed"), ("quick", 2, "nvidia-smi has"), ("list", 1, "nvidia-smi has")],
)
def test_a_log_that_ends_too_early(
    cluster: farm.Cluster, capsys: pytest.CaptureFixture[str], level: str, replicas: int, words: str
) -> None:
    cluster.nodes = [farm.make_node(0, replicas, labels={"nvidia.com/gpu.replicas": str(replicas)})]
    cluster.fate_of = lambda _pod, _node, _resource: Fate(after=farm.ended("Error", 1))
    result = run(capsys, cluster, level=level)
    assert verdicts(result) == [("failed", "task_failed")] * replicas
    assert f"that the pod failed (its log ends before {words})" in result["msg"]


def test_a_pod_that_is_late_names_its_gpu(
    cluster: farm.Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.nodes = cluster.nodes[:1]
    cluster.fate_of = lambda _pod, _node, _resource: Fate(after=STILL_RUNS)
    # Over when a log was read.
    monkeypatch.setattr(
        running.Run, "seconds_left", lambda _run: 0 if any("/log" in path for path in cluster.paths()) else 9
    )
    result = run(capsys, cluster, level="start")
    assert verdicts(result) == [("failed", "timeout")] * 2
    assert [gpu["uuid"] for gpu in result["gpus"]] == [farm.uuid_of(0, 0), farm.uuid_of(0, 1)]
    assert f"GPU {farm.uuid_of(0, 1)}: found that the pod was still Running" in result["gpus"][1]["message"]


def test_a_list_of_gpus_that_is_half_there_names_none(
    cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    half = f"GPU 0: {farm.MODEL} (UUID: {farm.uuid_of(0, 0)})\n"
    cluster.fate_of = lambda _pod, _node, _resource: Fate(farm.ended("OOMKilled", 137), log=half)
    assert {gpu["uuid"] for gpu in run(capsys, cluster)["gpus"]} == {None}


def test_a_log_without_an_end(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    asked = []

    def limits(request: Any) -> bool:
        asked.extend([request.path] if "/log" in request.path else [])
        return False

    cluster.answer = limits
    endless = "x" * running.LOG_BYTES
    cluster.fate_of = lambda _pod, _node, _resource: Fate(after=STILL_RUNS, does=lambda _uuid: endless)
    result = run(capsys, cluster, level="start", nodes=["node00000"])
    assert verdicts(result) == [("failed", "log_unreadable")] * 2 and result["gpus"][0]["uuid"]
    assert f"a log without its end in the first {running.LOG_BYTES} bytes" in result["msg"]
    assert asked and all(f"limitBytes={running.LOG_BYTES}" in path for path in asked)


def container_of(slot: Slot | None = None, **given: Any) -> dict[str, Any]:
    pod = podspec.pod_of("a", "run", slot or Slot("n", GPU, 0), Settings(**given), seconds=10, gives_up_at=20)
    (container,) = pod["spec"]["containers"]
    return dict(container)


def test_a_pod_that_only_lists_has_no_program() -> None:
    container = container_of()
    assert (container["image"], container["env"]) == ("docker.io/nvidia/cuda:12.8.1-base-ubuntu24.04", [])
    assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"] == "256Mi"
    assert "python" not in str(container)


@pytest.mark.parametrize("level", ["start", "quick"])
def test_a_pod_that_computes_has_the_program_with_it(level: str) -> None:
    container = container_of(level=level)
    assert container["image"].startswith("docker.io/library/python:")
    assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"] == "1024Mi"
    given = {each["name"]: each["value"] for each in container["env"]}
    assert given == {
        "NVIDIA_DRIVER_CAPABILITIES": "compute,utility", "GPUFARM_PAYLOAD": script.payload_of_pod()
    }  # fmt: skip
    # One string of an environment has 128 KiB on Linux, an object in etcd 1.5 MiB, and there is a pod for each GPU.
    assert len(given["GPUFARM_PAYLOAD"]) < 32768
    text = container["command"][-1]
    assert f"--level {level} --format json --timeout 60)" in text and "--memory-share" not in text
    # Kubernetes makes one of two, and puts a value where the name of a variable is in $(...).
    assert "$$" not in text and not [name for name in given if f"$({name})" in text]


def test_what_a_pod_is_given_to_compute() -> None:
    container = container_of(level="quick", memory_mib=77, image="own:1", timeout=8)
    assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"] == "77Mi"
    assert container["image"] == "own:1" and "--timeout 2)" in container["command"][-1]


@pytest.mark.parametrize("level", ["start", "quick"])
def test_a_pod_on_a_shared_gpu_is_one_that_only_lists(level: str) -> None:
    assert container_of(Slot("n", GPU, 0, shared=True), level=level) == container_of()


def test_options_reach_the_pod(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, cluster, nodes=["node00001"], sample=1, memory_mib=77, level="start")
    (pod,) = [body for body in cluster.bodies if body and body.get("kind") == "Pod"]
    (container,) = pod["spec"]["containers"]
    assert container["resources"]["limits"]["memory"] == "77Mi" and "--level start" in container["command"][-1]


# --- what is not proven ----------------------------------------------------------------------


def test_gpus_in_use_are_left_alone(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.pods = [{**farm.make_pod("training", "node00000", 1, namespace="team"), "node": "node00000"}]
    cluster.pods[0].update(resource=GPU, gpu=farm.uuid_of(0, 0))
    result = run(capsys, cluster, expected=farm.make_expected(2, 2))
    assert "failed" not in result, result["msg"]
    assert verdicts(result)[:2] == [("ok", None), ("busy", "gpu_busy")]
    assert "found held by pod team/training. Expected: a free GPU" in result["gpus"][1]["message"]
    assert run(capsys, cluster, skip_busy=False)["problems"][0]["code"] == "gpu_busy"


def test_whose_pods_may_not_be_seen(
    cluster: farm.Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the scheduler says that a GPU is not free."""
    warnings: list[str] = []
    monkeypatch.setattr(kubernetes_gpu_job_verify.AnsibleModule, "warn", lambda _self, text: warnings.append(text))
    cluster.pods = [{**farm.make_pod("training", "node00000", 1), "node": "node00000", "resource": GPU}]
    cluster.pods[0]["gpu"] = farm.uuid_of(0, 0)

    def refuse(request: Any) -> bool:
        if not request.path.startswith("/api/v1/pods"):
            return False
        request.refuse(403, "Forbidden", "pods is forbidden")
        return True

    cluster.answer = refuse
    # The pod of another with a lower priority would have to go.
    refused = run(capsys, cluster)
    assert "without 'priority_class' pods of lower priority could be removed" in refused["msg"] and not cluster.created
    result = run(capsys, cluster, priority_class="gentle")
    assert sorted(verdicts(result)[:2], key=str) == [("busy", "gpu_busy"), ("ok", None)]
    assert ["it is not known which GPUs are free" in text for text in warnings] == [True]
    all_end(cluster)


def test_a_sample_takes_free_gpus_first(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.pods = [{**farm.make_pod("training", "node00000", 1), "node": "node00000", "resource": GPU}]
    cluster.pods[0]["gpu"] = farm.uuid_of(0, 1)
    result = run(capsys, cluster, sample=1)
    assert verdicts(result) == [("ok", None), ("skipped", "not_sampled")] * 2 and len(cluster.created) == 2


def test_a_sample_takes_free_gpus_of_another_kind_before_busy_ones(
    cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    part = "nvidia.com/mig-1g.10gb"
    cluster.nodes = [farm.make_node(0, 1, **{part: 2})]
    cluster.pods = [{**farm.make_pod("training", "node00000", 1), "node": "node00000", "resource": GPU}]
    cluster.pods[0]["gpu"] = farm.uuid_of(0, 0)
    result = run(capsys, cluster, nodes=["node00000"], sample=1, check_mode=True)
    assert [(gpu["resource"], gpu["code"]) for gpu in result["gpus"]] == [
        (GPU, "not_sampled"), (part, "check_mode"), (part, "not_sampled"),
    ]  # fmt: skip


def test_cordoned_nodes(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.nodes[0]["spec"]["unschedulable"] = True
    assert verdicts(run(capsys, cluster))[:2] == [("skipped", "node_closed")] * 2
    assert verdicts(run(capsys, cluster, nodes=["node00000"])) == [("failed", "not_placed")] * 2


def test_check_mode_asks_and_changes_nothing(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(capsys, cluster, check_mode=True)
    assert verdicts(result) == [("skipped", "check_mode")] * 4
    assert {method for method, _path, _query in cluster.requests} == {"GET"}


def test_nodes_that_cannot_be_proven(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.nodes += [farm.make_node(2, 2, 0), farm.make_node(3, 0), farm.make_node(4, 2)]
    cluster.nodes[-1]["status"]["conditions"][-1]["status"] = "False"
    names = [f"node{number:05d}" for number in (2, 3, 4)]
    result = run(capsys, cluster, nodes=[*names, "lost", "node00000"])
    assert [problem["code"] for problem in result["problems"]] == [
        "no_devices",
        "no_devices",
        "node_down",
        "node_missing",
    ]
    assert "none of its 2 GPUs allocatable" in result["problems"][0]["found"]
    assert result["counts"]["ok"] == 2
    cluster.nodes = [farm.make_node(0, 0)]
    assert "no ready node with GPUs, so nothing would be proven" in run(capsys, cluster)["msg"]


def test_what_no_pod_can_get_is_no_proof(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    """Without names too."""
    cluster.nodes += [farm.make_node(2, 8, 0), farm.make_node(3, 8, 7), farm.make_node(4, 2), farm.make_node(5, 0)]
    cluster.nodes[4]["status"]["conditions"][-1]["status"] = "Unknown"
    result = run(capsys, cluster)
    assert [(problem["node"], problem["code"]) for problem in result["problems"]] == [
        ("node00002", "no_devices"),
        ("node00003", "gpu_unhealthy"),
        ("node00004", "node_down"),
    ]
    assert result["counts"]["ok"] == 11 and "7 of 8 GPUs allocatable" in result["msg"]
    # Of what was taken out of work that is known.
    for node in cluster.nodes[2:]:
        node["spec"]["unschedulable"] = True
    result = run(capsys, cluster)
    assert result["problems"] == [] and result["counts"] == {"ok": 4, "failed": 0, "busy": 0, "skipped": 7}


def test_what_is_expected_counts_as_named(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.nodes.append(farm.make_node(2, 2))
    cluster.nodes[2]["spec"]["unschedulable"] = True
    expected = [{"node": "node00002"}, {"node": "lost"}]
    result = run(capsys, cluster, expected=expected)
    assert sorted(problem["code"] for problem in result["problems"]) == ["node_missing", "not_placed", "not_placed"]
    assert result["counts"]["ok"] == 4
    # Who names nodes means only these.
    assert run(capsys, cluster, expected=expected, nodes=["node00000"])["problems"] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"nodes": []}, "the option 'nodes' is empty, so nothing would be proven"),
        ({"sample": 0}, "the option 'sample' is 0"),
        ({"timeout": 0}, "the option 'timeout' is 0"),
        ({"parallel": 0}, "the option 'parallel' is 0"),
        ({"memory_mib": 9}, "the option 'memory_mib' is 9. Expected: at least 10"),
        ({"image": ""}, "the option 'image' is empty"),
        ({"namespace": ""}, "the option 'namespace' is empty"),
    ],
)
def test_wrong_options(
    cluster: farm.Cluster, capsys: pytest.CaptureFixture[str], arguments: dict[str, Any], words: str
) -> None:
    assert words in run(capsys, cluster, **arguments)["msg"] and cluster.requests == []


# --- what fails ------------------------------------------------------------------------------

MANY = [farm.uuid_of(0, 0), farm.uuid_of(0, 1)]
NOT_DIVIDED = (
    f"GPU 0: A100 (UUID: {MANY[0]})\ngpufarm-verify: visible void\ngpufarm-verify: divided {MANY[0]}\n"
    "gpufarm-verify: end 0\n"
)


@pytest.mark.parametrize(
    ("fate", "code", "words"),
    [
        (Fate(sees=[], exit_code=6), "gpu_not_seen", "set runtime_class"),
        (Fate(sees=MANY), "extra_gpus_seen", f"sees {', '.join(MANY)}"),
        (Fate(farm.ended("Completed", 0), log=NOT_DIVIDED), "mig_empty", "turn its MIG mode off on the node"),
        (Fate(exit_code=9), "task_failed", "nvidia-smi -L ended with 9"),
        (Fate(sees=[], exit_code=127), "task_failed", "nvidia-smi -L ended with 127"),
        (Fate(farm.waiting("ImagePullBackOff", "Back-off pulling image")), "task_failed", "check the image's name"),
        (Fate(farm.waiting("InvalidImageName")), "task_failed", "InvalidImageName"),
        (Fate(farm.waiting("CreateContainerError", "CDI device injection failed")), "task_failed", "CDI specification"),
        (Fate({"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "Allocate failed due to x"}),
         "task_failed", "log of the device plugin's pod"),
        (Fate(farm.ended("StartError", 128, "nvidia-container-cli: x", started=False)), "task_failed", "container-cli"),
        (Fate(farm.ended("OOMKilled", 137), log="GPU 0"), "task_failed", "OOMKilled"),
        (Fate(farm.ended("OOMKilled", 137)), "task_failed", "OOMKilled"),
        (Fate(farm.ended("Error", 1), log=""), "task_failed", "its log ends before nvidia-smi has"),
        (Fate(farm.ended("Error", 1)), "log_unreadable", "waiting to start"),
        (Fate(farm.unplaced("0/2 nodes are available: 1 node(s) had untolerated taint {a: b}")),
         "not_placed", "tolerations"),
    ],
)  # fmt: skip
def test_pods_that_prove_nothing(
    cluster: farm.Cluster, capsys: pytest.CaptureFixture[str], fate: Fate, code: str, words: str
) -> None:
    cluster.nodes = cluster.nodes[:1]
    cluster.fate_of = lambda _pod, _node, _resource: fate
    result = run(capsys, cluster)
    assert verdicts(result) == [("failed", code)] * 2, result["msg"]
    assert words in result["msg"] and result["failed"]
    all_end(cluster)


def test_an_empty_gpu_whose_mig_devices_nobody_told_is_the_nodes_own(
    cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.nodes = [farm.make_node(0, 1)]
    cluster.fate_of = lambda _pod, _node, _resource: Fate(farm.ended("Completed", 0), log=NOT_DIVIDED)
    expected = [{"node": "node00000", "uuids": MANY[1:], "mig_unknown": [MANY[0].upper()]}]
    assert verdicts(run(capsys, cluster, expected=expected)) == [("failed", "mig_empty")]


@pytest.mark.parametrize(
    ("why", "code"),
    [("1 Insufficient cpu", "node_full"), ("1 Too many pods", "node_full"), (f"1 Insufficient {GPU}", "gpu_busy")],
)
def test_a_full_node_is_busy(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str], why: str, code: str) -> None:
    def taken(_pod: Any, node: str, _resource: str) -> Fate:
        cluster.pods.append(farm.make_pod(f"fast-{len(cluster.pods)}", node, 1))
        return Fate(farm.unplaced(f"0/2 nodes are available: {why}."))

    cluster.fate_of = taken
    assert verdicts(run(capsys, cluster)) == [("busy", code)] * 4


@pytest.mark.parametrize(
    ("now", "named", "verdict", "code"),
    [
        ({"status": {"allocatable": {GPU: "1"}}}, None, "failed", "gpu_unhealthy"),
        ({"status": {"allocatable": {GPU: "0"}, "capacity": {GPU: "0"}}}, None, "failed", "gpu_unhealthy"),
        ({"spec": {"unschedulable": True}}, None, "skipped", "node_closed"),
        ({"spec": {"unschedulable": True}}, ["node00000"], "failed", "not_placed"),
        # Nobody holds it, and it is there.
        ({}, None, "failed", "not_placed"),
    ],
)
def test_a_node_that_changes_during_the_proof(
    cluster: farm.Cluster,
    capsys: pytest.CaptureFixture[str],
    *,
    now: dict[str, Any],
    named: list[str] | None,
    verdict: str,
    code: str,
) -> None:
    cluster.nodes = cluster.nodes[:1]

    def changes(_pod: Any, _node: str, _resource: str) -> Fate:
        farm.merge(cluster.nodes[0], now)
        return Fate(farm.unplaced(f"0/1 nodes are available: 1 Insufficient {GPU}."))

    cluster.fate_of = changes
    result = run(capsys, cluster, nodes=named)
    assert verdicts(result) == [(verdict, code)] * 2
    assert result["gpus"][0]["pod"] == cluster.created[0]
    all_end(cluster)


def test_a_gpu_that_comes_free_between_two_looks(
    cluster: farm.Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.nodes = cluster.nodes[:1]
    cluster.fate_of = lambda _pod, _node, _resource: Fate(farm.unplaced(f"1 Insufficient {GPU}."))
    looks: list[str] = []

    def ends(request: Any) -> bool:
        if request.command == "GET" and request.path.startswith("/api/v1/pods?"):
            looks.append(request.path)
            if len(looks) == 2:
                cluster.fate_of = lambda _pod, _node, _resource: Fate()
                for pod in cluster.pods:
                    pod["status"] = {"phase": "Pending"}
        return False

    cluster.answer = ends
    monkeypatch.setattr(running, "FREE_WAIT_S", 0.3)
    assert verdicts(run(capsys, cluster)) == [("ok", None)] * 2
    all_end(cluster)


@pytest.mark.parametrize(("code", "found"), [(0, ("ok", None)), (9, ("failed", "task_failed"))])
def test_a_container_beside_ours(
    cluster: farm.Cluster, capsys: pytest.CaptureFixture[str], code: int, found: tuple[str, str | None]
) -> None:
    status = farm.ended("Error", code)
    status["phase"] = "Running"
    mesh = {"name": "istio-proxy", "state": {"waiting": {"reason": "CreateContainerError", "message": "mesh"}}}
    status["containerStatuses"].insert(0, mesh)
    cluster.fate_of = lambda _pod, node, _resource: Fate(
        status, log=farm.listing_of([farm.uuid_of(int(node[4:]), 0)], code)
    )
    cluster.nodes = [farm.make_node(0, 1), farm.make_node(1, 1)]
    result = run(capsys, cluster)
    assert verdicts(result) == [found] * 2 and "mesh" not in result.get("msg", "")


def test_a_container_that_ended_beside_another(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    """The pod goes on, and there is nothing to wait for."""
    status = {**farm.ended("OOMKilled", 137), "phase": "Running"}
    cluster.fate_of = lambda _pod, _node, _resource: Fate(status, log="GPU 0")
    assert verdicts(run(capsys, cluster)) == [("failed", "task_failed")] * 4


@pytest.mark.parametrize(
    ("status", "reason", "words"), [(403, "Forbidden", "right to get pods/log"), (500, "InternalError", "port 10250")]
)
def test_logs_that_cannot_be_read(
    cluster: farm.Cluster,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    *,
    status: int,
    reason: str,
    words: str,
) -> None:
    """While the pods run on."""
    monkeypatch.setattr(running, "UNREADABLE_WAIT_S", 0.1 if reason != "Forbidden" else 9 * PATIENCE_S)

    def refuse(request: Any) -> bool:
        if "/log" in request.path:
            request.refuse(status, reason, "no log")
        return "/log" in request.path

    cluster.answer = refuse
    result = run(capsys, cluster)
    assert verdicts(result) == [("failed", "log_unreadable")] * 4 and words in result["msg"]
    assert "Expected: the log of the pod, as 'kubectl logs' shows it. Next step: " in result["msg"]
    all_end(cluster)


def test_a_log_that_could_not_be_read_in_time(
    cluster: farm.Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def refuse(request: Any) -> bool:
        if "/log" in request.path:
            asked.append(request.path)
            request.refuse(500, "InternalError", "no log")
        return "/log" in request.path

    cluster.answer = refuse
    monkeypatch.setattr(running.Run, "seconds_left", lambda _run: 0 if asked else 9)
    assert verdicts(run(capsys, cluster)) == [("failed", "log_unreadable")] * 4


def test_one_cause_is_told_once(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.fate_of = lambda _pod, _node, _resource: Fate(farm.waiting("ImagePullBackOff", "no such host"))
    result = run(capsys, cluster)
    lines = result["msg"].splitlines()
    assert lines[0].startswith(f"{platform.node()}: 4 problems after ")
    assert lines[2].split() == ["NODE", "GPUS", "OK", "FAILED", "BUSY", "SKIPPED", "REASONS"]
    told = [line for line in lines if "ImagePullBackOff: no such host" in line]
    assert len(told) == 1 and told[0].endswith(" The same on 3 more.")


def test_a_runtime_that_is_missing_is_told_by_events(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.fate_of = lambda _pod, _node, _resource: Fate(farm.waiting("ContainerCreating"))
    message = 'Failed to create pod sandbox: rpc error: no runtime for "nvidia" is configured'
    cluster.events = [{"reason": "FailedCreatePodSandBox", "message": message}]
    result = run(capsys, cluster)
    assert verdicts(result) == [("failed", "task_failed")] * 4
    assert 'no runtime for "nvidia" is configured' in result["msg"] and "nvidia-ctk runtime configure" in result["msg"]


def test_time_that_is_over(
    cluster: farm.Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.fate_of = lambda _pod, _node, _resource: Fate(farm.waiting("ContainerCreating"))
    cluster.events = [{"reason": "FailedMount", "message": "no such volume"}]
    # Over when the events have been asked for once, which tell of all pods.
    monkeypatch.setattr(
        running.Run, "seconds_left", lambda _run: 0 if any("/events" in path for path in cluster.paths()) else 9
    )
    result = run(capsys, cluster, parallel=1)
    # Of the second node nothing is known, so nothing there has failed, and yet it is not proven.
    assert verdicts(result) == [("failed", "timeout")] * 2 + [("skipped", "not_begun")] * 2
    assert all(
        "that the pod was still Pending (ContainerCreating; FailedMount: no such volume)" in gpu["message"]
        for gpu in result["gpus"][:2]
    )
    # By the second pod nothing was asked that the first had not asked already, when it was silent and when it was late.
    assert len([path for path in cluster.paths() if path.endswith("/events")]) == 2
    assert "that no pod of this node had begun" in result["gpus"][2]["message"]
    assert [(problem["node"], problem["code"]) for problem in result["problems"]] == [
        ("node00000", "timeout"),
        ("node00000", "timeout"),
        ("node00001", "not_begun"),
    ]
    assert result["failed"] and "raise 'timeout' or 'parallel'" in result["msg"]
    all_end(cluster)


def test_a_pod_that_somebody_removes(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    def remove(request: Any) -> bool:
        if request.command == "GET" and request.path.startswith("/api/v1/namespaces/default/pods?"):
            cluster.pods = []
        return False

    cluster.answer = remove
    assert "somebody else has removed it" in run(capsys, cluster)["msg"]


def test_two_pods_with_one_gpu(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.nodes = cluster.nodes[:1]
    cluster.fate_of = lambda _pod, _node, _resource: Fate(sees=[farm.uuid_of(0, 0)])
    result = run(capsys, cluster)
    assert verdicts(result) == [("failed", "wrong_gpu")] * 2 and "in 2 pods at once" in result["msg"]
    # By time slices they may.
    cluster.nodes = [farm.make_node(0, 2, labels={"nvidia.com/gpu.replicas": "2"})]
    assert verdicts(run(capsys, cluster)) == [("ok", None)] * 2


def test_gpus_that_may_be_shared_are_only_listed(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    """Twice as many as nvidia-smi lists, and GPU feature discovery does not run."""
    cluster.nodes = [farm.make_node(0, 4, labels={})]
    pods = iter(range(4))
    cluster.fate_of = lambda _pod, _node, _resource: Fate(sees=[farm.uuid_of(0, next(pods) % 2)])
    result = run(capsys, cluster, expected=farm.make_expected(1, 2), level="quick")
    assert verdicts(result) == [("ok", None)] * 4 and {gpu["benchmark"] for gpu in result["gpus"]} == {None}


def test_a_gpu_of_another_machine(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    expected = farm.make_expected(2, 2)
    expected[0]["uuids"] = [farm.uuid_of(7, 0), farm.uuid_of(7, 1)]
    result = run(capsys, cluster, expected=expected)
    assert verdicts(result) == [("failed", "wrong_gpu")] * 2 + [("ok", None)] * 2
    assert "one of the 2 that nvidia-smi lists on the node" in result["msg"]


def test_a_gpu_that_no_pod_is_given(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(capsys, cluster, expected=farm.make_expected(1, 3))
    (problem,) = result["problems"]
    assert (problem["code"], problem["uuid"]) == ("gpu_not_seen", farm.uuid_of(0, 2))
    # With a sample it may be one of the others.
    assert run(capsys, cluster, expected=farm.make_expected(1, 3), sample=1)["problems"] == []


def computed(uuid: str, code: str | None = None, **more: Any) -> PodResult:
    """The result of a pod on node n that had this GPU."""
    verdict = "failed" if code else "ok"
    return PodResult("n", uuid, "", verdict, code=code, benchmark={"name": uuid}, pod=f"pod-{uuid}", **more)


def together(*results: PodResult, own: Any = (), shared: bool = False) -> tuple[list[PodResult], list[Any]]:
    slots = {Slot("n", GPU, number, shared=shared): result for number, result in enumerate(results)}
    judged, problems = judging.judge_together(slots, {"n": own}, {})
    return list(judged.values()), [(problem.code, problem.uuid) for problem in problems]


def test_what_computed_badly_is_compared_as_well() -> None:
    """And which GPU it was comes before what it did."""
    judged, _problems = together(computed("GPU-1", "wrong_results", duration_s=2.0), computed("GPU-1"))
    assert [(each.verdict, each.code) for each in judged] == [("failed", "wrong_gpu")] * 2
    assert judged[0].benchmark == {"name": "GPU-1"} and (judged[0].duration_s, judged[0].pod) == (2.0, "pod-GPU-1")
    (strange, own), problems = together(computed("GPU-9", "hung"), computed("gpu-1"), own=["GPU-1", "GPU-2"])
    assert (strange.code, own.code, problems) == ("wrong_gpu", None, []) and strange.benchmark
    judged, problems = together(computed("GPU-1", "slow_fp32"), own=["GPU-1", "GPU-2"])
    assert [each.code for each in judged] == ["slow_fp32"] and problems == [("gpu_not_seen", "GPU-2")]


def test_mig_devices_that_nobody_tells_may_be_there() -> None:
    slots = {Slot("n", GPU, number): computed(uuid) for number, uuid in enumerate(("GPU-1", "MIG-2", "GPU-3"))}
    judged, problems = judging.judge_together(slots, {"n": ["GPU-1", "GPU-4"]}, {"n": {"gpu-5"}})
    assert [each.code for each in judged.values()] == [None, None, "wrong_gpu"] and problems == []
    judged, problems = judging.judge_together(slots, {"n": ["GPU-1"]}, {"n": {"gpu-3"}})
    assert [each.code for each in judged.values()] == [None] * 3 and problems == []
    judged, _problems = judging.judge_together(slots, {"n": ["GPU-1"]}, {})
    assert [each.code for each in judged.values()] == [None, "wrong_gpu", "wrong_gpu"]


def test_what_is_not_compared() -> None:
    for results, shared in (
        ((computed("GPU-1", "hung"), computed("GPU-1")), True),
        ((computed("GPU-1", "task_failed", ended=True), computed("GPU-1")), False),
        ((computed("", "extra_gpus_seen"), computed("", "extra_gpus_seen")), False),
    ):
        judged, problems = together(*results, shared=shared)
        assert (judged, problems) == (list(results), [])
    over, *_others = together(computed("GPU-1", "task_failed", ended=True), computed("GPU-1"), computed("GPU-1"))[0]
    assert over.code == "task_failed"
    # The GPU of one that ended may have come to another, and then this one's own was left.
    assert together(computed("GPU-1", "task_failed", ended=True), own=["GPU-1", "GPU-2"])[1] == []
    (strange,), _problems = together(computed("GPU-9", "task_failed", ended=True), own=["GPU-1"])
    assert (strange.code, strange.ended) == ("wrong_gpu", True)


def test_nothing_separates_gpus_under_wsl(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.fate_of = lambda _pod, _node, _resource: Fate(sees=MANY, wsl=True)
    result = run(capsys, cluster)
    assert verdicts(result) == [("ok", None)] * 4
    assert result["gpus"][0]["isolated"] is False and result["gpus"][0]["uuid"] is None


# --- creation and removal --------------------------------------------------------------------


def test_a_refused_pod_ends_the_run(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(request: Any) -> bool:
        if request.command == "POST":
            request.refuse(403, "Forbidden", 'pods "x" is forbidden: violates PodSecurity "restricted:latest"')
        return bool(request.command == "POST")

    cluster.answer = refuse
    result = run(capsys, cluster)
    assert 'violates PodSecurity "restricted:latest"' in result["msg"] and "gpus" not in result
    # Nobody changes a refusal by asking again.
    names = [path for method, path, _query in cluster.requests if method == "POST"]
    assert len(names) == 4


@pytest.mark.parametrize("number", [0, 3])
def test_a_quota_is_no_end_for_what_it_allows(
    cluster: farm.Cluster, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    """Whichever of those that are asked for at once are too many."""

    def refuse(request: Any) -> bool:
        if request.command == "POST" and request.body["metadata"]["name"].endswith(f"-{number}"):
            request.refuse(403, "Forbidden", 'pods "x" is forbidden: exceeded quota: q')
            return True
        return False

    cluster.answer = refuse
    result = run(capsys, cluster)
    wanted: list[Any] = [("ok", None)] * 4
    wanted[number] = ("failed", "not_placed")
    assert verdicts(result) == wanted
    assert "exceeded quota" in result["msg"]
    all_end(cluster)


def test_an_overloaded_apiserver_is_asked_again(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    refused: list[str] = []

    def now_and_then(request: Any) -> bool:
        name = (request.body or {}).get("metadata", {}).get("name")
        key = f"{request.command} {request.path.partition('?')[0]} {name}"
        early = request.command == "GET" and not refused
        if "/namespaces/" not in request.path or "/log" in request.path or key in refused or early:
            return False
        refused.append(key)
        request.refuse(429, "TooManyRequests", "too many requests, please try again later")
        return True

    cluster.answer = now_and_then
    result = run(capsys, cluster)
    assert verdicts(result) == [("ok", None)] * 4 and len(refused) >= 5
    all_end(cluster)


def test_a_quota_that_changes_is_asked_again(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    refused: list[str] = []

    def conflict(request: Any) -> bool:
        if request.command != "POST" or request.body["metadata"]["name"] in refused:
            return False
        refused.append(request.body["metadata"]["name"])
        request.refuse(409, "Conflict", 'Operation cannot be fulfilled on resourcequotas "q"')
        return True

    cluster.answer = conflict
    assert verdicts(run(capsys, cluster)) == [("ok", None)] * 4 and len(refused) == 4
    all_end(cluster)


@pytest.mark.parametrize(
    ("status", "reason", "message"),
    [(500, "", "etcdserver: leader changed"), (404, "NotFound", "the server could not find the requested resource")],
)
def test_pods_are_removed_whatever_is_said_first(
    cluster: farm.Cluster, capsys: pytest.CaptureFixture[str], status: int, reason: str, message: str
) -> None:
    refused: list[str] = []

    def refuse(request: Any) -> bool:
        kinds = ("DELETE",) if reason else ("DELETE", "POST")
        if request.command not in kinds or request.command in refused:
            return False
        refused.append(request.command)
        request.refuse(status, reason, message)
        return True

    cluster.answer = refuse
    result = run(capsys, cluster)
    assert verdicts(result) == [("ok", None)] * 4 and "DELETE" in refused, result["msg"]
    all_end(cluster)


def test_who_may_not_delete_a_collection(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(request: Any) -> bool:
        if request.command == "DELETE" and "labelSelector" in request.path:
            request.refuse(403, "Forbidden", "cannot deletecollection")
            return True
        return False

    cluster.answer = refuse
    assert verdicts(run(capsys, cluster)) == [("ok", None)] * 4
    all_end(cluster)


def test_without_the_right_to_delete_pods_no_more_of_them_are_made(
    cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(request: Any) -> bool:
        if request.command == "DELETE":
            request.refuse(403, "Forbidden", 'User "x" cannot delete resource "pods"')
            return True
        return False

    cluster.answer = refuse
    result = run(capsys, cluster, parallel=1)
    assert verdicts(result) == [("ok", None)] * 2 + [("skipped", "not_begun")] * 2
    assert sorted(problem["code"] for problem in result["problems"]) == ["job_left", "job_left", "not_begun"]
    assert 'could not be removed (Kubernetes answered Forbidden: User "x" cannot delete resource' in result["msg"]
    assert "because others could not be removed" in result["gpus"][2]["message"]
    assert len(cluster.paths("DELETE")) == 3


def test_who_may_neither_make_nor_delete_pods_has_left_none(
    cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(request: Any) -> bool:
        if request.command in ("POST", "DELETE"):
            request.refuse(403, "Forbidden", f'User "x" cannot {request.command} pods')
            return True
        return False

    cluster.answer = refuse
    result = run(capsys, cluster)
    assert result["failed"] and "cannot POST pods" in result["msg"]
    assert "left" not in result["msg"] and "kubectl" not in result["msg"]


def test_pods_that_stay_are_told(
    cluster: farm.Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "REMOVE_WAIT_S", 0.3)
    cluster.undying = True
    result = run(capsys, cluster, parallel=1)
    assert [problem["code"] for problem in result["problems"]] == ["job_left"] * 4
    assert "kubectl -n default delete pod gpufarm-verify-" in result["msg"]
    # A kubelet that is slow keeps no other node from its proof.
    assert result["counts"]["ok"] == 4


def test_pods_that_stay_are_told_where_the_run_fails(
    cluster: farm.Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "REMOVE_WAIT_S", 0.3)

    def refuse(request: Any) -> bool:
        if request.command != "GET" or "/namespaces/" not in request.path or not cluster.created:
            return False
        request.refuse(403, "Forbidden", "cannot list pods")
        return True

    cluster.answer = refuse
    failed = run(capsys, cluster, nodes=["node00000"])
    assert "cannot list pods" in failed["msg"] and "2 pods are left. Expected: a proof that removes" in failed["msg"]
    assert "kubectl -n default delete pod gpufarm-verify-" in failed["msg"] and "gpus" not in failed


def test_pods_of_killed_runs_are_removed(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    def left(name: str, gives_up_at: Any, prefix: str = podspec.PREFIX) -> dict[str, Any]:
        pod = farm.make_pod(f"{prefix}{name}", "node00009", 1, phase="Failed")
        pod["metadata"].update(labels={podspec.LABEL: name}, annotations={podspec.GIVES_UP_AT: gives_up_at})
        return pod

    now = int(time.time())
    cluster.pods = [
        left("old", str(now - 10)),
        left("running", str(now + PATIENCE_S)),
        left("odd", "x"),
        left("b", "1", "my-"),
    ]
    assert run(capsys, cluster, check_mode=True)["leftovers"] == ["gpufarm-verify-old"]
    result = run(capsys, cluster)
    assert result["leftovers"] == ["gpufarm-verify-old"] and result["changed"] is True
    assert [pod["metadata"]["name"] for pod in cluster.pods] == ["gpufarm-verify-running", "gpufarm-verify-odd", "my-b"]


@pytest.mark.parametrize("moment", ["the first pod", "the first log"])
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_leaves_no_pod(cluster: farm.Cluster, number: signal.Signals, moment: str) -> None:
    reached: list[str] = []

    def notice(request: Any) -> bool:
        if request.command == "POST" and moment == "the first pod":
            reached.append(request.path)
        elif "/log" in request.path:
            reached.append(request.path)
            request.reply(200, b"not yet", "text/plain")
            return True
        return False

    cluster.answer = notice
    process = program_helper.start("kubernetes_gpu_job_verify", {**cluster.arguments, "timeout": PATIENCE_S})
    wait_for(lambda: reached)
    process.send_signal(number)
    # A second one comes while pods are removed.
    process.send_signal(signal.SIGTERM)
    process.wait(PATIENCE_S)
    # Which of two is seen first, where both come at once, nobody can say.
    assert cluster.created and process.returncode in (128 + number, 128 + signal.SIGTERM)
    all_end(cluster)


def test_a_signal_during_the_removal_leaves_no_pod(cluster: farm.Cluster) -> None:
    reached: list[str] = []
    sent: list[bool] = []

    def notice(request: Any) -> bool:
        if request.command != "DELETE" or sent:
            return False
        reached.append(request.path)
        request.refuse(503, "ServiceUnavailable", "not yet")
        return True

    cluster.answer = notice
    given = {**cluster.arguments, "timeout": PATIENCE_S, "parallel": 1}
    process = program_helper.start("kubernetes_gpu_job_verify", given)
    wait_for(lambda: reached)
    process.send_signal(signal.SIGTERM)
    sent.append(True)
    process.wait(PATIENCE_S)
    # The second node is not begun any more.
    assert len(cluster.created) == 2 and process.returncode == 128 + signal.SIGTERM
    all_end(cluster)


# --- pure ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("date", "code"), [(2000, 1), (1000, 0), (None, 0)])
def test_a_pod_that_starts_when_the_proof_is_over_ends_at_once(tmp_path: Path, date: int | None, code: int) -> None:
    """One without a place waits for it without end, whoever has made it."""
    pod = podspec.pod_of("a", "run", Slot("n", GPU, 0), Settings(), seconds=0, gives_up_at=2000)
    programs = {"nvidia-smi": "true", "sleep": "true", "uname": "true", **({"date": f"echo {date}"} if date else {})}
    for name, line in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    shell, option, script = pod["spec"]["containers"][0]["command"]
    # An image without a program has it nowhere.
    script = script.replace("/dev/termination-log", f"{tmp_path}/told").replace(
        "PATH=$PATH:/usr/bin:/bin", "PATH=$PATH"
    )
    done = subprocess.run(
        [shell, option, script], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == code and ("end 0" in done.stdout) is (code == 0)
    if code:
        assert "the proof was over" in (tmp_path / "told").read_text(encoding="utf-8")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=10,
)


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(JSON, JSON, st.text())
def test_whatever_a_pod_tells(one: Any, two: Any, log: str) -> None:
    for pod in (
        {"status": one, "metadata": two},
        {"status": {"containerStatuses": [{"state": {"terminated": one, "waiting": two}}], "conditions": [one, two]}},
        {"metadata": {"name": one, "annotations": {podspec.GIVES_UP_AT: two}}},
    ):
        state = judging.read_state(pod)
        assert isinstance(state.why, str) and isinstance(state.started, bool)
        podspec.leftovers([pod], 0)
        for level in gpu_proof.LEVELS:
            said, given = listing.read_listing(log), Settings(level=level)
            judging.judge_log(Slot("n", GPU, 0), said, log, state=state, pod="pod", settings=given)
    judging.failed_pod(log)


@pytest.mark.parametrize("words", [{"message": "0/1 nodes: no GPU"}, {}])
def test_a_scheduler_without_words_has_a_reason(words: dict[str, str]) -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", **words}
    state = judging.read_state({"status": {"phase": "Pending", "conditions": [condition]}})
    assert state.unscheduled == words.get("message", "Unschedulable")


def test_returned_keys_are_the_documented_ones(cluster: farm.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    documented = yaml.safe_load(kubernetes_gpu_job_verify.RETURN)
    result = run(capsys, cluster, nodes=["node00000", "lost"])
    assert set(documented) == set(result) - {"changed", "failed", "msg", "invocation", "exception", "warnings"}
    assert set(documented["gpus"]["contains"]) == set(result["gpus"][0])
    assert set(documented["problems"]["contains"]) == set(result["problems"][0])
    assert set(documented["counts"]["contains"]) == set(result["counts"])


def test_documentation_spec_and_settings_have_the_same_options() -> None:
    documented = yaml.safe_load(kubernetes_gpu_job_verify.DOCUMENTATION)["options"]
    spec = kubernetes_gpu_job_verify.argument_spec()
    usual = {field.name: field.default for field in dataclasses.fields(Settings)}
    usual["tolerations"] = list(Settings().tolerations)
    for name, option in documented.items():
        assert spec[name]["type"] == option["type"], name
        assert spec[name].get("default") == option.get("default"), name
        assert spec[name].get("choices") == option.get("choices"), name
        assert name == "expected" or spec[name].get("default") == usual.get(name), name
    assert set(usual) <= set(spec)
    described = " ".join(documented["image"]["description"])
    assert all(f"C({Settings(level=level).image_to_run})" in described for level in gpu_proof.LEVELS)


def test_every_code_is_documented() -> None:
    """And no other is."""
    folder = Path(running.__file__).parent
    codes = set().union(*map(codes_in, (choice, judging, running, work, kubernetes_gpu_job_verify)))
    assert {"wrong_gpu", "gpu_not_seen", "job_left", "node_closed", "no_python"} <= codes
    codes |= {code for code, _step in gpu_judging.ERRORS.values()} | CODES_OF_WORK
    notes = " ".join(yaml.safe_load(kubernetes_gpu_job_verify.DOCUMENTATION)["notes"])
    assert [code for code in sorted(codes) if f"C({code})" not in notes] == []
    sources = "".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py"))
    used = set(re.findall(r'"(\w+_\w+|timeout)",?\s', sources)) & set(re.findall(r'"([a-z_]+)"', sources)) | codes
    documented = {word for word in re.findall(r"C\(([a-z_]+)\),", notes) if "_" in word or word == "timeout"}
    assert documented <= used, documented - used
