"""A cluster that hands out a node's GPUs: all of them, to each pod its own, and none where the roles have gone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from tests.simulator.cache import ROOT
from tests.simulator.docker import docker
from tests.simulator.gpu import faults
from tests.testinfra.helpers import UUID, wait_for
from tests.testinfra.playbooks import changed_tasks, enter, run_in_scenario, words

NODE = "kubernetes-node"
CONVERGE = "molecule/kubernetes/converge.yml"
HEALTH = "playbooks/kubernetes_health.yml"
OUT, BACK = "node_maintenance/take_out", "node_maintenance/put_back"
OURS = {"node_maintenance_owner": "gpufarm.core"}
RESTART = "Start a device plugin again that misses GPUs which are well"
GATE = "Cordon sick nodes and uncordon healthy ones"
DRIVER_LABEL = "nvidia.com/cuda.driver-version.full"
IMAGE = "docker.io/library/gpufarm-test:1"
MIG = re.compile(r"MIG (\S+) +Device +\d+: \(UUID: (MIG-\S+)\)")


def sh(script: str) -> str:
    return docker("exec", NODE, "sh", "-c", script)


def kubectl(*arguments: str, stdin: Any = None) -> str:
    """Ask the cluster as its administrator, who may hand it an object."""
    command = ("kubectl", "--kubeconfig", "/etc/kubernetes/admin.conf", *arguments)
    return docker("exec", "--interactive", NODE, *command, stdin=json.dumps(stdin).encode() if stdin else None)


def get(*what: str) -> Any:
    return json.loads(kubectl("get", *what, "--output=json"))


def handed_out() -> dict[str, int]:
    """Return what the node has to hand out of GPUs and their parts."""
    found = get("node", NODE)["status"]["allocatable"].items()
    return {name: int(number) for name, number in found if name.startswith("nvidia.com/") and number != "0"}


def allocatable() -> int:
    """Return how many whole GPUs the node has to hand out."""
    return handed_out().get("nvidia.com/gpu", 0)


def pod(name: str, gpus: int, resource: str = "nvidia.com/gpu") -> None:
    """Have a pod that lists the GPUs that it sees, and holds them."""
    kubectl("create", "--filename=-", stdin={
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"of": "test"}},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            "runtimeClassName": "nvidia",
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            "containers": [{
                "name": "work",
                "image": IMAGE,
                "command": ["sh", "-c", "nvidia-smi -L; exec sleep infinity"],
                "resources": {"limits": {resource: gpus}},
            }],
        },
    })  # fmt: skip


def seen(name: str) -> list[str]:
    """Return the GPUs that a pod has listed, once it has."""
    wait_for(f"{name} lists its GPUs", lambda: "GPU-" in kubectl("logs", name, "--ignore-errors"))
    return UUID.findall(kubectl("logs", name))


def restarts() -> dict[str, int]:
    """Return how often the containers of each pod of the cluster's own were started again."""
    return {
        pod["metadata"]["name"]: pod["status"]["containerStatuses"][0]["restartCount"]
        for pod in get("pods", "--namespace=kube-system")["items"]
    }


def test_the_node_has_as_many_gpus_to_hand_out_as_nvidia_smi_lists() -> None:
    listed = UUID.findall(sh("nvidia-smi -L"))
    wait_for("the node has GPUs", lambda: allocatable() > 0)
    assert allocatable() == len(listed) == 4


def test_the_node_is_labelled_with_what_gpu_feature_discovery_says() -> None:
    asked = "nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader,nounits --id=0"
    name, memory, driver = sh(asked).strip().split(", ")
    labels = get("node", NODE)["metadata"]["labels"]
    assert labels["nvidia.com/gpu.product"] == name.replace(" ", "-")
    assert (labels["nvidia.com/gpu.count"], labels["nvidia.com/gpu.memory"]) == ("4", memory)
    assert labels["nvidia.com/cuda.driver-version.full"] == driver


def label_of_before() -> None:
    """Have the label of another driver, as where the driver was exchanged after the node was labelled."""
    kubectl("label", "node", NODE, f"{DRIVER_LABEL}=470.1", "--overwrite")


def has_the_label_of_its_driver() -> bool:
    driver = sh("nvidia-smi --query-gpu=driver_version --format=csv,noheader --id=0").strip()
    return bool(get("node", NODE)["metadata"]["labels"][DRIVER_LABEL] == driver)


def test_the_control_plane_went_on_while_its_engine_was_given_the_runtime() -> None:
    assert set(restarts().values()) == {0}, restarts()


def test_each_pod_sees_its_gpus_alone_and_who_gets_none_waits(tmp_path: Path) -> None:
    pod("three", 3)
    pod("one", 1)
    three, one = seen("three"), seen("one")
    assert (len(three), len(one)) == (3, 1)
    assert sorted(three + one) == sorted(UUID.findall(sh("nvidia-smi -L")))
    pod("late", 1)

    def refused() -> bool:
        conditions = get("pod", "late")["status"].get("conditions", [])
        return any("Insufficient nvidia.com/gpu" in condition.get("message", "") for condition in conditions)

    wait_for("the third pod is told why it waits", refused)
    path = json.dumps({"report_path": f"{tmp_path}/farm.html"})
    report = run_in_scenario("playbooks/report.yml", "--extra-vars", path)
    assert report.code == 0, report.output
    told = json.loads((tmp_path / "farm.json").read_text(encoding="utf-8"))
    (node,) = told["nodes"]
    assert (node["kubernetes"]["devices_allocatable"], node["kubernetes"]["gpus_used"]) == (4, 4)
    assert "kubernetes" not in {problem["source"] for problem in node["problems"]}
    held = {use["pod"]: use["gpus"] for use in told["users"]["pods"]}
    assert (held["three"], held["one"], told["notices"]) == (3, 1, [])
    kubectl("delete", "pod", "one", "--wait=true")
    assert seen("late") == one
    kubectl("delete", "pod", "--selector=of=test", "--wait=true")


def test_a_pod_tells_a_gpu_that_computes_wrongly_from_its_siblings() -> None:
    """Nothing else notices: nvidia-smi, Kubernetes and a pod that only lists have all four."""
    sick = 1

    def fault(profile: faults.Profile) -> None:
        for gpu in range(4):
            faults.fill_memory(profile, gpu, 628)
        faults.compute_wrongly(profile, sick)

    def mend(profile: faults.Profile) -> None:
        faults.recover_cuda(profile, sick)
        for gpu in range(4):
            faults.find_gpu(profile, gpu).pop("fb_memory_usage")

    uuid = faults.find_gpu(faults.apply_to_container(NODE, fault), sick)["uuid"]
    asked = {"verify_jobs": True, "verify_jobs_level": "quick", "verify_jobs_image": IMAGE}
    try:
        run = run_in_scenario("playbooks/kubernetes_verify.yml", "--extra-vars", json.dumps(asked))
    finally:
        faults.apply_to_container(NODE, mend)
    told = words(run.output)
    assert run.code == 2 and "; of 4 GPUs 3 ok, 1 failed, 0 busy, 0 skipped:" in told, run.output
    assert re.search(rf"Node {NODE}, GPU {uuid}: found \d+ wrong results of fp32.* Expected: .* Next step: ", told)
    assert pods_of_test() == []


def test_a_taint_keeps_pods_away_that_do_not_tolerate_it() -> None:
    taints = get("node", NODE)["spec"]["taints"]
    assert {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"} in taints


def test_check_mode_tells_what_is_missing_and_nothing_else() -> None:
    run = run_in_scenario(CONVERGE, "--check", "--diff")
    assert (run.code, run.changed) == (0, {NODE: 0}), run.output
    kubectl("delete", "runtimeclass", "nvidia")
    kubectl("label", "node", NODE, "nvidia.com/gpu.present=perhaps", "--overwrite")
    kubectl("set", "env", "daemonset/nvidia-device-plugin-daemonset", "--namespace=kube-system", "MIG_STRATEGY=single")
    kubectl("label", "node", NODE, "nvidia.com/gpu.count=5", "--overwrite")
    label_of_before()
    wanted = [
        "Have the runtime class",
        "Have the node labelled",
        "Have NVIDIA's device plugin on every node with GPUs",
        "Have the labels of GPU feature discovery",
    ]
    for options in (["--check"], []):
        run = run_in_scenario(CONVERGE, *options)
        assert run.code == 0 and changed_tasks(run.output) == wanted, run.output
    assert has_the_label_of_its_driver()


def cordoned() -> tuple[bool, str]:
    """Return whether the node is, and the gate's reason."""
    node = get("node", NODE)
    return bool(node["spec"].get("unschedulable")), node["metadata"]["annotations"].get("gpufarm.core/gate-reason", "")


def test_a_lost_gpu_cordons_the_node_which_comes_back_after_its_repair() -> None:
    """NVIDIA's device plugin takes all GPUs of its node for lost with one, and never finds them again by itself."""
    faults.apply_to_container(NODE, lambda profile: faults.lose_gpu(profile, 2))
    wait_for("all GPUs are taken for lost", lambda: allocatable() == 0)
    assert int(get("node", NODE)["status"]["capacity"]["nvidia.com/gpu"]) == 4
    run = run_in_scenario(HEALTH)
    assert (run.code, changed_tasks(run.output)) == (2, [GATE]), run.output
    closed, reason = cordoned()
    assert closed and reason.startswith("gpu_lost ") and reason.endswith("; kubernetes gpu_unhealthy"), reason
    faults.apply_to_container(NODE, lambda profile: faults.recover_gpu(profile, 2))
    # What a restart would bring about is not foretold.
    run = run_in_scenario(HEALTH, "--check")
    assert (run.code, changed_tasks(run.output)) == (2, [RESTART, GATE]), run.output
    assert cordoned() == (True, reason) and allocatable() == 0
    run = run_in_scenario(HEALTH)
    assert (run.code, changed_tasks(run.output)) == (0, [RESTART, GATE]), run.output
    assert cordoned() == (False, "") and allocatable() == 4
    run = run_in_scenario(HEALTH)
    assert (run.code, run.changed) == (0, {NODE: 0}), run.output


def marks() -> dict[str, str]:
    """Return what the node's annotations tell of its maintenance."""
    annotations = get("node", NODE)["metadata"]["annotations"]
    return {name.partition("/")[2]: text for name, text in annotations.items() if "core/maintenance" in name}


def pods_of_test() -> list[str]:
    return [pod["metadata"]["name"] for pod in get("pods")["items"]]


def test_a_change_ends_no_pod_unasked_and_drains_the_node_with_consent() -> None:
    pod("train", 1)
    seen("train")
    change = {"node_maintenance_change": "another driver", **OURS}
    run = enter(OUT, **change)
    assert run.code == 2, run.output
    assert "1 running pod, which another driver would end: default/train (1 GPU)." in words(run.output), run.output
    assert pods_of_test() == ["train"] and cordoned() == (False, "") and marks() == {}
    run = enter(OUT, node_maintenance_policy="drain", node_maintenance_deadline=1, **change)
    assert (run.code, changed_tasks(run.output)) == (0, ["Have no pods on the node"]), run.output
    assert pods_of_test() == [] and cordoned() == (True, "")
    assert marks()["maintenance"] == "another driver" and marks()["maintenance-gpus"] == "4"
    # Another change of the same run, and the gate, leave it as it is.
    assert enter(OUT, **{**change, "node_maintenance_change": "a reboot"}).changed == {NODE: 0}
    run = run_in_scenario(HEALTH)
    assert (run.code, run.changed) == (0, {NODE: 0}), run.output
    assert cordoned() == (True, "")


def test_a_node_that_is_out_comes_back_when_its_gpus_are_well() -> None:
    """The device plugin has lost them meanwhile, as it does where the driver was exchanged beneath it."""
    faults.apply_to_container(NODE, lambda profile: faults.lose_gpu(profile, 1))
    wait_for("all GPUs are taken for lost", lambda: allocatable() == 0)
    run = enter(BACK, gpu_node_gpus=4, **OURS)
    assert run.code == 2 and "gpu_lost" in run.output, run.output
    assert "Expected: healthy GPUs; the node stays out of work." in words(run.output), run.output
    assert cordoned()[0] and marks()["maintenance"] == "another driver"
    faults.apply_to_container(NODE, lambda profile: faults.recover_gpu(profile, 1))
    label_of_before()
    run = enter(BACK, gpu_node_gpus=4, **OURS)
    assert run.code == 0 and RESTART in changed_tasks(run.output), run.output
    assert cordoned() == (False, "") and marks() == {} and allocatable() == 4
    assert has_the_label_of_its_driver()
    run = enter(BACK, **OURS)
    assert (run.code, run.changed) == (0, {NODE: 0}), run.output


def test_a_divided_gpu_is_handed_out_in_parts_beside_whole_ones() -> None:
    """By NVIDIA's device plugin, which is started again for it. The run itself verifies that the cluster has them."""
    layout = {"nvidia_mig_layout": "disabled",
              "nvidia_mig_gpus": [{"index": 0, "layout": {"3g.40gb": 1, "1g.10gb": 1}}]}  # fmt: skip
    run = run_in_scenario(CONVERGE, "--extra-vars", json.dumps(layout))
    assert run.code == 0, run.output
    assert {"Have the instances of the layout", RESTART} <= set(changed_tasks(run.output)), run.output
    assert cordoned() == (False, "")
    parts = dict(MIG.findall(sh("nvidia-smi -L")))
    assert sorted(parts) == ["1g.10gb", "3g.40gb"]
    whole = {"nvidia.com/gpu": 3}
    assert handed_out() == {**whole, **{f"nvidia.com/mig-{profile}": 1 for profile in parts}}
    labels = get("node", NODE)["metadata"]["labels"]
    assert {labels[f"nvidia.com/mig-{profile}.count"] for profile in parts} == {"1"}
    pod("part", 1, "nvidia.com/mig-1g.10gb")
    seen("part")
    assert MIG.findall(kubectl("logs", "part")) == [("1g.10gb", parts["1g.10gb"])]
    kubectl("delete", "pod", "part", "--wait=true")
    run = run_in_scenario(CONVERGE, "--check", "--extra-vars", json.dumps(layout))
    assert (run.code, run.changed) == (0, {NODE: 0}), changed_tasks(run.output)


def test_a_shared_volume_is_claimed_as_the_example_has_it() -> None:
    """Only a kernel with NFS could mount it."""
    part, given = "shared_data/kubernetes", {"shared_data_server": "192.0.2.10", "shared_data_export": "/srv/data"}
    for changed in (["Have the volume"], []):
        run = enter(part, **given)
        assert run.code == 0 and changed_tasks(run.output) == changed, run.output
    example = yaml.safe_load((ROOT / "examples/kubernetes/shared-data.yml").read_text(encoding="utf-8"))
    kubectl("create", "--filename=-", "--dry-run=server", stdin=example)
    kubectl("create", "--filename=-", stdin=example["items"][0])
    wait_for("the claim has the volume", lambda: get("pvc", "shared-data")["status"]["phase"] == "Bound")
    assert get("pv", "shared-data")["spec"]["claimRef"]["name"] == "shared-data"
    for changed in (["Have no volume"], []):
        run = enter(part, shared_data_state="absent", **given)
        assert run.code == 0 and changed_tasks(run.output) == changed, run.output
    assert "deletionTimestamp" in get("pv", "shared-data")["metadata"]
    kubectl("delete", "pvc", "shared-data", "--wait=true")
    wait_for("the volume is gone", lambda: get("pv")["items"] == [])


def test_a_node_whose_group_nobody_has_told_is_not_changed() -> None:
    run = enter(OUT, node_maintenance_change="another driver", __node_maintenance_of_kubernetes=False)
    assert run.code == 2 and "Expected: a host of the group kubernetes_nodes" in words(run.output), run.output
    assert cordoned() == (False, "")


def test_removal_leaves_a_node_that_hands_out_nothing() -> None:
    parts = ("kubernetes_device_plugin/main", "kubernetes_node/main")
    gone = {"kubernetes_device_plugin_state": "absent", "kubernetes_node_state": "absent"}
    run = enter(*parts, **gone)
    assert run.code == 0, run.output
    assert changed_tasks(run.output) == [
        "Have no device plugin",
        "Have the labels of GPU feature discovery",
        "Have the node labelled",
        "Have the node tainted",
    ]
    node = get("node", NODE)
    assert [name for name in node["metadata"]["labels"] if name.startswith("nvidia.com/")] == []
    assert "taints" not in node["spec"]
    assert get("daemonsets", "--all-namespaces")["items"] == []
    wait_for("the node has no GPU to hand out", lambda: handed_out() == {})
    run = enter(*parts, **gone)
    assert (run.code, run.changed) == (0, {NODE: 0}), run.output
