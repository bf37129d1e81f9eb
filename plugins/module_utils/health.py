# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A verdict on each GPU of this node, from what nvidia-smi, the kernel log, DCGM and Fabric Manager say.

C(probe) asks the sources and C(judge), which touches nothing, weighs their answers. A source that could not be asked is
told in C(checks) and is a problem itself; what the platform does not give (null) is none.
Nothing here needs Ansible, and nothing beyond Python's standard library: a timer on the node runs the same code.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import platform as python_platform
import re
import select
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

from ansible_collections.gpufarm.core.plugins.module_utils import nvidia_smi, xid
from ansible_collections.gpufarm.core.plugins.module_utils.text import clean
from ansible_collections.gpufarm.core.plugins.module_utils.xid import CRITICAL, IGNORE, WARNING, Event

SEVERITIES = (IGNORE, WARNING, CRITICAL)


# --------------------------------------------------------------------------------------------------------------------
# Options


@dataclasses.dataclass(frozen=True)
class HealthOptions:
    """The options of the module C(nvidia_gpu_health), by their names; the defaults are here and nowhere else."""

    gpus: int | None = None
    path: str | None = None
    timeout: float = 60.0
    xid_since: str | None = None
    acknowledged_file: str = "/var/lib/gpufarm/health-acknowledged"
    ecc_required: bool = False
    ecc_uncorrected_max: int = 0
    ecc_corrected_max: int | None = None
    temperature_gpu_max_c: int | None = None
    throttle_reasons: tuple[str, ...] = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")
    pcie_width_min: int | None = None
    pcie_generation_min: int | None = None
    persistence_required: bool = True
    dcgm: bool = True
    dcgm_diag_level: int | None = None
    dcgm_diag_timeout: float = 3600.0
    severities: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        _check(self)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> HealthOptions:
        """The options in a dictionary, as a JSON file holds them; ValueError when it has others or of another type."""
        return cls(**_checked(mapping))


def defaults() -> dict[str, Any]:
    """Every option with its default, as JSON has it."""
    return {
        field.name: list(value) if isinstance(value, tuple) else value
        for field in dataclasses.fields(HealthOptions)
        for value in [getattr(HealthOptions(), field.name)]
    }


def _refuse(found: str, expected: str) -> ValueError:
    return ValueError(f"found {found}. Expected: {expected}. Next step: correct the options of the health check.")


def _is(value: Any, kind: str) -> bool:
    if kind == "bool":
        return isinstance(value, bool)
    if kind == "int":
        return isinstance(value, int) and not isinstance(value, bool)
    if kind == "float":
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind == "tuple[str, ...]":
        return isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value)
    if kind == "Mapping[str, str]":
        return isinstance(value, Mapping) and all(isinstance(item, str) for pair in value.items() for item in pair)
    return isinstance(value, str)


_KINDS = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "tuple[str, ...]": "a list of texts",
    "Mapping[str, str]": "a dictionary of texts",
}


def _checked(mapping: Mapping[str, Any]) -> dict[str, Any]:
    fields = {field.name: str(field.type) for field in dataclasses.fields(HealthOptions)}
    unknown = sorted(str(key) for key in mapping if key not in fields)
    if unknown:
        raise _refuse(f"the unknown option {', '.join(unknown)}", f"one of {', '.join(fields)}")
    values: dict[str, Any] = {}
    for name, value in mapping.items():
        kind = fields[name].replace(" | None", "")
        if value is None and fields[name] != kind:
            continue
        if not _is(value, kind):
            raise _refuse(f"{name} is {value!r}", _KINDS[kind])
        values[name] = tuple(value) if kind.startswith("tuple") else float(value) if kind == "float" else value
    return values


def _check(options: HealthOptions) -> None:
    for name in ("timeout", "dcgm_diag_timeout"):
        if not 0 < getattr(options, name) < math.inf:
            raise _refuse(f"{name} is {getattr(options, name):g}", "more than 0 seconds, and an end")
    for name in ("gpus", "ecc_uncorrected_max", "ecc_corrected_max", "pcie_width_min", "pcie_generation_min"):
        value = getattr(options, name)
        if value is not None and value < 0:
            raise _refuse(f"{name} is {value}", "0 or more")
    if options.dcgm_diag_level not in (None, 1, 2, 3, 4):
        raise _refuse(f"dcgm_diag_level is {options.dcgm_diag_level}", "1, 2, 3 or 4")
    for code, severity in options.severities.items():
        if severity not in SEVERITIES:
            raise _refuse(f"severities has {code}: {severity!r}", f"one of {', '.join(SEVERITIES)}")
        if code not in PROBLEMS and not _NUMBERED.match(code):
            raise _refuse(
                f"severities has the unknown code {code!r}", "a code such as temperature, xid_94 or dcgm_pcie"
            )
    if options.xid_since is not None:
        seconds_of(options.xid_since)


def seconds_of(text: str) -> float:
    """Seconds since the epoch, from those or from a time in ISO 8601, local where it names no zone."""
    if re.match(r"^[0-9]{1,12}(?:\.[0-9]{1,9})?$", text):
        return float(text)
    try:
        # Python before 3.11 does not take Z for UTC.
        return datetime.datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", text.strip())).timestamp()
    except ValueError:
        expected = "a time such as 2026-01-31T18:00:00Z, or seconds since the epoch"
        raise _refuse(f"xid_since is {text!r}", expected) from None


# How long a process that just ended may go on being listed.
PROCESS_WAIT = 1.0
# What a probe asks one after the other: nvidia-smi, the kernel log, DCGM, nvidia-smi again, Fabric Manager.
_SOURCES = 5


def longest_probe(options: HealthOptions) -> float:
    """The seconds after which C(probe) has ended, whatever hangs."""
    asked = _SOURCES * (options.timeout + nvidia_smi.GRACE) + PROCESS_WAIT
    if not options.dcgm or options.dcgm_diag_level is None:
        return asked
    return asked + options.dcgm_diag_timeout + nvidia_smi.GRACE


def refuse_longer(options: HealthOptions, limit: float) -> None:
    """ValueError where a probe could be killed before its end: it would never give a verdict."""
    longest = longest_probe(options)
    if longest > limit:
        cause = "timeout" if options.dcgm_diag_level is None else "timeout, dcgm_diag_level and dcgm_diag_timeout"
        raise _refuse(f"options ({cause}) with which a probe may take {longest:g} s", f"at most {limit:g} s")


# --------------------------------------------------------------------------------------------------------------------
# Problems


@dataclasses.dataclass(frozen=True)
class Kind:
    """What is the same for every problem of a code."""

    severity: str
    action: str
    expected: str


_ANSWERS = "every GPU to answer nvidia-smi"

PROBLEMS: dict[str, Kind] = {
    # The reasons of nvidia_smi_facts; reset_required and gpu_lost are those of single GPUs, too.
    "not_installed": Kind(CRITICAL, "update_driver", "an installed driver"),
    "driver_not_loaded": Kind(CRITICAL, "reboot", "a loaded driver"),
    "library_not_found": Kind(CRITICAL, "update_driver", "the driver's library libnvidia-ml.so.1"),
    "library_mismatch": Kind(CRITICAL, "reboot", "kernel module and libraries of one version"),
    "no_devices": Kind(CRITICAL, "check_hardware", "at least one GPU"),
    "access_blocked": Kind(CRITICAL, "check_configuration", "a GPU that the operating system lets through"),
    "permission_denied": Kind(CRITICAL, "check_configuration", "permission to use the GPUs"),
    "gpu_lost": Kind(CRITICAL, "reboot", _ANSWERS),
    "reset_required": Kind(CRITICAL, "reset_gpu", "a GPU that needs no reset"),
    "interrupt_issue": Kind(CRITICAL, "check_hardware", "interrupts from every GPU"),
    "timeout": Kind(CRITICAL, "reboot", "an answer of nvidia-smi in time"),
    "crashed": Kind(CRITICAL, "update_driver", "an nvidia-smi that runs to its end"),
    "unsupported": Kind(CRITICAL, "update_driver", "an nvidia-smi that knows -q -x"),
    "invalid_output": Kind(CRITICAL, "update_driver", "a whole answer of nvidia-smi"),
    "unknown_error": Kind(CRITICAL, "reboot", _ANSWERS),
    "gpu_unreadable": Kind(CRITICAL, "check_configuration", _ANSWERS),
    "gpu_count": Kind(CRITICAL, "check_hardware", "{gpus} GPUs"),
    "gpu_init_failed": Kind(CRITICAL, "reset_gpu", "a GPU that the driver can start"),
    "sensors_failed": Kind(WARNING, "watch", "a value from every sensor"),
    "inforom_corrupted": Kind(WARNING, "contact_support", "an infoROM that can be read"),
    "compute_prohibited": Kind(CRITICAL, "check_configuration", "a compute mode in which jobs may use the GPU"),
    "recovery_action": Kind(CRITICAL, "drain_and_reset", "None"),
    "ecc_uncorrected": Kind(CRITICAL, "drain_and_reset", "at most {ecc_uncorrected_max}"),
    "ecc_corrected": Kind(WARNING, "watch", "at most {ecc_corrected_max}"),
    "ecc_disabled": Kind(WARNING, "check_configuration", "ECC enabled"),
    "ecc_mode_pending": Kind(WARNING, "reset_gpu", "one ECC mode before and after a reset"),
    "unrepairable_memory": Kind(CRITICAL, "contact_support", "memory that can be repaired"),
    "channel_repair_pending": Kind(CRITICAL, "drain_and_reset", "no channel of memory that waits to be repaired"),
    "tpc_repair_pending": Kind(CRITICAL, "drain_and_reset", "no part of the chip that waits to be repaired"),
    "sram_threshold_exceeded": Kind(CRITICAL, "contact_support", "fewer errors in SRAM than the threshold"),
    "row_remap_pending": Kind(CRITICAL, "drain_and_reset", "no row of memory that waits to be replaced"),
    "row_remap_failed": Kind(CRITICAL, "contact_support", "a spare row for every row that failed"),
    "retired_pages_pending": Kind(CRITICAL, "drain_and_reset", "no page of memory that waits to be retired"),
    "hw_slowdown": Kind(WARNING, "check_hardware", "none of {throttle_reasons}"),
    "temperature": Kind(WARNING, "check_hardware", "less than the card's own limits"),
    "pcie_width": Kind(WARNING, "check_hardware", "all lanes"),
    "pcie_generation": Kind(WARNING, "check_hardware", "generation {pcie_generation_min} or newer"),
    "nvlink_down": Kind(WARNING, "check_nvlink", "as many active links as its neighbours of the same model"),
    "fabric_not_ready": Kind(CRITICAL, "check_nvlink", "state Completed with status Success"),
    "fabric_unhealthy": Kind(CRITICAL, "check_nvlink", "a healthy fabric with its full bandwidth"),
    "fabric_manager": Kind(
        CRITICAL, "check_configuration", "an active unit nvidia-fabricmanager on a host with NVSwitch"
    ),
    "persistence_off": Kind(WARNING, "check_configuration", "persistence mode Enabled"),
    "process_without_owner": Kind(WARNING, "reset_gpu", "a living process for all memory in use"),
    "mig_pending": Kind(WARNING, "reset_gpu", "one MIG mode before and after a reset"),
    "check_failed": Kind(WARNING, "check_configuration", "an answer"),
}
_NUMBERED = re.compile(r"^(?:s?xid_[1-9][0-9]{0,5}|dcgm_[a-z0-9_]+)$")

# Where the general step would send people the wrong way.
_STEPS = {
    **{
        reason: step.rstrip(".") for reason, step in nvidia_smi.NEXT_STEPS.items() if reason in PROBLEMS
    },
    "gpu_count": "look for the missing GPU with 'lspci -d 10de:' and in the kernel log; drain the node and reseat it",
    "compute_prohibited": "run 'nvidia-smi -c DEFAULT', or leave the node drained if it is meant to be out of use",
    "ecc_disabled": "run 'nvidia-smi -e 1' and reset the GPU, or set ecc_required to false",
    "fabric_manager": "read 'journalctl -u nvidia-fabricmanager'; its version must be exactly that of the driver",
    "fabric_not_ready": "check that nvidia-fabricmanager runs and has the driver's version, then reset the GPUs",
    "persistence_off": "enable nvidia-persistenced, or set persistence_required to false",
    "temperature": "check fans, air flow and dust, and the load of the neighbours",
    "hw_slowdown": "check cooling and power supply of the node",
    "pcie_width": "reseat the GPU; if the slot is wired so, set severities or pcie_width_min",
    "pcie_generation": "reseat the GPU and check the slot's setting in the firmware",
    "process_without_owner": "end what still holds /dev/nvidia* ('fuser -v /dev/nvidia*'), or reset the GPU",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Problem:
    """One thing that is wrong; uuid and pci_bus_id are None for the node."""

    code: str
    severity: str
    uuid: str | None
    pci_bus_id: str | None
    found: str
    expected: str
    action: str
    message: str


@dataclasses.dataclass(frozen=True)
class Finding:
    """What DCGM says of a GPU, or of the node."""

    code: str
    severity: str
    uuid: str | None
    found: str


@dataclasses.dataclass(frozen=True)
class _Complaint:
    """A problem before the options, the GPU's name and the node's are known to it."""

    code: str
    found: str
    severity: str | None = None
    action: str | None = None
    expected: str | None = None
    step: str | None = None


def _problem(
    complaint: _Complaint, host: str, options: HealthOptions, uuid: str | None, pci_bus_id: str | None
) -> Problem | None:
    """The problem as it is told; None where its severity is to be ignored."""
    kind = PROBLEMS.get(complaint.code, Kind(WARNING, "watch", ""))
    severity = options.severities.get(complaint.code, complaint.severity or kind.severity)
    if severity == IGNORE:
        return None
    action = complaint.action or kind.action
    values = dataclasses.asdict(options)
    values["throttle_reasons"] = ", ".join(options.throttle_reasons)
    expected = complaint.expected or kind.expected.format_map(values)
    step = complaint.step or _STEPS.get(complaint.code) or xid.ACTIONS[action]
    where = " ".join(part for part in (f"Node {host}", _named(uuid, pci_bus_id)) if part)
    found = complaint.found.rstrip(".")
    step = step[:1].lower() + step[1:]
    message = f"{where}: found {found}. Expected: {expected}. Next step: {step}."
    return Problem(complaint.code, severity, uuid, pci_bus_id, found, expected, action, message)


def _named(uuid: str | None, pci_bus_id: str | None) -> str:
    if uuid and pci_bus_id:
        return f"GPU {uuid} at {pci_bus_id}"
    return f"GPU {uuid}" if uuid else f"device {pci_bus_id}" if pci_bus_id else ""


# --------------------------------------------------------------------------------------------------------------------
# Judgement of nvidia-smi's facts

_UNANSWERED = {"lost": "gpu_lost", "reset_required": "reset_required", "unreadable": "gpu_unreadable"}


def _more(value: float | None, limit: float | None) -> bool:
    return value is not None and limit is not None and value > limit


def _less(value: float | None, limit: float | None) -> bool:
    return value is not None and limit is not None and value < limit


def _gpu_status(gpu: Mapping[str, Any], _options: HealthOptions) -> Iterator[_Complaint]:
    code = _UNANSWERED.get(gpu["status"])
    failed = gpu["sensors_failed"]
    if code:
        step = "reset_gpu" if failed else None
        yield _Complaint(code, f"that {_without_advice(gpu['status_message'] or gpu['status'])}", action=step)
    elif failed:
        yield _Complaint("sensors_failed", f"an error in place of {', '.join(failed)}")
    if gpu["inforom_corrupted"]:
        yield _Complaint("inforom_corrupted", "a corrupted infoROM, which cannot keep which memory was replaced")
    if gpu["compute_mode"] == "Prohibited":
        yield _Complaint("compute_prohibited", "compute mode Prohibited")
    action = gpu["recovery_action"]
    if action not in (None, "None"):
        wanted = action.lower()
        step = "reboot" if "reboot" in wanted else "reset_gpu" if wanted == "reset" else None
        yield _Complaint("recovery_action", f"the recovery action {action}", action=step)


def _gpu_memory(gpu: Mapping[str, Any], options: HealthOptions) -> Iterator[_Complaint]:
    ecc = gpu["ecc"]
    for code, name, limit in (
        ("ecc_uncorrected", "uncorrected", options.ecc_uncorrected_max),
        ("ecc_corrected", "corrected", options.ecc_corrected_max),
    ):
        count = ecc[name]["volatile"]
        if _more(count, limit):
            yield _Complaint(code, f"{count} {name} memory errors since the driver was loaded")
    if options.ecc_required and ecc["mode"] == "Disabled":
        yield _Complaint("ecc_disabled", "ECC disabled")
    if ecc["mode"] and ecc["mode_pending"] and ecc["mode"] != ecc["mode_pending"]:
        yield _Complaint("ecc_mode_pending", f"ECC {ecc['mode']} now and {ecc['mode_pending']} after the next reset")
    if ecc["sram_threshold_exceeded"]:
        yield _Complaint("sram_threshold_exceeded", "more errors in SRAM than the threshold")
    if ecc["unrepairable_memory"]:
        yield _Complaint("unrepairable_memory", "memory that cannot be repaired any more")
    if ecc["channel_repair_pending"]:
        yield _Complaint("channel_repair_pending", "a channel of memory that waits for a reset to be repaired")
    if ecc["tpc_repair_pending"]:
        yield _Complaint("tpc_repair_pending", "a part of the chip (TPC) that waits for a reset to be repaired")
    if ecc["remapped_rows"]["pending"]:
        yield _Complaint("row_remap_pending", "a row of memory that waits for a reset to be replaced")
    if ecc["remapped_rows"]["failure"]:
        yield _Complaint("row_remap_failed", "a row of memory that could not be replaced")
    if ecc["retired_pages"]["pending"]:
        yield _Complaint("retired_pages_pending", "a page of memory that waits for a reset to be retired")


def _gpu_temperature(gpu: Mapping[str, Any], options: HealthOptions) -> Iterator[_Complaint]:
    celsius, limits = gpu["temperature_gpu_c"], gpu["temperature_limits"]
    if options.temperature_gpu_max_c is not None:
        if _more(celsius, options.temperature_gpu_max_c):
            yield _Complaint("temperature", f"{celsius} C", expected=f"at most {options.temperature_gpu_max_c} C")
    else:
        # The card's own limits: newer ones tell how far they are from one limit, which shrinks as they get hot.
        margin = limits["margin_c"]
        for limit, severity, deed in (("shutdown", CRITICAL, "turns itself off"), ("slowdown", WARNING, "slows down")):
            hottest, least = limits[f"{limit}_c"], limits[f"{limit}_margin_c"]
            if _more(celsius, None if hottest is None else hottest - 1):
                expected = f"less than {hottest} C, at which the card {deed}"
                yield _Complaint("temperature", f"{celsius} C", severity, expected=expected)
                break
            if _less(margin, None if least is None else least + 1):
                found = f"{'an unknown temperature' if celsius is None else f'{celsius} C'}, a margin of {margin} C"
                expected = f"a margin of more than {least} C, at which the card {deed}"
                yield _Complaint("temperature", found, severity, expected=expected)
                break
    hottest = limits["memory_max_c"]
    if _more(gpu["temperature_memory_c"], None if hottest is None else hottest - 1):
        expected = f"less than {hottest} C, at which the card slows down"
        yield _Complaint("temperature", f"{gpu['temperature_memory_c']} C of the memory", expected=expected)


def _gpu_speed(gpu: Mapping[str, Any], options: HealthOptions) -> Iterator[_Complaint]:
    reasons = gpu["clocks_event_reasons"] or []
    slowing = [reason for reason in options.throttle_reasons if reason in reasons]
    if slowing:
        yield _Complaint("hw_slowdown", f"clocks held down by {', '.join(slowing)}")
    yield from _gpu_temperature(gpu, options)
    pcie = gpu["pcie"]
    width = pcie["width_current"]
    wanted = pcie["width_max"] if options.pcie_width_min is None else options.pcie_width_min
    if _less(width, wanted):
        yield _Complaint("pcie_width", f"{width} PCI Express lanes", expected=f"{wanted}")
    # An idle GPU saves power on a slower link.
    resting = "gpu_idle" in reasons or gpu["performance_state"] not in (None, "P0", "P1", "P2")
    fastest = pcie["generation_max"] if resting else pcie["generation_current"]
    if _less(fastest, options.pcie_generation_min):
        yield _Complaint("pcie_generation", f"PCI Express generation {fastest}")


# What each part of the fabric's health says when nothing is wrong; "" where the driver does not tell it.
_FABRIC_GOOD = frozenset(("", "healthy", "full", "false", "no", "none", "not active"))
# Without these jobs run, slower than they might.
_FABRIC_BROKEN = frozenset(("summary", "route_unhealthy", "incorrect_configuration"))
_FABRIC_SLOW = frozenset(("Limited Capacity",))


def _gpu_settings(gpu: Mapping[str, Any], options: HealthOptions) -> Iterator[_Complaint]:
    state, status = gpu["fabric_state"], gpu["fabric_status"]
    if (state is not None and state != "Completed") or (status is not None and status != "Success"):
        yield _Complaint("fabric_not_ready", f"fabric state {state} with status {status}")
    bad = [(words, told) for words, told in gpu["fabric_health"].items() if (told or "").lower() not in _FABRIC_GOOD]
    if bad:
        named = ", ".join(f"{words.replace('_', ' ')} {told}" for words, told in bad)
        severity = (
            CRITICAL if any(words in _FABRIC_BROKEN and told not in _FABRIC_SLOW for words, told in bad) else WARNING
        )
        yield _Complaint("fabric_unhealthy", f"a fabric with {named}", severity)
    if options.persistence_required and gpu["persistence_mode"] == "Disabled":
        yield _Complaint("persistence_off", "persistence mode Disabled")
    now, later = gpu["mig_mode"], gpu["mig_mode_pending"]
    if now and later and now != later:
        yield _Complaint("mig_pending", f"MIG {now} now and {later} after the next reset")


def _judge_gpu(gpu: Mapping[str, Any], options: HealthOptions, on_wsl: bool) -> Iterator[_Complaint]:
    for rule in (_gpu_status, _gpu_memory, _gpu_speed, _gpu_settings):
        yield from rule(gpu, dataclasses.replace(options, persistence_required=False) if on_wsl else options)


def _judge_links(gpus: Sequence[Mapping[str, Any]]) -> dict[int, _Complaint]:
    """Links that are down while a neighbour of the same model has them, by position of the GPU."""
    active = {
        position: sum(1 for link in gpu["nvlinks"] if link["active"])
        for position, gpu in enumerate(gpus)
        if gpu["nvlinks"] is not None and gpu["status"] == "ok"
    }
    most: Counter[Any] = Counter()
    for position, number in active.items():
        most[gpus[position]["name"]] = max(most[gpus[position]["name"]], number)
    return {
        position: _Complaint("nvlink_down", f"{number} active NVLinks where a neighbour of the same model has {best}")
        for position, number in active.items()
        for best in [most[gpus[position]["name"]]]
        if number < best
    }


def _judge_node(facts: Mapping[str, Any], options: HealthOptions, checks: Mapping[str, Any]) -> Iterator[_Complaint]:
    if options.gpus != 0:
        gpus = facts["gpus"]
        named = any(gpu["status"] in _UNANSWERED for gpu in gpus)
        if facts["reason"] and not named:
            yield _Complaint(facts["reason"], f"that {_without_advice(facts['message'] or facts['reason'])}")
        elif options.gpus is not None and len(gpus) < options.gpus:
            yield _Complaint("gpu_count", f"{len(gpus)} GPUs")
    for source, words in (("kernel_log", "the kernel log"), ("dcgm", "DCGM")):
        told = str(checks.get(source))
        if told.startswith(("unreadable", "failed")):
            yield _Complaint(
                "check_failed", f"that {words} cannot be asked: {told.partition(': ')[2]}", step=_ASK[source]
            )
    fabric_manager = str(checks.get("fabric_manager"))
    if fabric_manager.startswith("failed"):
        yield _Complaint("fabric_manager", fabric_manager.partition(": ")[2])
    # It may run elsewhere, as outside of a virtual machine; then the GPUs say that their fabric is complete.
    elif fabric_manager == "not_installed" and not any(gpu["fabric_state"] == "Completed" for gpu in facts["gpus"]):
        yield _Complaint("fabric_manager", f"no unit {_FABRIC_MANAGER}")


_ASK = {
    "kernel_log": "run the check as root, where the kernel's messages can be read",
    "dcgm": "start nvidia-dcgm and run 'dcgmi health -s a', or set dcgm to false",
}


def _without_advice(text: str) -> str:
    """A finding of nvidia_smi_facts without its advice, for which the problem has a place of its own."""
    for step in nvidia_smi.NEXT_STEPS.values():
        text = text.replace(step, "")
    text = " ".join(text.split())
    return text[:1].lower() + text[1:] if text[1:2].islower() or text[1:2] == " " else text


# --------------------------------------------------------------------------------------------------------------------
# Judgement of everything else


def utc(seconds: float) -> str:
    """A time in ISO 8601, to the second, in UTC."""
    moment = datetime.datetime.fromtimestamp(seconds, tz=datetime.timezone.utc)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def _judge_event(event: Event, answers: bool) -> _Complaint | None:
    often = "once" if event.count == 1 else f"{event.count} times"
    when = f"at {utc(event.last)}" if event.count == 1 else f"from {utc(event.first)} to {utc(event.last)}"
    said = f", saying: {event.text}" if event.text else ""
    if event.kind == "init":
        if answers:
            return None
        return _Complaint("gpu_init_failed", f"that the driver failed {often} to start the GPU {when}{said}")
    if event.kind == "sxid":
        severity, action = (WARNING, "watch") if event.fatal is not True else (CRITICAL, "check_nvlink")
        name = "NVSwitch error"
    else:
        row = xid.lookup(event.number, event.text, event.fatal)
        severity, action, name = row.severity, row.action, row.name
    label = "SXid" if event.kind == "sxid" else "Xid"
    expected = f"no {label} {event.number}"
    return _Complaint(event.code, f"{label} {event.number} ({name}) {often} {when}{said}", severity, action, expected)


def _padded(bus_id: str | None) -> str | None:
    """A PCI address as nvidia-smi writes it."""
    if bus_id is None:
        return None
    domain, rest = bus_id.split(":", 1)
    return f"{int(domain, 16):08X}:{rest.upper()}"


def _worst(problems: Iterable[Mapping[str, Any]]) -> str:
    severities = {problem["severity"] for problem in problems}
    return CRITICAL if CRITICAL in severities else WARNING if WARNING in severities else "ok"


MAX_REASON = 500


def reason_of(problems: Sequence[Mapping[str, Any]]) -> str | None:
    """One line of printable ASCII on what is wrong; None when nothing is. Warnings count where nothing is critical."""
    worst = _worst(problems)
    devices: dict[str, list[str]] = {}
    for problem in problems:
        if problem["severity"] != worst:
            continue
        # The first block of a UUID names a GPU within a node.
        device = (problem["uuid"] or "")[:12] or problem["pci_bus_id"]
        named = devices.setdefault(problem["code"], [])
        if device and device not in named:
            named.append(device)
    line = "; ".join(" ".join([code, *named]) for code, named in devices.items())
    line = "".join(char if " " <= char <= "~" else "?" for char in line)
    return (line if len(line) <= MAX_REASON else line[: MAX_REASON - 4] + " ...") or None


def judge(
    facts: Mapping[str, Any],
    xids: Sequence[Event],
    dcgm: Sequence[Finding],
    options: HealthOptions,
    *,
    host: str = "",
    checks: Mapping[str, Any] | None = None,
    orphans: Mapping[int, Sequence[int]] | None = None,
) -> dict[str, Any]:
    """The verdict on the node and on each GPU, from answers alone; C(orphans) are dead pids by position of the GPU."""
    gpus = facts["gpus"]
    told: list[tuple[_Complaint, str | None, str | None]] = []
    on_wsl = facts["platform"] == "wsl"
    links = _judge_links(gpus)
    for position, gpu in enumerate(gpus):
        complaints = list(_judge_gpu(gpu, options, on_wsl))
        if position in links:
            complaints.append(links[position])
        dead = (orphans or {}).get(position)
        if dead:
            pids = ", ".join(str(pid) for pid in dead)
            complaints.append(_Complaint("process_without_owner", f"memory held by processes that ended: {pids}"))
        told += [(complaint, gpu["uuid"], gpu["pci_bus_id"]) for complaint in complaints]
    told += [(complaint, None, None) for complaint in _judge_node(facts, options, checks or {})]

    by_bus = {nvidia_smi.normal_bus_id(gpu["pci_bus_id"]): gpu for gpu in gpus if gpu["pci_bus_id"]}
    by_uuid = {gpu["uuid"]: gpu for gpu in gpus if gpu["uuid"]}
    events = []
    for event in xids:
        known = by_bus.get(event.pci_bus_id, {}) if event.pci_bus_id else {}
        uuid = known.get("uuid") or event.uuid
        address = known.get("pci_bus_id") or _padded(event.pci_bus_id)
        complaint = _judge_event(event, known.get("status") == "ok")
        if complaint:
            told.append((complaint, uuid, address))
        severity = options.severities.get(event.code, (complaint.severity if complaint else None) or CRITICAL)
        events.append(
            {
                "code": event.code,
                "severity": severity if complaint else IGNORE,
                "uuid": uuid,
                "pci_bus_id": address,
                "count": event.count,
                "first_at": utc(event.first),
                "last_at": utc(event.last),
                "text": event.text,
            }
        )
    for finding in dcgm:
        address = by_uuid.get(finding.uuid, {}).get("pci_bus_id") if finding.uuid else None
        complaint = _Complaint(finding.code, finding.found, finding.severity, "contact_support", "a pass of DCGM")
        told.append((complaint, finding.uuid, address))

    made = (_problem(complaint, host, options, uuid, address) for complaint, uuid, address in told)
    problems = [dataclasses.asdict(problem) for problem in made if problem]
    problems.sort(key=lambda problem: problem["severity"] != CRITICAL)
    verdicts = []
    for gpu in gpus:
        own = [problem for problem in problems if _is_about(problem, gpu)]
        verdicts.append(
            {
                **{key: gpu[key] for key in ("index", "uuid", "name", "pci_bus_id")},
                "verdict": _worst(own),
                "problems": own,
            }
        )
    return {
        "verdict": _worst(problems),
        "reason": reason_of(problems),
        "gpus": verdicts,
        "problems": problems,
        "xids": events,
    }


def _is_about(problem: Mapping[str, Any], gpu: Mapping[str, Any]) -> bool:
    if problem["uuid"] and gpu["uuid"]:
        return bool(problem["uuid"] == gpu["uuid"])
    return problem["pci_bus_id"] is not None and problem["pci_bus_id"] == gpu["pci_bus_id"]


# --------------------------------------------------------------------------------------------------------------------
# The kernel log

SYSTEM_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
MAX_LINE_BYTES = 64 * 1024
_KERNEL_FACILITY = "0"
_SYSLOG_LINE = re.compile(r"^<([0-9]{1,4})>\s*(?:\[\s*([0-9]{1,12}\.[0-9]{1,9})\])?\s*(?:\[\s*[TC][0-9]+\])?\s?(.*)")
_KMSG_LINE = re.compile(r"^([0-9]{1,4}),([0-9]{1,20}),([0-9]{1,20}),[^;]*;(.*)")
_ESCAPED = re.compile(r"\\x([0-9a-fA-F]{2})")


class SourceError(Exception):
    """A source of the kernel log gives none; the message says why."""


def _program(name: str, search: str | None) -> str | None:
    return shutil.which(name, path=search) or (shutil.which(name, path=SYSTEM_PATH) if search is None else None)


def lines_of(argv: Sequence[str], timeout: float) -> Iterator[bytes]:
    """The lines that a program prints, one at a time; SourceError when it fails or does not end in time."""
    deadline = time.monotonic() + timeout
    process = subprocess.Popen(  # pylint: disable=ansible-bad-function  # the node's own gate has no module to run it
        list(argv),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=nvidia_smi.environment(),
        start_new_session=True,
    )
    output = cast(IO[bytes], process.stdout)
    try:
        yield from _split(_chunks(output.fileno(), deadline, " ".join(argv), timeout))
        returncode = process.wait(max(deadline - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        raise _slow(" ".join(argv), timeout) from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        # Not by Popen's own context, which waits without limit for one that hangs in the kernel.
        nvidia_smi.reap(process, time.monotonic() + nvidia_smi.KILL_WAIT)
        output.close()
    if returncode:
        raise SourceError(f"{' '.join(argv)} ended with exit code {returncode}")


def _slow(what: str, timeout: float) -> SourceError:
    return SourceError(f"{what} did not end within {timeout:.3g} s")


def _chunks(descriptor: int, deadline: float, what: str, timeout: float) -> Iterator[bytes]:
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([descriptor], [], [], left)[0]:
            raise _slow(what, timeout)
        chunk = os.read(descriptor, 1 << 16)
        if not chunk:
            return
        yield chunk


def _split(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The lines in these chunks; of one that is longer than the kernel writes them, the start."""
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        yield from whole
        rest = rest[:MAX_LINE_BYTES]
    if rest:
        yield rest


@dataclasses.dataclass
class _Seen:
    """How much of the log was read: a kernel that wrote nothing since it started cannot be."""

    records: int = 0
    said: str = ""


def journal_records(lines: Iterable[bytes], seen: _Seen) -> Iterator[tuple[float, str]]:
    """Time and message of the entries that C(journalctl --output=json) prints."""
    for line in lines:
        if not line.startswith(b"{"):
            seen.said = clean(line.decode("utf-8", "replace").strip()) or seen.said
            continue
        seen.records += 1
        # A message that is not UTF-8, as a process can be named, is printed as a list of numbers.
        if not any(needle in line for needle in xid.NEEDLES) and not re.search(rb'"MESSAGE"\s*:\s*\[', line):
            continue
        try:
            entry = json.loads(line)
            message, at = entry["MESSAGE"], float(entry["__REALTIME_TIMESTAMP"]) / 1e6
            if isinstance(message, list):
                message = bytes(message).decode("utf-8", "replace")
        except (ValueError, KeyError, TypeError):
            continue
        if isinstance(message, str) and entry.get("SYSLOG_FACILITY", _KERNEL_FACILITY) == _KERNEL_FACILITY:
            yield at, message


def kernel_records(lines: Iterable[bytes], seen: _Seen, booted: float) -> Iterator[tuple[float, str]]:
    """Time and message of the lines that C(dmesg --raw) prints, or that /dev/kmsg gives."""
    for line in lines:
        text = line.decode("utf-8", "replace")
        syslog, kmsg = _SYSLOG_LINE.match(text), _KMSG_LINE.match(text)
        if kmsg:
            priority, after = int(kmsg.group(1)), int(kmsg.group(3)) / 1e6
            message = _ESCAPED.sub(lambda match: chr(int(match.group(1), 16)), kmsg.group(4))
        elif syslog:
            priority, after, message = int(syslog.group(1)), float(syslog.group(2) or 0), syslog.group(3)
        else:
            seen.said = clean(text.strip()) or seen.said
            continue
        # Who writes to /dev/kmsg cannot speak as the kernel: that is facility 0 alone.
        if priority >> 3 == 0:
            seen.records += 1
            yield booted + after, message


def _kmsg_chunks(path: Path, timeout: float) -> Iterator[bytes]:
    deadline = time.monotonic() + timeout
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        while True:
            if time.monotonic() > deadline:
                raise _slow(f"reading {path}", timeout)
            try:
                chunk = os.read(descriptor, 1 << 16)
            except BlockingIOError:
                return
            except BrokenPipeError:
                # The kernel overwrote what was next; reading goes on behind it.
                continue
            if not chunk:
                return
            yield chunk
    finally:
        os.close(descriptor)


def boot_time(root: Path) -> float:
    """When the kernel started, in seconds since the epoch."""
    try:
        return time.time() - float((root / "proc/uptime").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return 0.0


def kernel_events(since: float, timeout: float, root: Path, search: str | None) -> tuple[str, list[Event]]:
    """What the kernel log of this boot says of GPUs, and where it was read; the first source that has one counts."""
    booted = boot_time(root)
    deadline = time.monotonic() + timeout

    def left() -> float:
        # Half of what is left, so that a source that hangs leaves time for the next one.
        return max((deadline - time.monotonic()) / 2, 0.1)

    def journal(seen: _Seen) -> Iterator[tuple[float, str]]:
        options = ("--dmesg", "--boot", "--output=json", "--output-fields=MESSAGE,SYSLOG_FACILITY", "--no-pager")
        yield from journal_records(lines_of([_found("journalctl"), *options], left()), seen)

    def dmesg(seen: _Seen) -> Iterator[tuple[float, str]]:
        yield from kernel_records(lines_of([_found("dmesg"), "-r"], left()), seen, booted)

    def kmsg(seen: _Seen) -> Iterator[tuple[float, str]]:
        yield from kernel_records(_split(_kmsg_chunks(root / "dev/kmsg", left())), seen, booted)

    def _found(name: str) -> str:
        program = _program(name, search)
        if program is None:
            raise SourceError(f"there is no {name}")
        return program

    sources: dict[str, Callable[[_Seen], Iterator[tuple[float, str]]]] = {
        "journal": journal,
        "dmesg": dmesg,
        "kmsg": kmsg,
    }
    failures = []
    for name, read in sources.items():
        seen = _Seen()
        try:
            events = xid.read_events(read(seen), since)
            if seen.records:
                return name, events
            failures.append(f"{name} has no message of the kernel" + (f" ({seen.said[:120]})" if seen.said else ""))
        except (SourceError, OSError) as error:
            why = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
            failures.append(why + (f" ({seen.said[:120]})" if seen.said else ""))
    return f"unreadable: {'; '.join(failures)}", []


# --------------------------------------------------------------------------------------------------------------------
# DCGM

_DCGM_GPU = re.compile(r"^\|\s*([0-9]{1,4})\s*\|")
_DCGM_UUID = re.compile(r"Device UUID:\s*(GPU-[0-9a-fA-F-]{36})")
_DCGM_SEVERITIES = {"warning": WARNING, "warn": WARNING, "failure": CRITICAL, "fail": CRITICAL}


def parse_dcgm_discovery(text: str) -> dict[str, str]:
    """C(dcgmi discovery -l): DCGM numbers GPUs on its own, so its numbers by UUID."""
    uuids: dict[str, str] = {}
    number = None
    for line in text.splitlines():
        start, uuid = _DCGM_GPU.match(line), _DCGM_UUID.search(line)
        number = start.group(1) if start else number
        if uuid and number is not None:
            uuids[number] = uuid.group(1)
    return uuids


def dcgm_code(name: str) -> str:
    """C(PCIe system) as dcgm_pcie."""
    slug = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    return f"dcgm_{re.sub('_system$', '', slug)}"


def _json_of(text: str) -> Any:
    start, end = text.find("{"), text.rfind("}")
    if start < 0 or end < start:
        raise ValueError(text.strip()[:200] or "no output")
    return json.loads(text[start : end + 1])


def _finding(name: str, status: str, words: str, device: tuple[str, str], uuids: Mapping[str, str]) -> Finding:
    group, number = device
    uuid = uuids.get(number) if group == "GPU" else None
    whose = "" if uuid or not group else f" for {group} {number}"
    said = f": {' '.join(words.split())[:300]}" if words.strip() else ""
    found = clean(f"{status} of DCGM's {name}{whose}{said}")
    return Finding(dcgm_code(name), _DCGM_SEVERITIES[status.lower()], uuid, found)


def parse_dcgm_health(text: str, uuids: Mapping[str, str]) -> list[Finding]:
    """C(dcgmi health -c -j): what it warns of; ValueError when it says nothing usable."""
    body = _json_of(text).get("body")
    if not isinstance(body, dict) or not isinstance(body.get("Overall Health"), dict):
        raise ValueError("an answer without Overall Health")
    findings = []
    for group, devices in body.items():
        for number, device in (devices.get("children") or {}).items():
            errors = ((device.get("children") or {}).get("Errors") or {}).get("children") or {}
            for system, told in errors.items():
                if str(told.get("value")).lower() in _DCGM_SEVERITIES:
                    words = " ".join(str(part) for part in told.get("overflow") or [])
                    findings.append(_finding(system, told["value"], words, (group, number), uuids))
    overall = str(body["Overall Health"].get("value"))
    if overall.lower() in _DCGM_SEVERITIES and not findings:
        findings.append(_finding("health", overall, "", ("", ""), uuids))
    return findings


def _warning_text(warning: Any) -> str:
    return str(warning.get("warning", "")) if isinstance(warning, dict) else str(warning)


def parse_dcgm_diag(text: str, uuids: Mapping[str, str]) -> list[Finding]:
    """C(dcgmi diag -j): the tests that did not pass; ValueError when it ran none."""
    answer = _json_of(text)
    report = next((part for part in answer.values() if isinstance(part, dict) and "test_categories" in part), None)
    if report is None:
        errors = [str(part["runtime_error"]) for part in answer.values() if "runtime_error" in part]
        raise ValueError("; ".join(errors) or "an answer without tests")
    findings = []
    for category in report["test_categories"]:
        for test in category.get("tests", []):
            for result in test.get("results", []):
                if str(result.get("status")).lower() not in _DCGM_SEVERITIES:
                    continue
                warnings = result.get("warnings") or []
                words = " ".join(map(_warning_text, warnings if isinstance(warnings, list) else [warnings]))
                group = result.get("entity_group") or ("GPU" if "gpu_id" in result or "gpu_ids" in result else "")
                numbers = str(result.get("entity_id", result.get("gpu_id", result.get("gpu_ids", "")))).split(",")
                findings += [
                    _finding(test["name"], result["status"], words, (group, number.strip()), uuids)
                    for number in numbers
                ]
    return findings


def dcgm_findings(options: HealthOptions, search: str | None) -> tuple[str, list[Finding]]:
    """What DCGM says, and whether it could be asked."""
    if not options.dcgm:
        return "skipped", []
    program = _program("dcgmi", search)
    if program is None:
        return "not_installed", []
    health, discovery = nvidia_smi.run_commands(
        [[program, "health", "-c", "-j"], [program, "discovery", "-l"]], options.timeout
    )
    uuids = parse_dcgm_discovery(discovery.stdout)
    findings: list[Finding] = []
    failures = []
    for command, parse in [(health, parse_dcgm_health), *_diag(program, options)]:
        try:
            if command.timed_out:
                raise ValueError(f"no answer within {command.limit:g} s")
            findings += parse(command.stdout, uuids)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            words = " ".join(clean(command.words if "{" not in command.stdout else str(error)).split())[:200]
            failures.append(f"{' '.join(command.argv[1:])}: {words or error}")
    return f"failed: {'; '.join(failures)}" if failures else "ok", findings


def _diag(program: str, options: HealthOptions) -> Iterator[tuple[nvidia_smi.Command, Callable[..., list[Finding]]]]:
    if options.dcgm_diag_level is not None:
        argv = [program, "diag", "-r", str(options.dcgm_diag_level), "-j"]
        yield nvidia_smi.run_commands([argv], options.dcgm_diag_timeout)[0], parse_dcgm_diag


# --------------------------------------------------------------------------------------------------------------------
# Fabric Manager, processes, acknowledgement

_FABRIC_MANAGER = "nvidia-fabricmanager.service"


def fabric_manager_state(root: Path, search: str | None, timeout: float) -> str:
    """Whether Fabric Manager runs, on a host that has NVSwitches."""
    if not _entries(root / "proc/driver/nvidia-nvswitch/devices") and not any(
        (root / "dev").glob("nvidia-nvswitch[0-9]*")
    ):
        return "not_needed"
    program = _program("systemctl", search)
    if program is None:
        return "skipped: there is no systemctl"
    argv = [program, "show", _FABRIC_MANAGER, "--property=LoadState,ActiveState,Result"]
    (command,) = nvidia_smi.run_commands([argv], timeout)
    state = dict(line.partition("=")[::2] for line in command.stdout.splitlines())
    if "ActiveState" not in state:
        return f"skipped: systemctl says {command.words[:120] or 'nothing'!r}"
    if state.get("LoadState") == "not-found":
        return "not_installed"
    if state["ActiveState"] == "active":
        return "ok"
    return clean(f"failed: {_FABRIC_MANAGER} is {state['ActiveState']} (result {state.get('Result', 'unknown')})")


def _entries(path: Path) -> list[Path]:
    try:
        return list(path.iterdir())
    except OSError:
        return []


# The kernel gives its first pid namespace this number, and no other one.
HOST_PID_NAMESPACE = "pid:[4026531836]"


def dead_pids(gpus: Sequence[Mapping[str, Any]], root: Path) -> dict[int, list[int]]:
    """Pids that nvidia-smi lists and /proc has not, by position of the GPU."""
    dead = {
        position: [pid for pid in pids if not (root / f"proc/{pid}").exists()]
        for position, gpu in enumerate(gpus)
        for pids in [[process["pid"] for process in gpu["processes"] or [] if process["pid"]]]
    }
    return {position: pids for position, pids in dead.items() if pids}


def processes_without_owner(
    facts: Mapping[str, Any], root: Path, again: Callable[[], Mapping[str, Any]], wait: float = PROCESS_WAIT
) -> tuple[str, dict[int, list[int]]]:
    """Pids that hold memory of a GPU though they ended, and whether that can be told here.

    The driver names processes by the host's pids. In another pid namespace, as a container has, they mean nothing.
    """
    if facts["platform"] == "wsl":
        return "skipped: under WSL the driver names processes of Windows", {}
    try:
        # Path.readlink needs Python 3.9, which not all nodes have.
        namespace = os.readlink(root / "proc/self/ns/pid")  # noqa: PTH115
    except OSError as error:
        return f"skipped: the pid namespace is unknown ({error.strerror})", {}
    if namespace != HOST_PID_NAMESPACE:
        return "skipped: not in the pid namespace of the host", {}
    # Who may not see the processes of others in /proc would take them for dead.
    if not (root / "proc/1").exists():
        return "skipped: /proc hides the processes of others", {}
    dead = dead_pids(facts["gpus"], root)
    if dead:
        # One that ended between the call and the look into /proc is gone from the next call.
        time.sleep(wait)
        still = {gpu["uuid"]: gpu for gpu in again()["gpus"]}
        listed = [still.get(gpu["uuid"], {"processes": None}) for gpu in facts["gpus"]]
        later = dead_pids(listed, root)
        both = {position: [pid for pid in pids if pid in later.get(position, ())] for position, pids in dead.items()}
        dead = {position: pids for position, pids in both.items() if pids}
    return "ok", dead


def acknowledged_at(path: str, now: float) -> tuple[str, float]:
    """When somebody declared the GPUs repaired: the time of the file's last change."""
    try:
        at = Path(path).stat().st_mtime
    except OSError:
        return "none", 0.0
    # A time to come would hide every Xid until then.
    return (f"ignored: {path} is of {utc(at)}, which is in the future", 0.0) if at > now + 60 else (utc(at), at)


# --------------------------------------------------------------------------------------------------------------------


def probe(options: HealthOptions, *, root: str = "/", search: str | None = None) -> dict[str, Any]:
    """Ask every source on this node, and judge. Never raises because a GPU is sick."""
    base = Path(root)

    def ask(subsets: Sequence[str]) -> dict[str, Any]:
        chosen = nvidia_smi.resolve_subsets(subsets)
        return nvidia_smi.collect(chosen, path=options.path, timeout=options.timeout, root=root, search=search)

    facts = ask(["all"])
    acknowledged, repaired = acknowledged_at(options.acknowledged_file, time.time())
    since = max(repaired, seconds_of(options.xid_since) if options.xid_since is not None else 0.0)
    events: list[Event] = []
    if facts["platform"] == "wsl":
        kernel_log = "skipped: under WSL the driver writes its log in Windows"
    else:
        kernel_log, events = kernel_events(since, options.timeout, base, search)
    dcgm, findings = dcgm_findings(options, search)
    processes, orphans = processes_without_owner(facts, base, lambda: ask(["!min", "processes"]))
    checks = {
        "nvidia_smi": "ok" if facts["reason"] is None else facts["reason"],
        "kernel_log": kernel_log,
        "acknowledged": acknowledged,
        "dcgm": dcgm,
        "fabric_manager": fabric_manager_state(base, search, options.timeout),
        "processes": processes,
    }
    host = python_platform.node()
    verdict = judge(facts, events, findings, options, host=host, checks=checks, orphans=orphans)
    return {**verdict, "checks": checks, "nvidia_smi": facts}
