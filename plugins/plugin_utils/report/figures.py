# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is counted over all nodes: the summary, versions that differ, MIG."""

from __future__ import annotations

from collections import Counter, defaultdict

from ansible_collections.gpufarm.core.plugins.plugin_utils.report.nodes import is_mig
from ansible_collections.gpufarm.core.plugins.plugin_utils.report.records import (
    VERDICTS,
    Drift,
    DriftField,
    Gpu,
    Mig,
    MigGpu,
    Node,
    Summary,
)
from ansible_collections.gpufarm.core.plugins.plugin_utils.report.sums import known_numbers, mean, natural_key, total


def summary_of(nodes: list[Node], with_nomad: bool, with_kubernetes: bool) -> Summary:
    gpus = [gpu for node in nodes for gpu in node["gpus"]]
    verdicts = Counter(gpu["verdict"] for gpu in gpus)
    node_verdicts = Counter(node["verdict"] for node in nodes)
    utilization = known_numbers(gpu["utilization_gpu_percent"] for gpu in gpus)
    power = known_numbers(gpu["power_draw_w"] for gpu in gpus)
    expected = known_numbers(node["gpus_expected"] for node in nodes)
    return {
        "nodes": len(nodes),
        "nodes_answered": sum(1 for node in nodes if node["state"] == "answered"),
        "nodes_unanswered": sum(1 for node in nodes if node["state"] != "answered"),
        "gpus": len(gpus),
        "allocatable_gpus": sum(
            1 for node in nodes for gpu in node["gpus"] if node["in_kubernetes"] or not gpu["hidden"]
        ),
        "gpus_expected": int(sum(expected)) if expected else None,
        "gpus_expected_nodes": len(expected),
        "verdicts": {verdict: verdicts[verdict] for verdict in VERDICTS},
        "node_verdicts": {verdict: node_verdicts[verdict] for verdict in VERDICTS},
        "mig_devices": sum(len(gpu["mig_devices"]) for gpu in gpus),
        "allocated_gpus": round(sum(known_numbers(gpu["allocated_share"] for gpu in gpus)), 2) if with_nomad else None,
        "pod_gpus": _pod_gpus(nodes) if with_kubernetes else None,
        "utilization_percent": mean(utilization),
        "utilization_gpus": len(utilization),
        "power_draw_w": total(power),
        "power_gpus": len(power),
        "memory_used_mib": total(gpu["memory_used_mib"] for gpu in gpus),
        "memory_total_mib": total(gpu["memory_total_mib"] for gpu in gpus),
    }


def _pod_gpus(nodes: list[Node]) -> int | None:
    used = [node["kubernetes"]["gpus_used"] for node in nodes if node["state"] == "answered" and node["kubernetes"]]
    known = [number for number in used if number is not None]
    return sum(known) if len(known) == len(used) else None


DRIFT_FIELDS = ("driver_version", "cuda_version", "vbios_version", "gsp_firmware_version", "nomad_driver_version")


def drift_of(nodes: list[Node]) -> list[Drift]:
    groups: dict[tuple[str, str], list[tuple[Node, Gpu]]] = defaultdict(list)
    for node in nodes:
        for gpu in node["gpus"]:
            if node["state"] == "answered":
                groups[node["platform"] or "unknown", gpu["model"] or "unknown"].append((node, gpu))
    found: list[Drift] = []
    for (platform, model), members in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])):
        fields: list[DriftField] = []
        for field in DRIFT_FIELDS:
            holders: dict[str, list[str]] = defaultdict(list)
            for node, gpu in members:
                value = {**node, **gpu}[field]
                if value is not None:
                    holders[str(value)].append(node["name"])
            # Of two equally frequent versions the newer one is called the majority: it is where the farm goes.
            ordered = sorted(holders, key=natural_key, reverse=True)
            ordered.sort(key=lambda value: -len(holders[value]))
            fields.append(
                {
                    "field": field,
                    "agrees": len(holders) <= 1,
                    "majority": ordered[0] if ordered else None,
                    "values": [
                        {"value": value, "gpus": len(holders[value]), "nodes": list(dict.fromkeys(holders[value]))}
                        for value in ordered
                    ],
                    "unknown_gpus": len(members) - sum(len(names) for names in holders.values()),
                }
            )
        names = {node["name"] for node, _gpu_ in members}
        found.append(
            {"platform": platform, "model": model, "gpus": len(members), "nodes": len(names), "fields": fields}
        )
    return found


def mig_of(nodes: list[Node], with_nomad: bool) -> Mig:
    gpus: list[MigGpu] = []
    profiles: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for node in nodes:
        for gpu in node["gpus"]:
            pending = gpu["mig_mode_pending"] not in (None, gpu["mig_mode"])
            if not (is_mig(gpu) or pending or gpu["mig_devices"]):
                continue
            gpus.append(
                {
                    "node": node["name"],
                    "index": gpu["index"],
                    "model": gpu["model"],
                    "mode": gpu["mig_mode"],
                    "pending": gpu["mig_mode_pending"] if pending else None,
                    "devices": gpu["mig_devices"],
                }
            )
            for device in gpu["mig_devices"]:
                key = (gpu["model"] or "unknown", device["profile"] or "not told")
                profiles[key].append(bool(device["allocation"]))
    return {
        "gpus": gpus,
        "profiles": [
            {
                "model": model,
                "profile": profile,
                "devices": len(held),
                "allocated": sum(held) if with_nomad else None,
            }
            for (model, profile), held in sorted(profiles.items())
        ],
    }
