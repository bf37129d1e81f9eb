# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The GPUs that Nomad reports, and which allocation holds them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

from ansible_collections.gpufarm.core.plugins.module_utils.pci import normal_bus_id

GPU_DEVICE_TYPE = "gpu"


_MEBIBYTE = 1 << 20


_BYTES = {
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
}


def attribute_value(attribute: Any) -> Any:
    """The value in Nomad's C({"Int": ..., "Unit": ...}) form; None where there is none."""
    if isinstance(attribute, dict):
        for kind in ("Int", "Float", "String", "Bool"):
            if attribute.get(kind) is not None:
                return attribute[kind]
    return None


def mebibytes(attribute: Any) -> int | None:
    """A memory attribute in MiB, whatever its unit is; without a unit it counts as MiB, as the plugin means it."""
    value = attribute_value(attribute)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    unit = attribute.get("Unit") or "MiB"
    if unit not in _BYTES:
        return None
    return int(value * _BYTES[unit] // _MEBIBYTE)


class Gpu(TypedDict):
    """A GPU, or a MIG device, as Nomad lists it."""

    uuid: str
    model: str
    vendor: str
    type: str
    device_id: str
    memory_mib: int | None
    driver_version: str | None
    mig: bool
    mig_profile: str | None
    healthy: bool
    health_description: str | None
    pci_bus_id: str | None
    numa_node: int | None


class Node(TypedDict):
    """A node as far as GPUs need it."""

    id: str
    name: str
    address: str | None
    status: str
    eligibility: str
    drain: bool
    datacenter: str
    node_pool: str | None
    node_class: str | None
    version: str | None
    create_index: int
    modify_index: int
    gpus: list[Gpu]


_MIG_PROFILE = re.compile(r"\bMIG (\S+)")


def gpus_of_node(node: Mapping[str, Any]) -> list[Gpu]:
    """The GPUs of one element of C(GET /v1/nodes?resources=true), or of C(GET /v1/node/:id); what is not known is None.

    Attributes belong to a group of devices: Nomad's plugin takes them from the first GPU of each model.
    """
    resources = node.get("NodeResources") or {}
    groups = resources.get("Devices")
    if not groups:
        return []
    numa_nodes = _numa_nodes(resources)
    gpus: list[Gpu] = []
    for group in groups:
        if not group or group.get("Type") != GPU_DEVICE_TYPE:
            continue
        attributes = group.get("Attributes") or {}
        vendor, model = group.get("Vendor") or "", group.get("Name") or ""
        profile = _MIG_PROFILE.search(model)
        driver = attribute_value(attributes.get("driver_version"))
        memory_mib = mebibytes(attributes.get("memory"))
        for instance in group.get("Instances") or []:
            if not instance:
                continue
            uuid = instance.get("ID") or ""
            bus = (instance.get("Locality") or {}).get("PciBusID") or None
            gpus.append(
                {
                    "uuid": uuid,
                    "model": model,
                    "vendor": vendor,
                    "type": GPU_DEVICE_TYPE,
                    "device_id": f"{vendor}/{GPU_DEVICE_TYPE}/{model}",
                    "memory_mib": memory_mib,
                    "driver_version": None if driver is None else str(driver),
                    "mig": uuid.startswith("MIG-"),
                    "mig_profile": profile.group(1) if profile else None,
                    "healthy": bool(instance.get("Healthy")),
                    "health_description": instance.get("HealthDescription") or None,
                    "pci_bus_id": bus,
                    "numa_node": numa_nodes.get(normal_bus_id(bus)),
                }
            )
    return gpus


def _numa_nodes(resources: Mapping[str, Any]) -> dict[str | None, int]:
    """PCI address to NUMA node, where the agent reports it."""
    topology = (resources.get("Processors") or {}).get("Topology") or {}
    numa_nodes = {normal_bus_id(bus): numa for bus, numa in (topology.get("BusAssociativity") or {}).items()}
    return {bus: numa for bus, numa in numa_nodes.items() if bus}


def describe_node(node: Mapping[str, Any]) -> Node:
    """What nomad_gpu_info returns for one element of C(GET /v1/nodes?resources=true)."""
    return {
        "id": node.get("ID") or "",
        "name": node.get("Name") or "",
        "address": node.get("Address") or None,
        "status": node.get("Status") or "",
        "eligibility": node.get("SchedulingEligibility") or "",
        "drain": bool(node.get("Drain")),
        "datacenter": node.get("Datacenter") or "",
        "node_pool": node.get("NodePool") or None,
        "node_class": node.get("NodeClass") or None,
        "version": node.get("Version") or None,
        "create_index": int(node.get("CreateIndex") or 0),
        "modify_index": int(node.get("ModifyIndex") or 0),
        "gpus": gpus_of_node(node),
    }


def lives(node: Node) -> bool:
    """Whether its client is there. One that is away and has allocations that wait for it is disconnected."""
    return node["status"] not in ("down", "disconnected")


def rank(node: Node) -> tuple[bool, bool, int]:
    """The greatest of several nodes with one name is the one that counts.

    A client that lost its data registers anew, and its former self stays listed as down for a day.
    """
    return lives(node), node["status"] != "down", node["create_index"]


ALLOCATIONS_QUERY = {
    "resources": "true",
    "task_states": "false",
    # What has ended on its client holds no device any more.
    "filter": 'ClientStatus == "running" or ClientStatus == "pending" or ClientStatus == "unknown"',
}


ENDED = ("complete", "failed", "lost")
JOBS_OWNER_KEY = "gpufarm_owner"
"""Who keeps a job, in the meta of it."""


def owner_of(job: Mapping[str, Any]) -> str | None:
    """Who keeps a job; None for what one has dispatched, too, which has its meta and goes on without the owner."""
    return None if job.get("ParentID") else (job.get("Meta") or {}).get(JOBS_OWNER_KEY)


def devices_in_use(allocations: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """Node ID and UUID of a GPU to the allocation that holds it, from C(GET /v1/allocations?resources=true)."""
    held: dict[tuple[str, str], dict[str, Any]] = {}
    for allocation in allocations:
        if allocation.get("ClientStatus") in ENDED:
            continue
        tasks = (allocation.get("AllocatedResources") or {}).get("Tasks") or {}
        for task, resources in tasks.items():
            for device in (resources or {}).get("Devices") or []:
                if not device or device.get("Type") != GPU_DEVICE_TYPE:
                    continue
                for uuid in device.get("DeviceIDs") or []:
                    held[allocation.get("NodeID") or "", uuid] = {
                        "id": allocation.get("ID"),
                        "namespace": allocation.get("Namespace"),
                        "job_id": allocation.get("JobID"),
                        "task_group": allocation.get("TaskGroup"),
                        "task": task,
                        "client_status": allocation.get("ClientStatus"),
                    }
    return held
