# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Nodes and the GPUs that they have for pods, as the device plugin and GPU feature discovery tell them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypedDict

from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes.client import listing, mapping, text_of

DOMAIN = "nvidia.com/"
PLUGIN_GPU = "nvidia.com/gpu"
READY, NOT_READY, UNKNOWN = "ready", "not ready", "unknown"
# Names of the labels that this collection has set, so that they may go again.
MARK = "gpufarm.core/gpu-labels"
# What GPU feature discovery sets where it runs by itself.
TIMESTAMP = "nvidia.com/gfd.timestamp"


class Taint(TypedDict):
    key: str
    value: str | None
    effect: str


class Resource(TypedDict):
    """One kind of GPU of a node."""

    name: str
    mig_profile: str | None
    shared: bool
    replicas: int
    capacity: int
    allocatable: int
    used: int | None


class PodUse(TypedDict):
    namespace: str
    name: str
    phase: str
    gpus: dict[str, int]


class Node(TypedDict):
    """A node as far as GPUs need it; None is what nobody tells."""

    name: str
    id: str
    status: str
    schedulable: bool
    taints: list[Taint]
    kubelet_version: str | None
    labels: dict[str, str]
    annotations: dict[str, str]
    resource_version: str
    resources: list[Resource]
    gpus_capacity: int
    gpus_allocatable: int
    gpus_used: int | None
    product: str | None
    memory_mib: int | None
    driver_version: str | None
    mig_strategy: str | None
    pods: list[PodUse] | None


_GPU = re.compile(r"^nvidia\.com/(?:gpu|mig-([0-9a-z.+-]+?))(\.shared)?$")


_QUANTITY = re.compile(r"^([0-9]{1,12})(k|M|G)?$")
_UNITS = {None: 1, "k": 10**3, "M": 10**6, "G": 10**9}


def quantity(value: Any) -> int:
    """A number of devices, as Kubernetes writes quantities; 0 for what is none."""
    if isinstance(value, bool):
        return 0
    if isinstance(value, int):
        return max(0, value)
    match = _QUANTITY.match(value) if isinstance(value, str) else None
    return int(match[1]) * _UNITS[match[2]] if match else 0


def is_gpu(resource: str) -> bool:
    return _GPU.match(resource) is not None


def profile_key(profile: str) -> str:
    """A MIG profile as resources have it, where C(+) is not allowed: C(1g.10gb+me) is C(1g.10gb.me)."""
    return profile.replace("+", ".")


def model_key(model: str) -> str:
    """A model as GPU feature discovery writes it into a label: without what labels may not have, joined by hyphens."""
    return "-".join(re.sub(r"[^A-Za-z0-9\-_. ]", "", model).split())


def gpus_of(resources: Any) -> dict[str, int]:
    """The GPUs in a list of resources, by name."""
    return {name: quantity(value) for name, value in mapping(resources).items() if is_gpu(name)}


def _resources(status: Mapping[str, Any], labels: Mapping[str, str]) -> list[Resource]:
    capacity, allocatable = gpus_of(status.get("capacity")), gpus_of(status.get("allocatable"))
    found: list[Resource] = []
    for name in sorted({*capacity, *allocatable}):
        profile, suffix = _GPU.match(name).groups()  # type: ignore[union-attr]
        base = name[: -len(suffix)] if suffix else name
        # 0 where GPU feature discovery tells of GPUs that are divided.
        replicas = max(1, quantity(labels.get(f"{base}.replicas")))
        found.append(
            {
                "name": name,
                "mig_profile": profile,
                "shared": bool(suffix) or replicas > 1,
                "replicas": replicas,
                "capacity": capacity.get(name, 0),
                "allocatable": allocatable.get(name, 0),
                "used": None,
            }
        )
    # What a plugin no longer offers stays listed with 0, as after a change of the MIG layout.
    return [each for each in found if each["capacity"] or each["allocatable"]]


def _status(status: Mapping[str, Any]) -> str:
    for condition in listing(status.get("conditions")):
        if mapping(condition).get("type") == "Ready":
            return {"True": READY, "False": NOT_READY}.get(text_of(condition.get("status")), UNKNOWN)
    return UNKNOWN


def _driver(labels: Mapping[str, str]) -> str | None:
    whole = labels.get("nvidia.com/cuda.driver-version.full")
    if whole:
        return whole
    parts = [labels.get(f"nvidia.com/cuda.driver.{part}") for part in ("major", "minor", "rev")]
    return ".".join(part for part in parts if part) if parts[0] and parts[1] else None


def _product(labels: Mapping[str, str]) -> str | None:
    """The model's name in GPU feature discovery's form, less what it adds for MIG and for sharing."""
    label = labels.get("nvidia.com/gpu.product")
    return re.sub(r"(-MIG-.*)?(-SHARED)?$", "", label) or None if label else None


def profile_of_gpus(node: Node) -> str | None:
    """The MIG profile of what this node calls C(nvidia.com/gpu); empty for whole GPUs, None where nobody tells it.

    With the strategy C(single) MIG devices have the name of whole GPUs, and only the label of the model differs.
    """
    if node["mig_strategy"] not in (None, "single") or any(each["mig_profile"] for each in node["resources"]):
        return ""
    label = node["labels"].get("nvidia.com/gpu.product")
    if not label:
        return None
    match = re.search(r"-MIG-(.+?)(?:-SHARED)?$", label)
    return match[1] if match else ""


def devices(resource: Resource, key: str = "capacity") -> int:
    """How many GPUs or MIG devices these are, of which each may be offered more than once."""
    number: int = resource["capacity"] if key == "capacity" else resource["allocatable"]
    return number // resource["replicas"]


def may_be_shared(node: Node, number: int) -> bool:
    """Whether a node has a multiple of its GPUs, so that each may be offered more than once, and nobody tells that.

    GPU feature discovery, which does not run everywhere, always tells it.
    """
    names = [each["name"] for each in node["resources"]]
    told = any(f"{name.removesuffix('.shared')}.replicas" in node["labels"] for name in names)
    found = node["gpus_capacity"]
    return number > 0 and len(names) == 1 and not told and found > number and found % number == 0


def labelled_by_us(node: Node) -> bool:
    """Whether the labels are those of the last run, and nobody refreshes them by himself."""
    return MARK in node["annotations"] and TIMESTAMP not in node["labels"]


def describe_node(item: Mapping[str, Any]) -> Node:
    """One element of C(GET /api/v1/nodes); what is not as it should be is as if it were not there."""
    metadata, spec, status = (mapping(item.get(key)) for key in ("metadata", "spec", "status"))
    labels = {key: text_of(value) for key, value in mapping(metadata.get("labels")).items() if key.startswith(DOMAIN)}
    resources = _resources(status, labels)
    memory = quantity(labels.get("nvidia.com/gpu.memory"))
    return {
        "name": text_of(metadata.get("name")),
        "id": text_of(metadata.get("uid")),
        "status": _status(status),
        "schedulable": spec.get("unschedulable") is not True,
        "taints": [
            {
                "key": text_of(taint.get("key")),
                "value": text_of(taint.get("value")) or None,
                "effect": text_of(taint.get("effect")),
            }
            for taint in map(mapping, listing(spec.get("taints")))
            if taint
        ],
        "kubelet_version": text_of(mapping(status.get("nodeInfo")).get("kubeletVersion")) or None,
        "labels": dict(sorted(labels.items())),
        "annotations": {
            key: value for key, value in mapping(metadata.get("annotations")).items() if isinstance(value, str)
        },
        "resource_version": text_of(metadata.get("resourceVersion")),
        "resources": resources,
        "gpus_capacity": sum(devices(each) for each in resources),
        "gpus_allocatable": sum(devices(each, "allocatable") for each in resources),
        "gpus_used": None,
        "product": _product(labels),
        "memory_mib": memory or None,
        "driver_version": _driver(labels),
        "mig_strategy": labels.get("nvidia.com/mig.strategy") or None,
        "pods": None,
    }
