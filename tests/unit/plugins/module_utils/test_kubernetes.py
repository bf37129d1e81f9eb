# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
from typing import Any

import pytest
from ansible_collections.gpufarm.core.plugins.module_utils import kubernetes
from ansible_collections.gpufarm.core.plugins.module_utils.commands import Command
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_verdicts import Expected, NodeVerdict
from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes import client as kubernetes_client
from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes import nodes as kubernetes_nodes
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils import kubernetes_helper as helper
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils.recorded import assert_recorded
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=10,
)


def judged(wanted: Expected, *nodes: dict[str, Any], **options: Any) -> list[NodeVerdict]:
    return kubernetes.compare([wanted], [kubernetes.describe_node(node) for node in nodes], **options)


def codes(verdicts: list[NodeVerdict]) -> list[str]:
    return [problem.code for verdict in verdicts for problem in verdict.problems]


def wish(**more: Any) -> Expected:
    return Expected(**{"node": "node00000", **more})


# --- one node --------------------------------------------------------------------------------


def test_a_recorded_node() -> None:
    """Of a real cluster of one node, with the device plugin 0.18.0 over the double of four T4."""
    node = kubernetes.describe_node(helper.recorded("node-1.34.1"))
    taint = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
    assert (node["status"], node["schedulable"], node["taints"]) == ("ready", True, [taint])
    assert node["kubelet_version"] == "v1.34.1"
    assert node["gpus_capacity"] == node["gpus_allocatable"] == 4
    (resource,) = node["resources"]
    assert (resource["name"], resource["capacity"], resource["used"]) == ("nvidia.com/gpu", 4, None)
    # No GPU feature discovery there.
    assert [node["product"], node["memory_mib"], node["driver_version"], node["mig_strategy"]] == [None] * 4


def test_a_node_with_labels_and_mig() -> None:
    more = {"nvidia.com/mig-1g.10gb": 7, "nvidia.com/mig-1g.10gb.me": 1, "nvidia.com/mig-2g.20gb": 0}
    node = kubernetes.describe_node(helper.make_node(0, 1, **more))
    assert [(each["mig_profile"], each["capacity"]) for each in node["resources"]] == [
        (None, 1),
        ("1g.10gb", 7),
        ("1g.10gb.me", 1),
    ]
    assert node["gpus_capacity"] == 9
    assert (node["product"], node["memory_mib"]) == (helper.PRODUCT, 81559)
    assert (node["driver_version"], node["mig_strategy"]) == (helper.DRIVER, "mixed")


@pytest.mark.parametrize(
    ("labels", "driver"),
    [
        ({"cuda.driver-version.full": "580.1.2"}, "580.1.2"),
        ({"cuda.driver.major": "580", "cuda.driver.minor": "159", "cuda.driver.rev": "04"}, "580.159.04"),
        ({"cuda.driver.major": "580", "cuda.driver.minor": "159", "cuda.driver.rev": ""}, "580.159"),
        ({"cuda.driver.major": "580"}, None),
        ({}, None),
    ],
)
def test_the_driver_in_old_and_new_labels(labels: dict[str, str], driver: str | None) -> None:
    node = helper.make_node(0, 1, labels={f"nvidia.com/{key}": value for key, value in labels.items()})
    assert kubernetes.describe_node(node)["driver_version"] == driver


@pytest.mark.parametrize(
    ("label", "product"),
    [
        ("Tesla-T4", "Tesla-T4"),
        ("NVIDIA-H100-80GB-HBM3-SHARED", "NVIDIA-H100-80GB-HBM3"),
        ("NVIDIA-A100-SXM4-80GB-MIG-1g.10gb", "NVIDIA-A100-SXM4-80GB"),
        ("NVIDIA-A100-SXM4-80GB-MIG-1g.10gb-SHARED", "NVIDIA-A100-SXM4-80GB"),
        ("NVIDIA-A100-SXM4-80GB-MIG-INVALID", "NVIDIA-A100-SXM4-80GB"),
        ("", None),
    ],
)
def test_the_product_without_what_is_added(label: str, product: str | None) -> None:
    node = helper.make_node(0, 1, labels={"nvidia.com/gpu.product": label})
    assert kubernetes.describe_node(node)["product"] == product


def test_shared_gpus_count_once() -> None:
    labels = {"nvidia.com/gpu.replicas": "10"}
    node = kubernetes.describe_node(helper.make_node(0, 40, 30, labels=labels))
    assert (node["gpus_capacity"], node["gpus_allocatable"]) == (4, 3)
    assert node["resources"][0]["shared"] and node["resources"][0]["capacity"] == 40
    renamed = kubernetes.describe_node(helper.make_node(0, 0, labels=labels, **{"nvidia.com/gpu.shared": 40}))
    assert renamed["gpus_capacity"] == 4 and renamed["resources"][0]["shared"]


@pytest.mark.parametrize(
    ("value", "number"),
    [("4", 4), (4, 4), ("1k", 1000), ("2M", 2_000_000), ("0", 0), (-1, 0), ("-1", 0), ("4.5", 0), (True, 0), (None, 0)],
)
def test_quantities(value: Any, number: int) -> None:
    assert kubernetes_nodes.quantity(value) == number


@pytest.mark.parametrize(
    ("condition", "status"), [("True", "ready"), ("False", "not ready"), ("Unknown", "unknown"), (None, "unknown")]
)
def test_the_status_of_a_node(condition: str | None, status: str) -> None:
    node = helper.make_node(0, 1)
    node["status"]["conditions"][-1]["status"] = condition
    assert kubernetes.describe_node(node)["status"] == status


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(JSON, JSON, JSON)
def test_whatever_stands_in_an_answer(one: Any, two: Any, three: Any) -> None:
    whole = {"metadata": one, "spec": two, "status": three}
    inner = {
        "metadata": {"name": one, "labels": {"nvidia.com/gpu.product": two, "nvidia.com/gpu.replicas": three}},
        "spec": {"taints": [one], "containers": [two, {"resources": {"requests": {"nvidia.com/gpu": three}}}]},
        "status": {"capacity": {"nvidia.com/gpu": one}, "conditions": [two], "phase": three},
    }
    for item in (whole, inner):
        node = kubernetes.describe_node(item)
        assert node["gpus_capacity"] >= 0 and node["status"] in ("ready", "not ready", "unknown")
        assert isinstance(node["name"], str)
        kubernetes.pod_uses([item])
        kubernetes.plugin_of([item])
        kubernetes.compare([wish(count=1)], [node])


def test_texts_from_outside_do_not_steer_a_terminal() -> None:
    node = helper.make_node(0, 1, labels={"nvidia.com/gpu.product": "T4\x1b[31m"})
    assert kubernetes.describe_node(node)["product"] == "T4 [31m"


# --- pods ------------------------------------------------------------------------------------


def container(gpus: int | str, **more: Any) -> dict[str, Any]:
    return {"resources": {"limits": {"nvidia.com/gpu": gpus}}, **more}


@pytest.mark.parametrize(
    ("containers", "before", "held"),
    [
        ([container("2")], [], 2),
        ([container(1), container(2)], [], 3),
        ([container(1)], [container(4)], 4),
        ([container(1)], [container(1, restartPolicy="Always")], 2),
        ([container(1)], [container(1, restartPolicy="Always"), container(3)], 4),
        ([container(1)], [container(3), container(1, restartPolicy="Always")], 3),
        ([{}], [], 0),
    ],
)
def test_what_a_pod_holds(containers: list[Any], before: list[Any], held: int) -> None:
    found = kubernetes.gpus_of_pod({"containers": containers, "initContainers": before})
    assert found == ({"nvidia.com/gpu": held} if held else {})


def test_pods_that_have_ended_hold_nothing() -> None:
    pods = [
        helper.make_pod("a", "node00000", 1),
        helper.make_pod("b", "node00000", 2, phase="Pending"),
        helper.make_pod("c", "node00000", 4, phase="Succeeded"),
        helper.make_pod("d", "node00000", 4, phase="Failed"),
        helper.make_pod("e", "node00000", 0),
        helper.make_pod("f", "", 1),
        # A list that was begun anew.
        helper.make_pod("a", "node00000", 1),
    ]
    uses = kubernetes.pod_uses(pods)
    assert [use["name"] for use in uses["node00000"]] == ["a", "b"] and len(uses) == 1
    node = kubernetes.with_uses(kubernetes.describe_node(helper.make_node(0, 4)), uses["node00000"])
    assert node["gpus_used"] == 3 and node["resources"][0]["used"] == 3


# --- what is expected ------------------------------------------------------------------------


def test_a_good_node() -> None:
    verdicts = judged(
        wish(uuids=("a", "b"), models=(helper.MODEL,), driver_version=helper.DRIVER), helper.make_node(0, 2)
    )
    assert codes(verdicts) == [] and verdicts[0].gpus_found == 2 and verdicts[0].status == "ready"


def single(profile: str = "", more: str = "", strategy: str = "single") -> dict[str, str]:
    """Labels of GPU feature discovery where MIG devices have the name of whole GPUs."""
    product = f"{helper.PRODUCT}-MIG-{profile}{more}" if profile else helper.PRODUCT
    return {"nvidia.com/gpu.product": product, **({"nvidia.com/mig.strategy": strategy} if strategy else {})}


@pytest.mark.parametrize(
    ("wanted", "node", "options", "code"),
    [
        ({"count": 3}, helper.make_node(0, 2), {}, "count_mismatch"),
        # Each may be offered four times, of which nobody tells; where it is told, or does not come out, it is not so.
        ({"count": 2}, helper.make_node(0, 8, labels={}), {}, "sharing_unknown"),
        ({"count": 2}, helper.make_node(0, 0, labels={}, **{"nvidia.com/gpu.shared": 8}), {}, "sharing_unknown"),
        ({"count": 2}, helper.make_node(0, 8), {}, "count_mismatch"),
        ({"count": 3}, helper.make_node(0, 8, labels={}), {}, "count_mismatch"),
        ({"count": 4}, helper.make_node(0, 2, labels={}), {}, "count_mismatch"),
        ({"count": 0}, helper.make_node(0, 8, labels={}), {}, "count_mismatch"),
        (
            {"count": 2},
            helper.make_node(0, 7, labels={}, **{"nvidia.com/mig-1g.10gb": 1}),
            {},
            "count_mismatch",
        ),
        ({"count": 2}, helper.make_node(0, 2, 1), {}, "gpu_unhealthy"),
        ({"count": 2}, helper.make_node(0, 2, 0), {}, "gpu_unhealthy"),
        ({}, helper.make_node(0, 0), {}, "no_devices"),
        ({"count": 1}, helper.make_node(0, 0), {}, "no_devices"),
        ({"count": 0}, helper.make_node(0, 0), {}, None),
        ({}, helper.make_node(0, 1), {}, None),
        ({"models": ("Tesla T4",)}, helper.make_node(0, 1), {}, "model_mismatch"),
        ({"models": ("Tesla T4", helper.MODEL)}, helper.make_node(0, 1), {}, None),
        ({"model_counts": {helper.MODEL: 2}}, helper.make_node(0, 1), {}, "count_mismatch"),
        ({"model_counts": {helper.MODEL: 1, "Tesla T4": 0}}, helper.make_node(0, 1), {}, None),
        ({"models": ("Tesla T4",)}, helper.make_node(0, 1, labels={}), {}, None),
        ({"memory_mib_min": 81560}, helper.make_node(0, 1), {}, "memory_too_small"),
        ({"memory_mib_min": 81559}, helper.make_node(0, 1), {}, None),
        ({"driver_version": "1.2.3"}, helper.make_node(0, 1), {}, "driver_version_stale"),
        ({"mig": True}, helper.make_node(0, 1), {}, "mig_mismatch"),
        ({"mig": False}, helper.make_node(0, 0, **{"nvidia.com/mig-1g.10gb": 7}), {}, "mig_mismatch"),
        ({"mig": True}, helper.make_node(0, 0, **{"nvidia.com/mig-1g.10gb": 7}), {}, None),
        ({"mig_profiles": {"1g.10gb": 7}}, helper.make_node(0, 0, **{"nvidia.com/mig-1g.10gb": 7}), {}, None),
        ({"mig_profiles": {"1g.10gb": 6}}, helper.make_node(0, 0, **{"nvidia.com/mig-1g.10gb": 7}), {}, "mig_mismatch"),
        (
            {"mig_profiles": {"1g.10gb": 6}, "mig_unknown": ("GPU-0",)},
            helper.make_node(0, 1, **{"nvidia.com/mig-1g.10gb": 7}),
            {},
            None,
        ),
        (
            {"mig_profiles": {"1g.10gb": 8}, "mig_unknown": ("GPU-0",)},
            helper.make_node(0, 1, **{"nvidia.com/mig-1g.10gb": 7}),
            {},
            "mig_mismatch",
        ),
        ({"mig_profiles": {"1g.10gb": 6}, "mig_unknown": ("GPU-0",)}, helper.make_node(0, 7, labels={}), {}, None),
        (
            {"mig_profiles": {"1g.10gb": 8}, "mig_unknown": ("GPU-0",)},
            helper.make_node(0, 7, labels={}),
            {},
            "mig_mismatch",
        ),
        ({"count": 9, "mig_unknown": ("GPU-0",)}, helper.make_node(0, 7, labels={}), {}, "count_mismatch"),
        ({"mig_profiles": {"1g.10gb+me": 1}}, helper.make_node(0, 0, **{"nvidia.com/mig-1g.10gb.me": 1}), {}, None),
        ({"mig_profiles": {"1g.10gb": 7}}, helper.make_node(0, 0, **{"nvidia.com/mig-1g.10gb": 6}), {}, "mig_mismatch"),
        ({"mig_profiles": {"1g.10gb": 7}}, helper.make_node(0, 1), {}, "mig_mismatch"),
        # The strategy single, told and not told.
        (
            {"mig_profiles": {"1g.10gb": 7}},
            helper.make_node(0, 7, labels={"nvidia.com/mig.strategy": "single"}),
            {},
            None,
        ),
        ({"mig_profiles": {"1g.10gb": 7}}, helper.make_node(0, 7, labels={}), {}, None),
        ({"mig_profiles": {"1g.10gb": 7}}, helper.make_node(0, 6, labels={}), {}, "mig_mismatch"),
        ({"mig_profiles": {"1g.10gb": 7, "2g.20gb": 1}}, helper.make_node(0, 8, labels={}), {}, "mig_mismatch"),
        ({"mig_profiles": {}}, helper.make_node(0, 8, labels={}), {}, None),
        # The label of the model tells it.
        ({"mig": True}, helper.make_node(0, 8, labels=single()), {}, "mig_mismatch"),
        ({"mig": False}, helper.make_node(0, 8, labels=single()), {}, None),
        ({"mig": True}, helper.make_node(0, 8, labels=single("7g.80gb")), {}, None),
        ({"mig": False}, helper.make_node(0, 8, labels=single("7g.80gb")), {}, "mig_mismatch"),
        ({"mig": False}, helper.make_node(0, 8, labels=single("7g.80gb", "-SHARED")), {}, "mig_mismatch"),
        ({"mig_profiles": {"7g.80gb": 8}}, helper.make_node(0, 8, labels=single()), {}, "mig_mismatch"),
        ({"mig_profiles": {"7g.80gb": 8}}, helper.make_node(0, 8, labels=single("7g.80gb")), {}, None),
        ({"mig_profiles": {"7g.80gb": 8}}, helper.make_node(0, 7, labels=single("7g.80gb")), {}, "mig_mismatch"),
        ({"mig_profiles": {"1g.10gb": 8}}, helper.make_node(0, 8, labels=single("3g.40gb")), {}, "mig_mismatch"),
        ({"mig_profiles": {"1g.10gb+me": 8}}, helper.make_node(0, 8, labels=single("1g.10gb.me", "-SHARED")), {}, None),
        ({"mig_profiles": {}}, helper.make_node(0, 8, labels=single("3g.40gb")), {}, "mig_mismatch"),
        # No strategy, so pods get whole GPUs however these are divided.
        ({"mig_profiles": {"7g.80gb": 8}}, helper.make_node(0, 8, labels=single(strategy="")), {}, "mig_mismatch"),
    ],
)
def test_every_wish_is_compared(
    wanted: dict[str, Any], node: dict[str, Any], options: dict[str, Any], code: str | None
) -> None:
    assert codes(judged(wish(**wanted), node, **options)) == ([code] if code else [])


def test_an_old_label_of_the_driver_is_refreshed_by_who_has_set_it() -> None:
    node = helper.make_node(0, 1)

    def step() -> str:
        (problem,) = judged(wish(driver_version="1.2.3"), node)[0].problems
        return problem.message.partition("Next step: ")[2]

    assert step().startswith("restart the pods of GPU feature discovery and of the device plugin on the node")
    node["metadata"]["annotations"]["gpufarm.core/gpu-labels"] = "nvidia.com/cuda.driver-version.full"
    assert step().startswith("run playbooks/kubernetes.yml again, which labels the node anew")
    node["metadata"]["labels"]["nvidia.com/gfd.timestamp"] = "1764165911"
    assert step().startswith("restart the pods of GPU feature discovery")


def test_mig_devices_of_before_are_not_taken_for_as_many_whole_gpus() -> None:
    told = kubernetes.expected_of_facts(facts(gpu(0), gpu(1)), "node00000")
    wanted = wish(mig_profiles=told.get("mig_profiles"), count=len(told["uuids"]))
    (verdict,) = judged(wanted, helper.make_node(0, 0, **{"nvidia.com/mig-3g.40gb": 2}))
    assert [(each.code, each.found, each.expected) for each in verdict.problems] == [
        ("mig_mismatch", "2 x 3g.40gb", "none")
    ]
    for whole in (helper.make_node(0, 2), helper.make_node(0, 2, labels={})):
        assert codes(judged(wanted, whole)) == []


def test_nodes_that_are_not_as_they_should_be() -> None:
    assert codes(judged(wish())) == ["node_missing"]
    node = helper.make_node(0, 1)
    node["spec"]["unschedulable"] = True
    assert codes(judged(wish(), node)) == []
    assert codes(judged(wish(), node, require_eligible=True)) == ["node_ineligible"]
    node["status"]["conditions"][-1]["status"] = "Unknown"
    assert codes(judged(wish(), node)) == ["node_down"]
    extra = [helper.make_node(1, 1), helper.make_node(2, 0)]
    assert codes(judged(wish(), helper.make_node(0, 1), *extra, allow_extra_nodes=False)) == ["node_unexpected"]
    described = [kubernetes.describe_node(each) for each in extra]
    assert kubernetes.extra_gpu_nodes([wish()], described) == ["node00001"]


def test_a_lost_gpu_is_named_with_what_to_do() -> None:
    node = helper.make_node(0, 4, 0)
    plugin = kubernetes.plugin_of([helper.make_pod("other", "node00000", 1), helper.plugin_pod("node00000")])
    (problem,) = judged(wish(count=4), node, plugins={"node00000": plugin})[0].problems
    assert problem.found == "0 of 4 GPUs allocatable as nvidia.com/gpu"
    assert "one makes the device plugin call all GPUs of the node unhealthy" in problem.message
    assert problem.message.endswith(
        "restart it with 'kubectl -n nvidia-device-plugin delete pod nvidia-device-plugin-node00000'."
    )
    # Without a plugin the cause is another one.
    nothing = kubernetes.plugin_of([])
    (problem,) = judged(wish(count=4), node, plugins={"node00000": nothing})[0].problems
    assert problem.found.endswith(", and no pod of the device plugin") and "DaemonSet" in problem.message


def test_a_plugin_that_does_not_run_is_told() -> None:
    waiting = {"phase": "Pending", "containerStatuses": [{"state": {"waiting": {"reason": "ImagePullBackOff"}}}]}
    plugin = kubernetes.plugin_of([{**helper.plugin_pod("node00000"), "status": waiting}])
    (problem,) = judged(wish(), helper.make_node(0, 0), plugins={"node00000": plugin})[0].problems
    name = "nvidia-device-plugin/nvidia-device-plugin-node00000"
    assert problem.found == f"no GPU at all, and the device plugin's pod {name} is waiting (ImagePullBackOff)"
    assert "describe pod" in problem.message


@pytest.mark.parametrize(
    ("name", "image", "is_one"),
    [
        ("nvidia-device-plugin-ctr", "nvcr.io/nvidia/k8s-device-plugin:v0.18.0", True),
        ("nvidia-device-plugin", "mirror.example.com/x:1", True),
        ("plugin", "nvcr.io/nvidia/k8s-device-plugin@sha256:0", True),
        ("gpu-feature-discovery-ctr", "nvcr.io/nvidia/k8s-device-plugin:v0.18.0", False),
        ("mps-control-daemon-ctr", "nvcr.io/nvidia/k8s-device-plugin:v0.18.0", False),
        ("main", "example.com/training:1", False),
    ],
)
def test_what_is_a_device_plugin(name: str, image: str, is_one: bool) -> None:
    pod = helper.make_pod("pod", "node00000", 0)
    pod["spec"]["containers"][0].update(name=name, image=image)
    assert bool(kubernetes.plugin_of([pod]).name) is is_one


def test_what_could_not_be_compared_is_said() -> None:
    wanted = wish(models=("Tesla T4",), memory_mib_min=1, driver_version="1.2")
    node = kubernetes.describe_node(helper.make_node(0, 1, labels={}))
    assert kubernetes.not_compared(wanted, node) == ["models", "memory_mib_min", "driver_version"]
    assert kubernetes.not_compared(wish(count=1), node) == kubernetes.not_compared(wanted, None) == []
    divided = wish(mig=True, mig_profiles={"1g.10gb": 7})
    assert kubernetes.not_compared(divided, node) == ["mig", "mig_profiles"]
    # With resources of their own it needs no label.
    mixed = helper.make_node(0, 0, labels={}, **{"nvidia.com/mig-1g.10gb": 7})
    told = helper.make_node(0, 7, labels=single("1g.10gb"))
    for each in (mixed, told, helper.make_node(0, 0)):
        assert kubernetes.not_compared(divided, kubernetes.describe_node(each)) == []


def test_messages_as_recorded() -> None:
    nodes = [helper.make_node(0, 4, 0), helper.make_node(1, 4, 3), helper.make_node(2, 0), helper.make_node(3, 4)]
    nodes[3]["status"]["conditions"][-1]["status"] = "False"
    nodes[3]["spec"]["unschedulable"] = True
    wanted = [Expected(f"node{number:05d}", count=4) for number in range(3)]
    wanted.append(
        Expected(
            "node00003",
            count=5,
            models=("Tesla T4",),
            memory_mib_min=100000,
            driver_version="1.2.3",
            mig=True,
        )
    )
    wanted += [Expected("lost"), Expected("node00001x", mig_profiles={"1g.10gb": 7})]
    described = [kubernetes.describe_node(node) for node in [*nodes, helper.make_node(9, 1)]]
    found = kubernetes.compare(wanted, described, allow_extra_nodes=False, require_eligible=True)
    assert_recorded("kubernetes_messages", [problem.message for verdict in found for problem in verdict.problems])


# --- facts -----------------------------------------------------------------------------------


def gpu(number: int, profiles: list[str] | None = None, **more: Any) -> dict[str, Any]:
    migs = [{"uuid": f"MIG-{number}-{place}", "profile": profile} for place, profile in enumerate(profiles or ())]
    mode = "Disabled" if profiles is None else "Enabled"
    return {"uuid": f"GPU-{number}", "name": helper.MODEL, "mig_mode": mode, "mig_devices": migs, **more}


def facts(*gpus: dict[str, Any], available: bool = True) -> dict[str, Any]:
    return {"available": available, "driver_version": helper.DRIVER, "gpus": list(gpus)}


def test_what_facts_expect() -> None:
    assert kubernetes.expected_of_facts(facts(gpu(0), gpu(1)), "gpu01") == {
        "node": "gpu01",
        "uuids": ["GPU-0", "GPU-1"],
        "driver_version": helper.DRIVER,
        "models": [helper.MODEL],
        "mig_profiles": {},
    }
    incapable = kubernetes.expected_of_facts(facts(gpu(0, mig_mode=None)), "gpu01")
    assert "mig_profiles" not in incapable
    divided = kubernetes.expected_of_facts(facts(gpu(0, ["1g.10gb", "1g.10gb", "2g.20gb"]), gpu(1)), "gpu01")
    assert divided["mig_profiles"] == {"1g.10gb": 2, "2g.20gb": 1} and len(divided["uuids"]) == 4
    assert kubernetes.expected_of_facts(facts(available=False), "gpu01") == {"node": "gpu01"}
    unknown = kubernetes.expected_of_facts(facts(gpu(0, [], mig_devices=None), gpu(1, ["1g.10gb"]), gpu(2)), "gpu01")
    assert (unknown["mig_unknown"], unknown["mig_profiles"]) == (["GPU-0"], {"1g.10gb": 1})
    assert unknown["uuids"] == ["MIG-1-0", "GPU-2"]
    sick = kubernetes.expected_of_facts(facts(gpu(0), gpu(1, uuid=None, name=None)), "gpu01")
    assert sick["count"] == 2 and "models" not in sick


# --- kubectl ---------------------------------------------------------------------------------


def failure(stderr: str = "", **more: Any) -> kubernetes.KubernetesError:
    return kubernetes_client.read_failure(Command(("kubectl", "get"), **{"returncode": 1, "stderr": stderr, **more}))


def test_what_kubectl_says_as_recorded() -> None:
    lines = (helper.FIXTURES / "messages.txt").read_text(encoding="utf-8").splitlines()
    told = {}
    for line in lines[1:]:
        error = failure(line)
        told[line] = {"error": str(error), "transient": error.transient, "reason": error.reason}
    assert_recorded("kubectl_messages", told)


def test_failures_without_words() -> None:
    assert str(failure(returncode=None, error="No such file or directory")) == (
        "kubectl cannot be run (No such file or directory). Expected: kubectl on the machine that runs this module. "
        "Next step: install kubectl there, or set 'kubectl' to where it is."
    )
    slow = failure(returncode=None, timed_out=True, limit=45.0)
    assert "no answer of kubectl within 45 s" in str(slow) and slow.transient
    assert "exit code 1 without a word" in str(failure())
    assert "\x1b" not in str(failure("error: \x1b[31mred"))


def test_a_long_refusal_is_known() -> None:
    long = failure(f"Error from server (Forbidden): pods is forbidden: {'x' * 2000}")
    assert long.reason == "Forbidden" and "pods is forbidden" in str(long) and len(str(long)) < 1000


CONNECT = "Unable to connect to the server: "
INTERNAL = "Error from server (InternalError): Internal error occurred: "


@pytest.mark.parametrize(
    ("said", "passes"),
    [
        ("Error from server: etcdserver: mvcc: database space exceeded", False),
        (f"{INTERNAL}etcdserver: mvcc: database space exceeded", False),
        (f"{INTERNAL}etcdserver: no leader", True),
        (f'{INTERNAL}failed calling webhook "x": Post "https://x:443/y?timeout=10s": no endpoints available', True),
        (f'{INTERNAL}failed calling webhook "x": Post "https://x:443/y?timeout=10s": x509: unknown authority', False),
        (f"{INTERNAL}no kind is registered for the type", False),
        ('Error from server (InternalError): an error on the server ("<title>502 Bad Gateway</title>")', True),
        # As without any kubeconfig.
        ("The connection to the server localhost:8080 was refused - did you specify the right host or port?", False),
        (f"{CONNECT}dial tcp 192.0.2.1:6443: connect: connection refused", True),
        (f"{CONNECT}dial tcp 192.0.2.1:6443: i/o timeout", True),
        (f"{CONNECT}net/http: TLS handshake timeout", True),
        (f"{CONNECT}dial tcp: lookup no.such.host.invalid on 192.0.2.53:53: server misbehaving", True),
        (f"{CONNECT}dial tcp: lookup no.such.host.invalid on 192.0.2.53:53: no such host", False),
        (f"{CONNECT}http: server gave HTTP response to HTTPS client", False),
    ],
)
def test_what_passes(said: str, passes: bool) -> None:
    assert failure(said).transient is passes


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(st.text())
def test_whatever_kubectl_says(text: str) -> None:
    assert "Next step: " in str(failure(text))


class Answers:
    """A runner that answers in turn."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.calls: list[list[str]] = []

    def __call__(self, argvs: Any, _timeout: float) -> list[Command]:
        done = []
        for argv in argvs:
            if "config" in argv:
                done.append(Command(tuple(argv), 0, "https://farm:6443"))
                continue
            self.calls.append(list(argv))
            answer = self.answers.pop(0)
            done.append(
                answer
                if isinstance(answer, Command)
                else Command(tuple(argv), 0, answer if isinstance(answer, str) else json.dumps(answer))
            )
        return done


def client(*answers: Any, **connection: Any) -> tuple[kubernetes.Client, Answers]:
    run = Answers(*answers)
    return kubernetes.Client(kubernetes.Connection(**connection), run), run


def page(*names: str, token: str | None = None) -> dict[str, Any]:
    items = [{"metadata": {"name": name}} for name in names]
    return {"kind": "NodeList", "metadata": {"continue": token} if token else {}, "items": items}


EXPIRED = Command(("kubectl",), 1, stderr="Error from server (Expired): The provided continue parameter is too old")


def test_argv_is_exact() -> None:
    asked, run = client({}, kubeconfig="/etc/x", context="farm", kubectl="/opt/kubectl", request_timeout=7)
    asked.get(kubernetes.path_of("api", "v1", "nodes", "a/b?c", limit=5, none=None))
    options = ["--kubeconfig=/etc/x", "--context=farm", "--request-timeout=7s"]
    assert run.calls == [["/opt/kubectl", *options, "get", "--raw", "/api/v1/nodes/a%2Fb%3Fc?limit=5"]]
    asked, run = client({})
    asked.get("/version")
    assert run.calls == [["kubectl", "--request-timeout=30s", "get", "--raw", "/version"]]


@pytest.mark.parametrize(
    ("view", "path"),
    [
        (Command((), 0, "https://rancher.example.com/k8s/clusters/c-m-abc"), "/k8s/clusters/c-m-abc/version"),
        (Command((), 0, "https://rancher.example.com/k8s/clusters/c-m-abc/"), "/k8s/clusters/c-m-abc/version"),
        (Command((), 0, "farm:6443/a?b"), "/a/version"),
        (Command((), 0, "https://[::1]:6443"), "/version"),
        (Command((), 0, ""), "/version"),
        (Command((), 1, stderr="error: current-context must exist in order to minify"), "/version"),
    ],
)
def test_the_path_of_the_servers_address_is_kept(view: Command, path: str) -> None:
    calls: list[Any] = []

    def run(argvs: Any, _timeout: float) -> list[Command]:
        calls.extend(argvs)
        return [view if "config" in argv else Command((), 0, "{}") for argv in argvs]

    asked = kubernetes.Client(kubernetes.Connection(kubeconfig="/x", context="farm"), run)
    asked.get("/version")
    asked.delete("/version")
    options = ["kubectl", "--kubeconfig=/x", "--context=farm", "--request-timeout=30s"]
    words = ["config", "view", "--minify", "--output=jsonpath={.clusters[0].cluster.server}"]
    assert calls == [[*options, *words], [*options, "get", "--raw", path], [*options, "delete", "--raw", path]]


def test_no_cluster_is_guessed() -> None:
    slow = Command(("kubectl",), None, timed_out=True, limit=45.0)
    asked = kubernetes.Client(kubernetes.Connection(), lambda _argvs, _timeout: [slow])
    with pytest.raises(kubernetes.KubernetesError, match="no answer of kubectl within 45 s"):
        asked.get("/version")


def test_pages_are_read_to_the_end() -> None:
    asked, run = client(page("a", token="t 1"), page("b"))
    assert [node["name"] for node in kubernetes.read_nodes(asked, "x=y")] == ["a", "b"]
    assert [call[-1] for call in run.calls] == [
        "/api/v1/nodes?labelSelector=x%3Dy&limit=250",
        "/api/v1/nodes?labelSelector=x%3Dy&limit=250&continue=t+1",
    ]


def test_a_list_that_grew_too_old_is_read_anew() -> None:
    # What was in the first one need not be there any more.
    asked, run = client(page("gone", token="t"), EXPIRED, page("a", "b"))
    assert [node["name"] for node in kubernetes.read_nodes(asked)] == ["a", "b"] and len(run.calls) == 3
    asked, run = client(*[page("a", token="t"), EXPIRED] * 3)
    with pytest.raises(kubernetes.KubernetesError, match="too old"):
        kubernetes.read_nodes(asked)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("", "no JSON, of 0 characters"),
        ("<html>a proxy</html>", "no JSON, of 20 characters that begin with '<html>a proxy</html>'"),
        ("[" * 100000, "nested too deeply"),
        ("[1]", "JSON that is no object, a list"),
        ("null", "JSON that is no object, a NoneType"),
        ({"kind": "Status"}, "a Status instead of a list"),
        ({"items": {}}, "a text without kind instead of a list"),
        (page("a", token="t"), "the same page again"),
    ],
)
def test_answers_that_are_none(answer: Any, words: str) -> None:
    asked, _run = client(answer, answer, answer)
    with pytest.raises(kubernetes.KubernetesError) as caught:
        kubernetes.read_nodes(asked)
    assert words in str(caught.value) and not caught.value.transient


def test_an_empty_list_of_go_is_one() -> None:
    assert kubernetes.read_nodes(client({"kind": "NodeList", "items": None})[0]) == []
    assert kubernetes.read_nodes(client({"items": [None, 1, {}]})[0]) == []


def test_a_node_that_is_not_there() -> None:
    missing = Command(("kubectl",), 1, stderr='Error from server (NotFound): nodes "x" not found')
    assert kubernetes.read_node(client(missing)[0], "x") is None
    refused = Command(("kubectl",), 1, stderr="Error from server (Forbidden): no")
    with pytest.raises(kubernetes.KubernetesError):
        kubernetes.read_node(client(refused)[0], "x")
    # What only helps to find a cause is no failure.
    assert kubernetes.read_plugins(client(refused)[0], ["x"]) == {}


def test_pods_of_few_nodes_are_asked_node_by_node() -> None:
    pods = {"kind": "PodList", "items": [helper.make_pod("a", "n0", 1)]}
    asked, run = client(pods, pods)
    assert kubernetes.read_uses(asked, ["n1", "n0"])["n1"] == []
    assert [call[-1].partition("spec.nodeName%3D")[2][:2] for call in run.calls] == ["n0", "n1"]
    asked, run = client(pods)
    many = kubernetes.read_uses(asked, [f"n{number}" for number in range(9)])
    assert len(run.calls) == 1 and len(many["n0"]) == 1 and len(many) == 9
