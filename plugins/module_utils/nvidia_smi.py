# Copyright (c) gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What nvidia-smi says about a node's GPUs, as plain data.

Pure parsers (C(parse_*), C(merge_*)) turn text into dictionaries and never touch the machine; C(collect) runs
nvidia-smi and puts their results together. Nothing here needs Ansible, and nothing beyond Python's standard library.

Which call answers which question, and why
    C(nvidia-smi -q -x) reads every sensor of every GPU: about 0.1 s a GPU, 0.40 s on a host with four H200. The listing
    calls C(-L) and C(--query-gpu) cost about 0.014 s a GPU there. So the facts that playbooks branch on (subset C(min):
    identity, memory, modes, driver version) come from one C(--query-gpu) call with only cheap fields, and C(-q -x) runs
    when a subset was asked for that needs it, instead of the listing call and never in addition to it.
    What no call on that path gives is read where it is free: the minor number from /proc/driver/nvidia, NUMA node and
    CPU affinity from sysfs (C(topo -m) would cost a quarter of C(-q -x)).
    Calls that are needed besides the main one run at the same time as it, so they add little to the wall time:
    C(--version) for the CUDA version of the listing path, C(-L) for UUIDs and profiles of MIG devices (in the XML of
    few drivers only) when the kernel shows MIG instances, C(nvlink -s) when asked for. Only the main call may fail the
    gathering; the others leave their facts null.

    C(--query-gpu) refuses a field that the driver does not know with exit code 2 before it asks any GPU, naming the
    field: the call is repeated without it. Such old drivers pay for one more initialisation of NVML, others nothing.

Reading the XML
    The document is read with expat itself rather than with ElementTree: entity declarations can then be refused before
    anything expands (a document type with an internal subset is never what nvidia-smi writes), the list of supported
    clocks, two thirds of the text, is skipped, and there is one import less.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ansible_collections.gpufarm.core.plugins.module_utils.text import clean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    Runner = Callable[[Sequence[Sequence[str]], float], "list[Command]"]

REASONS = (
    "not_installed",
    "driver_not_loaded",
    "library_not_found",
    "library_mismatch",
    "no_devices",
    "access_blocked",
    "permission_denied",
    "gpu_lost",
    "reset_required",
    "interrupt_issue",
    "timeout",
    "crashed",
    "unsupported",
    "invalid_output",
    "unknown_error",
)

WSL_DIRECTORY = "/usr/lib/wsl/lib"

# Far above what 16 GPUs with thousands of processes print, far below what would hurt the node.
MAX_OUTPUT_BYTES = 64 * 1024 * 1024
MAX_XML_DEPTH = 32


class NvidiaSmiError(Exception):
    """nvidia-smi gave no usable answer; C(reason) is one of REASONS, C(message) says what was found."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


# --------------------------------------------------------------------------------------------------------------------
# Values

# What NVML's error strings and nvidia-smi itself put where a value cannot be given.
_NO_VALUE = frozenset(
    (
        "",
        "n/a",
        "err!",
        "unknown",
        "uninitialized",
        "invalid argument",
        "not supported",
        "insufficient permissions",
        "already initialized",
        "not found",
        "insufficient size",
        "insufficient external power",
        "driver not loaded",
        "timeout",
        "interrupt request issue",
        "nvml shared library not found",
        "function not found",
        "corrupted inforom",
        "gpu is lost",
        "gpu requires reset",
        "gpu access blocked by the operating system",
        "driver/library version mismatch",
        "in use by another client",
        "insufficient memory",
        "no data",
        "vgpu ecc not supported",
        "insufficient resources",
        "frequency not supported",
        "invalid frequency",
        "argument version mismatch",
        "requested functionality has been deprecated",
        "system is not ready",
        "system is not in ready state",
        "gpu not found",
        "no supported gpus were found",
        "invalid state",
        "resource not in correct state to perform requested operation",
        "reset type is not supported for given device",
        "unknown error",
    )
)
# Of these, what is no lack of a value but a GPU, or a driver, that fails. A healthy card gives none of its sensors so:
# fan and power limits of some do (enkore/i3pystatus#850), and are no sensors here for that reason.
_ERRORS = frozenset(
    (
        "err!",
        "unknown error",
        "timeout",
        "uninitialized",
        "driver not loaded",
        "interrupt request issue",
        "corrupted inforom",
        "insufficient external power",
    )
)
_GPU_STATES = {"gpu is lost": "lost", "gpu requires reset": "reset_required"}

# No more digits than a 64-bit counter has, so that damaged text cannot become a number of absurd size.
_NUMBER = re.compile(r"^(-?[0-9]{1,20}(?:\.[0-9]{1,9})?)\s*([A-Za-z%/]*)$")


def _bare(text: str | None) -> str:
    """The text without padding and without the brackets that the CSV format puts around what is not a value."""
    value = clean((text or "").strip())
    if value.startswith("[") and value.endswith("]"):
        value = value[1:-1].strip()
    return value


def _text(raw: str | None) -> str | None:
    value = _bare(raw)
    return None if value.lower() in _NO_VALUE else value


def _fails(raw: str | None) -> bool:
    return _bare(raw).lower() in _ERRORS


def _number(raw: str | None, units: tuple[str, ...]) -> str | None:
    match = _NUMBER.match(_bare(raw))
    return match.group(1) if match and match.group(2) in units else None


def _int(raw: str | None, *units: str) -> int | None:
    value = _number(raw, units or ("",))
    return None if value is None or "." in value else int(value)


def _float(raw: str | None, *units: str) -> float | None:
    value = _number(raw, units or ("",))
    return None if value is None else float(value)


def _bool(raw: str | None) -> bool | None:
    return {"yes": True, "no": False}.get(_bare(raw).lower())


def _identifier(raw: str | None) -> str | None:
    """A UUID or serial number; the driver masks what it never read with question marks."""
    value = _text(raw)
    return None if value is None or "?" in value else value


_VERSION = re.compile(r"^[0-9]+(?:\.[0-9]+)+")


def _version(raw: str | None) -> str | None:
    """A version number; driver 610 appends to it, or puts in its place, that the label is deprecated."""
    match = _VERSION.match(_bare(raw))
    return match.group(0) if match else None


def _sum(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _first(*values: Any) -> Any:
    for value in values:
        if value is not None:
            return value
    return None


_BUS_ID = re.compile(r"(?:([0-9a-fA-F]{4,8}):)?([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-7])")


def normal_bus_id(bus_id: str | None) -> str | None:
    """A PCI address as sysfs and /proc write it: nvidia-smi pads the domain to eight digits, its messages do not."""
    match = _BUS_ID.search(bus_id or "")
    if not match:
        return None
    domain = int(match.group(1) or "0", 16)
    return f"{domain:04x}:{match.group(2).lower()}:{match.group(3).lower()}.{match.group(4)}"


# CUDA's compute capability names the architecture; the listing call knows no other field for it.
_ARCHITECTURES = {
    (3,): "Kepler",
    (5,): "Maxwell",
    (6,): "Pascal",
    (7, 0): "Volta",
    (7, 2): "Volta",
    (7, 5): "Turing",
    (8, 9): "Ada Lovelace",
    (8,): "Ampere",
    (9,): "Hopper",
    (10,): "Blackwell",
    (11,): "Blackwell",
    (12,): "Blackwell",
}


def architecture_of(compute_capability: str | None) -> str | None:
    match = re.match(r"^([0-9]{1,3})\.([0-9]{1,3})$", _bare(compute_capability))
    if not match:
        return None
    major, minor = int(match.group(1)), int(match.group(2))
    return _ARCHITECTURES.get((major, minor), _ARCHITECTURES.get((major,)))


# --------------------------------------------------------------------------------------------------------------------
# The shape of the facts

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
    "topology": ("numa_node", "cpu_affinity"),
    "nvlink": ("nvlinks",),
    "board": (
        "brand",
        "board_part_number",
        "vbios_version",
        "gsp_firmware_version",
        "virtualization_mode",
        "addressing_mode",
        "driver_model",
        "inforom_corrupted",
    ),
    "memory": ("memory_free_mib", "memory_reserved_mib", "bar1_total_mib", "bar1_used_mib"),
    "power": ("power_draw_w", "power_limit_w", "power_limit_enforced_w", "power_limit_default_w"),
    "temperature": ("temperature_gpu_c", "temperature_memory_c", "temperature_limits"),
    "utilization": ("utilization_gpu_percent", "utilization_memory_percent"),
    "ecc": ("ecc", "recovery_action"),
    "clocks": ("performance_state", "clocks", "clocks_event_reasons"),
    "pcie": ("pcie",),
    "fabric": ("fabric_state", "fabric_status", "fabric_health"),
    "processes": ("processes",),
}
DEFAULT_SUBSETS = ("min", "mig", "topology")
# These come from the listing call, from sysfs or from a call of their own; every other one needs -q -x.
_WITHOUT_XML = frozenset(("min", "mig", "topology", "nvlink"))
# A GPU is always named, whatever was gathered.
IDENTITY_KEYS = ("index", "name", "uuid", "pci_bus_id", "status", "status_message", "sensors_failed")


def empty_gpu() -> dict[str, Any]:
    """Every key that a GPU's facts have, nothing known yet."""
    return {
        "index": None,
        "name": None,
        "uuid": None,
        "pci_bus_id": None,
        "status": "ok",
        "status_message": None,
        "sensors_failed": None,
        "serial": None,
        "architecture": None,
        "minor_number": None,
        "memory_total_mib": None,
        "memory_used_mib": None,
        "persistence_mode": None,
        "compute_mode": None,
        "mig_mode": None,
        "mig_mode_pending": None,
        "mig_devices": None,
        "numa_node": None,
        "cpu_affinity": None,
        "nvlinks": None,
        "brand": None,
        "board_part_number": None,
        "vbios_version": None,
        "gsp_firmware_version": None,
        "virtualization_mode": None,
        "addressing_mode": None,
        "driver_model": None,
        "inforom_corrupted": None,
        "memory_free_mib": None,
        "memory_reserved_mib": None,
        "bar1_total_mib": None,
        "bar1_used_mib": None,
        "power_draw_w": None,
        "power_limit_w": None,
        "power_limit_enforced_w": None,
        "power_limit_default_w": None,
        "temperature_gpu_c": None,
        "temperature_memory_c": None,
        "temperature_limits": {
            "slowdown_c": None,
            "shutdown_c": None,
            "memory_max_c": None,
            "margin_c": None,
            "slowdown_margin_c": None,
            "shutdown_margin_c": None,
        },
        "utilization_gpu_percent": None,
        "utilization_memory_percent": None,
        "ecc": {
            "mode": None,
            "mode_pending": None,
            "corrected": {"volatile": None, "aggregate": None},
            "uncorrected": {"volatile": None, "aggregate": None},
            "sram_threshold_exceeded": None,
            "unrepairable_memory": None,
            "channel_repair_pending": None,
            "tpc_repair_pending": None,
            "remapped_rows": {"corrected": None, "uncorrected": None, "pending": None, "failure": None},
            "retired_pages": {"single_bit": None, "double_bit": None, "pending": None},
            "pending": None,
        },
        "recovery_action": None,
        "performance_state": None,
        "clocks": {
            "graphics_mhz": None,
            "sm_mhz": None,
            "memory_mhz": None,
            "graphics_max_mhz": None,
            "sm_max_mhz": None,
            "memory_max_mhz": None,
        },
        "clocks_event_reasons": None,
        "pcie": {
            "generation_current": None,
            "generation_max": None,
            "generation_device_max": None,
            "generation_host_max": None,
            "width_current": None,
            "width_max": None,
            "replay_count": None,
        },
        "fabric_state": None,
        "fabric_status": None,
        "fabric_health": {
            "summary": None,
            "bandwidth": None,
            "route_recovery_in_progress": None,
            "route_unhealthy": None,
            "access_timeout_recovery": None,
            "incorrect_configuration": None,
        },
        "processes": None,
    }


def empty_facts(platform: str | None = None) -> dict[str, Any]:
    return {
        "available": False,
        "reason": None,
        "message": None,
        "platform": platform,
        "driver_version": None,
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


def keep_subsets(gpu: dict[str, Any], subsets: frozenset[str]) -> dict[str, Any]:
    """The GPU with only what was asked for: one source gives more than that, and null has to mean one thing."""
    wanted = set(IDENTITY_KEYS)
    for subset in subsets:
        wanted.update(SUBSETS[subset])
    kept = empty_gpu()
    kept.update((key, value) for key, value in gpu.items() if key in wanted)
    return kept


# --------------------------------------------------------------------------------------------------------------------
# nvidia-smi -q -x


class _Node:
    def __init__(self, name: str, attributes: dict[str, str]) -> None:
        self.name = name
        self.attributes = attributes
        self.children: list[_Node] = []
        self.text = ""

    def find(self, path: str) -> _Node | None:
        node: _Node | None = self
        for name in path.split("/"):
            node = next((child for child in node.children if child.name == name), None) if node else None
        return node

    def value(self, *paths: str) -> str | None:
        """The text of the first of these elements that holds a value."""
        for path in paths:
            node = self.find(path)
            if node is not None and _text(node.text) is not None:
                return node.text
        return None


_PROCESS_NAME = re.compile(r"(<process_name>)(.*?)(</process_name>)", re.DOTALL)
_NOT_IN_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")
_BARE_AMPERSAND = re.compile(r"&(?!(?:amp|lt|gt|quot|apos|#[0-9]{1,7}|#x[0-9a-fA-F]{1,6});)")


def _mend_process_names(text: str) -> str:
    """nvidia-smi copies process names without escaping them, control characters included (cwltool#1910)."""

    def mend(match: re.Match[str]) -> str:
        name = _NOT_IN_XML.sub("\ufffd", match.group(2)).replace("<", "&lt;")
        return match.group(1) + _BARE_AMPERSAND.sub("&amp;", name) + match.group(3)

    return _PROCESS_NAME.sub(mend, text)


def _damaged(message: str) -> NvidiaSmiError:
    return NvidiaSmiError("invalid_output", message)


def _read_tree(text: str) -> _Node:
    from xml.parsers import expat  # noqa: PLC0415  # the listing path, the default one, does without

    parser = expat.ParserCreate()
    top = _Node("", {})
    stack = [top]
    skipping = 0

    def refuse(*_: Any) -> NoReturn:
        raise _damaged("The XML declares or uses an entity, which nvidia-smi never does; it was not read.")

    def start_doctype(_name: str, _system: str | None, _public: str | None, has_internal_subset: bool) -> None:
        if has_internal_subset:
            refuse()

    def start(name: str, attributes: dict[str, str]) -> None:
        nonlocal skipping
        if skipping or name == "supported_clocks":
            skipping += 1
            return
        if len(stack) > MAX_XML_DEPTH:
            raise _damaged(f"The XML is nested more than {MAX_XML_DEPTH} deep, which nvidia-smi's never is.")
        node = _Node(name, attributes)
        stack[-1].children.append(node)
        stack.append(node)

    def end(_name: str) -> None:
        nonlocal skipping
        if skipping:
            skipping -= 1
        else:
            stack.pop()

    def characters(data: str) -> None:
        if not skipping:
            stack[-1].text += data

    parser.buffer_text = True
    parser.StartDoctypeDeclHandler = start_doctype
    parser.EntityDeclHandler = refuse
    parser.SkippedEntityHandler = refuse
    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.CharacterDataHandler = characters
    try:
        parser.Parse(text, True)
    except (expat.ExpatError, ValueError) as error:
        raise _damaged(f"The output of nvidia-smi is not the whole XML document it should be: {error}.") from error
    return top.children[0]


def _mib(node: _Node, *paths: str) -> int | None:
    return _int(node.value(*paths), "MiB", "MB")


def _ecc_counts(counters: _Node | None) -> tuple[int | None, int | None]:
    """Corrected and uncorrected errors; the layout changed with Turing, and again with driver 535 or so."""
    if counters is None:
        return None, None
    if counters.find("single_bit") or counters.find("double_bit"):
        return _int(counters.value("single_bit/total")), _int(counters.value("double_bit/total"))
    corrected, uncorrected = [], []
    for child in counters.children:
        if "_uncorrectable" in child.name:
            uncorrected.append(_int(child.text))
        elif child.name.endswith("_correctable"):
            corrected.append(_int(child.text))
    return _sum(corrected), _sum(uncorrected)


def _ecc(gpu: _Node) -> dict[str, Any]:
    corrected_volatile, uncorrected_volatile = _ecc_counts(gpu.find("ecc_errors/volatile"))
    corrected_aggregate, uncorrected_aggregate = _ecc_counts(gpu.find("ecc_errors/aggregate"))
    rows = {
        "corrected": _int(gpu.value("remapped_rows/remapped_row_corr")),
        "uncorrected": _int(gpu.value("remapped_rows/remapped_row_unc")),
        "pending": _bool(gpu.value("remapped_rows/remapped_row_pending")),
        "failure": _bool(gpu.value("remapped_rows/remapped_row_failure")),
    }
    pages = {
        "single_bit": _int(gpu.value("retired_pages/multiple_single_bit_retirement/retired_count")),
        "double_bit": _int(gpu.value("retired_pages/double_bit_retirement/retired_count")),
        "pending": _bool(gpu.value("retired_pages/pending_retirement", "retired_pages/pending_blacklist")),
    }
    waiting = [value for value in (rows["pending"], pages["pending"]) if value is not None]
    return {
        "mode": _text(gpu.value("ecc_mode/current_ecc")),
        "mode_pending": _text(gpu.value("ecc_mode/pending_ecc")),
        "corrected": {"volatile": corrected_volatile, "aggregate": corrected_aggregate},
        "uncorrected": {"volatile": uncorrected_volatile, "aggregate": uncorrected_aggregate},
        "sram_threshold_exceeded": _bool(gpu.value("ecc_errors/aggregate/sram_threshold_exceeded")),
        "unrepairable_memory": _bool(gpu.value("ecc_errors/unrepairable_memory")),
        "channel_repair_pending": _bool(gpu.value("ecc_errors/channel_repair_pending")),
        "tpc_repair_pending": _bool(gpu.value("ecc_errors/tpc_repair_pending")),
        "remapped_rows": rows,
        "retired_pages": pages,
        "pending": any(waiting) if waiting else None,
    }


def _clocks_event_reasons(gpu: _Node) -> list[str] | None:
    """The reasons that are active; the element was called clocks_throttle_reasons before driver 535."""
    reasons = gpu.find("clocks_event_reasons") or gpu.find("clocks_throttle_reasons")
    if reasons is None:
        return None
    active, known = [], False
    for child in reasons.children:
        state = _bare(child.text).lower()
        if state in ("active", "not active"):
            known = True
        if state == "active":
            active.append(re.sub(r"^clocks_(?:event|throttle)_reasons?_", "", child.name))
    return active if known else None


def _processes(gpu: _Node) -> list[dict[str, Any]] | None:
    element = gpu.find("processes")
    if element is None:
        return None
    found = [
        {
            "pid": _int(child.value("pid")),
            "type": _text(child.value("type")),
            "name": _text(child.value("process_name")),
            "memory_used_mib": _mib(child, "used_memory"),
            "gpu_instance_id": _int(child.value("gpu_instance_id")),
            "compute_instance_id": _int(child.value("compute_instance_id")),
        }
        for child in element.children
        if child.name == "process_info"
    ]
    # An element that holds words instead of processes says that the list cannot be had.
    return None if not found and element.text.strip() else found


def _mig_devices(gpu: _Node) -> list[dict[str, Any]] | None:
    if _text(gpu.value("mig_mode/current_mig")) != "Enabled":
        return []
    element = gpu.find("mig_devices")
    if element is None:
        return None
    return [
        {
            "index": _int(child.value("index")),
            "uuid": _identifier(child.value("uuid")),
            "profile": _text(child.value("profile", "name")),
            "gpu_instance_id": _int(child.value("gpu_instance_id")),
            "compute_instance_id": _int(child.value("compute_instance_id")),
            "memory_total_mib": _mib(child, "fb_memory_usage/total"),
        }
        for child in element.children
        if child.name == "mig_device"
    ]


def _temperature_limits(gpu: _Node) -> dict[str, Any]:
    """At what the card protects itself: temperatures, or with newer ones distances to a limit that is not told."""
    paths = {
        "slowdown_c": "gpu_temp_slow_threshold",
        "shutdown_c": "gpu_temp_max_threshold",
        "memory_max_c": "gpu_temp_max_mem_threshold",
        "margin_c": "gpu_temp_tlimit",
        "slowdown_margin_c": "gpu_temp_slow_tlimit_threshold",
        "shutdown_margin_c": "gpu_temp_max_tlimit_threshold",
    }
    return {key: _int(gpu.value(f"temperature/{path}"), "C") for key, path in paths.items()}


_POWER_DRAW = ("average_power_draw", "power_draw", "instant_power_draw")
_SENSORS: dict[str, tuple[str, ...]] = {
    "temperature_gpu_c": ("temperature/gpu_temp",),
    "power_draw_w": tuple(
        f"{section}/{name}" for section in ("gpu_power_readings", "power_readings") for name in _POWER_DRAW
    ),
    "utilization_gpu_percent": ("utilization/gpu_util",),
    "performance_state": ("performance_state",),
    "clocks.sm_mhz": ("clocks/sm_clock",),
    "memory_used_mib": ("fb_memory_usage/used",),
}


def _sensors(gpu: _Node) -> tuple[list[str], bool]:
    """The sensors that answer with an error where a value was due, and whether none has a value besides the memory."""
    failed, answers = [], False
    for key, paths in _SENSORS.items():
        if gpu.value(*paths) is not None:
            answers = answers or key != "memory_used_mib"
        elif any(_fails(node.text) for node in map(gpu.find, paths) if node is not None):
            failed.append(key)
    return failed, bool(failed) and not answers


def _fabric_health(gpu: _Node) -> dict[str, str | None]:
    return {key: _text(gpu.value(f"fabric/health/{key}")) for key in empty_gpu()["fabric_health"]}


def _fabric_status(gpu: _Node) -> str | None:
    """Success, or why the GPU could not join its fabric: NVML's words for an error are the value here."""
    status = gpu.find("fabric/status")
    text = _bare(status.text if status else None)
    return None if text.lower() in ("", "n/a", "not supported") else text


def _recovery_action(gpu: _Node) -> str | None:
    """What the driver recommends, in the words of newer ones: drivers from 535 to 555 or so gave two flags instead."""
    action = _text(gpu.value("gpu_recovery_action"))
    reset = _bool(gpu.value("gpu_reset_status/reset_required"))
    drain = _bool(gpu.value("gpu_reset_status/drain_and_reset_recommended"))
    if action is not None or (reset is None and drain is None):
        return action
    if reset:
        return "Reset"
    return "Drain and Reset" if drain else "None"


def _status(gpu: _Node) -> tuple[str, str | None]:
    """Whether the GPU answered: a lost one still has its element, with NVML's error where the values were."""
    waiting = [gpu]
    while waiting:
        node = waiting.pop()
        state = _GPU_STATES.get(_bare(node.text).lower())
        if state:
            return state, f"nvidia-smi says {_bare(node.text)!r} in <{node.name}>."
        waiting.extend(child for child in node.children if child.name not in ("processes", "accounted_processes"))
    return "ok", None


def _gpu_of_xml(element: _Node, index: int) -> dict[str, Any]:
    gpu = empty_gpu()
    status, status_message = _status(element)
    sensors_failed, dumb = _sensors(element)
    if dumb and status == "ok":
        status, status_message = "unreadable", f"Its sensors answer with errors only: {', '.join(sensors_failed)}."
    power = element.find("gpu_power_readings") or element.find("power_readings") or _Node("", {})
    link = element.find("pci/pci_gpu_link_info") or _Node("", {})
    gpu.update(
        index=index,
        name=_text(element.value("product_name")),
        uuid=_identifier(element.value("uuid")),
        pci_bus_id=_text(element.value("pci/pci_bus_id")) or _text(element.attributes.get("id")),
        status=status,
        status_message=status_message,
        sensors_failed=sensors_failed,
        serial=_identifier(element.value("serial")),
        architecture=_text(element.value("product_architecture")),
        minor_number=_int(element.value("minor_number")),
        memory_total_mib=_mib(element, "fb_memory_usage/total"),
        memory_used_mib=_mib(element, "fb_memory_usage/used"),
        persistence_mode=_text(element.value("persistence_mode")),
        compute_mode=_text(element.value("compute_mode")),
        mig_mode=_text(element.value("mig_mode/current_mig")),
        mig_mode_pending=_text(element.value("mig_mode/pending_mig")),
        mig_devices=_mig_devices(element),
        brand=_text(element.value("product_brand")),
        board_part_number=_text(element.value("board_part_number")),
        vbios_version=_text(element.value("vbios_version")),
        gsp_firmware_version=_text(element.value("gsp_firmware_version")),
        virtualization_mode=_text(element.value("gpu_virtualization_mode/virtualization_mode")),
        addressing_mode=_text(element.value("addressing_mode")),
        driver_model=_text(element.value("driver_model/current_dm")),
        memory_free_mib=_mib(element, "fb_memory_usage/free"),
        memory_reserved_mib=_mib(element, "fb_memory_usage/reserved"),
        bar1_total_mib=_mib(element, "bar1_memory_usage/total"),
        bar1_used_mib=_mib(element, "bar1_memory_usage/used"),
        # The average is what --query-gpu=power.draw gives wherever the card has one.
        power_draw_w=_float(power.value(*_POWER_DRAW), "W"),
        power_limit_w=_float(power.value("requested_power_limit", "power_limit"), "W"),
        power_limit_enforced_w=_float(power.value("current_power_limit", "enforced_power_limit"), "W"),
        power_limit_default_w=_float(power.value("default_power_limit"), "W"),
        temperature_gpu_c=_int(element.value("temperature/gpu_temp"), "C"),
        temperature_memory_c=_int(element.value("temperature/memory_temp"), "C"),
        temperature_limits=_temperature_limits(element),
        utilization_gpu_percent=_int(element.value("utilization/gpu_util"), "%"),
        utilization_memory_percent=_int(element.value("utilization/memory_util"), "%"),
        ecc=_ecc(element),
        recovery_action=_recovery_action(element),
        performance_state=_text(element.value("performance_state")),
        clocks={
            "graphics_mhz": _int(element.value("clocks/graphics_clock"), "MHz"),
            "sm_mhz": _int(element.value("clocks/sm_clock"), "MHz"),
            "memory_mhz": _int(element.value("clocks/mem_clock"), "MHz"),
            "graphics_max_mhz": _int(element.value("max_clocks/graphics_clock"), "MHz"),
            "sm_max_mhz": _int(element.value("max_clocks/sm_clock"), "MHz"),
            "memory_max_mhz": _int(element.value("max_clocks/mem_clock"), "MHz"),
        },
        clocks_event_reasons=_clocks_event_reasons(element),
        pcie={
            "generation_current": _int(link.value("pcie_gen/current_link_gen")),
            "generation_max": _int(link.value("pcie_gen/max_link_gen")),
            "generation_device_max": _int(link.value("pcie_gen/max_device_link_gen")),
            "generation_host_max": _int(link.value("pcie_gen/max_host_link_gen")),
            "width_current": _int(link.value("link_widths/current_link_width"), "x"),
            "width_max": _int(link.value("link_widths/max_link_width"), "x"),
            "replay_count": _int(element.value("pci/replay_counter")),
        },
        fabric_state=_text(element.value("fabric/state")),
        fabric_status=_fabric_status(element),
        fabric_health=_fabric_health(element),
        processes=_processes(element),
    )
    return gpu


def parse_query_xml(text: str) -> dict[str, Any]:
    """C(nvidia-smi -q -x) as driver_version, cuda_version, attached_gpus and gpus; NvidiaSmiError when damaged."""
    if len(text) > MAX_OUTPUT_BYTES:
        raise _damaged(f"nvidia-smi printed more than {MAX_OUTPUT_BYTES} bytes of XML; it was not read.")
    try:
        root = _read_tree(text)
    except NvidiaSmiError:
        root = _read_tree(_mend_process_names(text))
    if root.name != "nvidia_smi_log":
        raise _damaged(f"The output is XML, but its root is <{root.name}> where nvidia-smi writes <nvidia_smi_log>.")
    elements = [child for child in root.children if child.name == "gpu"]
    return {
        "driver_version": _first(_version(root.value("driver_version")), _version(root.value("kmd_version"))),
        "cuda_version": _first(_version(root.value("cuda_version")), _version(root.value("cuda_umd_version"))),
        "attached_gpus": _int(root.value("attached_gpus")),
        "gpus": [_gpu_of_xml(element, index) for index, element in enumerate(elements)],
    }


def split_xml(output: str) -> tuple[str, str]:
    """The XML document and the words around it: warnings and errors go to the same stream."""
    start = output.find("<?xml")
    if start < 0:
        start = output.find("<nvidia_smi_log")
    if start < 0:
        return "", output.strip()
    closing = "</nvidia_smi_log>"
    end = output.rfind(closing)
    if end < 0:
        # A document that breaks off can hold the reason: a sentence where an element was due.
        sentences = (line.strip() for line in output[start:].splitlines() if "<" not in line and ">" not in line)
        return output[start:], "\n".join([output[:start].strip(), *(line for line in sentences if " " in line)]).strip()
    end += len(closing)
    around = (output[:start].strip(), output[end:].strip())
    return output[start:end], "\n".join(part for part in around if part)


# --------------------------------------------------------------------------------------------------------------------
# nvidia-smi --query-gpu

QUERY_FIELDS = (
    "index",
    "name",
    "uuid",
    "pci.bus_id",
    "driver_version",
    "memory.total",
    "memory.used",
    "serial",
    "persistence_mode",
    "compute_mode",
    "mig.mode.current",
    "mig.mode.pending",
    "compute_cap",
    # The cheapest that a GPU must answer itself: one that requires a reset still has its name, memory and modes.
    "pstate",
)
# Without these a line names no GPU; drivers that lack another one are asked again without it.
_REQUIRED_FIELDS = frozenset(("index", "name", "uuid", "pci.bus_id", "memory.total"))
_UNKNOWN_FIELD = re.compile(r'Field "([^"]+)" is not a valid field to query')


def parse_query_csv(text: str, fields: Sequence[str] = QUERY_FIELDS) -> dict[str, Any]:
    """C(--query-gpu=<fields> --format=csv,noheader,nounits) in the shape of parse_query_xml."""
    gpus: list[dict[str, Any]] = []
    driver_version = None
    for line in text.splitlines():
        if not line.strip():
            continue
        values = [value.strip() for value in line.split(",")]
        row = {name: values[column] for column, name in enumerate(fields) if column < len(values)}
        index = _int(row.get("index"))
        if len(values) != len(fields) or index is None:
            expected = f"{len(fields)} values with an index first"
            raise _damaged(f"A line of nvidia-smi --query-gpu should have {expected}; found {line[:200]!r}.")
        gpu = empty_gpu()
        mig_mode = _text(row.get("mig.mode.current"))
        state = next((_GPU_STATES[word.lower()] for word in map(_bare, values) if word.lower() in _GPU_STATES), "ok")
        if state == "ok" and _fails(row.get("memory.total")) and _fails(row.get("memory.used")):
            state = "unreadable"
        gpu.update(
            index=index,
            name=_text(row.get("name")),
            uuid=_identifier(row.get("uuid")),
            pci_bus_id=_text(row.get("pci.bus_id")),
            status=state,
            status_message=None if state == "ok" else f"nvidia-smi --query-gpu says that the GPU is {state}.",
            serial=_identifier(row.get("serial")),
            architecture=architecture_of(row.get("compute_cap")),
            memory_total_mib=_int(row.get("memory.total")),
            memory_used_mib=_int(row.get("memory.used")),
            persistence_mode=_text(row.get("persistence_mode")),
            compute_mode=_text(row.get("compute_mode")),
            mig_mode=mig_mode,
            mig_mode_pending=_text(row.get("mig.mode.pending")),
            mig_devices=None if mig_mode == "Enabled" else [],
        )
        gpus.append(gpu)
        driver_version = driver_version or _version(row.get("driver_version"))
    return {"driver_version": driver_version, "cuda_version": None, "attached_gpus": None, "gpus": gpus}


# --------------------------------------------------------------------------------------------------------------------
# The other calls

_LIST_GPU = re.compile(r"^GPU ([0-9]{1,4}): .+ \(UUID: ([^()\s]+)\)$")
_LIST_MIG = re.compile(r"^MIG (\S+)\s+Device\s+([0-9]{1,4}): \(UUID: ([^()\s]+)\)$")
_OLD_MIG_UUID = re.compile(r"^MIG-GPU-[0-9a-fA-F-]+/([0-9]{1,4})/([0-9]{1,4})$")


def parse_list(text: str) -> list[dict[str, Any]]:
    """C(nvidia-smi -L): index, uuid and mig_devices of each GPU; other lines (messages) are passed over."""
    gpus: list[dict[str, Any]] = []
    for raw in text.splitlines():
        line = raw.strip()
        gpu, mig = _LIST_GPU.match(line), _LIST_MIG.match(line)
        if gpu:
            gpus.append(
                {
                    "index": int(gpu.group(1)),
                    "uuid": _identifier(gpu.group(2)),
                    "mig_devices": [],
                }
            )
        elif mig and gpus:
            # Until driver 470 the UUID was made of the parent's UUID and the two instance numbers.
            old = _OLD_MIG_UUID.match(mig.group(3))
            gpus[-1]["mig_devices"].append(
                {
                    "index": int(mig.group(2)),
                    "uuid": _identifier(mig.group(3)),
                    "profile": mig.group(1),
                    "gpu_instance_id": int(old.group(1)) if old else None,
                    "compute_instance_id": int(old.group(2)) if old else None,
                    "memory_total_mib": None,
                }
            )
        elif line.startswith(("GPU ", "MIG ")):
            raise _damaged(f"nvidia-smi -L printed a line that names no GPU or MIG device: {line[:200]!r}.")
    return gpus


def merge_list(gpus: Sequence[dict[str, Any]], listing: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The GPUs with their MIG devices completed from C(-L): it alone has profile and UUID with most drivers."""
    by_uuid = {entry["uuid"]: entry for entry in listing if entry["uuid"]}
    merged = []
    for gpu in gpus:
        entry = by_uuid.get(gpu["uuid"])
        if entry is None or gpu["mig_mode"] != "Enabled":
            merged.append(gpu)
            continue
        listed = {device["index"]: device for device in entry["mig_devices"]}
        if gpu["mig_devices"] is None:
            devices = [dict(device) for device in entry["mig_devices"]]
        else:
            devices = [
                {key: _first(value, listed.get(device["index"], {}).get(key)) for key, value in device.items()}
                for device in gpu["mig_devices"]
            ]
        merged.append(dict(gpu, mig_devices=devices))
    return merged


_NVLINK_GPU = re.compile(r"^GPU [0-9]{1,4}: .+ \(UUID: ([^()\s]+)\)$")
_NVLINK_LINE = re.compile(r"^Link ([0-9]{1,3}): (?:([0-9]{1,6}(?:\.[0-9]{1,9})?) GB/s|<inactive>)$")


def parse_nvlink_status(text: str) -> dict[str, list[dict[str, Any]] | None]:
    """C(nvidia-smi nvlink -s): the links of each GPU by its UUID, None for one in MIG mode, which is not told."""
    links: dict[str, list[dict[str, Any]] | None] = {}
    uuid = None
    for raw in text.splitlines():
        line = raw.strip()
        gpu, link = _NVLINK_GPU.match(line), _NVLINK_LINE.match(line)
        if gpu:
            uuid = gpu.group(1)
            links[uuid] = []
        elif uuid is None:
            continue
        elif link:
            speed = link.group(2)
            state: dict[str, Any] = {"link": int(link.group(1)), "active": speed is not None, "speed_gb_per_s": None}
            if speed is not None:
                state["speed_gb_per_s"] = float(speed)
            links[uuid] = [*(links[uuid] or []), state]
        elif "not supported" in line.lower():
            links[uuid] = None
        elif line.startswith("Link"):
            raise _damaged(f"nvidia-smi nvlink -s printed a line that is no link's state: {line[:200]!r}.")
    return links


def parse_version(text: str) -> dict[str, str | None]:
    """C(nvidia-smi --version): the driver's version and the newest CUDA version it runs."""
    labels: dict[str, str | None] = {}
    for line in text.splitlines():
        label, _colon, value = line.partition(":")
        labels[label.strip().lower()] = _version(value)
    return {
        "driver_version": _first(labels.get("driver version"), labels.get("kmd version")),
        "cuda_version": _first(labels.get("cuda version"), labels.get("cuda umd version")),
    }


def parse_proc_information(text: str) -> dict[str, str | None]:
    """A GPU's C(/proc/driver/nvidia/gpus/<address>/information) by its lower-case labels."""
    lines = (line.partition(":") for line in text.splitlines())
    return {label.strip().lower(): _identifier(value) for label, colon, value in lines if colon}


# --------------------------------------------------------------------------------------------------------------------
# Failures

_MESSAGES = (
    ("driver/library version mismatch", "library_mismatch"),
    ("couldn't communicate with the nvidia driver", "driver_not_loaded"),
    ("driver not loaded", "driver_not_loaded"),
    ("couldn't find libnvidia-ml", "library_not_found"),
    ("couldn't find nvml", "library_not_found"),
    ("nvml shared library not found", "library_not_found"),
    ("error while loading shared libraries", "library_not_found"),
    ("gpu access blocked by the operating system", "access_blocked"),
    ("gpu is lost", "gpu_lost"),
    ("fallen off the bus", "gpu_lost"),
    ("gpu requires reset", "reset_required"),
    ("interrupt request issue", "interrupt_issue"),
    ("not receiving interrupts", "interrupt_issue"),
    ("insufficient permissions", "permission_denied"),
    ("no devices were found", "no_devices"),
    ("no devices found", "no_devices"),
    ("is not a valid field to query", "unsupported"),
    ("is not recognized. please run", "unsupported"),
    ("unable to determine the device handle for gpu", "gpu_lost"),
    ("unable to determine the product name for gpu", "gpu_lost"),
)
# nvidia-smi exits with NVML's own error numbers.
_EXIT_CODES = {
    2: "unsupported",
    3: "unsupported",
    4: "permission_denied",
    6: "no_devices",
    9: "driver_not_loaded",
    10: "interrupt_issue",
    11: "interrupt_issue",
    12: "library_not_found",
    13: "library_mismatch",
    15: "gpu_lost",
    16: "reset_required",
    17: "access_blocked",
    18: "library_mismatch",
}
NEXT_STEPS = {
    "not_installed": "Install the NVIDIA driver; under WSL install it in Windows.",
    "driver_not_loaded": "Load the kernel module (modprobe nvidia), or reboot if the driver was just installed.",
    "library_not_found": "Reinstall the driver's NVML library (libnvidia-ml.so.1) and run ldconfig.",
    "library_mismatch": "Reboot, so that the kernel module becomes the version of the installed libraries.",
    "no_devices": "Check that lspci shows the GPU and that the kernel log has no NVRM error about it.",
    "access_blocked": "Check that /dev/nvidiactl exists and may be opened; under WSL, that no card is in TCC mode.",
    "permission_denied": "Run with become, or give the user access to /dev/nvidia*.",
    "gpu_lost": "Look for Xid 79 in the kernel log; drain the node, then reboot it or reseat the GPU.",
    "reset_required": "Drain the node and reset the GPU (nvidia-smi --gpu-reset) or reboot.",
    "interrupt_issue": "Check the kernel log for interrupt errors of the GPU and the firmware's PCI settings.",
    "timeout": "Look for Xid lines in the kernel log, or give more time with the option timeout.",
    "crashed": "Check that nvidia-smi and libnvidia-ml.so.1 are of the same driver.",
    "unsupported": "Update the NVIDIA driver; this nvidia-smi does not know the call.",
    "invalid_output": "Run the call by hand; report it with its output if it looks whole.",
    "unknown_error": "Run the call by hand; in a container, check that its devices are still allowed.",
}


@dataclass(frozen=True)
class Command:
    """What a call came to; C(returncode) is None when it could not be started or did not end in time."""

    argv: tuple[str, ...]
    returncode: int | None
    stdout: str = ""
    stderr: str = ""
    timed_out: bool = False
    error: str | None = None
    limit: float = 0.0

    @property
    def words(self) -> str:
        return "\n".join(part for part in (self.stdout.strip(), self.stderr.strip()) if part)


def classify(returncode: int | None, text: str) -> str | None:
    """The reason behind an exit code and the words that came with it; None when neither speaks of a failure.

    The words come first: they are more exact than the code, and some versions exit with 0 after them.
    """
    lowered = text.lower()
    for needle, reason in _MESSAGES:
        if needle in lowered:
            return reason
    # 14: an infoROM is corrupted, a warning after a full answer.
    if returncode in (0, 14):
        return None
    if returncode is not None and returncode < 0:
        return "crashed"
    return _EXIT_CODES.get(returncode if returncode is not None else -1, "unknown_error")


def _explain(command: Command, reason: str, words: str) -> str:
    """One sentence on what was found, one on the next step."""
    call = " ".join(command.argv)
    said = " ".join(clean(words).split())[:400]
    if command.timed_out:
        found = f"{call} gave no answer within {command.limit:.3g} s and was killed"
    elif command.error:
        found = f"{call} could not be started: {command.error}"
    elif command.returncode is not None and command.returncode < 0:
        found = f"{call} was ended by signal {-command.returncode}"
    else:
        found = f"{call} ended with exit code {command.returncode}"
    if said:
        found += f" and said: {said}"
    return f"{found.rstrip('.')}. {NEXT_STEPS[reason]}"


# --------------------------------------------------------------------------------------------------------------------
# Running nvidia-smi


def environment() -> dict[str, str]:
    """The caller's environment in the C locale: messages are matched, and numbers have a point."""
    return dict(os.environ, LC_ALL="C")


@dataclass
class _Child:
    process: subprocess.Popen[bytes]
    output: dict[str, bytearray] = field(default_factory=lambda: {"stdout": bytearray(), "stderr": bytearray()})
    open_pipes: int = 0

    def start(self, selector: selectors.BaseSelector) -> None:
        for name, pipe in (("stdout", self.process.stdout), ("stderr", self.process.stderr)):
            if pipe is not None:
                selector.register(pipe, selectors.EVENT_READ, (self, name))
                self.open_pipes += 1

    def read(self, name: str, data: bytes) -> bool:
        """Take what came; False when there is no more to come, or more than can be right."""
        self.output[name] += data
        if len(self.output[name]) > MAX_OUTPUT_BYTES:
            self.kill()
        elif data:
            return True
        self.open_pipes -= 1
        return False

    def kill(self) -> None:
        # Each call leads its own process group, so this reaches what a wrapper script started too.
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def result(self, argv: Sequence[str], left: float, limit: float) -> Command:
        try:
            returncode: int | None = self.process.wait(max(left, 0.05))
        except subprocess.TimeoutExpired:
            returncode = None
        stdout, stderr = (bytes(self.output[name]).decode("utf-8", "replace") for name in ("stdout", "stderr"))
        return Command(tuple(argv), returncode, stdout, stderr, timed_out=returncode is None, limit=limit)

    def end(self, deadline: float) -> None:
        reap(self.process, deadline)
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


def reap(process: subprocess.Popen[bytes], deadline: float) -> None:
    """Take leave of a killed process, of one that no signal reaches because it hangs in the driver too."""
    try:
        process.wait(max(deadline - time.monotonic(), 0.05))
    except subprocess.TimeoutExpired:
        # Popen's destructor need not warn.
        process.returncode = -signal.SIGKILL


# Calls that initialise NVML at the same moment hold each other up: beside C(nvidia-smi -q -x), 220 ms on a host with
# two H200, C(nvlink -s) cost 14 ms when it started with it, and 4 ms when it started 20 to 40 ms later.
HEAD_START = 0.03
# How long the killed may take to be gone, all of one moment together.
KILL_WAIT = 1.0
# By how much C(collect) and C(run_commands) can be late: what was begun in time is asked to its end, call by call.
GRACE = 10.0


def run_commands(argvs: Sequence[Sequence[str]], timeout: float) -> list[Command]:
    """Run the calls at the same time; what has not ended after C(timeout) seconds is killed with all its children."""
    deadline = time.monotonic() + timeout
    children: dict[int, _Child] = {}
    results: dict[int, Command] = {}
    with selectors.DefaultSelector() as selector:
        try:
            for number, argv in enumerate(argvs):
                if number == 1 and "-q" in argvs[0]:
                    time.sleep(HEAD_START)
                try:
                    process = subprocess.Popen(  # pylint: disable=ansible-bad-function  # as in health.py
                        list(argv),
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        env=environment(),
                        start_new_session=True,
                    )
                except OSError as error:
                    results[number] = Command(tuple(argv), None, error=error.strerror or str(error))
                    continue
                children[number] = _Child(process)
                children[number].start(selector)
            while selector.get_map() and time.monotonic() < deadline:
                for key, _events in selector.select(max(deadline - time.monotonic(), 0)):
                    child, name = key.data
                    if not child.read(name, os.read(key.fd, 1 << 16)):
                        selector.unregister(key.fileobj)
            for number, child in children.items():
                results[number] = child.result(argvs[number], deadline - time.monotonic(), timeout)
        finally:
            for child in children.values():
                if child.process.returncode is None or child.open_pipes:
                    child.kill()
            given_up = time.monotonic() + KILL_WAIT
            for child in children.values():
                child.end(given_up)
    return [results[number] for number in sorted(results)]


def find_nvidia_smi(path: str | None = None, search: str | None = None) -> str | None:
    """The given program, or nvidia-smi from PATH, or the one that Windows gives a WSL distribution.

    WSL's init adds its folder to PATH of login shells only; sudo and systemd units do without.
    """
    if path:
        return shutil.which(path, path=search)
    return shutil.which("nvidia-smi", path=search) or shutil.which("nvidia-smi", path=WSL_DIRECTORY)


# --------------------------------------------------------------------------------------------------------------------
# What the kernel says


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _entries(path: Path) -> list[Path]:
    try:
        return sorted(path.iterdir())
    except OSError:
        return []


def detect_platform(root: Path) -> str:
    release = _read(root / "proc/sys/kernel/osrelease") or ""
    if "microsoft" in release.lower():
        return "wsl"
    # A kernel that the user built has any release name, but only WSL has these two together.
    guest = (root / "dev/dxg").exists() and (root / WSL_DIRECTORY[1:]).is_dir()
    return "wsl" if guest else "linux"


def kernel_gpus(root: Path) -> dict[str, dict[str, str | None]]:
    """What the NVIDIA kernel module says of its GPUs, by PCI address; it knows those that no longer answer too."""
    found = {}
    for entry in _entries(root / "proc/driver/nvidia/gpus"):
        bus_id = normal_bus_id(entry.name)
        information = _read(entry / "information")
        if bus_id and information is not None:
            found[bus_id] = parse_proc_information(information)
    return found


def kernel_has_mig(root: Path) -> bool:
    """Whether the kernel module has a GPU instance on any GPU."""
    gpus = _entries(root / "proc/driver/nvidia/capabilities")
    return any(entry.name.startswith("gi") for gpu in gpus for entry in _entries(gpu / "mig"))


def topology(bus_id: str | None, root: Path) -> dict[str, Any]:
    """NUMA node and near CPUs of a PCI device, as sysfs has them."""
    address = normal_bus_id(bus_id)
    if address is None:
        return {"numa_node": None, "cpu_affinity": None}
    folder = root / "sys/bus/pci/devices" / address
    node = _int(_read(folder / "numa_node"))
    if node == -1:
        # The firmware assigns no node, as in many virtual machines; with a single node there is no doubt.
        node = _int(_read(root / "sys/devices/system/node/online"))
    return {"numa_node": node, "cpu_affinity": _text(_read(folder / "local_cpulist"))}


# --------------------------------------------------------------------------------------------------------------------
# Everything together


@dataclass
class _Gathering:
    """One run of collect: what is asked, by which program, and how long that may take."""

    binary: str
    subsets: frozenset[str]
    run: Runner
    deadline: float
    root: Path
    kernel: dict[str, dict[str, str | None]]
    fields: tuple[str, ...] = QUERY_FIELDS

    @property
    def with_xml(self) -> bool:
        return not self.subsets <= _WITHOUT_XML

    def call(self, *arguments: Sequence[str]) -> list[Command]:
        left = max(self.deadline - time.monotonic(), 0.1)
        return self.run([(self.binary, *argument) for argument in arguments], left)

    def question(self) -> list[str]:
        if self.with_xml:
            return ["-q", "-x"]
        return ["--query-gpu=" + ",".join(self.fields), "--format=csv,noheader,nounits"]

    def ask(self) -> tuple[Command, dict[str, Command]]:
        """The main call, and those beside it by their arguments."""
        beside = []
        if not self.with_xml:
            beside.append(["--version"])
        if "mig" in self.subsets and kernel_has_mig(self.root):
            beside.append(["-L"])
        if "nvlink" in self.subsets:
            beside.append(["nvlink", "-s"])
        main, *others = self.call(self.question(), *beside)
        while main.returncode == 2 and not self.with_xml:
            refused = _UNKNOWN_FIELD.search(main.words)
            if not refused or refused.group(1) not in self.fields or refused.group(1) in _REQUIRED_FIELDS:
                break
            self.fields = tuple(name for name in self.fields if name != refused.group(1))
            main = self.call(self.question())[0]
        return main, {" ".join(command.argv[1:]): command for command in others}

    def read(self, command: Command) -> dict[str, Any]:
        """The answer to a main call, or NvidiaSmiError."""
        if command.timed_out:
            raise NvidiaSmiError("timeout", _explain(command, "timeout", command.stderr))
        if command.error:
            reason = "permission_denied" if "denied" in command.error.lower() else "unknown_error"
            raise NvidiaSmiError(reason, _explain(command, reason, ""))
        document, words = self._split(command)
        failed = classify(command.returncode, words)
        if failed is None and not document:
            failed = "invalid_output" if words else "no_devices"
        if failed:
            raise NvidiaSmiError(failed, _explain(command, failed, words))
        try:
            return parse_query_xml(document) if self.with_xml else parse_query_csv(document, self.fields)
        except NvidiaSmiError as error:
            raise NvidiaSmiError(error.reason, _explain(command, error.reason, error.message)) from error

    def _split(self, command: Command) -> tuple[str, str]:
        if self.with_xml:
            document, words = split_xml(command.stdout)
        else:
            lines = command.stdout.splitlines()
            is_row = [len(line.split(",")) == len(self.fields) for line in lines]
            document = "\n".join(line for number, line in enumerate(lines) if is_row[number])
            words = "\n".join(line for number, line in enumerate(lines) if not is_row[number])
        return document, "\n".join(part for part in (words.strip(), command.stderr.strip()) if part)

    def words(self, command: Command) -> str:
        return self._split(command)[1]


def _lost_gpu(status: str, message: str, bus_id: str | None, kernel: dict[str, str | None]) -> dict[str, Any]:
    """What can be said of a GPU that nvidia-smi cannot read."""
    gpu = empty_gpu()
    padded = None
    if bus_id:
        domain, rest = bus_id.split(":", 1)
        padded = f"{int(domain, 16):08X}:{rest.upper()}"
    gpu.update(
        status=status,
        status_message=message,
        name=kernel.get("model"),
        uuid=kernel.get("gpu uuid"),
        pci_bus_id=padded,
        minor_number=_int(kernel.get("device minor")),
    )
    return gpu


# What makes a GPU unreadable without saying that it is lost.
_NOT_ITS_FAULT = frozenset(
    ("permission_denied", "access_blocked", "timeout", "crashed", "unsupported", "invalid_output")
)


def _alone(gathering: _Gathering, command: Command, target: str, bus_id: str | None) -> dict[str, Any]:
    """The answer about one GPU: its driver_version and cuda_version, and the GPU, whole or as a lost one."""
    try:
        answer = gathering.read(command)
        if answer["gpus"]:
            # The XML of one GPU does not say which one it is.
            answer["gpu"] = dict(answer["gpus"][0], index=None) if gathering.with_xml else answer["gpus"][0]
            return answer
        failure = NvidiaSmiError("gpu_lost", f"nvidia-smi says nothing about {target}.")
    except NvidiaSmiError as error:
        failure = error
    if failure.reason == "reset_required":
        status = "reset_required"
    else:
        status = "unreadable" if failure.reason in _NOT_ITS_FAULT else "lost"
    gpu = _lost_gpu(status, failure.message, bus_id, gathering.kernel.get(bus_id or "", {}))
    if bus_id is None:
        gpu["uuid"] = target
    return {"driver_version": None, "cuda_version": None, "gpu": gpu}


def _one_by_one(gathering: _Gathering, failure: NvidiaSmiError, words: str) -> dict[str, Any] | None:
    """Ask each GPU alone: one that is lost fails the call for all, while C(-i) still reads its neighbours."""
    targets: list[tuple[str, str | None]] = [(bus_id, bus_id) for bus_id in _expected(gathering)]
    if not targets:
        listing = gathering.call(["-L"])[0]
        words = f"{words}\n{listing.words}"
        with contextlib.suppress(NvidiaSmiError):
            targets = [(gpu["uuid"], None) for gpu in parse_list(listing.stdout) if gpu["uuid"]]
    if not targets:
        return None
    commands = gathering.call(*([*gathering.question(), "-i", target] for target, _bus_id in targets))
    answers = [_alone(gathering, command, *targets[number]) for number, command in enumerate(commands)]
    gpus = [answer["gpu"] for answer in answers]
    # Where the kernel gives no list, the message itself names the GPU that no listing has any more.
    named = {normal_bus_id(gpu["pci_bus_id"]) for gpu in gpus}
    for match in _BUS_ID.finditer(words):
        bus_id = normal_bus_id(match.group(0))
        if match.group(1) and bus_id not in named:
            named.add(bus_id)
            gpus.append(_lost_gpu("lost", failure.message, bus_id, {}))
    return {
        "driver_version": _first(*(answer["driver_version"] for answer in answers)),
        "cuda_version": _first(*(answer["cuda_version"] for answer in answers)),
        "gpus": _indexed(gpus),
    }


def _indexed(gpus: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The GPUs by PCI address, which is NVML's order too, so that it gives those their index that brought none."""
    ordered = sorted(gpus, key=lambda gpu: normal_bus_id(gpu["pci_bus_id"]) or "~")
    if any(gpu["index"] not in (None, position) for position, gpu in enumerate(ordered)):
        return ordered
    return [dict(gpu, index=position) for position, gpu in enumerate(ordered)]


def _expected(gathering: _Gathering) -> list[str]:
    """The GPUs of the kernel module that can be meant to be seen here.

    In a container the kernel's list is the host's: a GPU without device node belongs to somebody else.
    """
    expected = []
    for bus_id, information in gathering.kernel.items():
        device = gathering.root / f"dev/nvidia{_int(information.get('device minor'))}"
        excluded = (information.get("gpu excluded") or "").lower() == "yes"
        if device.exists() and not excluded:
            expected.append(bus_id)
    return expected


_CORRUPTED = re.compile(r"infoROM is corrupted at gpu ([0-9a-fA-F:.]+)", re.IGNORECASE)


def _mark_inforoms(gpus: list[dict[str, Any]], words: str) -> None:
    """nvidia-smi tells a damaged infoROM in a line of its own, after a full answer."""
    corrupted = {normal_bus_id(match.group(1)) for match in _CORRUPTED.finditer(words)}
    for gpu in gpus:
        gpu["inforom_corrupted"] = normal_bus_id(gpu["pci_bus_id"]) in corrupted


def _missing(gathering: _Gathering, gpus: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The GPUs that the kernel module holds while nvidia-smi is silent about them."""
    reported = {normal_bus_id(gpu["pci_bus_id"]) for gpu in gpus}
    return [
        _lost_gpu(
            "lost",
            f"The kernel module holds GPU {bus_id}, but nvidia-smi does not list it.",
            bus_id,
            gathering.kernel[bus_id],
        )
        for bus_id in _expected(gathering)
        if bus_id not in reported
    ]


def _complete(gathering: _Gathering, gpus: list[dict[str, Any]], aside: dict[str, Command]) -> list[dict[str, Any]]:
    """The GPUs with what other calls, /proc and sysfs say of them, and without what was not asked for."""
    subsets = gathering.subsets
    if "mig" in subsets and any(gpu["mig_mode"] == "Enabled" for gpu in gpus):
        listing = aside.get("-L") or gathering.call(["-L"])[0]
        with contextlib.suppress(NvidiaSmiError):
            gpus = merge_list(gpus, parse_list(listing.stdout))
    links = _nvlinks(aside["nvlink -s"]) if "nvlink" in subsets else None
    completed = []
    for gpu in gpus:
        information = gathering.kernel.get(normal_bus_id(gpu["pci_bus_id"]) or "", {})
        more = {"minor_number": _first(gpu["minor_number"], _int(information.get("device minor")))}
        if links is not None:
            more["nvlinks"] = links.get(gpu["uuid"], [])
        if "topology" in subsets:
            more.update(topology(gpu["pci_bus_id"], gathering.root))
        completed.append(keep_subsets(dict(gpu, **more), subsets))
    return completed


def _nvlinks(command: Command) -> dict[str, list[dict[str, Any]] | None] | None:
    """The links by UUID; None when the call failed, for then nothing is known of them."""
    if command.returncode != 0:
        return None
    try:
        return parse_nvlink_status(command.stdout)
    except NvidiaSmiError:
        return None


def _sick(gpus: list[dict[str, Any]], reason: str | None) -> dict[str, str]:
    """Reason and message when a GPU is lost, must be reset or fails; nothing more than is known already otherwise."""
    sick = [gpu for gpu in gpus if gpu["status"] in ("lost", "reset_required")]
    if not sick and reason is None:
        sick = [gpu for gpu in gpus if gpu["status"] == "unreadable"]
    if not sick:
        return {}
    reasons = {"lost": "gpu_lost", "reset_required": "reset_required", "unreadable": "unknown_error"}
    reason = next(reasons[status] for status in reasons if any(gpu["status"] == status for gpu in sick))
    named = " ".join(f"GPU {_first(gpu['pci_bus_id'], gpu['uuid'])}: {gpu['status_message']}" for gpu in sick)
    step = NEXT_STEPS[reason]
    return {"reason": reason, "message": named if named.endswith(step) else f"{named} {step}"}


def collect(
    subsets: frozenset[str],
    *,
    path: str | None = None,
    timeout: float = 60.0,
    run: Runner = run_commands,
    root: str = "/",
    search: str | None = None,
) -> dict[str, Any]:
    """The facts of this node; a node without GPU, driver or nvidia-smi is an answer too, never an exception."""
    base = Path(root)
    facts = empty_facts(detect_platform(base))
    binary = find_nvidia_smi(path, search)
    if binary is None:
        looked = path or f"nvidia-smi in PATH and in {WSL_DIRECTORY}"
        message = f"No executable program was found as {looked}. {NEXT_STEPS['not_installed']}"
        return dict(facts, reason="not_installed", message=message)

    gathering = _Gathering(binary, subsets, run, time.monotonic() + timeout, base, kernel_gpus(base))
    main, aside = gathering.ask()
    try:
        answer = gathering.read(main)
    except NvidiaSmiError as failure:
        facts.update(reason=failure.reason, message=failure.message)
        if failure.reason == "library_mismatch":
            module = (_read(base / "sys/module/nvidia/version") or "").strip()
            facts["message"] += f" The loaded kernel module is {clean(module)}." if module else ""
        words = gathering.words(main)
        speaks_of_one = failure.reason in ("gpu_lost", "reset_required", "interrupt_issue") or _BUS_ID.search(words)
        recovered = _one_by_one(gathering, failure, words) if speaks_of_one and not main.timed_out else None
        if recovered is None:
            return facts
        answer = recovered
    else:
        _mark_inforoms(answer["gpus"], gathering.words(main))
        answer["gpus"] += _missing(gathering, answer["gpus"])
        if not answer["gpus"]:
            facts.update(reason="no_devices", message=_explain(main, "no_devices", ""))

    versions = parse_version(aside["--version"].stdout) if "--version" in aside else {}
    gpus = _complete(gathering, answer["gpus"], aside)
    facts.update(
        available=any(gpu["status"] == "ok" for gpu in gpus),
        driver_version=_first(answer["driver_version"], versions.get("driver_version")),
        cuda_version=_first(answer["cuda_version"], versions.get("cuda_version")),
        gpus=gpus,
        **_sick(gpus, facts["reason"]),
    )
    return facts
