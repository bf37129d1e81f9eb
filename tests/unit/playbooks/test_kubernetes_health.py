# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What kubernetes_health.yml makes of nodes that it reaches and of others; the rest is in the scenario kubernetes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpufarm.core.tests.unit.playbooks import playbook_helper
from ansible_collections.gpufarm.core.tests.unit.playbooks.playbook_helper import LOCAL
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils import kubernetes_helper as farm


def test_a_sick_node_is_cordoned_and_one_that_nobody_reaches_stays_as_it_is(tmp_path: Path) -> None:
    cluster = farm.Cluster(tmp_path)
    cluster.nodes = [farm.make_node(number, 2) for number in range(2)]
    cluster.pods = [farm.make_pod("train", "node00000", 1)]
    cluster.pods[0]["metadata"]["ownerReferences"] = [{"kind": "ReplicaSet", "name": "it", "controller": True}]
    patched: list[tuple[str, Any]] = []

    def takes_patches(request: Any) -> bool:
        if request.command != "PATCH":
            return False
        patched.append((request.path.rpartition("/")[2].partition("?")[0], request.body))
        request.reply(200, cluster.nodes[0])
        return True

    cluster.answer = takes_patches
    # The first one is asked nothing: whoever speaks for the cluster is another.
    away = {"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 1}
    hosts: dict[str, Any] = {
        "away": {"kubernetes_node_name": "node00001", **away},
        # More than any machine has.
        "sick": {"kubernetes_node_name": "node00000", "gpu_node_gpus": 99, "gpu_health_drain": True},
    }
    asked = playbook_helper.asked_of(cluster, tmp_path)
    inventory = {
        "all": {
            "vars": {**LOCAL, **asked, "ansible_become": False},
            "children": {
                "kubernetes_control_plane": {"hosts": {"control": {}}},
                "kubernetes_nodes": {"hosts": hosts},
            },
        }
    }
    try:
        result = playbook_helper.run_playbook(tmp_path, inventory, "kubernetes_health.yml")
    finally:
        cluster.close()
    said = " ".join((result.stdout + result.stderr).split())
    assert result.returncode == 2, said
    assert [(name, body["spec"]) for name, body in patched] == [("node00000", {"unschedulable": True})], said
    assert "evicting default/train (1 GPU)" in said and cluster.removed == ["train"], said
    assert "Node node00000: found " in said and "healthy GPUs that Kubernetes has. Next step: " in said
    assert "away: cannot be reached (" in said and "Its node stays as it is in Kubernetes." in said


# Its pod tells of the driver that is there now; whether one runs that could be asked, the module sees before.
KUBECTL = f"""#!/bin/sh
case "$*" in
    *' delete pod --namespace={farm.PLUGIN} {farm.PLUGIN}-node00000 --ignore-not-found --timeout='*--dry-run=server)
        echo 'pod "{farm.PLUGIN}-node00000" deleted (server dry run)' ;;
    *' delete pod --namespace={farm.PLUGIN} {farm.PLUGIN}-node00000 --ignore-not-found --timeout='*)
        path=/api/v1/namespaces/{farm.PLUGIN}/pods/{farm.PLUGIN}-node00000
        '{farm.KUBECTL}' --kubeconfig="$2" "$3" delete --raw "$path" >&2 &&
        echo 'pod "{farm.PLUGIN}-node00000" deleted' ;;
    *' exec --namespace={farm.PLUGIN} {farm.PLUGIN}-node00000 -- gpu-feature-discovery --oneshot '*)
        echo nvidia.com/cuda.driver-version.full={farm.DRIVER} ;;
    *) exec '{farm.KUBECTL}' "$@" ;;
esac
"""
DRIVER_LABEL = "nvidia.com/cuda.driver-version.full"


@pytest.mark.parametrize("check_mode", [False, True])
def test_labels_of_before_are_refreshed_where_the_plugin_was_started_again(tmp_path: Path, check_mode: bool) -> None:
    """Those of a node whose plugin does not start stay as they are, which ends nothing."""
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(KUBECTL, encoding="utf-8")
    kubectl.chmod(0o755)
    cluster = farm.Cluster(tmp_path)
    cluster.nodes = [farm.make_node(number, 2, well) for number, well in enumerate((0, 2))]
    for node in cluster.nodes:
        node["metadata"]["labels"][DRIVER_LABEL] = "470.1"
        node["metadata"]["annotations"]["gpufarm.core/gpu-labels"] = DRIVER_LABEL
    cluster.pods = [farm.plugin_pod("node00000"), farm.plugin_pod("node00001", phase="Pending")]
    looks = 0

    def start_again(request: Any) -> bool:
        """As a DaemonSet and a kubelet do: the new pod runs at the second look, and hands out the GPUs then."""
        nonlocal looks
        if request.command == "DELETE":
            cluster.pods[0] = farm.plugin_pod("node00000", phase="Pending")
            request.reply(200, {"kind": "Status", "status": "Success"})
            return True
        if cluster.pods[0]["status"]["phase"] == "Pending" and "node00000" in request.path:
            looks += 1
            if looks == 2:
                cluster.pods[0] = farm.plugin_pod("node00000")
                cluster.nodes[0]["status"]["allocatable"]["nvidia.com/gpu"] = "2"
        return False

    cluster.answer = start_again
    compare = {"name": "gpufarm.core.kubernetes", "tasks_from": "compare.yml", "public": True}
    codes = "map(attribute='problems') | map('map', attribute='code') | map('join', ' ') | join('; ')"
    given = {
        "kubernetes_kubectl": str(kubectl),
        "kubernetes_kubeconfig": str(cluster.kubeconfig),
        "__kubernetes_wanted": farm.make_expected(2, 2),
        "__kubernetes_well": ["node00000", "node00001"],
        "__kubernetes_timeout": 5,
    }
    tasks = [
        {"ansible.builtin.include_role": compare},
        {"ansible.builtin.debug": {"msg": f"{{{{ __kubernetes_verdicts | {codes} }}}}"}},
    ]
    play = [{"hosts": "all", "gather_facts": False, "tasks": tasks}]
    (tmp_path / "play.yml").write_text(json.dumps(play), encoding="utf-8")
    options = ["--check"] * check_mode
    try:
        result = playbook_helper.run_playbook(
            tmp_path, {"all": {"hosts": {"gpu-7": {**LOCAL, **given}}}}, str(tmp_path / "play.yml"), *options
        )
    finally:
        cluster.close()
    told = " ".join((result.stdout + result.stderr).split())
    assert result.returncode == 0, told
    labels = [node["metadata"]["labels"][DRIVER_LABEL] for node in cluster.nodes]
    if check_mode:
        assert "msg: gpu_unhealthy driver_version_stale; driver_version_stale PLAY" in told, told
        assert labels == ["470.1", "470.1"] and {method for method, _path, _query in cluster.requests} == {"GET"}
    else:
        assert "msg: ; driver_version_stale PLAY" in told, told
        assert labels == [farm.DRIVER, "470.1"]
    assert "the device plugin's pod nvidia-device-plugin/nvidia-device-plugin-node00001 is Pending" in told, told


def test_a_plugin_that_cannot_be_ended_keeps_no_node_from_its_gate(tmp_path: Path) -> None:
    """That of a node that is down is not even asked, for only its kubelet ends pods."""
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(
        f"""#!/bin/sh
case "$*" in
    *' get nodes --output=name') echo node/node00000 ;;
    *' delete pod --namespace={farm.PLUGIN} '*)
        echo "$7" >>"$0.deleted"
        echo 'pod "{farm.PLUGIN}-node00001" deleted'
        echo 'error: timed out waiting for the condition on pods/{farm.PLUGIN}-node00001' >&2
        exit 1 ;;
    *) exec '{farm.KUBECTL}' "$@" ;;
esac
""",
        encoding="utf-8",
    )
    kubectl.chmod(0o755)
    cluster = farm.Cluster(tmp_path)
    cluster.nodes = [farm.make_node(number, 2, well) for number, well in enumerate((0, 0, 2))]
    (ready,) = [each for each in cluster.nodes[0]["status"]["conditions"] if each["type"] == "Ready"]
    ready["status"] = "Unknown"
    cluster.pods = [farm.plugin_pod("node00000"), farm.plugin_pod("node00001")]
    entry = {"index": 10**9, "uptime": "5", "close_on": "critical", "drain": False, "drain_deadline": 3600}
    sick = {"verdict": "critical", "reason": "xid_79 on 0000:3B:00.0"}
    hosts = {
        f"gpu-{number}": {
            **LOCAL,
            "__farm_kubernetes_entry": {
                **entry, "node": expected["node"], "host": f"gpu-{number}",
                "probe": sick if number == 2 else {"verdict": "ok", "reason": ""},
            },
            "__farm_kubernetes_expected": expected,
        }
        for number, expected in enumerate(farm.make_expected(3, 2))
    }  # fmt: skip
    given = {"kubernetes_kubectl": str(kubectl), "kubernetes_kubeconfig": str(cluster.kubeconfig)}
    given |= {"health_kubernetes_timeout": 3, "gate_max_closed": "100%"}
    tasks = [
        {"ansible.builtin.import_role": {"name": "gpufarm.core.farm", "tasks_from": name, "rolespec_validate": False}}
        for name in ("kubernetes_before.yml", "kubernetes_gate.yml")
    ]
    play = [{"hosts": "kubernetes_nodes", "gather_facts": False, "tasks": tasks}]
    (tmp_path / "play.yml").write_text(json.dumps(play), encoding="utf-8")
    inventory = {"all": {"vars": given, "children": {"kubernetes_nodes": {"hosts": hosts}}}}
    try:
        result = playbook_helper.run_playbook(tmp_path, inventory, str(tmp_path / "play.yml"))
    finally:
        cluster.close()
    said = " ".join((result.stdout + result.stderr).split())
    assert (tmp_path / "kubectl.deleted").read_text(encoding="utf-8") == f"{farm.PLUGIN}-node00001\n"
    closed = [node["metadata"]["name"] for node in cluster.nodes if node["spec"].get("unschedulable")]
    assert result.returncode == 2 and closed == ["node00000", "node00001", "node00002"], said
    assert "timed out waiting for the condition on pods" in said and "Node node00001: found " in said, said


@pytest.mark.parametrize("name", ["kubernetes.yml", "kubernetes_verify.yml", "kubernetes_health.yml"])
def test_two_clusters_are_refused_before_any_host_is_asked(tmp_path: Path, name: str) -> None:
    """Hosts are asked once for all nodes of a play; those that name none are asked by themselves."""
    away = {"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 1, "ansible_ssh_retries": 0}
    hosts: dict[str, Any] = {host: {"kubernetes_api_host": host[0], **away} for host in ("a1", "a2", "b1")}
    inventory = {"all": {"children": {"kubernetes_nodes": {"hosts": {**hosts, "a": away}}}}}
    told = (
        "the nodes' cluster is asked by a, b. Expected: one host that asks it, once for all of them. Next step: name "
        "one in kubernetes_api_host where it is one cluster, and run this for each by itself, by --limit, where they "
        "are several."
    )
    result = playbook_helper.run_playbook(tmp_path, inventory, name)
    said = " ".join((result.stdout + result.stderr).split())
    assert result.returncode == 2 and told in said and "UNREACHABLE" not in said, said
    result = playbook_helper.run_playbook(tmp_path, inventory, name, "--limit", "a,a1,a2")
    said = " ".join((result.stdout + result.stderr).split())
    assert result.returncode != 0 and told not in said and "UNREACHABLE" in said, said
