# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The gate's status in Prometheus' text format, for the textfile collector of node_exporter.

A state is a series for each value that it can have, 1 for the one that holds. What is unknown has no series, and so no
0 that somebody takes for a number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ansible_collections.gpufarm.core.plugins.module_utils import gate
from ansible_collections.gpufarm.core.plugins.module_utils.gate_status import FAILED, VERDICTS
from ansible_collections.gpufarm.core.plugins.module_utils.text import epoch

FILE = "gpufarm.prom"

METRICS: dict[str, tuple[str, str]] = {
    "gpufarm_gate_run_timestamp_seconds": ("gauge", "When the gate of the node ran last."),
    "gpufarm_gate_success": ("gauge", "Whether the gate could do its work, which needs a probe and Nomad."),
    "gpufarm_gate_state": (
        "gauge",
        "Whether Nomad may place work on the node (open), and otherwise who does not let it: the node's own gate, the "
        "farm's run, maintenance, or others.",
    ),
    "gpufarm_probe_timestamp_seconds": ("gauge", "When the GPUs were probed last."),
    "gpufarm_node_healthy": ("gauge", "Whether GPUs and Nomad are as they should be."),
    "gpufarm_node_verdict": ("gauge", "Verdict of the probe on the node."),
    "gpufarm_node_gpus_expected": ("gauge", "GPUs that the node should have, by the inventory."),
    "gpufarm_node_gpus_found": ("gauge", "GPUs that answer nvidia-smi."),
    "gpufarm_gpu_info": ("gauge", "A GPU that is there, or was since the node started."),
    "gpufarm_gpu_verdict": ("gauge", "Verdict of the probe on a GPU; missing where nvidia-smi lists it no more."),
    "gpufarm_problem": (
        "gauge",
        "Problems of this code, as the probe or the comparison with Nomad has found them; without uuid those of the "
        "node.",
    ),
    "gpufarm_gpu_ecc_errors_total": ("counter", "Memory errors since the driver was loaded."),
    "gpufarm_gpu_clocks_event_seconds_total": ("counter", "How long this reason has held the clocks of a GPU down."),
    "gpufarm_gpu_utilization_ratio": ("gauge", "Share of the time in which something ran on the GPU, at the probe."),
    "gpufarm_gpu_power_draw_watts": ("gauge", "What the GPU drew at the probe."),
    "gpufarm_gpu_power_limit_watts": ("gauge", "What the GPU may draw, by the limit that is in force."),
    "gpufarm_gpu_check_timestamp_seconds": ("gauge", "When the GPU was without work and computed at this level last."),
    "gpufarm_gpu_check_success": ("gauge", "Whether it did so as it should."),
    "gpufarm_gpu_xids": (
        "gauge",
        "Xids of this code in the kernel log of this boot, since GPUs were declared repaired.",
    ),
}
"""Type and meaning of every metric, in their order."""

if TYPE_CHECKING:
    Sample = tuple[str, Mapping[str, Any], float]


def text_of(status: Mapping[str, Any]) -> str:
    """All that the status tells."""
    samples: dict[str, dict[str, float]] = {name: {} for name in METRICS}
    for name, labels, value in _samples(status):
        # Prometheus takes no series twice; what has the same labels, as two problems of one code, counts together.
        series = f"{name}{_labels(labels)}"
        samples[name][series] = samples[name].get(series, 0) + value
    return "".join(
        f"# HELP {name} {words}\n# TYPE {name} {kind}\n"
        + "".join(f"{series} {value}\n" for series, value in samples[name].items())
        for name, (kind, words) in METRICS.items()
        if samples[name]
    )


def _samples(status: Mapping[str, Any]) -> Iterator[Sample]:
    yield "gpufarm_gate_run_timestamp_seconds", {}, epoch(status["checked_at"])
    yield "gpufarm_gate_success", {}, status["action"] != FAILED
    yield from _states("gpufarm_gate_state", "state", gate.STATES, status["state"])
    if status["probed_at"] is not None:
        yield "gpufarm_probe_timestamp_seconds", {}, epoch(status["probed_at"])
    if status["healthy"] is not None:
        yield "gpufarm_node_healthy", {}, status["healthy"]
    yield from _states("gpufarm_node_verdict", "verdict", VERDICTS[:3], status["verdict"])
    for name in ("gpus_expected", "gpus_found"):
        if status[name] is not None:
            yield f"gpufarm_node_{name}", {}, status[name]
    yield from _gpus(status["gpus"] or [])
    yield from _problems(status)
    for event in status["xids"] or []:
        yield "gpufarm_gpu_xids", {**_of(event), "code": event["code"]}, event["count"]


def _gpus(gpus: Iterable[Mapping[str, Any]]) -> Iterator[Sample]:
    for gpu in gpus:
        yield "gpufarm_gpu_info", {**_of(gpu), "index": gpu["index"], "model": gpu["name"]}, 1
        yield from _states("gpufarm_gpu_verdict", "verdict", VERDICTS, gpu["verdict"], _of(gpu))
        for level, record in (gpu["checks"] or {}).items():
            yield "gpufarm_gpu_check_timestamp_seconds", {**_of(gpu), "level": level}, epoch(record["checked_at"])
            yield "gpufarm_gpu_check_success", {**_of(gpu), "level": level}, record["verdict"] == "ok"
        for kind in ("corrected", "uncorrected"):
            if gpu[f"ecc_{kind}"] is not None:
                yield "gpufarm_gpu_ecc_errors_total", {**_of(gpu), "kind": kind}, gpu[f"ecc_{kind}"]
        percent = gpu["utilization_gpu_percent"]
        for metric, value in (
            ("gpufarm_gpu_utilization_ratio", None if percent is None else percent / 100),
            ("gpufarm_gpu_power_draw_watts", gpu["power_draw_w"]),
            ("gpufarm_gpu_power_limit_watts", gpu["power_limit_enforced_w"]),
        ):
            if value is not None:
                yield metric, _of(gpu), value
        for name, microseconds in gpu["clocks_event_reasons_counters"].items():
            if microseconds is not None:
                labels = {**_of(gpu), "reason": name.removesuffix("_us")}
                yield "gpufarm_gpu_clocks_event_seconds_total", labels, microseconds / 1e6


def _problems(status: Mapping[str, Any]) -> Iterator[Sample]:
    for problem in status["problems"]:
        labels = {"code": problem["code"], "severity": problem["severity"], "source": "probe"}
        yield "gpufarm_problem", {**_of(problem), **labels}, 1
    for problem in status["nomad_problems"] or []:
        severity = gate.WARNING if problem["code"] in gate.HARMLESS else gate.CRITICAL
        yield "gpufarm_problem", {**_of(problem), "code": problem["code"], "severity": severity, "source": "nomad"}, 1


def _of(thing: Mapping[str, Any]) -> dict[str, Any]:
    """The labels that name a GPU: one that the driver cannot read has its address alone."""
    return {"uuid": thing.get("uuid"), "pci_bus_id": thing.get("pci_bus_id")}


def _states(
    name: str, label: str, states: Iterable[str], state: str | None, labels: Mapping[str, Any] | None = None
) -> Iterator[Sample]:
    if state is not None:
        for each in states:
            yield name, {**(labels or {}), label: each}, each == state


def _labels(labels: Mapping[str, Any]) -> str:
    pairs = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items() if value is not None)
    return f"{{{pairs}}}" if pairs else ""


def _escaped(value: Any) -> str:
    return str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
