# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Who uses how many GPUs, and how many each may."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypedDict

from ansible_collections.gpufarm.core.plugins.module_utils.nomad.nodes import Node

BUDGET_KEY = "gpufarm_gpus"
"""In the meta of a namespace: the GPUs that its jobs may use at a time, as nomad_tenancy writes it."""


class NamespaceUse(TypedDict):
    """GPUs that its jobs hold, and how many they may; None without a budget."""

    namespace: str
    gpus: int
    budget: int | None


class JobUse(TypedDict):
    namespace: str
    job_id: str
    gpus: int


class NodePoolUse(TypedDict):
    node_pool: str
    nodes: int
    gpus: int | None
    gpus_used: int


class Usage(TypedDict):
    """GPUs that allocations hold; a MIG device counts as one, as it does for Nomad's scheduler."""

    namespaces: list[NamespaceUse]
    jobs: list[JobUse]
    node_pools: list[NodePoolUse]


def budget_of(namespace: Mapping[str, Any]) -> int | None:
    """The budget of one element of C(GET /v1/namespaces); None where it has none."""
    value = str((namespace.get("Meta") or {}).get(BUDGET_KEY, ""))
    return int(value) if re.fullmatch("[0-9]{1,9}", value) else None


def usage_of(
    held: Mapping[tuple[str, str], Mapping[str, Any]],
    nodes: Collection[Node],
    namespaces: Iterable[Mapping[str, Any]],
    with_gpus: bool,
) -> Usage:
    """The use of these nodes' GPUs, of which C(held) has node IDs and UUIDs as C(devices_in_use) tells them.

    Without C(with_gpus) the nodes do not say what they have.
    """
    pools = {node["id"]: node["node_pool"] or "default" for node in nodes}
    here = [(node_id, allocation) for (node_id, _uuid), allocation in held.items() if node_id in pools]
    by_job = Counter((str(each["namespace"]), str(each["job_id"])) for _node_id, each in here)
    by_pool = Counter(pools[node_id] for node_id, _each in here)
    by_namespace: Counter[str] = Counter()
    for (namespace, _job), gpus in by_job.items():
        by_namespace[namespace] += gpus
    budgets = {str(each.get("Name")): budget_of(each) for each in namespaces}
    there = Counter(pools.values())
    gpus_of_pool: Counter[str] = Counter()
    for node in nodes:
        gpus_of_pool[pools[node["id"]]] += len(node["gpus"])
    return {
        "namespaces": [
            {"namespace": name, "gpus": by_namespace[name], "budget": budgets.get(name)}
            for name in sorted({*budgets, *by_namespace})
        ],
        "jobs": [
            {"namespace": namespace, "job_id": job, "gpus": gpus}
            for (namespace, job), gpus in sorted(by_job.items(), key=lambda item: (-item[1], item[0]))
        ],
        "node_pools": [
            {
                "node_pool": pool,
                "nodes": there[pool],
                "gpus": gpus_of_pool[pool] if with_gpus else None,
                "gpus_used": by_pool[pool],
            }
            for pool in sorted(there)
        ],
    }
