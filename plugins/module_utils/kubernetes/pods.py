# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which pods hold GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes.client import listing, mapping, text_of
from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes.nodes import Node, PodUse, gpus_of

# A pod that has ended holds nothing, though it stays listed.
ENDED = ("Succeeded", "Failed")
NOT_ENDED = "status.phase!=Succeeded,status.phase!=Failed"


def gpus_of_pod(spec: Mapping[str, Any]) -> dict[str, int]:
    """How many GPUs of each kind a pod holds, as Kubernetes' scheduler counts them.

    Its containers together, or the greatest need of one that runs before them, whatever is more. One that is started
    before and goes on (C(restartPolicy: Always)) counts beside all that come later.
    """
    beside: Counter[str] = Counter()
    before: Counter[str] = Counter()
    for container in map(mapping, listing(spec.get("initContainers"))):
        need = Counter(_requests(container)) + beside
        if container.get("restartPolicy") == "Always":
            beside = need
        before |= need
    together = sum((Counter(_requests(each)) for each in map(mapping, listing(spec.get("containers")))), beside)
    return {name: number for name, number in sorted((together | before).items()) if number}


def _requests(container: Mapping[str, Any]) -> dict[str, int]:
    resources = mapping(container.get("resources"))
    # Of such resources both are the same, and the apiserver writes the request where only the limit is given.
    return {**gpus_of(resources.get("limits")), **gpus_of(resources.get("requests"))}


def pod_uses(pods: Iterable[Mapping[str, Any]]) -> dict[str, list[PodUse]]:
    """Node to the pods on it that hold GPUs, from C(GET /api/v1/pods)."""
    found: dict[str, dict[tuple[str, str], PodUse]] = {}
    for pod in pods:
        metadata, spec, status = (mapping(pod.get(key)) for key in ("metadata", "spec", "status"))
        node, phase = text_of(spec.get("nodeName")), text_of(status.get("phase"))
        gpus = gpus_of_pod(spec)
        if node and gpus and phase not in ENDED:
            namespace, name = text_of(metadata.get("namespace")), text_of(metadata.get("name"))
            use: PodUse = {"namespace": namespace, "name": name, "phase": phase or "Unknown", "gpus": gpus}
            found.setdefault(node, {})[namespace, name] = use
    return {node: [uses[key] for key in sorted(uses)] for node, uses in found.items()}


def with_uses(node: Node, uses: Iterable[PodUse]) -> Node:
    """The node with what pods hold on it."""
    pods = list(uses)
    used = sum((Counter(pod["gpus"]) for pod in pods), Counter[str]())
    resources = [{**each, "used": used[each["name"]]} for each in node["resources"]]
    return {**node, "resources": resources, "gpus_used": sum(used.values()), "pods": pods}  # type: ignore[typeddict-item]
