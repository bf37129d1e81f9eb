# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the verifications of Kubernetes say where something is missing; that they pass is in the scenario kubernetes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gpufarm.core.tests.unit.playbooks import playbook_helper
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils import kubernetes_helper as farm

from tests.simulator.cache import ROOT

# What kubectl 1.33 prints of a pod that runs, of one whose image cannot be pulled, and of one that no node takes.
PODS = 'gpu-7 Running  \ngpu-8 Pending ImagePullBackOff Back-off pulling image "plugin:v1"\n Pending  \n'
KUBECTL = """#!/bin/sh
[ "$3" = --request-timeout=30s ] || sleep 600
case "$*" in
    *' get nodes --output=name') cut -d' ' -f1 "$0.nodes" ;;
    *' get daemonsets --all-namespaces --output=jsonpath='*) [ ! -e "$0.daemonsets" ] || cat "$0.daemonsets" ;;
    *' get node/'*' runtimeclass/nvidia --ignore-not-found --output=json') ;;
    *' apply --filename=-') cat >"$0.applied"; echo 'daemonset.apps/nvidia-device-plugin-daemonset created' ;;
    *' rollout status daemonset/nvidia-device-plugin-daemonset --namespace=kube-system --timeout=7s')
        echo 'Waiting for daemon set "nvidia-device-plugin-daemonset" rollout to finish: 1 of 3 updated pods are ...'
        echo 'error: timed out waiting for the condition' >&2
        exit 1 ;;
    *' get pods --namespace=kube-system --selector name=nvidia-device-plugin-ds --output=jsonpath='*)
        cat "$0.pods" ;;
    *' get nodes --selector=nvidia.com/gpu.present=true --output=jsonpath='*)
        [ ! -e "$0.refused" ] || { cat "$0.refused" >&2; exit 1; }
        cat "$0.nodes" ;;
    *) echo "error: unknown: $*" >&2; exit 1 ;;
esac
"""
DEAD = 'gpu-7 {"nvidia.com/gpu":"4"}\ngpu-8 {"nvidia.com/gpu":"0"} dedicated=ml:NoSchedule\n'
WAIT, VERIFY = (
    {"name": "gpufarm.core.kubernetes_device_plugin", "tasks_from": name} for name in ("wait.yml", "verify.yml")
)


def run(folder: Path, tasks: list[dict[str, Any]], hosts: Sequence[str] = ("gpu-7",), **given: Any) -> tuple[int, str]:
    play = [{"name": "Nodes", "hosts": "all", "gather_facts": False, "tasks": tasks}]
    (folder / "play.yml").write_text(json.dumps(play), encoding="utf-8")
    known = {**playbook_helper.LOCAL, "ansible_become": False, **given}
    inventory = {"all": {"vars": known, "hosts": dict.fromkeys(hosts)}}
    result = playbook_helper.run_playbook(folder, inventory, str(folder / "play.yml"))
    return result.returncode, " ".join((result.stdout + result.stderr).split())


def asked_by_kubectl(folder: Path, pods: str) -> dict[str, str]:
    """Have a kubectl that tells of these pods, and return by what variables it is asked."""
    kubectl = folder / "kubectl"
    kubectl.write_text(KUBECTL, encoding="utf-8")
    kubectl.chmod(0o755)
    (folder / "kubectl.pods").write_text(pods, encoding="utf-8")
    return {"kubernetes_kubectl": str(kubectl), "kubernetes_kubeconfig": "/etc/kubernetes/admin.conf"}


def test_a_device_plugin_that_does_not_run_is_told_with_what_its_pods_wait_for(tmp_path: Path) -> None:
    asked = asked_by_kubectl(tmp_path, PODS)
    (tmp_path / "kubectl.nodes").write_text(DEAD, encoding="utf-8")
    known = {"name": "gpufarm.core.kubernetes", "public": True, "tasks_from": "look.yml"}
    code, said = run(
        tmp_path,
        [{"ansible.builtin.include_role": each} for each in (known, WAIT, VERIFY)],
        **asked,
        kubernetes_device_plugin_timeout=7,
    )
    assert code == 2, said
    assert (
        "gpu-7: the device plugin does not run (error: timed out waiting for the condition). Found: "
        'gpu-8 Pending ImagePullBackOff Back-off pulling image "plugin:v1"; Pending. Expected: a pod that runs on each '
        "node with nvidia.com/gpu.present=true. Next step: mend what is named; `kubectl describe daemonset "
        "--namespace=kube-system nvidia-device-plugin-daemonset` says more."
    ) in said.replace('\\"', '"'), said


@pytest.mark.parametrize(
    ("node", "applied", "pods", "told"),
    [
        ("gpu-7", True, PODS, ""),
        ("gpu-7", False, PODS, ""),
        ("gpu-8", True, PODS, "waiting for the condition). Found: gpu-8 Pending ImagePullBackOff"),
        ("gpu-8", False, PODS, "the device plugin runs, and gpu-8 has got no GPU to hand out"),
        (
            "gpu-8",
            False,
            "gpu-7 Running  \n",
            "no pod of the device plugin is on gpu-8 (dedicated=ml:NoSchedule). Expected",
        ),
    ],
)
def test_a_batch_does_not_wait_for_other_nodes(tmp_path: Path, node: str, applied: bool, pods: str, told: str) -> None:
    """One of the cluster that is dead would keep those out of work that were drained."""
    asked = asked_by_kubectl(tmp_path, pods.replace("\n Pending", ""))
    (tmp_path / "kubectl.nodes").write_text(DEAD, encoding="utf-8")
    look = {"name": "gpufarm.core.kubernetes", "public": True, "tasks_from": "look.yml"}
    tasks = yaml.safe_load((ROOT / "roles/kubernetes_node/tasks/preflight.yml").read_text(encoding="utf-8"))
    (noted,) = [task for task in tasks if task["name"] == "Note the node's name"]
    code, said = run(
        tmp_path,
        [
            {"ansible.builtin.include_role": look},
            noted,
            {"ansible.builtin.import_role": WAIT, "run_once": True},
            {"ansible.builtin.import_role": VERIFY},
        ],
        **asked,
        kubernetes_device_plugin_timeout=7,
        kubernetes_node_name=node,
        common_scope="kubernetes",
        __kubernetes_device_plugin_applied={"changed": applied},
    )
    assert code == (2 if told else 0) and told in said, said


def test_an_api_that_does_not_answer_is_no_cluster_without_labels(tmp_path: Path) -> None:
    """The limit is a text where it comes by -e."""
    refused = "The connection to the server 10.0.0.1:6443 was refused - did you specify the right host or port?"
    asked = asked_by_kubectl(tmp_path, "")
    (tmp_path / "kubectl.refused").write_text(refused, encoding="utf-8")
    known = {"name": "gpufarm.core.kubernetes", "public": True, "tasks_from": "look.yml"}
    code, said = run(
        tmp_path,
        [{"ansible.builtin.include_role": each} for each in (known, WAIT, VERIFY)],
        **asked,
        kubernetes_device_plugin_timeout="7",
    )
    assert code == 2 and "(3 retries left)" in said, said
    assert f"gpu-7: the cluster's API does not answer gpu-7 ({refused}). Expected: an answer to `" in said, said


def test_a_node_without_gpus_keeps_no_other_of_its_batch(tmp_path: Path) -> None:
    asked = asked_by_kubectl(tmp_path, "gpu-7 Running\ngpu-8 Running\n")
    (tmp_path / "kubectl.nodes").write_text(DEAD.replace("gpu-7", "gpu-9"), encoding="utf-8")
    node = yaml.safe_load((ROOT / "playbooks/tasks/kubernetes_node.yml").read_text(encoding="utf-8"))
    begin = [task["name"] for task in node].index("Have the device plugin")
    facts = {"__kubernetes_node_of_batch": "{{ inventory_hostname }}", "_common_checked": "kubernetes"}
    back = {"ansible.builtin.debug": {"msg": "{{ inventory_hostname }} works again."}}
    code, said = run(
        tmp_path,
        [{"ansible.builtin.set_fact": facts}, *node[begin:-1], back],
        ["gpu-8", "gpu-9"],
        kubernetes_api_host="gpu-9",
        **asked,
        kubernetes_device_plugin_timeout=7,
        common_scope="kubernetes",
    )
    assert code == 2 and "gpu-9 works again." in said and "gpu-8 works again." not in said, said
    assert "gpu-8: the device plugin runs, and gpu-8 has got no GPU to hand out" in said, said
    assert (tmp_path / "kubectl.applied").exists()


@pytest.mark.parametrize("role", ["farm", "minikube"])
def test_a_gpu_that_kubernetes_has_not_fails_the_verification(tmp_path: Path, role: str) -> None:
    cluster = farm.Cluster(tmp_path)
    cluster.nodes = [farm.make_node(number, 1) for number in range(2)]
    gpus = [
        {"uuid": farm.uuid_of(0, number), "name": farm.MODEL, "mig_mode": None, "mig_devices": None}
        for number in range(2)
    ]
    facts = {"available": True, "reason": "ok", "message": "", "driver_version": farm.DRIVER, "gpus": gpus}
    entry = {"farm": "kubernetes_verify.yml", "minikube": "verify.yml"}[role]
    verify = {"name": f"gpufarm.core.{role}", "tasks_from": entry, "rolespec_validate": False}
    tasks = [
        {"ansible.builtin.set_fact": {"nvidia_smi": facts, "cacheable": True}},
        {"ansible.builtin.include_role": verify},
    ]
    given = {**playbook_helper.asked_of(cluster, tmp_path), "kubernetes_node_name": "node00000", "verify_timeout": 0}
    # As minikube's user has it.
    server = json.loads(cluster.kubeconfig.read_text(encoding="utf-8"))["contexts"]["farm"]
    (tmp_path / ".kube").mkdir()
    config = {"current-context": "node00000", "contexts": {"node00000": server}}
    (tmp_path / ".kube/config").write_text(json.dumps(config), encoding="utf-8")
    given |= {
        "minikube_verify_timeout": 0,
        "minikube_profile": "node00000",
        "__minikube_said": {"stdout_lines": [f"home {tmp_path}", f"kubectl {given['kubernetes_kubectl']}"]},
    }
    try:
        code, said = run(tmp_path, tasks, **given)
        cluster.nodes[0] = farm.make_node(0, 2)
        # minikube runs pods besides.
        well, table = run(tmp_path, tasks, **given) if role == "farm" else (0, "node00000 failed=0")
    finally:
        cluster.close()
    assert code == 2 and "node00000 ready 2 1 failed count_mismatch" in said, said
    assert well == 0 and "node00000" in table and "failed=0" in table, table


@pytest.mark.parametrize("whole", [1, 2])
def test_a_gpu_that_is_to_have_no_mig_device_is_not_missed(tmp_path: Path, whole: int) -> None:
    """The plugin hands it out with the strategy none, and not with mixed, by which it hands out the others."""
    cluster = farm.Cluster(tmp_path)
    cluster.nodes = [farm.make_node(0, whole)]
    gpus = [
        {"uuid": farm.uuid_of(0, number), "name": farm.MODEL, "mig_mode": mode, "mig_devices": devices}
        for number, (mode, devices) in enumerate((("Disabled", None), ("Enabled", [])))
    ]
    facts = {"available": True, "reason": "ok", "message": "", "driver_version": farm.DRIVER, "gpus": gpus}
    verify = {"name": "gpufarm.core.farm", "tasks_from": "kubernetes_verify.yml", "rolespec_validate": False}
    noted, back = (
        yaml.safe_load((ROOT / "roles" / path).read_text(encoding="utf-8"))[-1]
        for path in ("farm/tasks/kubernetes_node.yml", "node_maintenance/tasks/kubernetes_back.yml")
    )
    alike = [
        "__farm_kubernetes_expected == __farm_kubernetes_wanted",
        "__kubernetes_wanted == [__farm_kubernetes_wanted]",
    ]
    tasks = [
        {"ansible.builtin.set_fact": {"nvidia_smi": facts, "cacheable": True}},
        {"ansible.builtin.import_role": verify},
        noted,
        {"ansible.builtin.assert": {"that": alike}, "vars": back["vars"]},
    ]
    given = {**playbook_helper.asked_of(cluster, tmp_path), "kubernetes_node_name": "node00000", "verify_timeout": 0}
    given |= {
        "__farm_health_probe": {"nvidia_smi": facts},
        "__node_maintenance_probe": {"nvidia_smi": facts},
        "__farm_kubernetes_listed": {"nodes": []},
        "__farm_kubernetes_uptime": {},
    }
    meant = {"gpu_health_options": {"severities": {"mig_empty": "ignore"}}}
    try:
        missed, said = run(tmp_path, tasks, **given)
        well, table = run(tmp_path, tasks, **given, **meant)
    finally:
        cluster.close()
    assert missed == (2 if whole == 1 else 0) and ("count_mismatch" in said) is (whole == 1), said
    assert well == 0, table


def test_the_nodes_are_labelled_before_they_are_compared_with_their_labels() -> None:
    plays = yaml.safe_load((ROOT / "playbooks/kubernetes.yml").read_text(encoding="utf-8"))
    (labels,) = [number for number, play in enumerate(plays) if "labels.yml" in str(play.get("tasks"))]
    (verify,) = [
        number
        for number, play in enumerate(plays)
        if play.get("ansible.builtin.import_playbook") == "kubernetes_verify.yml"
    ]
    batches = [number for number, play in enumerate(plays) if "kubernetes_node.yml" in str(play.get("tasks"))]
    assert max(batches) < labels < verify


@pytest.mark.parametrize(
    ("other", "given", "told", "changed"),
    [
        ("", {}, "", ["gpu-7", "gpu-8"]),
        ("x/nvdp nvidia-device-plugin-ctr=x.example/k8s-device-plugin:v1", {}, "another device plugin of NVIDIA's", []),
        ("", {"kubernetes_device_plugin_version": "0.15.0"}, "the version asked for is 0.15.0. Expected: 0.16.0", []),
        (
            "",
            {"kubernetes_node_name": "{{ 'gone' if inventory_hostname == 'gpu-8' else inventory_hostname }}"},
            "gpu-8: the cluster has the nodes gpu-7, gpu-8. Expected: gone among them.",
            ["gpu-7"],
        ),
    ],
)
def test_what_is_refused_is_refused_before_a_node_is_changed(
    tmp_path: Path, other: str, given: dict[str, str], told: str, changed: list[str]
) -> None:
    """A batch may have been drained, and what it was drained for is done, when the roles come to it."""
    asked = asked_by_kubectl(tmp_path, "")
    (tmp_path / "kubectl.nodes").write_text(DEAD, encoding="utf-8")
    (tmp_path / "kubectl.daemonsets").write_text(other, encoding="utf-8")
    plays = yaml.safe_load((ROOT / "playbooks/kubernetes.yml").read_text(encoding="utf-8"))
    checked = {"_common_checked": "kubernetes_refusals"}
    change = {"ansible.builtin.debug": {"msg": "{{ inventory_hostname }} is changed."}}
    begun = [number for number, play in enumerate(plays) if "kubernetes_node.yml" in str(play.get("tasks"))]
    kept = [play for play in plays[: min(begun)] if "hosts" in play]
    (tmp_path / "parts.yml").write_text(
        yaml.safe_dump([
            {"hosts": "all", "gather_facts": False, "tasks": [{"ansible.builtin.set_fact": checked}]}, *kept,
            {"hosts": "all", "gather_facts": False, "tasks": [change]},
        ]), encoding="utf-8",
    )  # fmt: skip
    known = {
        **playbook_helper.LOCAL,
        **asked,
        "kubernetes_api_host": "gpu-7",
        "kubernetes_node_distribution": "kubeadm",
        "kubernetes_node_name": "{{ inventory_hostname }}",
        "ansible_become": False,
        **given,
    }
    hosts: dict[str, Any] = dict.fromkeys(("gpu-7", "gpu-8"))
    inventory = {"all": {"vars": known, "children": {"kubernetes_nodes": {"hosts": hosts}}}}
    ran = playbook_helper.run_playbook(tmp_path, inventory, str(tmp_path / "parts.yml"))
    said = " ".join((ran.stdout + ran.stderr).split())
    assert ran.returncode == (2 if told else 0) and told in said, said
    assert [host for host in hosts if f"{host} is changed." in said] == changed, said
    # What other roles look at is unknown there, so the plays behind it look for themselves.
    scopes = {play["vars"]["common_scope"] for play in plays if "kubernetes_node.yml" in str(play.get("tasks"))}
    assert scopes == {"kubernetes"} and kept[-1]["vars"]["common_scope"] not in scopes


# What kubectl says of a pod that ends while it is asked.
ENDED = 'error: unable to upgrade connection: container not found ("nvidia-device-plugin-ctr")'


def test_a_pod_that_ends_while_it_is_asked_for_the_labels_is_asked_again(tmp_path: Path) -> None:
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(
        f"""#!/bin/sh
case "$*" in
    *' exec '*) [ -e "$0.asked" ] || {{ : >"$0.asked"; echo '{ENDED}' >&2; exit 1; }}; echo nvidia.com/gpu.count=2 ;;
    *) exec '{farm.KUBECTL}' "$@" ;;
esac
""",
        encoding="utf-8",
    )
    kubectl.chmod(0o755)
    cluster = farm.Cluster(tmp_path)
    cluster.nodes = [farm.make_node(0, 2)]
    cluster.pods = [farm.plugin_pod("node00000")]
    cluster.pods[0]["metadata"]["labels"] = {"name": "nvidia-device-plugin-ds"}
    labels = {"name": "gpufarm.core.kubernetes_device_plugin", "tasks_from": "labels.yml"}
    known = {"name": "gpufarm.core.kubernetes", "public": True, "tasks_from": "look.yml"}
    try:
        code, said = run(
            tmp_path,
            [{"ansible.builtin.include_role": known}, {"ansible.builtin.include_role": labels}],
            kubernetes_kubectl=str(kubectl),
            kubernetes_kubeconfig=str(cluster.kubeconfig),
            kubernetes_device_plugin_namespace=farm.PLUGIN,
        )
    finally:
        cluster.close()
    assert code == 0 and cluster.nodes[0]["metadata"]["labels"]["nvidia.com/gpu.count"] == "2", said
