# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What nvidia-smi's facts say is wrong."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils.health.node import FABRIC_MANAGER, STOPPED
from ansible_collections.gpufarm.core.plugins.module_utils.health.options import HealthOptions
from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi.facts import Facts, Gpu
from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi.failures import NEXT_STEPS, WSL_STEPS
from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi.values import sum_of
from ansible_collections.gpufarm.core.plugins.module_utils.problem import Finding
from ansible_collections.gpufarm.core.plugins.module_utils.xid import CRITICAL, WARNING

_UNANSWERED = {"lost": "gpu_lost", "reset_required": "reset_required", "unreadable": "gpu_unreadable"}
# Why a node that has no GPU is asked in vain.
_WITHOUT_GPUS = frozenset(("not_installed", "no_devices", "driver_not_loaded"))


def _more(value: float | None, limit: float | None) -> bool:
    return value is not None and limit is not None and value > limit


def _less(value: float | None, limit: float | None) -> bool:
    return value is not None and limit is not None and value < limit


def _gpu_status(gpu: Gpu, _options: HealthOptions) -> Iterator[Finding]:
    code = _UNANSWERED.get(gpu["status"])
    failed = gpu["sensors_failed"]
    if code:
        step = "reset_gpu" if failed else None
        yield Finding(code, f"that {_without_advice(gpu['status_message'] or gpu['status'])}", action=step)
    elif failed:
        yield Finding("sensors_failed", f"an error in place of {', '.join(failed)}")
    if gpu["inforom_corrupted"]:
        yield Finding("inforom_corrupted", "a corrupted infoROM, which cannot keep which memory was replaced")
    if gpu["compute_mode"] == "Prohibited":
        yield Finding("compute_prohibited", "compute mode Prohibited")
    action = gpu["recovery_action"]
    if action is not None and action != "None":
        wanted = action.lower()
        step = "reboot" if "reboot" in wanted else "reset_gpu" if wanted == "reset" else None
        found, severity = f"the recovery action {action}", None
        if "imex" in wanted:
            found += " (IMEX serves NVLink between nodes only)"
            severity, step = WARNING, "check_configuration"
        yield Finding("recovery_action", found, severity=severity, action=step)


def _gpu_memory(gpu: Gpu, options: HealthOptions) -> Iterator[Finding]:
    ecc = gpu["ecc"]
    for name, count, limit in (
        ("uncorrected", ecc["uncorrected"]["volatile"], options.ecc_uncorrected_max),
        ("corrected", ecc["corrected"]["volatile"], options.ecc_corrected_max),
    ):
        if _more(count, limit):
            yield Finding(f"ecc_{name}", f"{count} {name} memory errors since the driver was loaded")
    if options.ecc_required and ecc["mode"] == "Disabled":
        yield Finding("ecc_disabled", "ECC disabled")
    if ecc["mode"] and ecc["mode_pending"] and ecc["mode"] != ecc["mode_pending"]:
        yield Finding("ecc_mode_pending", f"ECC {ecc['mode']} now and {ecc['mode_pending']} after the next reset")
    if ecc["sram_threshold_exceeded"]:
        yield Finding("sram_threshold_exceeded", "more errors in SRAM than the threshold")
    if ecc["unrepairable_memory"]:
        yield Finding("unrepairable_memory", "memory that cannot be repaired any more")
    if ecc["channel_repair_pending"]:
        yield Finding("channel_repair_pending", "a channel of memory that waits for a reset to be repaired")
    if ecc["tpc_repair_pending"]:
        yield Finding("tpc_repair_pending", "a part of the chip (TPC) that waits for a reset to be repaired")
    if ecc["remapped_rows"]["pending"]:
        yield Finding("row_remap_pending", "a row of memory that waits for a reset to be replaced")
    if ecc["remapped_rows"]["failure"]:
        yield Finding("row_remap_failed", "a row of memory that could not be replaced")
    if ecc["retired_pages"]["pending"]:
        yield Finding("retired_pages_pending", "a page of memory that waits for a reset to be retired")
    retired = sum_of([ecc["retired_pages"]["single_bit"], ecc["retired_pages"]["double_bit"]])
    if _more(retired, options.retired_pages_max):
        yield Finding("retired_pages", f"{retired} retired pages of memory")


def _gpu_temperature(gpu: Gpu, options: HealthOptions) -> Iterator[Finding]:
    celsius, limits = gpu["temperature_gpu_c"], gpu["temperature_limits"]
    if options.temperature_gpu_max_c is not None:
        if _more(celsius, options.temperature_gpu_max_c):
            yield Finding("temperature", f"{celsius} C", expected=f"at most {options.temperature_gpu_max_c} C")
    else:
        # The card's own limits: newer ones tell how far they are from one limit, which shrinks as they get hot.
        margin = limits["margin_c"]
        for hottest, least, severity, deed in (
            (limits["shutdown_c"], limits["shutdown_margin_c"], CRITICAL, "turns itself off"),
            (limits["slowdown_c"], limits["slowdown_margin_c"], WARNING, "slows down"),
        ):
            if _more(celsius, None if hottest is None else hottest - 1):
                expected = f"less than {hottest} C, at which the card {deed}"
                yield Finding("temperature", f"{celsius} C", expected, severity=severity)
                break
            if _less(margin, None if least is None else least + 1):
                found = f"{'an unknown temperature' if celsius is None else f'{celsius} C'}, a margin of {margin} C"
                expected = f"a margin of more than {least} C, at which the card {deed}"
                yield Finding("temperature", found, expected, severity=severity)
                break
    hottest = limits["memory_max_c"]
    if _more(gpu["temperature_memory_c"], None if hottest is None else hottest - 1):
        expected = f"less than {hottest} C, at which the card slows down"
        yield Finding("temperature", f"{gpu['temperature_memory_c']} C of the memory", expected=expected)


def _gpu_speed(gpu: Gpu, options: HealthOptions) -> Iterator[Finding]:
    reasons = gpu["clocks_event_reasons"] or []
    slowing = [reason for reason in options.throttle_reasons if reason in reasons]
    if slowing:
        yield Finding("hw_slowdown", f"clocks held down by {', '.join(slowing)}")
    yield from _gpu_temperature(gpu, options)
    pcie = gpu["pcie"]
    width = pcie["width_current"]
    wanted = pcie["width_max"] if options.pcie_width_min is None else options.pcie_width_min
    if _less(width, wanted):
        yield Finding("pcie_width", f"{width} PCI Express lanes", expected=f"{wanted}")
    # An idle GPU saves power on a slower link.
    resting = "gpu_idle" in reasons or gpu["performance_state"] not in (None, "P0", "P1", "P2")
    fastest = pcie["generation_max"] if resting else pcie["generation_current"]
    if _less(fastest, options.pcie_generation_min):
        yield Finding("pcie_generation", f"PCI Express generation {fastest}")


def _gpu_links(gpu: Gpu, options: HealthOptions) -> Iterator[Finding]:
    for what, limit, counters in (
        ("brought up again", options.nvlink_recoveries_max, ("recovery_errors",)),
        ("with damaged or repeated data", options.nvlink_errors_max, ("replay_errors", "crc_errors")),
    ):
        counted = {
            link["link"]: max((link[name] or 0) for name in counters)  # type: ignore[literal-required]
            for link in gpu["nvlinks"] or []
        }
        bad = {number: count for number, count in counted.items() if _more(count, limit)}
        if bad:
            links = ", ".join(f"{number} ({count} times)" for number, count in bad.items())
            yield Finding(
                "nvlink_errors", f"NVLinks {what} since the driver was loaded: {links}", f"at most {limit} times a link"
            )


# What each part of the fabric's health says when nothing is wrong; "" where the driver does not tell it.
_FABRIC_GOOD = frozenset(("", "healthy", "full", "false", "no", "none", "not active"))


# Without these jobs run, slower than they might.
_FABRIC_BROKEN = frozenset(("summary", "route_unhealthy", "incorrect_configuration"))


_FABRIC_SLOW = frozenset(("Limited Capacity",))


def _gpu_settings(gpu: Gpu, options: HealthOptions) -> Iterator[Finding]:
    state, status = gpu["fabric_state"], gpu["fabric_status"]
    if (state is not None and state != "Completed") or (status is not None and status != "Success"):
        yield Finding("fabric_not_ready", f"fabric state {state} with status {status}")
    bad = [(words, told) for words, told in gpu["fabric_health"].items() if str(told or "").lower() not in _FABRIC_GOOD]
    if bad:
        named = ", ".join(f"{words.replace('_', ' ')} {told}" for words, told in bad)
        severity = (
            CRITICAL if any(words in _FABRIC_BROKEN and told not in _FABRIC_SLOW for words, told in bad) else WARNING
        )
        yield Finding("fabric_unhealthy", f"a fabric with {named}", severity=severity)
    license_status = gpu["vgpu_license_status"]
    # A whole GPU that a guest has to itself needs none to compute. While a vGPU asks for its own, it is not restricted.
    if (
        gpu["virtualization_mode"] == "VGPU"
        and (license_status or "").startswith("Unlicensed")
        and "Unrestricted" not in (license_status or "")
    ):
        of = f" of {gpu['vgpu_licensed_product']}" if gpu["vgpu_licensed_product"] else ""
        yield Finding("vgpu_unlicensed", f"license status {license_status}{of}")
    if options.persistence_required and gpu["persistence_mode"] == "Disabled":
        yield Finding("persistence_off", "persistence mode Disabled")
    now, later = gpu["mig_mode"], gpu["mig_mode_pending"]
    if now and later and now != later:
        yield Finding("mig_pending", f"MIG {now} now and {later} after the next reset")
    # Unlike no devices, devices that nobody tells (None) are no problem.
    if now == "Enabled" and gpu["mig_devices"] == []:
        yield Finding("mig_empty", "MIG mode Enabled and no MIG device, so that no job can use the GPU")


def findings_of_gpu(gpu: Gpu, options: HealthOptions, on_wsl: bool) -> Iterator[Finding]:
    for rule in (_gpu_status, _gpu_memory, _gpu_speed, _gpu_links, _gpu_settings):
        yield from rule(gpu, dataclasses.replace(options, persistence_required=False) if on_wsl else options)


def findings_of_links(gpus: Sequence[Gpu]) -> dict[int, Finding]:
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
        position: Finding("nvlink_down", f"{number} active NVLinks where a neighbour of the same model has {best}")
        for position, number in active.items()
        for best in [most[gpus[position]["name"]]]
        if number < best
    }


def _fabric_works(gpus: Sequence[Gpu]) -> bool:
    """Whether all GPUs that tell of their fabric say that it is complete, and one at least does."""
    told = [gpu for gpu in gpus if gpu["fabric_state"] is not None]
    return bool(told) and all(
        gpu["fabric_state"] == "Completed" and gpu["fabric_status"] in (None, "Success") for gpu in told
    )


def findings_of_node(facts: Facts, options: HealthOptions, checks: Mapping[str, Any]) -> Iterator[Finding]:
    gpus = facts["gpus"]
    named = any(gpu["status"] in _UNANSWERED for gpu in gpus)
    if facts["reason"] and not named:
        if options.gpus != 0 or facts["reason"] not in _WITHOUT_GPUS:
            yield Finding(facts["reason"], f"that {_without_advice(facts['message'] or facts['reason'])}")
    elif options.gpus is not None and len(gpus) < options.gpus:
        yield Finding("gpu_count", f"{len(gpus)} GPUs")
    for source, words in _SOURCES.items():
        told = str(checks.get(source))
        if told.startswith(("unreadable", "failed")):
            yield Finding(
                "check_failed", f"that {words} cannot be asked: {told.partition(': ')[2]}", next_step=_ASK[source]
            )
    fabric_manager = str(checks.get("fabric_manager"))
    if fabric_manager.startswith("failed"):
        version, driver = checks.get("fabric_manager_version"), facts["driver_version"]
        other = version is not None and driver is not None and version != driver
        yield Finding(
            "fabric_manager",
            fabric_manager.partition(": ")[2]
            + (f", in version {version}" if version is not None else "")
            + (f" where the driver has {driver}" if other else ""),
            # GPUs that have joined the fabric tell so after it has failed, too.
            severity=WARNING if fabric_manager.endswith(STOPPED) and _fabric_works(facts["gpus"]) else None,
            next_step=f"install Fabric Manager {driver} and start it" if other else "",
        )
    # It may run elsewhere, as outside of a virtual machine; then the GPUs say that their fabric is complete.
    elif fabric_manager == "not_installed" and not any(gpu["fabric_state"] == "Completed" for gpu in facts["gpus"]):
        yield Finding("fabric_manager", f"no unit {FABRIC_MANAGER}")


_SOURCES = {
    "kernel_log": "the kernel log",
    "dcgm": "DCGM",
    "nvlink": "NVLinks",
    "mig": "MIG devices",
}


_ASK = {
    "kernel_log": "run the check as root, where the kernel's messages can be read",
    "dcgm": "start nvidia-dcgm and run 'dcgmi health -s a', or set dcgm to false",
    "nvlink": "run 'nvidia-smi nvlink -s' there, and look for Xids in the kernel log",
    "mig": "run 'nvidia-smi -L' there, and look for Xids in the kernel log",
}


def _without_advice(text: str) -> str:
    """A finding of nvidia_smi_facts without its advice, for which the problem has a place of its own."""
    for step in (*NEXT_STEPS.values(), *WSL_STEPS.values()):
        text = text.replace(step, "")
    text = " ".join(text.split())
    return text[:1].lower() + text[1:] if text[1:2].islower() or text[1:2] == " " else text
