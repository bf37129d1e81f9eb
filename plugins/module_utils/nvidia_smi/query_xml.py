# Copyright (c) gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""C(nvidia-smi -q -x)."""

from __future__ import annotations

import contextlib
import re
from typing import Any, NoReturn, cast

from ansible_collections.gpufarm.core.plugins.module_utils.commands import MAX_OUTPUT_BYTES
from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi.facts import (
    Answer,
    ClocksEventReasonsCounters,
    Ecc,
    FabricHealth,
    Gpu,
    MigDevice,
    Process,
    RemappedRows,
    RetiredPages,
    TemperatureLimits,
    empty_gpu,
)
from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi.failures import NvidiaSmiError, damaged
from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi.values import (
    GPU_STATES,
    bare,
    bool_of,
    fails,
    first_of,
    float_of,
    identifier_of,
    int_of,
    sum_of,
    text_of,
    version_of,
)

MAX_XML_DEPTH = 32


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
            if node is not None and text_of(node.text) is not None:
                return node.text
        return None


# A name may hold the end of its element, or more: nvidia-smi writes the used memory behind each. Where that is missing,
# one look to the end is enough.
_PROCESS_NAME = re.compile(r"<process_name>(.*?)(</process_name>\s+<used_memory>|\Z)", re.DOTALL)


_NOT_IN_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")


_BARE_AMPERSAND = re.compile("&(?!(?:amp|lt|gt|quot|apos);)")


def _mend_process_names(text: str) -> str:
    """nvidia-smi copies process names, control characters included (cwltool#1910), and older ones escape nothing."""

    def mend(match: re.Match[str]) -> str:
        if not match.group(2):
            return match.group()
        name = _NOT_IN_XML.sub("\ufffd", match.group(1)).replace("<", "&lt;").replace(">", "&gt;")
        return f"<process_name>{_BARE_AMPERSAND.sub('&amp;', name)}{match.group(2)}"

    return _PROCESS_NAME.sub(mend, text)


def _read_tree(text: str) -> _Node:
    from xml.parsers import expat  # noqa: PLC0415  # the listing path, the default one, does without

    parser = expat.ParserCreate()
    top = _Node("", {})
    stack = [top]
    skipping = 0

    def refuse(*_: Any) -> NoReturn:
        raise damaged("The XML declares or uses an entity, which nvidia-smi never does; it was not read.")

    def start_doctype(_name: str, _system: str | None, _public: str | None, has_internal_subset: bool) -> None:
        if has_internal_subset:
            refuse()

    def start(name: str, attributes: dict[str, str]) -> None:
        nonlocal skipping
        if skipping or name == "supported_clocks":
            skipping += 1
            return
        if len(stack) > MAX_XML_DEPTH:
            raise damaged(f"The XML is nested more than {MAX_XML_DEPTH} deep, which nvidia-smi's never is.")
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
        raise damaged(f"The output of nvidia-smi is not the whole XML document it should be: {error}.") from error
    return top.children[0]


def _mib(node: _Node, *paths: str) -> int | None:
    return int_of(node.value(*paths), "MiB", "MB")


def _ecc_counts(counters: _Node | None) -> tuple[int | None, int | None]:
    """Corrected and uncorrected errors; the layout changed with Turing, and again with driver 535 or so."""
    if counters is None:
        return None, None
    if counters.find("single_bit") or counters.find("double_bit"):
        return int_of(counters.value("single_bit/total")), int_of(counters.value("double_bit/total"))
    corrected, uncorrected = [], []
    for child in counters.children:
        if "_uncorrectable" in child.name:
            uncorrected.append(int_of(child.text))
        elif child.name.endswith("_correctable"):
            corrected.append(int_of(child.text))
    return sum_of(corrected), sum_of(uncorrected)


def _ecc(gpu: _Node) -> Ecc:
    corrected_volatile, uncorrected_volatile = _ecc_counts(gpu.find("ecc_errors/volatile"))
    corrected_aggregate, uncorrected_aggregate = _ecc_counts(gpu.find("ecc_errors/aggregate"))
    rows: RemappedRows = {
        "corrected": int_of(gpu.value("remapped_rows/remapped_row_corr")),
        "uncorrected": int_of(gpu.value("remapped_rows/remapped_row_unc")),
        "pending": bool_of(gpu.value("remapped_rows/remapped_row_pending")),
        "failure": bool_of(gpu.value("remapped_rows/remapped_row_failure")),
    }
    pages: RetiredPages = {
        "single_bit": int_of(gpu.value("retired_pages/multiple_single_bit_retirement/retired_count")),
        "double_bit": int_of(gpu.value("retired_pages/double_bit_retirement/retired_count")),
        "pending": bool_of(gpu.value("retired_pages/pending_retirement", "retired_pages/pending_blacklist")),
    }
    waiting = [value for value in (rows["pending"], pages["pending"]) if value is not None]
    return {
        "mode": text_of(gpu.value("ecc_mode/current_ecc")),
        "mode_pending": text_of(gpu.value("ecc_mode/pending_ecc")),
        "corrected": {"volatile": corrected_volatile, "aggregate": corrected_aggregate},
        "uncorrected": {"volatile": uncorrected_volatile, "aggregate": uncorrected_aggregate},
        "sram_threshold_exceeded": bool_of(gpu.value("ecc_errors/aggregate/sram_threshold_exceeded")),
        "unrepairable_memory": bool_of(gpu.value("ecc_errors/unrepairable_memory")),
        "channel_repair_pending": bool_of(gpu.value("ecc_errors/channel_repair_pending")),
        "tpc_repair_pending": bool_of(gpu.value("ecc_errors/tpc_repair_pending")),
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
        state = bare(child.text).lower()
        if state in ("active", "not active"):
            known = True
        if state == "active":
            active.append(re.sub(r"^clocks_(?:event|throttle)_reasons?_", "", child.name))
    return active if known else None


def _clocks_event_reasons_counters(gpu: _Node) -> ClocksEventReasonsCounters:
    """How long each reason was active; the XML has shorter words for some than its list of reasons and --query-gpu."""

    def counter(name: str) -> int | None:
        return int_of(gpu.value(f"clocks_event_reasons_counters/clocks_event_reasons_counters_{name}"), "us")

    return {
        "sw_power_cap_us": counter("sw_power_cap"),
        "sync_boost_us": counter("sync_boost"),
        "sw_thermal_slowdown_us": counter("sw_therm_slowdown"),
        "hw_thermal_slowdown_us": counter("hw_therm_slowdown"),
        "hw_power_brake_slowdown_us": counter("hw_power_brake"),
    }


def _processes(gpu: _Node) -> list[Process] | None:
    element = gpu.find("processes")
    if element is None:
        return None
    found: list[Process] = [
        {
            "pid": int_of(child.value("pid")),
            "type": text_of(child.value("type")),
            "name": text_of(child.value("process_name")),
            "cpu_affinity": None,
            "memory_used_mib": _mib(child, "used_memory"),
            "gpu_instance_id": int_of(child.value("gpu_instance_id")),
            "compute_instance_id": int_of(child.value("compute_instance_id")),
        }
        for child in element.children
        if child.name == "process_info"
    ]
    # An element that holds words instead of processes says that the list cannot be had.
    return None if not found and element.text.strip() else found


def _mig_devices(gpu: _Node) -> list[MigDevice] | None:
    if text_of(gpu.value("mig_mode/current_mig")) != "Enabled":
        return []
    element = gpu.find("mig_devices")
    if element is None:
        return None
    return [
        {
            "index": int_of(child.value("index")),
            "uuid": identifier_of(child.value("uuid")),
            "profile": text_of(child.value("profile", "name")),
            "gpu_instance_id": int_of(child.value("gpu_instance_id")),
            "compute_instance_id": int_of(child.value("compute_instance_id")),
            "memory_total_mib": _mib(child, "fb_memory_usage/total"),
        }
        for child in element.children
        if child.name == "mig_device"
    ]


def _temperature_limits(gpu: _Node) -> TemperatureLimits:
    """At what the card protects itself: temperatures, or with newer ones distances to a limit that is not told."""

    def limit(name: str) -> int | None:
        return int_of(gpu.value(f"temperature/{name}_threshold"), "C")

    return {
        "slowdown_c": limit("gpu_temp_slow"),
        "shutdown_c": limit("gpu_temp_max"),
        "memory_max_c": limit("gpu_temp_max_mem"),
        "margin_c": int_of(gpu.value("temperature/gpu_temp_tlimit"), "C"),
        "slowdown_margin_c": limit("gpu_temp_slow_tlimit"),
        "shutdown_margin_c": limit("gpu_temp_max_tlimit"),
    }


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
        elif any(fails(node.text) for node in map(gpu.find, paths) if node is not None):
            failed.append(key)
    return failed, bool(failed) and not answers


def _fabric_health(gpu: _Node) -> FabricHealth:
    health = {key: text_of(gpu.value(f"fabric/health/{key}")) for key in FabricHealth.__annotations__}
    return cast(FabricHealth, health)


def _fabric_status(gpu: _Node) -> str | None:
    """Success, or why the GPU could not join its fabric: NVML's words for an error are the value here."""
    status = gpu.find("fabric/status")
    text = bare(status.text if status else None)
    return None if text.lower() in ("", "n/a", "not supported") else text


def _recovery_action(gpu: _Node) -> str | None:
    """What the driver recommends, in the words of newer ones: drivers from 535 to 555 or so gave two flags instead."""
    action = text_of(gpu.value("gpu_recovery_action"))
    reset = bool_of(gpu.value("gpu_reset_status/reset_required"))
    drain = bool_of(gpu.value("gpu_reset_status/drain_and_reset_recommended"))
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
        state = GPU_STATES.get(bare(node.text).lower())
        if state:
            return state, f"nvidia-smi says {bare(node.text)!r} in <{node.name}>."
        waiting.extend(child for child in node.children if child.name not in ("processes", "accounted_processes"))
    return "ok", None


def _gpu_of_xml(element: _Node, index: int) -> Gpu:
    gpu = empty_gpu()
    status, status_message = _status(element)
    sensors_failed, dumb = _sensors(element)
    if dumb and status == "ok":
        status, status_message = "unreadable", f"Its sensors answer with errors only: {', '.join(sensors_failed)}."
    power = element.find("gpu_power_readings") or element.find("power_readings") or _Node("", {})
    link = element.find("pci/pci_gpu_link_info") or _Node("", {})
    gpu.update(
        {
            "index": index,
            "name": text_of(element.value("product_name")),
            "uuid": identifier_of(element.value("uuid")),
            "pci_bus_id": text_of(element.value("pci/pci_bus_id")) or text_of(element.attributes.get("id")),
            "status": status,
            "status_message": status_message,
            "sensors_failed": sensors_failed,
            "serial": identifier_of(element.value("serial")),
            "architecture": text_of(element.value("product_architecture")),
            "minor_number": int_of(element.value("minor_number")),
            "memory_total_mib": _mib(element, "fb_memory_usage/total"),
            "memory_used_mib": _mib(element, "fb_memory_usage/used"),
            "persistence_mode": text_of(element.value("persistence_mode")),
            "compute_mode": text_of(element.value("compute_mode")),
            "mig_mode": text_of(element.value("mig_mode/current_mig")),
            "mig_mode_pending": text_of(element.value("mig_mode/pending_mig")),
            "mig_devices": _mig_devices(element),
            "brand": text_of(element.value("product_brand")),
            "board_part_number": text_of(element.value("board_part_number")),
            "vbios_version": text_of(element.value("vbios_version")),
            "gsp_firmware_version": text_of(element.value("gsp_firmware_version")),
            "virtualization_mode": text_of(element.value("gpu_virtualization_mode/virtualization_mode")),
            "vgpu_licensed_product": text_of(element.value("vgpu_software_licensed_product/licensed_product_name")),
            "vgpu_license_status": text_of(element.value("vgpu_software_licensed_product/license_status")),
            "addressing_mode": text_of(element.value("addressing_mode")),
            "c2c_mode": text_of(element.value("c2c_mode")),
            "driver_model": text_of(element.value("driver_model/current_dm")),
            "memory_free_mib": _mib(element, "fb_memory_usage/free"),
            "memory_reserved_mib": _mib(element, "fb_memory_usage/reserved"),
            "bar1_total_mib": _mib(element, "bar1_memory_usage/total"),
            "bar1_used_mib": _mib(element, "bar1_memory_usage/used"),
            # The average is what --query-gpu=power.draw gives wherever the card has one.
            "power_draw_w": float_of(power.value(*_POWER_DRAW), "W"),
            "power_limit_w": float_of(power.value("requested_power_limit", "power_limit"), "W"),
            "power_limit_enforced_w": float_of(power.value("current_power_limit", "enforced_power_limit"), "W"),
            "power_limit_default_w": float_of(power.value("default_power_limit"), "W"),
            "temperature_gpu_c": int_of(element.value("temperature/gpu_temp"), "C"),
            "temperature_memory_c": int_of(element.value("temperature/memory_temp"), "C"),
            "temperature_limits": _temperature_limits(element),
            "utilization_gpu_percent": int_of(element.value("utilization/gpu_util"), "%"),
            "utilization_memory_percent": int_of(element.value("utilization/memory_util"), "%"),
            "ecc": _ecc(element),
            "recovery_action": _recovery_action(element),
            "performance_state": text_of(element.value("performance_state")),
            "clocks": {
                "graphics_mhz": int_of(element.value("clocks/graphics_clock"), "MHz"),
                "sm_mhz": int_of(element.value("clocks/sm_clock"), "MHz"),
                "memory_mhz": int_of(element.value("clocks/mem_clock"), "MHz"),
                "graphics_max_mhz": int_of(element.value("max_clocks/graphics_clock"), "MHz"),
                "sm_max_mhz": int_of(element.value("max_clocks/sm_clock"), "MHz"),
                "memory_max_mhz": int_of(element.value("max_clocks/mem_clock"), "MHz"),
            },
            "clocks_event_reasons": _clocks_event_reasons(element),
            "clocks_event_reasons_counters": _clocks_event_reasons_counters(element),
            "pcie": {
                "generation_current": int_of(link.value("pcie_gen/current_link_gen")),
                "generation_max": int_of(link.value("pcie_gen/max_link_gen")),
                "generation_device_max": int_of(link.value("pcie_gen/max_device_link_gen")),
                "generation_host_max": int_of(link.value("pcie_gen/max_host_link_gen")),
                "width_current": int_of(link.value("link_widths/current_link_width"), "x"),
                "width_max": int_of(link.value("link_widths/max_link_width"), "x"),
                "replay_count": int_of(element.value("pci/replay_counter")),
            },
            "fabric_state": text_of(element.value("fabric/state")),
            "fabric_status": _fabric_status(element),
            "fabric_health": _fabric_health(element),
            "processes": _processes(element),
        }
    )
    return gpu


def _answer_of(text: str) -> Answer:
    root = _read_tree(text)
    if root.name != "nvidia_smi_log":
        raise damaged(f"The output is XML, but its root is <{root.name}> where nvidia-smi writes <nvidia_smi_log>.")
    elements = [child for child in root.children if child.name == "gpu"]
    return {
        "driver_version": first_of(version_of(root.value("driver_version")), version_of(root.value("kmd_version"))),
        "cuda_version": first_of(version_of(root.value("cuda_version")), version_of(root.value("cuda_umd_version"))),
        "attached_gpus": int_of(root.value("attached_gpus")),
        "gpus": [_gpu_of_xml(element, index) for index, element in enumerate(elements)],
    }


_GPU = re.compile(r"\n[ \t]+<gpu id=")


_ATTACHED = re.compile(r"<attached_gpus>([0-9]{1,4})</attached_gpus>")


def _without_processes(text: str) -> str:
    start, closing = text.find("<processes>"), "</processes>"
    end = text.rfind(closing)
    return text[:start] + text[end + len(closing) :] if 0 <= start < end else text


def parse_query_xml(text: str) -> Answer:
    """C(nvidia-smi -q -x) as driver_version, cuda_version, attached_gpus and gpus; NvidiaSmiError when damaged.

    A name that is not escaped can be more than one: it ends its process, adds elements or a GPU, or hides one. Whatever
    leaves the list of processes needs a second end of it. Then what the lists hold is unknown, and nothing else.
    """
    if len(text) > MAX_OUTPUT_BYTES:
        raise damaged(f"nvidia-smi printed more than {MAX_OUTPUT_BYTES} bytes of XML; it was not read.")
    text = _mend_process_names(text)
    # Both are before the first name.
    border, told = _GPU.search(text), _ATTACHED.search(text)
    parts = text.split(border.group()) if border else [text]
    count, attached = len(parts) - 1, int(told.group(1)) if told else None
    honest = all(part.count("</processes>") <= 1 for part in parts)
    # Fewer are told where one alone is asked for.
    if honest and (attached is None or count <= attached):
        with contextlib.suppress(NvidiaSmiError):
            answer = _answer_of(text)
            if not border or len(answer["gpus"]) == count:
                return answer
    if attached == 1:
        return _answer_of(_without_processes(text))
    if attached is not None and count > attached:
        raise damaged(f"The XML has {count} GPUs where {attached} are attached; the name of a process may hold one.")
    return _answer_of((border.group() if border else "").join(map(_without_processes, parts)))


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
