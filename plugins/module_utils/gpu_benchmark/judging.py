# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Judgement of what was measured, by what the card itself says that it can do."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils.problem import Finding

# What no attribute of CUDA tells: units for single precision in a multiprocessor, by compute capability.
FP32_UNITS = {"6.0": 64, "7.0": 64, "7.2": 64, "7.5": 64, "8.0": 64}
FP32_UNITS_OTHERWISE = 128

# Operations a clock of the tensor cores of a multiprocessor: FP16 in, FP32 out, no sparsity. Where cards of one
# capability differ (GeForce does half), it is the least. Others are told and not judged: of capability 7.5 some have no
# tensor cores at all.
TENSOR_OPERATIONS = {"8.0": 2048, "8.6": 512, "8.7": 1024, "8.9": 512, "9.0": 4096, "12.0": 512}

# A card whose tensor cores do a small part of what its siblings of capability 9.0 do.
TENSOR_CUT = re.compile(r"\bH20\b")

# Of the memory's bandwidth in percent. Older cards (T4, P100, V100) reach 69 to 83 % when they are well; where ECC is
# kept in GDDR itself, a part of the bus carries it. HBM has a bus of 1,024 bits and more.
MEMORY_MIN_PERCENT = 85.0
MEMORY_MIN_PERCENT_LESS = 65.0
HBM_BITS = 1024

# GB/s of a lane: transfers a second less the line code. The protocol takes some more: thresholds leave room for it.
PCIE_LANE_GB_PER_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}

# A MIG device that has not all compute slices of its GPU instance.
COMPUTE_PART = re.compile(r" MIG \d+c\.")

# What lowers the clocks of a card that is well: a limit that somebody set, or that is the card's own.
INNOCENT_REASONS = frozenset(
    ("gpu_idle", "applications_clocks_setting", "sw_power_cap", "sync_boost", "display_clocks_setting")
)


@dataclasses.dataclass(frozen=True)
class Thresholds:
    """Least share, in percent, of what the card can do; 0 where it is not judged, None where it goes by the card."""

    memory_min_percent: float | None = None
    fp32_min_percent: float = 85.0
    tensor_min_percent: float = 50.0
    host_min_percent: float = 65.0
    clock_min_percent: float = 80.0
    peer_min_percent: float = 66.0
    peer_min_gb_per_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Card:
    """What is known of a GPU from elsewhere than CUDA; None where it is not."""

    pcie_generation: int | None = None
    pcie_width: int | None = None
    c2c_mode: str | None = None
    """Where Enabled, copies with the host go by NVLink-C2C and not by PCI Express."""
    virtualization_mode: str | None = None
    """Where VGPU, it is a part of a card, and what CUDA tells is that of the whole one."""
    memory_total_mib: int | None = None
    """Of the whole GPU, by which the share of a MIG device is known."""
    slow_reasons: Sequence[str] | None = None
    """Why its clocks were held down while it worked."""
    ecc_uncorrected: int | None = None
    ecc_corrected: int | None = None
    """Memory errors that came while it worked."""
    xids: Sequence[str] = ()


def _product(*factors: float | None) -> float | None:
    product = 1.0
    for factor in factors:
        if not factor:
            return None
        product *= factor
    return product


def limits_of(device: Mapping[str, Any], card: Card) -> dict[str, float | None]:
    """What the device could do at most, at its highest clocks; None where it does not tell.

    A MIG device has its own number of multiprocessors, and shares the bus of its GPU by its share of the memory. One
    with a part of the multiprocessors of its GPU instance need not reach what the instance's memory could give.
    An integrated GPU has the host's memory: its clock may be told as transfers already, and no link is between them.
    A vGPU does not tell which part of the card's time, memory and link is its own.
    """
    capability = device["compute_capability"]
    clock_hz = _product(device["sm_clock_max_mhz"], 1e6)
    share: float | None = 1.0
    if device["uuid"].startswith("MIG-"):
        share = None
        if card.memory_total_mib and device["memory_total_mib"]:
            share = min(device["memory_total_mib"] / card.memory_total_mib, 1.0)
    if COMPUTE_PART.search(device["name"] or ""):
        share = None
    # Two transfers a clock.
    memory = _product(device["memory_clock_max_mhz"], 2e6, device["memory_bus_width_bits"], 1 / 8e9, share)
    known = capability is not None
    fp32 = _product(device["sm_count"], FP32_UNITS.get(capability, FP32_UNITS_OTHERWISE) * 2, clock_hz, 1e-12)
    operations = None if TENSOR_CUT.search(device["name"] or "") else TENSOR_OPERATIONS.get(capability)
    tensor = _product(device["sm_count"], operations, clock_hz, 1e-12)
    host = _product(PCIE_LANE_GB_PER_S.get(card.pcie_generation or 0), card.pcie_width)
    if card.c2c_mode == "Enabled":
        host = None
    if device["integrated"]:
        memory = host = None
    if card.virtualization_mode == "VGPU":
        memory = fp32 = tensor = host = None
    return {
        "memory_gb_per_s": _rounded(memory),
        "fp32_tflop_per_s": _rounded(fp32) if known else None,
        "tensor_tflop_per_s": _rounded(tensor),
        "host_gb_per_s": _rounded(host),
    }


def _major(capability: str | None) -> int | None:
    return None if capability is None else int(capability.partition(".")[0])


def memory_min_percent(device: Mapping[str, Any]) -> float:
    """What share of its bandwidth a card like this reaches when it is well."""
    major = _major(device["compute_capability"]) or 0
    gddr = (device["memory_bus_width_bits"] or HBM_BITS) < HBM_BITS
    return MEMORY_MIN_PERCENT_LESS if major < 8 or (gddr and device["ecc_enabled"]) else MEMORY_MIN_PERCENT


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def percent(value: float | None, limit: float | None) -> float | None:
    return None if value is None or not limit else round(100.0 * value / limit, 1)


def percents(figures: Mapping[str, float | None], limits: Mapping[str, float | None]) -> dict[str, float | None]:
    """What was reached of the limits, by what it says of the card."""

    def of(pick: Callable[..., float | None], *names: str) -> float | None:
        return pick((figures[name] for name in names if figures[name] is not None), default=None)

    return {
        "memory": percent(figures["memory_read_gb_per_s"], limits["memory_gb_per_s"]),
        "fp32": percent(figures["fp32_tflop_per_s"], limits["fp32_tflop_per_s"]),
        "tensor": percent(of(max, "fp16_tensor_tflop_per_s", "bf16_tensor_tflop_per_s"), limits["tensor_tflop_per_s"]),
        "host": percent(of(min, "host_to_device_gb_per_s", "device_to_host_gb_per_s"), limits["host_gb_per_s"]),
    }


REPLACE = (
    "drain the node and run nvidia_gpu_benchmark at level full; if it stays so, reset the GPU, then have the card "
    "replaced"
)


ERRORS = {
    "timeout": (
        "hung",
        "reset the GPU or reboot the node, and look for an Xid in the kernel log; a higher timeout helps a slow node",
    ),
    "crashed": ("crashed", "look for an Xid in the kernel log, and reset the GPU"),
    "library": (
        "no_cuda",
        "install the driver's libcuda.so.1 (libcuda1, nvidia-driver-cuda-libs), or let the container have the driver "
        "capability compute",
    ),
    "internal": ("failed", "report it with this message"),
}

_TOO_OLD = "update the driver; a card older than compute capability 6.0 cannot be measured"

# By CUDA's number, where more can be said than that it failed.
CUDA_STEPS = {
    2: "look with nvidia-smi for what holds the GPU's memory, and end it",
    46: "look with nvidia-smi for a process that has the GPU for itself, and at its compute mode",
    100: "check with nvidia-smi that the GPU is there, and that it is not hidden by CUDA_VISIBLE_DEVICES or MIG mode",
    101: "check with nvidia-smi -L that the UUID is right; a MIG device gets a new one each time that it is made",
    209: _TOO_OLD,
    214: "drain the node and reset the GPU: its memory has an error that ECC cannot correct",
    218: _TOO_OLD,
    221: "let the driver's libnvidia-ptxjitcompiler.so.1 be there too, which compiles the kernels",
    222: "update the driver: it does not know this version of PTX",
    802: "start Fabric Manager in the driver's version, and wait until the fabric is ready",
    803: "reboot the node: the driver's library and its kernel module are of different versions",
}
CUDA_STEP_OTHERWISE = "look for an Xid in the kernel log, reset the GPU, and try again"


NOT_COMPILED = (209, 218, 221, 222)
"""Errors of the step compile that say something of the driver and the age of the card, and nothing of its health."""
CAPABILITY_MIN = 6


def _error(error: Mapping[str, Any], capability: str | None = None) -> Finding:
    found = f"at step {error['step']}: {error['message']}"
    expected = "a GPU that CUDA can use"
    if error["code"] == "cuda":
        major = _major(capability)
        too_old = major is not None and major < CAPABILITY_MIN
        if error["step"] == "compile" and (too_old or error["cuda_error"] in NOT_COMPILED):
            step = CUDA_STEPS.get(error["cuda_error"], _TOO_OLD)
            return Finding("no_cuda", found, "a driver that compiles for the card", step)
        step = CUDA_STEPS.get(error["cuda_error"], CUDA_STEP_OTHERWISE)
        return Finding("context_failed" if error["step"] in ("driver", "context") else "failed", found, expected, step)
    code, step = ERRORS[error["code"]]
    return Finding(code, found, expected, step)


def _wrong(device: Mapping[str, Any]) -> Iterator[Finding]:
    memory = device["memory"] or {}
    if memory.get("errors"):
        first = memory["error_samples"][0] if memory["error_samples"] else None
        where = (
            f", the first at byte {first['offset_bytes']}: {first['found']} where {first['expected']} was written"
            if first
            else ""
        )
        yield Finding(
            "memory_errors",
            f"{memory['errors']} wrong words in {memory['tested_mib']} MiB of memory{where}",
            "every pattern read as it was written",
            REPLACE,
        )
    soak = device["soak"] or {}
    wrong = {name: count for name, count in (device["wrong_results"] or {}).items() if count}
    if soak.get("errors"):
        wrong["soak"] = soak["errors"]
    if wrong:
        yield Finding(
            "wrong_results",
            ", ".join(f"{count} wrong results of {name}" for name, count in wrong.items()),
            "the same result as worked out on the host",
            REPLACE,
        )


def _slow(
    device: Mapping[str, Any], card: Card, limits: Mapping[str, float | None], thresholds: Thresholds, level: str
) -> Iterator[Finding]:
    figures = device["figures"]
    clock, clock_max = device["sm_clock_mhz"], device["sm_clock_max_mhz"]
    # A card that was kept at a lower clock does its work at that clock; whether it had to be is another question.
    at = _share_of_clock(clock, clock_max)
    at_tensor = _share_of_clock(device["sm_clock_tensor_mhz"] or clock, clock_max)
    tensor = max(figures[name] or 0.0 for name in ("fp16_tensor_tflop_per_s", "bf16_tensor_tflop_per_s"))
    copies = [figures[name] for name in ("host_to_device_gb_per_s", "device_to_host_gb_per_s")]
    slowest = min((rate for rate in copies if rate is not None), default=None)
    asked = (
        ("slow_memory", "memory read", figures["memory_read_gb_per_s"], "GB/s", limits["memory_gb_per_s"], 1.0,
         memory_min_percent(device) if thresholds.memory_min_percent is None else thresholds.memory_min_percent,
         "compare its memory clock with a sibling's, and look for remapped rows"),
        ("slow_fp32", "single precision", figures["fp32_tflop_per_s"], "TFLOP/s", limits["fp32_tflop_per_s"], at,
         thresholds.fp32_min_percent, REPLACE),
        ("slow_tensor", "tensor cores", tensor or None, "TFLOP/s", limits["tensor_tflop_per_s"], at_tensor,
         thresholds.tensor_min_percent, REPLACE),
        ("slow_host_copies", "the slower way between host and GPU", slowest, "GB/s", limits["host_gb_per_s"], 1.0,
         thresholds.host_min_percent,
         "compare generation and width of the PCI Express link with a sibling's, and reseat the card; if its slot has "
         "fewer lanes, set host_min_percent"),
    )  # fmt: skip
    for code, what, value, unit, limit, scale, least, step in asked:
        if not least or value is None or not limit:
            continue
        reached = 100.0 * value / (limit * scale)
        if reached < least:
            yield Finding(
                code,
                f"{what} at {value:g} {unit}, {reached:.0f} % of the {limit * scale:.1f} that the card tells",
                f"at least {least:g} %",
                step,
            )
    least = thresholds.clock_min_percent
    seen = card.slow_reasons
    guilty = sorted(set(seen or ()) - INNOCENT_REASONS)
    # The soak heats the card after that. Its clock is the lowest of its seconds, of each second that of the best try:
    # no lone dip, as its lowest rate may be, which is told and not judged. A power limit may hold it there all the
    # time, whatever softer reason one look saw besides.
    soaked = (device["soak"] or {}).get("sm_clock_mhz_min")
    hard = [each for each in guilty if each.startswith("hw_")] if "sw_power_cap" in (seen or ()) else guilty
    # In a burst a power limit comes and goes between two looks at it: without a reason that was seen, only work without
    # a break tells.
    untold = level == "full" and seen is not None and not seen
    slow = [
        (mhz, why)
        for mhz, why in ((clock, guilty), (soaked, hard))
        if mhz and least and 100.0 * _share_of_clock(mhz, clock_max) < least and (why or untold)
    ]
    if slow:
        lowest, why = min(slow)
        yield Finding(
            "slow_clock",
            f"{lowest:g} MHz under load, {100.0 * _share_of_clock(lowest, clock_max):.0f} % of {clock_max} MHz"
            f"{', held down by ' + ', '.join(why) if why else ''}",
            f"at least {least:g} %",
            "check cooling and power supply, and clocks that were locked (nvidia-smi --reset-gpu-clocks)",
        )


def _share_of_clock(clock: float | None, clock_max: float | None) -> float:
    return min(clock / clock_max, 1.0) if clock and clock_max else 1.0


def judge_device(device: Mapping[str, Any], card: Card, thresholds: Thresholds, level: str) -> list[Finding]:
    """What is wrong with a device, the worst first; nothing where nothing is."""
    findings = [_error(device["error"], device["compute_capability"])] if device["error"] else []
    findings += _wrong(device)
    findings += _slow(device, card, limits_of(device, card), thresholds, level)
    if card.ecc_uncorrected:
        findings.append(
            Finding(
                "ecc_errors",
                f"{card.ecc_uncorrected} memory errors that ECC could not correct came under load",
                "none",
                "drain the node and reset the GPU",
            )
        )
    if card.xids:
        findings.append(
            Finding(
                "xid",
                f"in the kernel log under load: {'; '.join(card.xids)}",
                "no Xid",
                "do what nvidia_gpu_health says of it",
            )
        )
    return findings


NVLINKS = re.compile(r"NV([0-9]+)$")
PCIE_BRIDGES = ("PIX", "PXB")
"""Through nothing but bridges of PCI Express. What goes through a processor may be slow on a machine that is well."""


def peer_limit(way: str | None, ends: Sequence[Mapping[str, Any] | None]) -> float | None:
    """What two GPUs could copy each way, in GB/s, by how nvidia-smi says that they are connected; None if unknown."""
    gpus = [gpu for gpu in ends if gpu is not None]
    if way is None or len(gpus) < len(ends):
        return None
    links = NVLINKS.match(way)
    if links:
        speeds = [link["speed_gb_per_s"] for gpu in gpus for link in gpu["nvlinks"] or () if link["speed_gb_per_s"]]
        return _rounded(_product(int(links[1]), min(speeds, default=None)))
    if way not in PCIE_BRIDGES:
        return None
    rates = [
        _product(
            PCIE_LANE_GB_PER_S.get(gpu["pcie"]["generation_max"] or 0),
            gpu["pcie"]["width_current"] or gpu["pcie"]["width_max"],
        )
        for gpu in gpus
    ]
    known = [rate for rate in rates if rate is not None]
    return _rounded(min(known)) if len(known) == len(rates) else None


def with_limits(
    pairs: Iterable[Mapping[str, Any]], gpus: Iterable[Mapping[str, Any]], ways: Mapping[tuple[int, int], str]
) -> list[dict[str, Any]]:
    """Pairs with how they are connected, what that could give, and what share of it was reached."""
    by_uuid = {gpu["uuid"]: gpu for gpu in gpus}
    told = []
    for pair in pairs:
        ends = [by_uuid.get(pair[key]) for key in ("from", "to")]
        way = ways.get((ends[0]["index"], ends[1]["index"])) if ends[0] and ends[1] else None
        limit = peer_limit(way, ends) if pair["access"] else None
        told.append({**pair, "way": way, "limit_gb_per_s": limit, "percent": percent(pair["gb_per_s"], limit)})
    return told


def _slow_peer(pair: Mapping[str, Any], thresholds: Thresholds, other: str) -> tuple[str, str] | None:
    """What was found and expected of a pair that is too slow; None where it is not, or where nothing tells."""
    least, share = thresholds.peer_min_gb_per_s, thresholds.peer_min_percent
    if least and (pair["gb_per_s"] or 0.0) < least:
        return f"{pair['gb_per_s'] or 'no direct'} GB/s {other}", f"at least {least:g} GB/s"
    reached = pair.get("percent")
    if share and reached is not None and reached < share:
        links = NVLINKS.match(pair["way"])
        by = f"{links[1]} NVLinks" if links else "PCI Express"
        found = f"{pair['gb_per_s']:g} GB/s {other}, {reached:.0f} % of the {pair['limit_gb_per_s']:g} of {by}"
        return found, f"at least {share:g} %"
    return None


def judge_peers(
    pairs: Iterable[Mapping[str, Any]], error: Mapping[str, Any] | None, thresholds: Thresholds
) -> list[Finding]:
    """What is wrong between GPUs.

    Wrong words are told of the GPU that sent. A slow pair is told of the end that is in more slow pairs, and of the one
    that sent where both are in as many: one bad GPU is slow to all, and all are to it.
    """
    findings = []
    pairs = list(pairs)
    slow_pairs = Counter(pair[end] for pair in pairs if _slow_peer(pair, thresholds, "") for end in ("from", "to"))
    for pair in pairs:
        sender, receiver = pair["from"], pair["to"]
        if pair["errors"]:
            findings.append(
                Finding(
                    "peer_wrong",
                    f"{pair['errors']} wrong words after a copy to {receiver}",
                    "what was sent",
                    "check NVLink (nvidia-smi nvlink -e) and, under a hypervisor, what its IOMMU does",
                    uuid=sender,
                    peer=receiver,
                )
            )
        received = slow_pairs[receiver] > slow_pairs[sender]
        slow = _slow_peer(pair, thresholds, f"from {sender}" if received else f"to {receiver}")
        if slow:
            step = (
                "check NVLink (nvidia-smi nvlink -s -e) and Fabric Manager, or what else is on the PCI Express switch"
            )
            uuid, peer = (receiver, sender) if received else (sender, receiver)
            findings.append(Finding("slow_peer", *slow, step, uuid=uuid, peer=peer))
    if error:
        found = _error(error)
        findings.append(Finding("peers_failed", found.found, "copies between all GPUs", found.next_step))
    return findings
