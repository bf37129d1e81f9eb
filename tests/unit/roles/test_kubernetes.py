# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How a host's Kubernetes is found, what is refused of it, and what the device plugin is asked for."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
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
        ["/usr/local/bin/k3s", "kubectl", "--kubeconfig", "/etc/rancher/k3s/k3s.yaml"],
        ["/opt/kubectl", "--kubeconfig", "/root/config"],
    ]
    cases = [api("kubectl /usr/bin/kubectl"), api("kubeconfig /etc/kubernetes/admin.conf")]
    without, bare = role_helper.values("__kubernetes_refusal", ["kubernetes"], cases)
    assert without.startswith("gpu-7 has no kubeconfig of an administrator (") and "Next step: put the host" in without
    assert bare.startswith("gpu-7 has no kubectl. Expected:") and "kubernetes_api_host" in bare
