# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Who uses the GPUs."""

from __future__ import annotations

import posixpath
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi.facts import computes
from ansible_collections.gpufarm.core.plugins.plugin_utils.report.nodes import (
    Cluster,
    NomadView,
    may_have_pods,
    shares_of,
)
from ansible_collections.gpufarm.core.plugins.plugin_utils.report.records import (
    Gpu,
    JobUse,
    NamespaceUse,
    Node,
    PodUse,
    ProgramUse,
    Users,
)
from ansible_collections.gpufarm.core.plugins.plugin_utils.report.sums import mean, natural_key, total


def namespaces_of(views: Mapping[str, NomadView]) -> list[NamespaceUse]:
    """The use of each namespace, those that are over their budgets first."""
    found: list[NamespaceUse] = [
        {"region": region, **use}
        for region, view in views.items()
        for use in view.namespaces
        if use["gpus"] or use["budget"] is not None
    ]
    return sorted(found, key=lambda use: (not is_over(use), use["namespace"], use["region"]))


def is_over(use: NamespaceUse) -> bool:
    return use["budget"] is not None and use["gpus"] > use["budget"]


def pods_of(nodes: list[Node], cluster: Cluster | None) -> list[PodUse]:
    """The pods that hold GPUs of the whole cluster, by the names of hosts where the inventory has them."""
    hosts = {node["kubernetes"]["name"]: node["name"] for node in nodes if node["kubernetes"]}
    found: list[PodUse] = [
        {
            "node": hosts.get(listed["name"], listed["name"]),
            "namespace": pod["namespace"],
            "pod": pod["name"],
            "phase": pod["phase"],
            "gpus": sum(pod["gpus"].values()),
        }
        for listed in (cluster.nodes if cluster else None) or []
        for pod in listed["pods"] or []
    ]
    return sorted(found, key=lambda use: (-use["gpus"], use["namespace"], use["pod"]))


def users_of(nodes: list[Node], views: Mapping[str, NomadView], cluster: Cluster | None) -> Users:
    jobs: dict[tuple[str | None, str, str], list[tuple[str, Gpu, dict[str, Any]]]] = defaultdict(list)
    outside: dict[str, list[tuple[str, str, int | None]]] = defaultdict(list)
    for node in nodes:
        for gpu in node["gpus"]:
            for held in gpu["allocations"]:
                key = (node["region"], str(held.get("namespace")), str(held.get("job_id")))
                jobs[key].append((node["name"], gpu, held))
            if not gpu["allocations"] and not may_have_pods(node):
                for process in gpu["processes"] or []:
                    # Displays draw on every gaming PC; only what computes alone uses the farm.
                    if computes(process, only=True):
                        program = posixpath.basename(str(process.get("name") or "").replace("\\", "/")) or "not told"
                        name = str(gpu["uuid"] or gpu["pci_bus_id"])
                        outside[program].append((node["name"], name, process.get("memory_used_mib")))
    found: list[JobUse] = []
    for (region, namespace, job), uses in jobs.items():
        whole = {str(gpu["uuid"]): gpu for _node_, gpu, _held in uses if not gpu["mig_devices"]}
        shares = [_share_of(gpu, allocation) for _node_, gpu, allocation in uses]
        found.append(
            {
                "region": region,
                "namespace": namespace,
                "job_id": job,
                "devices": len(uses),
                "gpus": round(sum(shares), 2),
                "models": sorted({str(gpu["model"]) for _node_, gpu, _held in uses}),
                "nodes": sorted({name for name, _gpu_, _held in uses}, key=natural_key),
                "allocations": len({allocation.get("id") for _node_, _gpu_, allocation in uses}),
                "utilization_percent": mean(gpu["utilization_gpu_percent"] for gpu in whole.values()),
                "power_draw_w": total(gpu["power_draw_w"] for gpu in whole.values()),
            }
        )
    found.sort(key=lambda use: (-use["gpus"], -use["devices"], use["namespace"], use["job_id"], str(use["region"])))
    programs: list[ProgramUse] = [
        {
            "program": program,
            "gpus": len({key for _node_, key, _memory in used}),
            "memory_used_mib": total(memory for _node_, _key, memory in used),
            "nodes": sorted({name for name, _key, _memory in used}, key=natural_key),
        }
        for program, used in outside.items()
    ]
    return {
        "namespaces": namespaces_of(views),
        "jobs": found,
        "pods": pods_of(nodes, cluster),
        "outside": sorted(programs, key=lambda entry: (-entry["gpus"], entry["program"])),
    }


def _share_of(gpu: Gpu, allocation: Mapping[str, Any]) -> float:
    """What one allocation's device is of its GPU."""
    shares = zip(shares_of(gpu["mig_devices"]), gpu["mig_devices"], strict=True)
    own = [share for share, device in shares if device["allocation"] == allocation]
    # Two devices of one task are two entries here, each of which stands for its part.
    return sum(own) / len(own) if own else 1.0
