"""Compares the facts of every GPU with ``nvidia-smi --query-gpu``, field by field, on a machine with real GPUs.

    python tests/hardware/agree.py

Needs Python and the driver, nothing else. What moves by itself, such as power, is asked for before and after, and must
lie between the two answers, or within what it may move meanwhile. Ends with 1 when a field disagrees.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".collections"))

from ansible_collections.gpufarm.core.plugins.module_utils import health, nvidia_smi

NOTHING = ("[N/A]", "N/A", "[Not Supported]", "[Requested functionality has been deprecated]", "")


def number(text: str) -> float:
    return float(text.split(maxsplit=1)[0])


def integer(text: str) -> int:
    return int(float(text.split(maxsplit=1)[0]))


# Field of --query-gpu: path in the facts, how the text reads, and how far a moving value may be off (None: not at all).
FIELDS: dict[str, tuple[str, Callable[[str], Any], float | None]] = {
    "index": ("index", int, None),
    "name": ("name", str, None),
    "uuid": ("uuid", str, None),
    "serial": ("serial", str, None),
    "pci.bus_id": ("pci_bus_id", str, None),
    "memory.total": ("memory_total_mib", integer, None),
    "memory.used": ("memory_used_mib", integer, 64),
    "memory.free": ("memory_free_mib", integer, 64),
    "memory.reserved": ("memory_reserved_mib", integer, None),
    "persistence_mode": ("persistence_mode", str, None),
    "compute_mode": ("compute_mode", str, None),
    "mig.mode.current": ("mig_mode", str, None),
    "mig.mode.pending": ("mig_mode_pending", str, None),
    "vbios_version": ("vbios_version", str, None),
    "power.draw": ("power_draw_w", number, 60),
    "power.limit": ("power_limit_w", number, None),
    "enforced.power.limit": ("power_limit_enforced_w", number, None),
    "power.default_limit": ("power_limit_default_w", number, None),
    "temperature.gpu": ("temperature_gpu_c", integer, 5),
    "temperature.memory": ("temperature_memory_c", integer, 5),
    "utilization.gpu": ("utilization_gpu_percent", integer, 100),
    "utilization.memory": ("utilization_memory_percent", integer, 100),
    "ecc.mode.current": ("ecc.mode", str, None),
    "ecc.mode.pending": ("ecc.mode_pending", str, None),
    "ecc.errors.corrected.volatile.total": ("ecc.corrected.volatile", int, None),
    "ecc.errors.corrected.aggregate.total": ("ecc.corrected.aggregate", int, None),
    "ecc.errors.uncorrected.volatile.total": ("ecc.uncorrected.volatile", int, None),
    "ecc.errors.uncorrected.aggregate.total": ("ecc.uncorrected.aggregate", int, None),
    "pstate": ("performance_state", str, None),
    "clocks.gr": ("clocks.graphics_mhz", integer, 2000),
    "clocks.sm": ("clocks.sm_mhz", integer, 2000),
    "clocks.mem": ("clocks.memory_mhz", integer, 3000),
    "clocks.max.gr": ("clocks.graphics_max_mhz", integer, None),
    "clocks.max.sm": ("clocks.sm_max_mhz", integer, None),
    "clocks.max.mem": ("clocks.memory_max_mhz", integer, None),
    "pcie.link.gen.gpucurrent": ("pcie.generation_current", int, None),
    "pcie.link.gen.max": ("pcie.generation_max", int, None),
    "pcie.link.gen.gpumax": ("pcie.generation_device_max", int, None),
    "pcie.link.gen.hostmax": ("pcie.generation_host_max", int, None),
    "pcie.link.width.current": ("pcie.width_current", int, None),
    "pcie.link.width.max": ("pcie.width_max", int, None),
    "fabric.state": ("fabric_state", str, None),
    "fabric.status": ("fabric_status", str, None),
    "temperature.gpu.tlimit": ("temperature_limits.margin_c", integer, 5),
    "fabric.health.summary": ("fabric_health.summary", str, None),
    "fabric.health.bandwidth": ("fabric_health.bandwidth", str, None),
    "fabric.health.route_recovery_in_progress": ("fabric_health.route_recovery_in_progress", str, None),
    "fabric.health.route_unhealthy": ("fabric_health.route_unhealthy", str, None),
    "fabric.health.access_timeout_recovery": ("fabric_health.access_timeout_recovery", str, None),
    "fabric.health.incorrect_configuration": ("fabric_health.incorrect_configuration", str, None),
    **{
        f"clocks_event_reasons_counters.{name}": (f"clocks_event_reasons_counters.{name}_us", integer, 0)
        for name in (
            "sw_power_cap",
            "sync_boost",
            "sw_thermal_slowdown",
            "hw_thermal_slowdown",
            "hw_power_brake_slowdown",
        )
    },
}


def known_fields(binary: str) -> list[str]:
    """The fields that this driver can be asked for."""
    told = subprocess.run([binary, "--help-query-gpu"], capture_output=True, text=True, check=True).stdout
    known = {part.strip('"') for line in told.splitlines() if line.startswith('"') for part in line.split(" or ")}
    return [field for field in FIELDS if field in known]


def ask(binary: str, fields: list[str]) -> list[dict[str, str]]:
    line = [binary, f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    told = subprocess.run(line, capture_output=True, text=True, check=True).stdout
    rows = csv.reader(told.splitlines(), skipinitialspace=True)
    return [dict(zip(fields, row, strict=True)) for row in rows]


def value_of(gpu: Mapping[str, Any], path: str) -> Any:
    found: Any = gpu
    for part in path.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def agrees(text: str, later: str, fact: Any, read: Callable[[str], Any], slack: float | None) -> bool:
    if text in NOTHING:
        return fact is None
    if slack is None:
        return bool(read(text) == fact)
    low, high = sorted((read(text), read(later)))
    return isinstance(fact, (int, float)) and low - slack <= fact <= high + slack


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    binary = nvidia_smi.find_nvidia_smi()
    if binary is None:
        sys.stderr.write("no nvidia-smi here. Expected: a machine with an NVIDIA GPU. Next step: run this on one.\n")
        return 2
    fields = known_fields(binary)
    before = ask(binary, fields)
    facts = nvidia_smi.collect(nvidia_smi.resolve_subsets(["all"]))
    after = ask(binary, fields)
    wrong = 0
    if not facts["available"] or len(facts["gpus"]) != len(before):
        sys.stdout.write(f"{len(before)} GPUs, the facts have {len(facts['gpus'])}: {facts['message']}\n")
        wrong += 1
    for asked, gpu, later in zip(before, facts["gpus"], after, strict=False):
        for field in fields:
            path, read, slack = FIELDS[field]
            fact = value_of(gpu, path)
            if not agrees(asked[field], later[field], fact, read, slack):
                wrong += 1
                sys.stdout.write(f"GPU {asked['index']}: {field} is '{asked[field]}', the fact {path} is {fact!r}\n")
    # Of GPUs that work it must say nothing; whether these do, only who runs this knows.
    for problem in health.judge(facts, [], [], health.HealthOptions())["problems"]:
        sys.stdout.write(f"health, {problem['severity']}: {problem['message']}\n")
    left = sorted(set(FIELDS) - set(fields))
    sys.stdout.write(
        f"{len(before)} GPU(s), driver {facts['driver_version']}: {len(fields)} fields each, {wrong} disagree"
    )
    sys.stdout.write(f"; this driver cannot be asked for {', '.join(left)}\n" if left else "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
