# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How a host's Kubernetes is found, what is refused of it, and what the device plugin is asked for."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.template import trust_as_template
from ansible_collections.gpufarm.core.plugins.module_utils.gate.farm import HARMLESS
from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes import plugin_of
from ansible_collections.gpufarm.core.plugins.modules import kubernetes_gpu_job_verify
from ansible_collections.gpufarm.core.tests.unit.roles import role_helper

ROLES = Path(__file__).resolve().parents[3] / "roles"
FLAGS = 'KUBELET_KUBEADM_ARGS="--container-runtime-endpoint=unix:///var/run/crio/crio.sock --hostname-override=GPU-7"\n'


def look(root: Path, **files: str) -> list[str]:
    """Return what is found below a folder that has these files, each with its text; a program is one without text."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        if not text:
            path.chmod(0o755)
    told = subprocess.run(
        ["sh", str(ROLES / "kubernetes/files/look.sh"), str(root)], capture_output=True, text=True, check=True
    )
    assert told.stderr == ""
    return [line for line in told.stdout.splitlines() if not line.startswith("hostname ")]


def test_a_node_of_kubeadm_is_found_with_what_its_kubelet_was_told(tmp_path: Path) -> None:
    assert look(tmp_path) == []
    found = look(
        tmp_path,
        **{
            "etc/kubernetes/kubelet.conf": "x",
            "etc/kubernetes/admin.conf": "x",
            "var/lib/kubelet/kubeadm-flags.env": FLAGS,
            "usr/bin/kubectl": "",
        },
    )
    assert found == [
        "distribution kubeadm",
        "endpoint unix:///var/run/crio/crio.sock",
        "name GPU-7",
        "kubectl /usr/bin/kubectl",
        "kubeconfig /etc/kubernetes/admin.conf",
    ]


def test_the_endpoint_is_in_the_kubelets_configuration_where_it_is_no_argument(tmp_path: Path) -> None:
    settings = 'kind: KubeletConfiguration\ncontainerRuntimeEndpoint: "unix:///run/containerd/containerd.sock"\n'
    assert look(tmp_path, **{"var/lib/kubelet/config.yaml": settings}) == [
        "endpoint unix:///run/containerd/containerd.sock"
    ]


@pytest.mark.parametrize("name", ["k3s", "rke2"])
def test_k3s_and_rke2_are_found_and_whether_they_have_found_the_runtime(tmp_path: Path, name: str) -> None:
    agent = f"var/lib/rancher/{name}/agent"
    assert look(tmp_path, **{f"{agent}/kubelet.kubeconfig": "x"}) == [f"distribution {name}"]
    options = '[plugins."io.containerd.cri.v1.runtime".containerd.runtimes."nvidia".options]\n'
    written = {f"{agent}/etc/containerd/config.toml": options + '  BinaryName = "/usr/bin/nvidia-container-runtime"\n'}
    assert look(tmp_path, **written) == [f"distribution {name}", "runtime nvidia"]


def test_k3s_brings_its_kubectl(tmp_path: Path) -> None:
    assert look(tmp_path, **{"usr/local/bin/k3s": "", "etc/rancher/k3s/k3s.yaml": "x"}) == [
        "kubectl /usr/local/bin/k3s kubectl",
        "kubeconfig /etc/rancher/k3s/k3s.yaml",
    ]


def node(*told: str, items: tuple[dict[str, Any], ...] = (), **given: Any) -> dict[str, Any]:
    """Return what the role knows of a node whose cluster has gpu-7, of which look.sh told this."""
    return {
        "inventory_hostname": "gpu-7",
        "groups": {},
        "__kubernetes_nodes": {"stdout_lines": ["node/control", "node/gpu-7"]},
        "__kubernetes_node_said": {"stdout_lines": ["hostname GPU-7", *told]},
        "__kubernetes_node_asked": {"stdout": json.dumps({"items": items}) if items else ""},
        **given,
    }


KUBEADM = ("distribution kubeadm", "endpoint unix:///run/containerd/containerd.sock")
CLASS = {"kind": "RuntimeClass", "metadata": {"name": "nvidia"}, "handler": "nvidia"}


def test_what_cannot_be_a_node_is_refused_with_what_to_do() -> None:
    cases = [
        (node(*KUBEADM, items=(CLASS,)), ""),
        (node(*KUBEADM), ""),
        (node(), "no kubelet of kubeadm, k3s or RKE2 has joined a cluster here. Expected:"),
        (node("distribution k3s", "distribution kubeadm"), "this host is a node of k3s and of kubeadm. Expected"),
        (node("distribution k3s", "distribution kubeadm", kubernetes_node_distribution="k3s"), ""),
        (node("distribution kubeadm", "endpoint unix:///run/cri-dockerd.sock"), "the kubelet uses unix:///run/cri-dock"),
        (node(*KUBEADM, "name other"), "the cluster has the nodes control, gpu-7. Expected: other among them."),
        (node(*KUBEADM, kubernetes_node_name="x"), "the cluster has the nodes control, gpu-7. Expected: x among them."),
        (node(*KUBEADM, items=({**CLASS, "handler": "runc"},)), "the RuntimeClass nvidia has the handler runc. E"),
    ]  # fmt: skip
    roles = ("kubernetes", "kubernetes_node")
    found = role_helper.values("__kubernetes_node_refusal", roles, [given for given, _told in cases])
    for said, (given, told) in zip(found, cases, strict=True):
        assert said.startswith(told) and bool(said) == bool(told), (given, said)
        assert not said or "Next step: " in said


def test_whose_settings_get_the_runtime() -> None:
    cases = [
        (node(*KUBEADM), "containerd"),
        (node("distribution kubeadm", "endpoint unix:///var/run/crio/crio.sock"), "crio"),
        (node("distribution kubeadm"), "containerd"),
        (node("distribution kubeadm", kubernetes_node_engine="crio"), "crio"),
        (node("distribution rke2"), ""),
        (node("distribution k3s", kubernetes_node_engine="containerd"), "containerd"),
    ]
    found = role_helper.values("__kubernetes_node_engine", ("kubernetes", "kubernetes_node"), [c[0] for c in cases])
    assert found == [expected for _given, expected in cases]


def api(*told: str, **given: Any) -> dict[str, Any]:
    return {"inventory_hostname": "gpu-7", "groups": {}, "__kubernetes_said": {"stdout_lines": [*told]}, **given}


def test_where_the_api_is_asked() -> None:
    group = {"groups": {"kubernetes_control_plane": ["control", "other"]}}
    cases = [
        api(),
        api(**group),
        api(**group, kubernetes_api_host="mine"),
        api(groups={"kubernetes_control_plane": []}),
    ]
    assert role_helper.values("__kubernetes_host", ["kubernetes"], cases) == ["gpu-7", "control", "mine", "gpu-7"]
    cases = [
        api("kubectl /usr/local/bin/k3s kubectl", "kubeconfig /etc/rancher/k3s/k3s.yaml"),
        api(kubernetes_kubectl="/opt/kubectl", kubernetes_kubeconfig="/root/config"),
    ]
    assert role_helper.values("__kubernetes_ask", ["kubernetes"], cases) == [
        ["/usr/local/bin/k3s", "kubectl", "--kubeconfig", "/etc/rancher/k3s/k3s.yaml", "--request-timeout=30s"],
        ["/opt/kubectl", "--kubeconfig", "/root/config", "--request-timeout=30s"],
    ]
    cases = [api("kubectl /usr/bin/kubectl"), api("kubeconfig /etc/kubernetes/admin.conf")]
    without, bare = role_helper.values("__kubernetes_refusal", ["kubernetes"], cases)
    assert without.startswith("gpu-7 has no kubeconfig of an administrator (") and "Next step: put the host" in without
    assert bare.startswith("gpu-7 has no kubectl. Expected:") and "kubernetes_api_host" in bare


def test_another_device_plugin_and_an_old_one_are_refused() -> None:
    roles = ("kubernetes", "kubernetes_device_plugin")
    image = "nvcr.io/nvidia/k8s-device-plugin:v0.18.0"
    own = f"kube-system/nvidia-device-plugin-daemonset nvidia-device-plugin-ctr={image}"
    operators = "gpu-operator/nvidia-device-plugin-daemonset a=x.example/k8s-device-plugin@sha256:1 b=sidecar:1"
    cases = [
        {
            "__kubernetes_device_plugin_listed": {
                "stdout_lines": [own, "x/kube-proxy it=a:1", "y/z it=b/my-k8s-device-plugin:1"]
            }
        },
        {"__kubernetes_device_plugin_listed": {"stdout_lines": [own, operators]}},
        *(
            {"kubernetes_device_plugin_version": version, "__kubernetes_device_plugin_listed": {"stdout_lines": []}}
            for version in ("0.15.1", "v0.15.1", "latest", "v0.18.0")
        ),
    ]
    fine, other, old, older, named, newer = role_helper.values("__kubernetes_device_plugin_refusal", roles, cases)
    assert fine == newer == ""
    for refused, version in ((older, "v0.15.1"), (named, "latest")):
        assert refused.startswith(f"the version asked for is {version}. Expected: 0.16.0 or newer. Next step:")
    assert "another device plugin of NVIDIA's (gpu-operator/nvidia-device-plugin-daemonset). Expected: one" in other
    assert old.startswith("the version asked for is 0.15.1. Expected: 0.16.0 or newer. Next step:")


@pytest.mark.parametrize(
    ("containers", "plugin"),
    [
        ({"nvidia-device-plugin-ctr": "mirror.example/it:1"}, True),
        (
            {"config-manager": "nvcr.io/nvidia/k8s-device-plugin:v1", "main": "x.example/k8s-device-plugin@sha256:1"},
            True,
        ),
        ({"gpu-feature-discovery-ctr": "nvcr.io/nvidia/k8s-device-plugin:v1"}, False),
        ({"mps-control-daemon-ctr": "x.example/k8s-device-plugin:v1", "gfd": "x.example/k8s-device-plugin:v1"}, False),
        ({"nvidia-device-plugin-mps": "x.example/k8s-device-plugin:v1", "config-manager": "x.example/y:1"}, False),
    ],
)
def test_what_is_a_device_plugin_is_one_question(containers: dict[str, str], plugin: bool) -> None:
    """Its daemon for MPS and GPU feature discovery are in the same image, and hand out nothing."""
    roles = ("kubernetes", "kubernetes_device_plugin")
    line = " ".join(["x/y", *(f"{name}={image}" for name, image in containers.items())])
    (others,) = role_helper.values(
        "__kubernetes_device_plugin_others", roles, [{"__kubernetes_device_plugin_listed": {"stdout_lines": [line]}}]
    )
    pod = {"metadata": {"name": "y"}, "spec": {"containers": [{"name": n, "image": i} for n, i in containers.items()]}}
    assert (others == ["x/y"]) is plugin and (plugin_of([pod]).name == "y") is plugin


def test_what_the_device_plugin_is_asked_for() -> None:
    roles = ("kubernetes", "kubernetes_device_plugin")
    cases = [
        {},
        {
            "kubernetes_device_plugin_mig_strategy": "mixed",
            "kubernetes_device_plugin_runtime_class": "",
            "kubernetes_device_plugin_version": "v0.17.1",
            "kubernetes_device_plugin_environment": {"DP_DISABLE_HEALTHCHECKS": "all", "NUMBER": 1, "BOOLEAN": True},
        },
    ]
    plain, divided = (
        each["spec"]["template"]["spec"]
        for each in role_helper.values("__kubernetes_device_plugin_daemonset", roles, cases)
    )
    (container,) = plain["containers"]
    assert plain["runtimeClassName"] == "nvidia"
    assert plain["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
    assert plain["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert container["image"] == "nvcr.io/nvidia/k8s-device-plugin:v0.18.0"
    assert {"name": "FAIL_ON_INIT_ERROR", "value": "false"} in container["env"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    (container,) = divided["containers"]
    settings = {each["name"]: each["value"] for each in container["env"]}
    assert "runtimeClassName" not in divided
    assert (settings["MIG_STRATEGY"], settings["NVIDIA_MIG_MONITOR_DEVICES"]) == ("mixed", "all")
    assert [settings[name] for name in ("DP_DISABLE_HEALTHCHECKS", "NUMBER", "BOOLEAN")] == ["all", "1", "true"]
    assert container["image"] == "nvcr.io/nvidia/k8s-device-plugin:v0.17.1"
    assert container["securityContext"]["capabilities"] == {"add": ["SYS_ADMIN"]}


def test_what_the_gate_calls_harmless_keeps_no_node_out() -> None:
    (required,) = [
        task["ansible.builtin.assert"]["that"]
        for task in role_helper.tasks_of("node_maintenance/tasks/kubernetes_back.yml")
        if task["name"] == "Require that the cluster has them"
    ]
    for codes, back in (
        ([], True), *(([code], True) for code in HARMLESS), (HARMLESS, True),
        (["count_mismatch"], False), ([*HARMLESS, "node_down"], False),
    ):  # fmt: skip
        told = [{"verdict": "failed" if codes else "ok", "problems": [{"code": code} for code in codes]}]
        given = {"required": trust_as_template(f"{{{{ {required} }}}}"), "__kubernetes_verdicts": told}
        assert role_helper.value("required", given) is back, codes


def judged(name: str, *codes: str) -> dict[str, Any]:
    """Return what kubernetes_gpu_verify says of a node that has these problems."""
    return {
        "name": name,
        "verdict": "failed" if codes else "ok",
        "problems": [{"node": name, "code": code} for code in codes],
    }


def test_gpus_that_may_be_shared_are_waited_for_in_vain() -> None:
    nodes = [
        judged("well"), judged("shared", "sharing_unknown"), judged("lost", "gpu_unhealthy"),
        judged("both", "sharing_unknown", "gpu_unhealthy"), judged("sick", "gpu_unhealthy"),
    ]  # fmt: skip
    given = {
        **role_helper.variables("kubernetes"),
        "__kubernetes_well": ["well", "shared", "lost", "both"],
        "__kubernetes_first": {"nodes": nodes, "problems": [each for node in nodes for each in node["problems"]]},
        "__kubernetes_second": {"nodes": [judged("lost"), judged("both", "sharing_unknown")]},
    }
    assert [node["name"] for node in role_helper.value("__kubernetes_again", given)] == ["lost", "both"]
    verdicts = role_helper.value("__kubernetes_verdicts", given)
    assert [(node["name"], [each["code"] for each in node["problems"]]) for node in verdicts] == [
        ("well", []), ("shared", ["sharing_unknown"]), ("sick", ["gpu_unhealthy"]),
        ("lost", []), ("both", ["sharing_unknown"]),
    ]  # fmt: skip


def test_a_plugin_that_runs_and_hands_out_nothing_is_told() -> None:
    roles = ("kubernetes", "kubernetes_device_plugin")
    full, empty = 'gpu-7 {"cpu":"2","nvidia.com/gpu":"4"}', 'gpu-8 {"cpu":"2","nvidia.com/gpu":"0"}'
    divided, bare = 'gpu-9 {"cpu":"2","nvidia.com/mig-1g.10gb":"14"}', 'gpu-10 {"cpu":"2","pods":"110"}'
    # What every DaemonSet tolerates keeps none away.
    tainted = (
        'gpu-11 {"pods":"110"} node.kubernetes.io/unschedulable=:NoSchedule nvidia.com/gpu=x:NoSchedule a=:NoExecute'
    )
    cases = [
        {
            "__kubernetes_device_plugin_capacity": {"stdout_lines": [*lines]},
            "__kubernetes_device_plugin_waiting": {
                "stdout_lines": [f"gpu-{number} Running  " for number in (7, 8, 10)]
            },
        }
        for lines in (
            (full, divided),
            (full, empty, divided, bare),
            (),
            (full, empty, tainted, 'gpu-12 {"pods":"110"}'),
        )
    ]
    fine, without, none, podless = role_helper.values("__kubernetes_device_plugin_wrong", roles, cases)
    assert fine == ""
    assert without.startswith("the device plugin runs, and gpu-8, gpu-10 has got no GPU to hand out. Expected:")
    assert podless.startswith(
        "no pod of the device plugin is on gpu-11 (nvidia.com/gpu=x:NoSchedule, a=:NoExecute), gpu-12"
    )
    assert "Next step: tolerate what is named in kubernetes_device_plugin_tolerations" in podless
    assert none.startswith("no node has the labels nvidia.com/gpu.present=true. Expected: one at least")
    assert "Next step: " in without and "Next step: " in none


def test_all_that_asks_the_cluster_has_the_limit_of_one_request() -> None:
    asking = [
        (path, name)
        for path in sorted(ROLES.glob("*/*/*.yml"))
        for name in re.findall(r"__kubernetes_(?:program|credentials)\b", path.read_text(encoding="utf-8"))
    ]
    # The modules have a limit of their own.
    assert {path.relative_to(ROLES).as_posix() for path, _name in asking} == {"kubernetes/vars/main.yml"}
    known = role_helper.variables("kubernetes")
    users = {name for name, text in known.items() if re.search("__kubernetes_(program|credentials)", str(text))}
    assert users == {"__kubernetes_ask", "__kubernetes_api", "__kubernetes_refusal"}


def test_what_the_proof_may_need_can_be_set() -> None:
    """Its messages name options as the next step, which whoever runs the playbook has as variables."""
    (proof,) = [
        task["gpufarm.core.kubernetes_gpu_job_verify"]
        for task in role_helper.tasks_of("farm/tasks/kubernetes_verify.yml")
        if "gpufarm.core.kubernetes_gpu_job_verify" in task
    ]
    options = yaml.safe_load(kubernetes_gpu_job_verify.DOCUMENTATION)["options"]
    assert set(options) - set(proof) == {"parallel", "skip_busy"}
    defaults = yaml.safe_load((ROLES / "farm/defaults/main.yml").read_text(encoding="utf-8"))
    assert defaults["verify_jobs_tolerations"] == options["tolerations"]["default"]
