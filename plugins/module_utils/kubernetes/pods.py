# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which pods hold GPUs, and which of a node's pods are its work."""

from __future__ import annotations

import dataclasses
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


@dataclasses.dataclass(frozen=True)
class Work:
    """A pod that runs on a node and can run elsewhere: none of a DaemonSet's, none that the kubelet has by itself."""

    namespace: str
    name: str
    uid: str
    gpus: int
    ends: bool
    """Whether it may end by itself, as that of a Job or a PyTorchJob does, or is one that nothing would start again."""
    ending: bool
    """Whether it has been told to end."""

    def __str__(self) -> str:
        gpus = f" ({self.gpus} GPU{'s' * (self.gpus > 1)})" if self.gpus else ""
        return f"{self.namespace}/{self.name}{gpus}"


MIRROR = "kubernetes.io/config.mirror"


def _controller(metadata: Mapping[str, Any]) -> str:
    """The kind of what starts a pod anew when it is gone, empty where nothing does."""
    owners = map(mapping, listing(metadata.get("ownerReferences")))
    return next((text_of(owner.get("kind")) for owner in owners if owner.get("controller") is True), "")


def work_of(pods: Iterable[Mapping[str, Any]]) -> list[Work]:
    """What runs on a node and ends with it, by namespace and name."""
    found = []
    for pod in pods:
        metadata, spec, status = (mapping(pod.get(key)) for key in ("metadata", "spec", "status"))
        owner = _controller(metadata)
        if owner == "DaemonSet" or MIRROR in mapping(metadata.get("annotations")):
            continue
        if text_of(status.get("phase")) not in ENDED:
            found.append(
                Work(
                    namespace=text_of(metadata.get("namespace")),
                    name=text_of(metadata.get("name")),
                    uid=text_of(metadata.get("uid")),
                    gpus=sum(gpus_of_pod(spec).values()),
                    # What keeps its pods running, such as a ReplicaSet, has none of another policy; KubeVirt has, and
                    # moves the machine when its pod is to leave.
                    ends=not owner
                    or (
                        owner != "VirtualMachineInstance"
                        and text_of(spec.get("restartPolicy")) in ("Never", "OnFailure")
                    ),
                    ending=bool(metadata.get("deletionTimestamp")),
                )
            )
    return sorted(found, key=lambda work: (work.namespace, work.name))
