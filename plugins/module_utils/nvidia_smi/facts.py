# Copyright (c) gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The shape of the facts: which keys a GPU has, and which subset asks for them."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, cast

SUBSETS: dict[str, tuple[str, ...]] = {
    "min": (
        "serial",
        "architecture",
        "minor_number",
        "memory_total_mib",
        "memory_used_mib",
        "persistence_mode",
        "compute_mode",
        "mig_mode",
        "mig_mode_pending",
    ),
    "mig": ("mig_devices",),
    "topology": ("numa_node", "cpu_affinity", "pci_root"),
    "nvlink": ("nvlinks",),
    "peers": ("nvlink_peers",),
    "board": (
        "brand",
        "board_part_number",
        "vbios_version",
        "gsp_firmware_version",
        "virtualization_mode",
        "vgpu_licensed_product",
        "vgpu_license_status",
        "addressing_mode",
        "c2c_mode",
        "driver_model",
        "inforom_corrupted",
    ),
    "memory": ("memory_free_mib", "memory_reserved_mib", "bar1_total_mib", "bar1_used_mib"),
    "power": ("power_draw_w", "power_limit_w", "power_limit_enforced_w", "power_limit_default_w"),
    "temperature": ("temperature_gpu_c", "temperature_memory_c", "temperature_limits"),
    "utilization": ("utilization_gpu_percent", "utilization_memory_percent"),
    "ecc": ("ecc", "recovery_action"),
    "clocks": ("performance_state", "clocks", "clocks_event_reasons", "clocks_event_reasons_counters"),
    "pcie": ("pcie",),
    "fabric": ("fabric_state", "fabric_status", "fabric_health"),
    "processes": ("processes",),
}


DEFAULT_SUBSETS = ("min", "mig", "topology")


# These come from the listing call, from sysfs or from a call of their own; every other one needs -q -x.
WITHOUT_XML = frozenset(("min", "mig", "topology", "nvlink", "peers"))


# A GPU is always named, whatever was gathered.
IDENTITY_KEYS = ("index", "name", "uuid", "pci_bus_id", "status", "status_message", "sensors_failed")


class TemperatureLimits(TypedDict):
    slowdown_c: int | None
    shutdown_c: int | None
    memory_max_c: int | None
    margin_c: int | None
    slowdown_margin_c: int | None
    shutdown_margin_c: int | None


class EccCounts(TypedDict):
    volatile: int | None
    aggregate: int | None


class RemappedRows(TypedDict):
    corrected: int | None
    uncorrected: int | None
    pending: bool | None
    failure: bool | None


class RetiredPages(TypedDict):
    single_bit: int | None
    double_bit: int | None
    pending: bool | None


class Ecc(TypedDict):
    mode: str | None
    mode_pending: str | None
    corrected: EccCounts
    uncorrected: EccCounts
    sram_threshold_exceeded: bool | None
    unrepairable_memory: bool | None
    channel_repair_pending: bool | None
    tpc_repair_pending: bool | None
    remapped_rows: RemappedRows
    retired_pages: RetiredPages
    pending: bool | None


class Clocks(TypedDict):
    graphics_mhz: int | None
    sm_mhz: int | None
    memory_mhz: int | None
    graphics_max_mhz: int | None
    sm_max_mhz: int | None
    memory_max_mhz: int | None


class ClocksEventReasonsCounters(TypedDict):
    sw_power_cap_us: int | None
    sync_boost_us: int | None
    sw_thermal_slowdown_us: int | None
    hw_thermal_slowdown_us: int | None
    hw_power_brake_slowdown_us: int | None


class Pcie(TypedDict):
    generation_current: int | None
    generation_max: int | None
    generation_device_max: int | None
    generation_host_max: int | None
    width_current: int | None
    width_max: int | None
    replay_count: int | None


class FabricHealth(TypedDict):
    summary: str | None
    bandwidth: str | None
    route_recovery_in_progress: str | None
    route_unhealthy: str | None
    access_timeout_recovery: str | None
    incorrect_configuration: str | None


class MigDevice(TypedDict):
    index: int | None
    uuid: str | None
    profile: str | None
    gpu_instance_id: int | None
    compute_instance_id: int | None
    memory_total_mib: int | None


class NvLink(TypedDict):
    link: int
    active: bool
    speed_gb_per_s: float | None
    replay_errors: int | None
    recovery_errors: int | None
    crc_errors: int | None


class NvLinkPeer(TypedDict):
    index: int
    links: int


MPS_SERVER = "nvidia-cuda-mps-server"


class Process(TypedDict):
    pid: int | None
    type: str | None
    name: str | None
    cpu_affinity: str | None
    memory_used_mib: int | None
    gpu_instance_id: int | None
    compute_instance_id: int | None


class Gpu(TypedDict):
    """One GPU, in the order in which it is told; None is what was not asked for, or is not known."""

    index: int | None
    name: str | None
    uuid: str | None
    pci_bus_id: str | None
    status: str
    status_message: str | None
    sensors_failed: list[str] | None
    serial: str | None
    architecture: str | None
    minor_number: int | None
    memory_total_mib: int | None
    memory_used_mib: int | None
    persistence_mode: str | None
    compute_mode: str | None
    mig_mode: str | None
    mig_mode_pending: str | None
    mig_devices: list[MigDevice] | None
    numa_node: int | None
    cpu_affinity: str | None
    pci_root: str | None
    nvlinks: list[NvLink] | None
    nvlink_peers: list[NvLinkPeer] | None
    brand: str | None
    board_part_number: str | None
    vbios_version: str | None
    gsp_firmware_version: str | None
    virtualization_mode: str | None
    vgpu_licensed_product: str | None
    vgpu_license_status: str | None
    addressing_mode: str | None
    c2c_mode: str | None
    driver_model: str | None
    inforom_corrupted: bool | None
    memory_free_mib: int | None
    memory_reserved_mib: int | None
    bar1_total_mib: int | None
    bar1_used_mib: int | None
    power_draw_w: float | None
    power_limit_w: float | None
    power_limit_enforced_w: float | None
    power_limit_default_w: float | None
    temperature_gpu_c: int | None
    temperature_memory_c: int | None
    temperature_limits: TemperatureLimits
    utilization_gpu_percent: int | None
    utilization_memory_percent: int | None
    ecc: Ecc
    recovery_action: str | None
    performance_state: str | None
    clocks: Clocks
    clocks_event_reasons: list[str] | None
    clocks_event_reasons_counters: ClocksEventReasonsCounters
    pcie: Pcie
    fabric_state: str | None
    fabric_status: str | None
    fabric_health: FabricHealth
    processes: list[Process] | None


class Answer(TypedDict):
    """What one call said of the driver and of its GPUs."""

    driver_version: str | None
    cuda_version: str | None
    attached_gpus: int | None
    gpus: list[Gpu]


class Facts(TypedDict):
    """What C(nvidia_smi) holds of a node."""

    available: bool
    reason: str | None
    message: str | None
    platform: str | None
    driver_version: str | None
    kernel_modules: str | None
    cuda_version: str | None
    gpus: list[Gpu]


_NESTED = {
    record.__name__: record
    for record in (
        TemperatureLimits, EccCounts, RemappedRows, RetiredPages, Ecc, Clocks, ClocksEventReasonsCounters, Pcie,
        FabricHealth,
    )
}  # fmt: skip


def computes(process: Mapping[str, Any], only: bool = False) -> bool:
    """Whether a process holds its GPU for computing, itself (C) or by MPS (M), which one does whose type is not told.

    With C(only) whether it is known to do nothing else, and that for somebody: a browser and a desktop draw as well
    (C+G), and the server of MPS stays when its last client (M+C) has gone.
    """
    kinds = set(str(process.get("type") or ("G" if only else "C")).split("+"))
    return kinds <= {"C", "M"} and not serves_mps(process) if only else not kinds.isdisjoint({"C", "M"})


def serves_mps(process: Mapping[str, Any]) -> bool:
    """Whether a process is the server of MPS, which computes for its clients."""
    return posixpath.basename(str(process.get("name") or "")) == MPS_SERVER


def _empty(record: type) -> dict[str, Any]:
    kinds = ((key, _NESTED.get(kind.__forward_arg__)) for key, kind in record.__annotations__.items())
    return {key: _empty(kind) if kind else None for key, kind in kinds}


def empty_gpu() -> Gpu:
    """Every key that a GPU's facts have, nothing known yet."""
    gpu = cast(Gpu, _empty(Gpu))
    gpu["status"] = "ok"
    return gpu


def empty_facts(platform: str | None = None) -> Facts:
    return {
        "available": False,
        "reason": None,
        "message": None,
        "platform": platform,
        "driver_version": None,
        "kernel_modules": None,
        "cuda_version": None,
        "gpus": [],
    }


def resolve_subsets(requested: Sequence[str]) -> frozenset[str]:
    """The subsets to gather, by the rules of ansible.builtin.setup: C(min) unless C(!min), all when only excluding."""
    added: set[str] = set()
    named: set[str] = set()
    excluded: set[str] = set()
    for item in requested:
        name = item[1:] if item.startswith("!") else item
        if name != "all" and name not in SUBSETS:
            known = ", ".join(["all", *SUBSETS])
            raise ValueError(f"gather_subset has {item!r}; expected one of {known}, each with or without '!'.")
        if item.startswith("!"):
            excluded.update(set(SUBSETS) - {"min"} if name == "all" else (name,))
        elif name == "all":
            added.update(SUBSETS)
        else:
            named.add(name)
    if not added and not named:
        added.update(SUBSETS)
    # Naming a subset outranks excluding all of them, but not excluding that one by name.
    explicit = {item[1:] for item in requested if item.startswith("!")}
    chosen = (added - excluded) | (named - explicit)
    if "min" not in explicit:
        chosen.add("min")
    return frozenset(chosen)


def keep_subsets(gpu: Gpu, subsets: frozenset[str]) -> Gpu:
    """The GPU with only what was asked for: one source gives more than that, and null has to mean one thing."""
    wanted = set(IDENTITY_KEYS)
    for subset in subsets:
        wanted.update(SUBSETS[subset])
    kept = empty_gpu()
    return cast(Gpu, {**kept, **{key: value for key, value in gpu.items() if key in wanted}})
