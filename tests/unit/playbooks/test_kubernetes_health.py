# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What kubernetes_health.yml makes of nodes that it reaches and of others; the rest is in the scenario kubernetes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
