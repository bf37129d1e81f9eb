# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is worked out without a GPU: expected results, kernels' text, and the judgement of what real cards did."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from fractions import Fraction
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ansible_collections.gpufarm.core.plugins.module_utils import commands, gpu_benchmark, nvidia_smi, signals
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_benchmark import Card, Thresholds, judging, measuring
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_benchmark.devices import Device
from ansible_collections.gpufarm.core.tests.unit.patience import PATIENCE_S, wait_for
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils.recorded import assert_recorded

FIXTURES = Path(__file__).parents[1] / "fixtures" / "gpu_benchmark"
LINK = Card(pcie_generation=5, pcie_width=16, memory_total_mib=81559, slow_reasons=[])


@pytest.mark.parametrize(
    ("kind", "name", "is_busy"),
    [
        ("C", "python3", True),
        ("M+C", "python3", True),
        ("C+G", "/usr/lib/chromium/chromium", True),
        (None, None, True),
        ("G", "/usr/bin/Xorg", False),
        ("C", "nvidia-cuda-mps-server", False),
        ("C", "/usr/bin/nvidia-cuda-mps-server", False),
        # NVIDIA's manual has M, too, for a client of MPS; driver 580 tells M+C, and C of the server.
        ("M", "python3", True),
        ("M+C", "nvidia-cuda-mps-server-of-mine", True),
    ],
)
def test_who_computes_on_a_gpu(kind: str | None, name: str | None, is_busy: bool) -> None:
    process: Any = {"pid": 7, "type": kind, "name": name, "gpu_instance_id": None}
    known = {"processes": [process], "compute_mode": "Default", "utilization_gpu_percent": 0}
    gpu = {**nvidia_smi.empty_gpu(), "uuid": "GPU-1", **known}
    assert Device("GPU-1", cast(nvidia_smi.Gpu, gpu)).processes == [f"{name or 'a process'} (pid 7)"] * is_busy


@pytest.mark.parametrize(
    ("known", "is_busy"),
    [
        ({"compute_mode": "Default"}, True),
        ({"compute_mode": "Default", "utilization_gpu_percent": 0}, False),
        # A divided GPU tells of none, and lists all clients.
        ({"compute_mode": "Default", "mig_mode": "Enabled"}, False),
        # Before Volta its clients are not listed.
        ({"compute_mode": "Default", "utilization_gpu_percent": 1}, True),
        # Nobody else gets a context there.
        ({"compute_mode": "Exclusive_Process", "utilization_gpu_percent": 0}, True),
        ({}, True),
    ],
)
def test_a_server_of_mps_is_nobodys_where_it_shares_a_gpu_that_rests(known: dict[str, Any], is_busy: bool) -> None:
    process: Any = {"pid": 7, "type": "C", "name": "nvidia-cuda-mps-server", "gpu_instance_id": None}
    gpu = cast(nvidia_smi.Gpu, {**nvidia_smi.empty_gpu(), "uuid": "GPU-1", "processes": [process], **known})
    assert Device("GPU-1", gpu).processes == ["nvidia-cuda-mps-server (pid 7)"] * is_busy


def real() -> dict[str, Any]:
    """What two real H100 gave."""
    answer: dict[str, Any] = json.loads((FIXTURES / "h100x2-quick.json").read_text(encoding="utf-8"))
    # What is told since then is null in it.
    answer["devices"] = [{**gpu_benchmark.empty_device(each["uuid"]), **each} for each in answer["devices"]]
    return answer


def device(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = real()["devices"][0]
    for key, value in changes.items():
        found[key] = {**found[key], **value} if isinstance(value, dict) and found[key] else value
    return found


def codes(found: dict[str, Any], card: Card = LINK, level: str = "full", **thresholds: Any) -> list[str]:
    return [finding.code for finding in gpu_benchmark.judge_device(found, card, Thresholds(**thresholds), level)]


class Recorder(measuring.Gpu):
    """Keeps what would be asked of a GPU; memory that it has is whole."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.stream = object()  # type: ignore[assignment]
        self.cuda = self  # type: ignore[assignment]

    def call(self, name: str, *arguments: Any) -> None:
        self.calls.append((name, arguments))

    def allocate(self, size: int) -> int:
        return size

    def over(self, name: str, address: int, size: int, out: int, seed: int) -> None:
        self.call(name, address, size, out, seed)

    def fetch(self, address: int, size: int) -> bytes:
        self.call("fetch", address)
        return bytes(size)


def test_kernels_as_recorded() -> None:
    """Word for word what real H100 and H200 have run: the double does not know all that a driver refuses."""
    capabilities = [(7, 5), (8, 0), (9, 0), (10, 0)]
    kernels = {
        "memory": measuring.memory_ptx(), "figures": measuring.figures_ptx(),
        **{f"tensor {major}.{minor}": measuring.tensor_ptx((major, minor)) for major, minor in capabilities},
    }  # fmt: skip
    assert_recorded("gpu_benchmark", {name: text.splitlines() for name, text in kernels.items()})


def test_what_is_said_of_gpus_as_recorded() -> None:
    def told(finding: Any) -> dict[str, Any]:
        return {name: value for name, value in finding.__dict__.items() if value is not None}

    slow = {name: value / 9 for name, value in real()["devices"][0]["figures"].items()}
    sample = {"offset_bytes": 4096, "found": "0x00000000", "expected": "0xffffffff"}
    wrong = {name: number for number, name in enumerate(real()["devices"][0]["wrong_results"])}
    sick = {
        "memory": device(memory={"errors": 3, "error_samples": [sample]}),
        "memory, no sample": device(memory={"errors": 3}),
        "results": device(wrong_results=wrong, soak={"errors": 2}),
        "slow": device(figures=slow, sm_clock_mhz=600.0),
        **{
            f"{step} {code} {number}": {
                **gpu_benchmark.empty_device("GPU-1"),
                "error": {"step": step, "code": code, "cuda_error": number, "message": "m"},
            }
            for step in ("driver", "context", "compile", "memory")
            for code, number in [
                *((code, None) for code in judging.ERRORS),
                *(("cuda", n) for n in (*judging.CUDA_STEPS, 1)),
            ]
        },
    }
    held = {**LINK.__dict__, "slow_reasons": ["hw_slowdown"]}
    cards = {"slow": Card(**held), "memory": Card(**{**held, "ecc_uncorrected": 2, "xids": ["Xid 79", "Xid 63"]})}
    least = Thresholds(host_min_percent=50)
    judged = {
        name: [told(each) for each in gpu_benchmark.judge_device(found, cards.get(name, LINK), least, "full")]
        for name, found in sick.items()
    }
    pairs = [
        {**real()["peers"][0], "errors": 4},
        {**real()["peers"][1], "gb_per_s": 1.5, "way": "NV18", "limit_gb_per_s": 478.1, "percent": 0.3},
        {**real()["peers"][1], "gb_per_s": 1.5, "way": "PIX", "limit_gb_per_s": 63.0, "percent": 2.4},
    ]
    error = {"step": "peers", "code": "timeout", "cuda_error": None, "message": "m"}
    for limit, value in (("peer_min_percent", 50), ("peer_min_gb_per_s", 20)):
        found = gpu_benchmark.judge_peers(pairs, error, Thresholds(**{limit: value}))
        judged[limit] = [told(each) for each in found]
    assert_recorded("gpu_benchmark-findings", judged)


def test_real_cards_are_well() -> None:
    answer = real()
    for each in answer["devices"]:
        assert codes(each) == []
        limits = gpu_benchmark.limits_of(each, LINK)
        assert limits["memory_gb_per_s"] == pytest.approx(3352.3)
        assert limits["fp32_tflop_per_s"] == pytest.approx(66.9)
        # The target of this project on H100 and H200, which is above what is judged by default.
        assert codes(each, memory_min_percent=93, fp32_min_percent=90, tensor_min_percent=60) == []
    assert gpu_benchmark.judge_peers(answer["peers"], None, Thresholds(peer_min_gb_per_s=380)) == []
    assert all(pair["nvlink"] for pair in answer["peers"])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"figures": {"memory_read_gb_per_s": 1567.0}}, ["slow_memory"]),
        ({"figures": {"fp32_tflop_per_s": 32.0}}, ["slow_fp32"]),
        ({"figures": {"fp16_tensor_tflop_per_s": 300.0, "bf16_tensor_tflop_per_s": 301.0}}, ["slow_tensor"]),
        ({"figures": {"device_to_host_gb_per_s": 12.0}}, ["slow_host_copies"]),
        ({"wrong_results": {"fp32": 3}}, ["wrong_results"]),
        ({"memory": {"errors": 1}}, ["memory_errors"]),
        ({"soak": {"errors": 1}}, ["wrong_results"]),
    ],
)
def test_each_fault_is_named(changes: dict[str, Any], expected: list[str]) -> None:
    assert codes(device(**changes)) == expected


def test_what_is_not_judged() -> None:
    slow = device(figures={"memory_read_gb_per_s": 1.0, "fp32_tflop_per_s": 1.0})
    assert codes(slow, memory_min_percent=0, fp32_min_percent=0) == []
    assert codes(device(memory_bus_width_bits=None, figures={"memory_read_gb_per_s": 1.0})) == []
    unknown = Card()
    assert codes(device(figures={"device_to_host_gb_per_s": 1.0}), unknown) == []


@pytest.mark.parametrize(
    ("change", "reached"),
    [
        ({"compute_capability": "7.5", "memory_bus_width_bits": 256}, 0.69),  # T4
        ({"compute_capability": "6.0", "memory_bus_width_bits": 4096}, 0.72),  # P100
        ({"compute_capability": "8.6", "memory_bus_width_bits": 384, "ecc_enabled": True}, 0.75),
        ({"compute_capability": "8.9", "memory_bus_width_bits": 384, "ecc_enabled": False}, 0.90),
        ({"compute_capability": "8.0", "ecc_enabled": True}, 0.90),
    ],
)
def test_memory_is_judged_by_what_such_cards_reach(change: dict[str, Any], reached: float) -> None:
    def slow(share: float) -> bool:
        limit = gpu_benchmark.limits_of(device(**change), LINK)["memory_gb_per_s"] or 0.0
        return "slow_memory" in codes(device(**change, figures={"memory_read_gb_per_s": limit * share}))

    assert (slow(reached), slow(reached - 0.12)) == (False, True)


@pytest.mark.parametrize(
    ("change", "judged"),
    [
        ({}, True),
        ({"name": "NVIDIA H200"}, True),
        ({"name": "NVIDIA H20"}, False),
        ({"name": "NVIDIA GeForce GTX 1660", "compute_capability": "7.5"}, False),
    ],
)
def test_tensor_cores_that_differ_among_siblings_are_not_judged(change: dict[str, Any], judged: bool) -> None:
    assert ("slow_tensor" in codes(device(**change, figures=dict.fromkeys(measuring.FIGURES, 1.0)))) is judged


def test_tensor_cores_are_judged_at_their_own_clock() -> None:
    slow = {"figures": {"fp16_tensor_tflop_per_s": 330.0, "bf16_tensor_tflop_per_s": 330.0}}
    assert codes(device(**slow)) == ["slow_tensor"]
    assert codes(device(**slow, sm_clock_tensor_mhz=1000.0)) == []


@pytest.mark.parametrize(
    ("reasons", "expected", "in_a_burst"),
    [
        (["sw_power_cap"], [], []),
        ([], ["slow_clock"], []),
        (["sw_power_cap", "hw_thermal_slowdown"], ["slow_clock"], ["slow_clock"]),
        (None, [], []),
    ],
)
def test_a_card_is_judged_at_the_clock_that_it_was_kept_at(
    reasons: list[str] | None, expected: list[str], in_a_burst: list[str]
) -> None:
    """At half the clock half the work is what the card does; whether it had to be so slow is another question."""
    half = device(
        sm_clock_mhz=990.0,
        figures={"fp32_tflop_per_s": 32.0, "fp16_tensor_tflop_per_s": 330.0, "bf16_tensor_tflop_per_s": 330.0},
    )
    card = Card(pcie_generation=5, pcie_width=16, slow_reasons=reasons)
    assert codes(half, card) == expected
    assert codes(half, card, "quick") == in_a_burst


HOT = ["hw_slowdown", "hw_thermal_slowdown", "sw_power_cap", "sw_thermal_slowdown"]


@pytest.mark.parametrize(
    ("clock", "soak_clock", "reasons", "expected"),
    [
        (1980.0, 435.0, HOT, ["slow_clock"]),
        (1980.0, 435.0, [], ["slow_clock"]),
        (1980.0, 435.0, ["sw_power_cap"], []),
        # A passive card at its power limit that one look found hot.
        (1700.0, 1200.0, ["sw_power_cap", "sw_thermal_slowdown"], []),
        (1980.0, 435.0, ["sw_power_cap", "hw_thermal_slowdown"], ["slow_clock"]),
        (1980.0, 435.0, None, []),
        # What a real H200 did in 45 s, at 577 W.
        (1980.0, 1979.0, HOT, []),
        (1980.0, None, HOT, []),
        # It was hot before, and came back.
        (990.0, 1980.0, HOT, ["slow_clock"]),
        (None, 435.0, HOT, ["slow_clock"]),
    ],
)
def test_a_card_that_gets_slow_in_the_soak(
    clock: float | None, soak_clock: float | None, reasons: list[str] | None, expected: list[str]
) -> None:
    """Its figures are of the burst before, and judged at the clock of that."""
    soak = {"seconds": 60.0, "rounds": 19, "errors": 0, "fp32_tflop_per_s_min": 14.0, "sm_clock_mhz_min": soak_clock}
    burst = (clock or 1980.0) / 1980.0
    found = device(sm_clock_mhz=clock, figures={"fp32_tflop_per_s": 64.0 * burst}, soak=soak)
    findings = gpu_benchmark.judge_device(found, dataclasses.replace(LINK, slow_reasons=reasons), Thresholds(), "full")
    assert [finding.code for finding in findings] == expected
    if expected:
        assert f"{min(clock or 1980.0, soak_clock or 1980.0):g} MHz under load" in findings[0].found


def test_one_slow_try_is_no_slow_soak(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of a second is that of its best try, so the lowest of them was not passed for all of a second."""
    clocks, ticks = iter([1980.0, 1965.0]), iter([0.0, 0.0, 30.0, 60.0])

    def measure_fp32(_gpu: Any, spend: float) -> dict[str, Any]:
        assert spend == 1.0
        return {"tflop_per_s": 64.0, "tflop_per_s_min": 2.0, "clock_mhz": next(clocks), "errors": 0}

    monkeypatch.setattr(measuring, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
    monkeypatch.setattr(measuring, "measure_fp32", measure_fp32)
    monkeypatch.setattr(measuring, "check_memory", lambda *_arguments: {"errors": 0})
    told: list[Any] = []
    measuring.soak(Recorder(), {}, 1, 60.0, told.append)
    soak = told[-1]["device"]["soak"]
    assert (soak["rounds"], soak["sm_clock_mhz_min"], soak["fp32_tflop_per_s_min"]) == (2, 1965.0, 2.0)
    assert codes(device(soak=soak), dataclasses.replace(LINK, slow_reasons=HOT)) == []


def test_the_clock_is_that_of_the_best_try() -> None:
    """The rate and the clock by which it is judged belong together."""

    class Clocked(Recorder):
        took = iter([0.01, 0.008, 0.02, 0.02])

        def seconds(self, work: Callable[[], None]) -> float:
            work()
            spent = next(self.took)
            # The same cycles in each try.
            self.nanoseconds = int(spent * 1e9)
            return spent

        def wait(self) -> None:
            pass

        def fetch(self, address: int, size: int) -> bytes:
            super().fetch(address, size)
            return struct.pack("<I4xQQ", 0, 16_000_000, getattr(self, "nanoseconds", 1)).ljust(size, b"\0")[:size]

    told = measuring._arithmetic(Clocked(), lambda _out, _rounds: None, lambda rounds: rounds * 1e12, 0.0, 1)
    assert told["clock_mhz"] == pytest.approx(2000.0)
    assert (told["tflop_per_s"], told["tflop_per_s_min"]) == (pytest.approx(125.0), pytest.approx(50.0))


def test_no_block_waits_for_another() -> None:
    """A multiprocessor of Turing holds 1,024 threads, one of Ampere and Ada 1,536, of others 2,048."""
    assert measuring.FMA_BLOCKS_PER_SM * measuring.BLOCK <= 1024
    assert measuring.MMA_BLOCKS_PER_SM * measuring.MMA_BLOCK <= 1024


def test_a_part_of_a_gpu_instance_is_not_judged_by_all_of_its_memory() -> None:
    part = device(uuid="MIG-1", name="NVIDIA H100 80GB HBM3 MIG 1c.3g.40gb", memory_total_mib=40192)
    limits = gpu_benchmark.limits_of(part, LINK)
    assert limits["memory_gb_per_s"] is None and limits["fp32_tflop_per_s"]


def test_a_vgpu_is_told_and_not_judged() -> None:
    """It has a part of a card, and tells of the whole one. One that is passed through is a whole card."""
    slow = {"memory_read_gb_per_s": 9.0, "fp32_tflop_per_s": 0.1, "host_to_device_gb_per_s": 0.1}
    for mode, found in (("VGPU", []), ("Pass-Through", ["slow_memory", "slow_fp32", "slow_host_copies"])):
        card = dataclasses.replace(LINK, virtualization_mode=mode)
        assert codes(device(figures=slow), card) == found
        assert (set(gpu_benchmark.limits_of(device(), card).values()) == {None}) is (mode == "VGPU")
        # A wrong result is nobody else's fault.
        assert codes(device(wrong_results={"fp32": 1}), card) == ["wrong_results"]


def test_a_mig_device_is_judged_by_its_share() -> None:
    small = device(uuid="MIG-1", sm_count=16, memory_total_mib=9984)
    limits = gpu_benchmark.limits_of(small, LINK)
    assert limits["fp32_tflop_per_s"] == pytest.approx(8.1)
    assert limits["memory_gb_per_s"] == pytest.approx(3352.3 * 9984 / 81559, rel=1e-3)
    assert gpu_benchmark.limits_of(small, Card())["memory_gb_per_s"] is None


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        ({"step": "context", "code": "cuda", "cuda_error": 802, "message": "m"}, "context_failed", "Fabric Manager"),
        ({"step": "memory", "code": "cuda", "cuda_error": 999, "message": "m"}, "failed", "Xid"),
        ({"step": "context", "code": "timeout", "cuda_error": None, "message": "m"}, "hung", "reset the GPU"),
        ({"step": "driver", "code": "library", "cuda_error": None, "message": "m"}, "no_cuda", "libcuda.so.1"),
        ({"step": "memory", "code": "crashed", "cuda_error": None, "message": "m"}, "crashed", "Xid"),
        # Nothing is wrong with a GPU for which the driver cannot compile.
        ({"step": "compile", "code": "cuda", "cuda_error": 209, "message": "m"}, "no_cuda", "compute capability 6.0"),
        ({"step": "compile", "code": "cuda", "cuda_error": 218, "message": "m"}, "no_cuda", "compute capability 6.0"),
        ({"step": "compile", "code": "cuda", "cuda_error": 221, "message": "m"}, "no_cuda", "ptxjitcompiler"),
        ({"step": "compile", "code": "cuda", "cuda_error": 222, "message": "m"}, "no_cuda", "update the driver"),
        ({"step": "compile", "code": "cuda", "cuda_error": 999, "message": "m"}, "failed", "Xid"),
    ],
)
def test_errors_have_a_next_step(error: dict[str, Any], code: str, says: str) -> None:
    empty = {**gpu_benchmark.empty_device("GPU-1"), "error": error}
    (finding,) = gpu_benchmark.judge_device(empty, Card(), Thresholds(), "quick")
    assert finding.code == code and says in finding.next_step and error["step"] in finding.found
    (finding,) = gpu_benchmark.judge_peers([], error, Thresholds())
    assert finding.code == "peers_failed"


@pytest.mark.parametrize(("capability", "code"), [("5.2", "no_cuda"), ("10.0", "failed")])
def test_a_card_that_is_too_old_is_not_sick(capability: str, code: str) -> None:
    error = {"step": "compile", "code": "cuda", "cuda_error": 1, "message": "m"}
    old = {**gpu_benchmark.empty_device("GPU-1"), "compute_capability": capability, "error": error}
    (finding,) = gpu_benchmark.judge_device(old, Card(), Thresholds(), "quick")
    assert finding.code == code


def test_memory_errors_and_xids_that_came_meanwhile() -> None:
    card = Card(pcie_generation=5, pcie_width=16, slow_reasons=[], ecc_uncorrected=2, ecc_corrected=7, xids=("xid_48",))
    assert codes(device(), card) == ["ecc_errors", "xid"]


def ends(speed: float | None = 26.562, **pcie: int | None) -> list[dict[str, Any]]:
    link = {"generation_max": 4, "width_current": 16, "width_max": 16, **pcie}
    links = [{"speed_gb_per_s": speed}, {"speed_gb_per_s": None}]
    return [{"nvlinks": links, "pcie": link}, {"nvlinks": links, "pcie": {**link, "width_current": 8}}]


@pytest.mark.parametrize(
    ("way", "given", "limit"),
    [
        ("NV18", {}, 478.1),
        ("NV4", {"speed": 25.0}, 100.0),
        ("NV18", {"speed": None}, None),
        ("PIX", {}, 15.8),
        ("PXB", {}, 15.8),
        ("PIX", {"generation_max": None}, None),
        # Through a processor anything is possible.
        ("PHB", {}, None),
        ("SYS", {}, None),
        (None, {}, None),
    ],
)
def test_what_a_pair_could_do(way: str | None, given: dict[str, Any], limit: float | None) -> None:
    assert judging.peer_limit(way, ends(**given)) == limit
    assert judging.peer_limit(way, [ends(**given)[0], None]) is None


def test_pairs_are_judged_by_what_is_between_them() -> None:
    """Real H100 reach 82 % of their NVLinks."""
    pairs = real()["peers"]
    first, second = pairs[0]["from"], pairs[0]["to"]
    gpus = [{**ends()[index], "uuid": uuid, "index": index} for index, uuid in enumerate((first, second))]
    ways = {(0, 1): "NV18", (1, 0): "NV18"}
    known = gpu_benchmark.with_limits(pairs, gpus, ways)
    assert [(pair["way"], pair["limit_gb_per_s"], round(pair["percent"])) for pair in known] == [
        ("NV18", 478.1, 82)
    ] * 2
    assert gpu_benchmark.judge_peers(known, None, Thresholds()) == []
    slow = gpu_benchmark.with_limits([{**pairs[0], "gb_per_s": 310.0}, pairs[1]], gpus, ways)
    (finding,) = gpu_benchmark.judge_peers(slow, None, Thresholds())
    assert (finding.code, finding.uuid) == ("slow_peer", first)
    assert (
        finding.found == f"310 GB/s to {second}, 65 % of the 478.1 of 18 NVLinks"
        and finding.expected == "at least 66 %"
    )
    assert gpu_benchmark.judge_peers(slow, None, Thresholds(peer_min_percent=0)) == []
    # Where nobody tells, and where they do not reach each other, nothing is said of them.
    for unknown in (
        gpu_benchmark.with_limits(pairs, gpus, {}),
        gpu_benchmark.with_limits([{**pairs[0], "access": False, "gb_per_s": None}], gpus, ways),
        gpu_benchmark.with_limits([{**pairs[0], "gb_per_s": 1.0}], gpus[:1], ways),
    ):
        assert {(pair["limit_gb_per_s"], pair["percent"]) for pair in unknown} == {(None, None)}
        assert gpu_benchmark.judge_peers(unknown, None, Thresholds()) == []


def test_of_slow_pairs_the_gpu_that_is_in_most_is_named() -> None:
    def pair(one: str, other: str, rate: float) -> dict[str, Any]:
        names = {"from": f"GPU-{one}", "to": f"GPU-{other}", "way": "NV18", "limit_gb_per_s": 478.1, "errors": 0}
        return {**names, "gb_per_s": rate, "percent": judging.percent(rate, 478.1)}

    pairs = [pair(one, other, 300.0 if "c" in (one, other) else 392.0) for one, other in permutations("abcd", 2)]
    found = gpu_benchmark.judge_peers(iter(pairs), None, Thresholds())
    assert {finding.uuid for finding in found} == {"GPU-c"} and len(found) == 6
    told = {finding.found: finding.peer for finding in found}
    assert told["300 GB/s from GPU-a, 63 % of the 478.1 of 18 NVLinks"] == "GPU-a"
    assert told["300 GB/s to GPU-a, 63 % of the 478.1 of 18 NVLinks"] == "GPU-a"
    # Of two nobody can tell, and another slow pair is no matter of c.
    both = gpu_benchmark.judge_peers([pair("a", "b", 300.0), pair("b", "a", 300.0)], None, Thresholds())
    assert [(finding.uuid, finding.peer) for finding in both] == [("GPU-a", "GPU-b"), ("GPU-b", "GPU-a")]
    more = [{**each, "gb_per_s": 9.0} if (each["from"], each["to"]) == ("GPU-b", "GPU-d") else each for each in pairs]
    absolute = gpu_benchmark.judge_peers(more, None, Thresholds(peer_min_gb_per_s=350, peer_min_percent=0))
    assert {finding.uuid for finding in absolute} == {"GPU-b", "GPU-c"} and len(absolute) == 7
    assert {"9.0 GB/s to GPU-d", "300.0 GB/s from GPU-b"} <= {finding.found for finding in absolute}


def test_pairs_are_judged() -> None:
    pair = {**real()["peers"][0], "errors": 4, "gb_per_s": None}
    found = gpu_benchmark.judge_peers([pair], None, Thresholds(peer_min_gb_per_s=10))
    assert [(finding.code, finding.uuid) for finding in found] == [
        ("peer_wrong", pair["from"]),
        ("slow_peer", pair["from"]),
    ]


def test_fused_steps_are_exact() -> None:
    """Each product and sum fits a double, so that rounding it once is what the card does."""
    value = exact = measuring.FMA_STARTS[3]
    for _step in range(200):
        told = Fraction(exact) * Fraction(measuring.FMA_FACTOR) + Fraction(measuring.FMA_ADDEND)
        assert Fraction(value * measuring.FMA_FACTOR + measuring.FMA_ADDEND) == told
        value = exact = measuring.single(float(told))
    assert measuring.fma_result() == 0xFDD85363


@pytest.mark.parametrize(
    ("kind", "depth", "checksum"), [("f16", 8, 0x54A558EA), ("f16", 16, 0x0ED820C1), ("bf16", 16, 0x26DCB417)]
)
def test_products_are_what_the_fragments_say(kind: str, depth: int, checksum: int) -> None:
    """Read back by the tables of the PTX manual, not by the code that wrote them."""
    words = depth // 2 + depth // 2 + 4 * measuring.ACCUMULATORS
    data = measuring.mma_data(kind, depth)
    assert len(data) == 32 * 4 * words
    # These very matrices are what a real H200 multiplied without an error.
    assert zlib.crc32(data) == checksum

    def number(bits: int) -> float:
        if kind == "f16":
            return float(struct.unpack("<e", struct.pack("<H", bits))[0])
        return float(struct.unpack("<f", struct.pack("<I", bits << 16))[0])

    a: list[dict[tuple[int, int], float]] = [{}, {}]
    b: list[dict[tuple[int, int], float]] = [{}, {}, {}, {}]
    for lane in range(32):
        raw = data[lane * 4 * words : (lane + 1) * 4 * words]
        halves = [number(bits) for bits in struct.unpack(f"<{depth * 2}H", raw[: depth * 4])]
        group, thread = divmod(lane, 4)
        for which in range(2):
            for i in range(depth // 2):
                row = group + (8 if i % 4 >= 2 else 0)
                a[which][row, thread * 2 + (i & 1) + (8 if i >= 4 else 0)] = halves[which * depth // 2 + i]
        for which in range(4):
            for i in range(depth // 4):
                k = thread * 2 + (i & 1) + (8 if i >= 2 else 0)
                b[which][k, group] = halves[depth + which * depth // 4 + i]
    assert all(len(each) == 16 * depth for each in a) and all(len(each) == 8 * depth for each in b)
    for lane in range(32):
        raw = data[lane * 4 * words : (lane + 1) * 4 * words]
        sums = struct.unpack(f"<{4 * measuring.ACCUMULATORS}f", raw[depth * 4 :])
        group, thread = divmod(lane, 4)
        for number_of, told in enumerate(sums):
            which, i = divmod(number_of, 4)
            row, column = group + (8 if i >= 2 else 0), thread * 2 + (i & 1)
            assert told == math.fsum(a[which % 2][row, k] * b[which // 2][k, column] for k in range(depth))
    assert len({data[4 * depth : 4 * words]}) == 1 and any(data[4 * depth : 4 * words])


def test_sums_stay_whole_numbers() -> None:
    most = 4 * 16 * measuring.MMA_ROUNDS_MAX * measuring.MMA_UNROLLED
    assert most <= 2**24


def test_linear_sum() -> None:
    words = 4096
    assert measuring.linear_sum(4 * words, 77) == sum(77 + number for number in range(words)) & 0xFFFFFFFF


def test_newer_instructions_only_where_the_card_has_them() -> None:
    assert measuring.tensor_kernels((7, 0)) == {}
    assert set(measuring.tensor_kernels((7, 5))) == {"f16"}
    assert set(measuring.tensor_kernels((12, 0))) == {"f16", "bf16"}
    assert ".target sm_60" in measuring.memory_ptx() and ".target sm_60" in measuring.figures_ptx()
    assert ".target sm_75" in measuring.tensor_ptx((7, 5)) and "m16n8k8" in measuring.tensor_ptx((7, 5))


@pytest.mark.parametrize("patterns", [measuring.QUICK_PATTERNS, measuring.FULL_PATTERNS])
def test_each_piece_of_memory_has_all_patterns(
    patterns: tuple[tuple[str, int], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bit that is stuck at 0 shows where each line but one is set, one that is stuck at 1 where only one is."""
    monkeypatch.setattr(measuring, "PIECE_BYTES", measuring.MIB)
    gpu, pieces = Recorder(), 7
    measuring.check_memory(gpu, pieces * measuring.MIB, patterns)
    for what in ("fill", "check"):
        seeds = [arguments[-1] for name, arguments in gpu.calls if name == f"{what}_walking"]
        inverted = [sum(seed < 0 for seed in seeds[piece::pieces]) for piece in range(pieces)]
        assert inverted == [sum(seed < 0 for _name, seed in patterns)] * pieces
        assert len(set(seeds)) == len(seeds)


def test_all_work_goes_through_one_stream() -> None:
    """The default stream would not wait for it: zeros could come behind what they are to make room for."""
    gpu = Recorder()
    gpu.zero(0, 64)
    gpu.store(0, b"data")
    assert [name for name, arguments in gpu.calls if gpu.stream not in arguments] == []


def run_workers(works: dict[str, Any], timeout: float) -> dict[str, measuring.Worker]:
    workers = [measuring.Worker(key, work, None, timeout) for key, work in works.items()]
    measuring.attend(workers)
    return {worker.key: worker for worker in workers}


def members(group: int) -> list[str]:
    """The processes of a group that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            _name, _end, rest = path.read_text(encoding="utf-8").rpartition(")")
            state, _parent, theirs = rest.split()[:3]
            if int(theirs) == group and state not in "ZX":
                found.append(path.parent.name)
    return found


class Paced(measuring.Worker):
    """One whose limits are short once it has come to a step, whenever that is, and generous before."""

    hangs_at: dict[str, str]
    ends_at: dict[str, str]

    def touch(self) -> None:
        self.timeout = 0.5 if self.step and self.hangs_at.get(self.key) == self.step else PATIENCE_S
        if self.step and self.ends_at.get(self.key) == self.step:
            self.until = time.monotonic() + 0.5
        super().touch()


def pace(monkeypatch: pytest.MonkeyPatch, hangs_at: dict[str, str], ends_at: dict[str, str]) -> None:
    limits = {"hangs_at": hangs_at, "ends_at": ends_at}
    monkeypatch.setattr(measuring, "Worker", type("Worker", (Paced,), limits))


def test_one_that_hangs_is_ended_and_the_others_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    pace(monkeypatch, {"hang": "context"}, {})

    def hang(tell: measuring.Tell) -> None:
        tell({"step": "context"})
        os.fork()
        time.sleep(90)

    workers = run_workers({"hang": hang, "well": lambda tell: tell({"value": 1})}, PATIENCE_S)
    assert workers["well"].lines == [{"value": 1}] and workers["well"].failure() is None
    failure = workers["hang"].failure()
    assert failure is not None and (failure["code"], failure["step"]) == ("timeout", "context")
    wait_for(lambda: not members(workers["hang"].pid))


def test_what_a_sampler_runs_ends_with_it(tmp_path: Path) -> None:
    """Each call leads a group of its own."""
    told = tmp_path / "pid"

    def sample(_tell: measuring.Tell) -> None:
        signals.unwind()
        commands.run_commands([["sh", "-c", f"echo $$ >{told}.new; mv {told}.new {told}; exec sleep 900"]], 900)

    worker = measuring.Worker("samples", sample, None, float("inf"))
    with measuring.ended([worker]):
        wait_for(told.exists)
        assert members(int(told.read_text()))
    wait_for(lambda: not members(int(told.read_text())) and not members(worker.pid))


def test_what_goes_wrong_in_a_worker_is_told() -> None:
    def crash(_tell: measuring.Tell) -> None:
        os.kill(os.getpid(), 9)

    def fail(_tell: measuring.Tell) -> None:
        raise ValueError("of ours")

    def refuse(_tell: measuring.Tell) -> None:
        raise measuring.CudaError("cuCtxCreate", 999, "CUDA_ERROR_UNKNOWN", "unknown error")

    workers = run_workers({"crash": crash, "fail": fail, "refuse": refuse}, PATIENCE_S)
    told = {key: worker.failure() or {} for key, worker in workers.items()}
    assert told["crash"]["code"] == "crashed" and "signal 9" in told["crash"]["message"]
    assert told["fail"]["code"] == "internal" and "of ours" in told["fail"]["message"]
    assert (told["refuse"]["code"], told["refuse"]["cuda_error"]) == ("cuda", 999)


@pytest.mark.parametrize("code", [0, 3])
def test_one_that_ends_early_without_a_word_is_not_well(code: int) -> None:
    """A library may end the process that it is in."""

    def leave(tell: measuring.Tell) -> None:
        tell({"step": "memory"})
        os._exit(code)

    failure = run_workers({"leave": leave}, PATIENCE_S)["leave"].failure() or {}
    assert (failure["code"], failure["step"]) == ("crashed", "memory") and f"ended with {code}" in failure["message"]


def test_a_crash_that_is_not_seen_in_time_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "KILL_WAIT", 0.0)
    worker = run_workers({"crash": lambda _tell: os.kill(os.getpid(), 9)}, PATIENCE_S)["crash"]
    os.waitpid(worker.pid, 0)
    assert (worker.failure() or {})["code"] == "crashed"


def test_workers_end_with_who_started_them(tmp_path: Path) -> None:
    """Killed outright, it can clean nothing up; no context may stay behind."""
    program = (
        "import sys, time\nsys.path.insert(0, sys.argv[1])\nimport measuring\n"
        "worker = measuring.Worker('w', lambda tell: time.sleep(90), None, 3600)\n"
        "print(worker.pid, flush=True)\ntime.sleep(90)\n"
    )
    folder = Path(measuring.__file__).parent
    with subprocess.Popen(
        [sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True, cwd=tmp_path
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        # It may not have asked yet to be ended with its parent; then it sees that it has another one.
        parent.kill()
    wait_for(lambda: not members(pid))


def test_turns_are_taken_one_at_a_time(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def work(tell: measuring.Teller) -> None:
        with tell.turn(), log.open("a") as file:
            file.write("in ")
            file.flush()
            time.sleep(0.05)
            file.write("out ")

    workers = run_workers({str(number): work for number in range(4)}, PATIENCE_S)
    assert [worker.failure() for worker in workers.values()] == [None] * 4
    assert log.read_text() == "in out " * 4


def test_a_turn_is_taken_from_one_that_cannot_be_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In the driver no signal reaches a process; it keeps what it holds, locks too."""
    killed: list[int] = []
    kill = os.killpg
    monkeypatch.setattr(os, "killpg", lambda group, _signal: killed.append(group))

    def hold(tell: measuring.Teller) -> None:
        with tell.turn():
            tell({"step": "host_copies"})
            (tmp_path / "held").touch()
            time.sleep(600)

    def wait(tell: measuring.Teller) -> None:
        while not (tmp_path / "held").exists():
            time.sleep(0.01)
        with tell.turn():
            tell({"value": 1})

    pace(monkeypatch, {"hold": "host_copies"}, {})
    try:
        holder, *others = (
            measuring.Worker("hold", hold, None, PATIENCE_S),
            *(measuring.Worker(f"wait {number}", wait, None, PATIENCE_S) for number in range(2)),
        )
        measuring.attend([holder, *others])
        assert [worker.lines for worker in others] == [[{"value": 1}]] * 2
        failure = holder.failure() or {}
        assert (failure["code"], failure["step"]) == ("timeout", "host_copies")
        assert killed == [holder.pid] * 2
    finally:
        for group in killed:
            kill(group, 9)


def test_what_shares_a_gpu_instance_is_measured_in_turn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log = tmp_path / "log"

    def measure_device(_options: Any, tell: measuring.Teller) -> None:
        with log.open("a") as file:
            file.write("in ")
            file.flush()
            time.sleep(0.1)
            file.write("out ")
        tell({"device": {"name": "measured"}})

    monkeypatch.setattr(measuring, "measure_device", measure_device)
    uuids = [f"MIG-{number}" for number in range(3)]
    answer = measuring.measure(uuids, "start", shared=dict.fromkeys(uuids, ("GPU-1", 3)))
    assert [(each["uuid"], each["name"], each["error"]) for each in answer["devices"]] == [
        (uuid, "measured", None) for uuid in uuids
    ]
    assert log.read_text() == "in out " * 3


def test_nobody_is_to_blame_for_the_end_of_it_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only who came to the limit of its own step hangs: not who waits for it, nor who began shortly before the end."""
    first = tmp_path / "first"

    def measure_device(_options: Any, tell: measuring.Teller) -> None:
        while os.environ["CUDA_VISIBLE_DEVICES"] != "GPU-0" and not first.exists():
            time.sleep(0.01)
        with tell.turn():
            first.touch()
            tell({"step": "host_copies"})
            time.sleep(90 if os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-0" else 0)
        tell({"step": "memory"})
        time.sleep(90 if os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-2" else 0)

    def codes(**limits: float) -> list[str | None]:
        answer = measuring.measure(["GPU-0", "GPU-1", "GPU-2"], "start", **limits)
        return [(each["error"] or {}).get("code") for each in answer["devices"]]

    monkeypatch.setattr(measuring, "measure_device", measure_device)
    assert codes(timeout=60, limit_s=1) == ["over", "over", "over"]
    first.unlink(missing_ok=True)
    pace(monkeypatch, {"GPU-0": "host_copies"}, {"GPU-2": "memory"})
    assert codes() == ["timeout", None, "over"]


def test_nothing_begins_that_may_not_come_to_its_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def measure_device(_options: Any, _tell: measuring.Teller) -> None:
        (tmp_path / os.environ["CUDA_VISIBLE_DEVICES"]).touch()
        time.sleep(0.5)

    def measure_peers(_tell: measuring.Teller) -> None:
        (tmp_path / "peers").touch()

    monkeypatch.setattr(measuring, "measure_device", measure_device)
    monkeypatch.setattr(measuring, "measure_peers", measure_peers)
    answer = measuring.measure(["GPU-1", "GPU-2"], "quick", timeout=60, limit_s=60, shared={"GPU-1": 1, "GPU-2": 1})
    assert [each["error"] for each in answer["devices"]] == [None, None]
    assert [path.name for path in tmp_path.iterdir()] == ["GPU-1"] and answer["peers_error"] is None


def test_what_a_task_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", "GPU-1,MIG-2")
    assert measuring.visible_devices(5.0) == (["GPU-1", "MIG-2"], None)


def test_as_a_program_without_a_driver() -> None:
    done = subprocess.run(
        [sys.executable, measuring.__file__, "--level", "start"],
        env={"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": "/nonexistent"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and "libcuda.so.1" in done.stderr


def test_the_program_says_what_is_wrong() -> None:
    answer = real()
    assert not measuring.faulty(answer)
    assert "memory_read_gb_per_s" in measuring.table(answer) and "by the host 37.3" in measuring.table(answer)
    answer["devices"][0]["wrong_results"]["fp32"] = 5
    assert measuring.faulty(answer) and "fp32: 5 wrong results" in measuring.table(answer)


def test_percent() -> None:
    assert judging.percent(None, 3.0) is None and judging.percent(1.0, None) is None
    assert judging.percent(1.0, 3.0) == 33.3


@pytest.mark.parametrize(
    "change", [{"compute_capability": None}, {"memory_clock_max_mhz": 1, "memory_bus_width_bits": 1}]
)
def test_a_card_that_does_not_tell_what_it_can_do_is_not_judged_by_it(change: dict[str, Any]) -> None:
    """Not even where that is rounded to nothing."""
    assert codes(device(**change), level="quick") == []


def test_an_integrated_gpu_has_no_limit_for_memory_and_host_copies() -> None:
    """What CUDA and PCI Express tell of those is of another kind there."""
    slow = {**dict.fromkeys(measuring.FIGURES, 1.0), "fp32_tflop_per_s": 32.0}
    one = device(integrated=True, memory_clock_max_mhz=8533, memory_bus_width_bits=256, figures=slow)
    limits = gpu_benchmark.limits_of(one, Card(pcie_generation=1, pcie_width=1))
    assert (limits["memory_gb_per_s"], limits["host_gb_per_s"]) == (None, None)
    assert limits["fp32_tflop_per_s"] == pytest.approx(66.9)
    assert codes(one) == ["slow_fp32", "slow_tensor"]
    assert codes({**one, "integrated": False}) == ["slow_memory", "slow_fp32", "slow_tensor", "slow_host_copies"]


@pytest.mark.parametrize(
    ("integrated", "share", "tested"), [(1, 0.95, 50), (1, 0.05, 5), (0, 0.95, 95), (None, 0.95, 95)]
)
def test_half_of_the_hosts_memory_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, integrated: int | None, share: float, tested: int
) -> None:
    class Integrated(Untold):
        def attribute(self, name: str, _device: Any) -> int | None:
            return integrated if name == "integrated" else None

        def device(self, _ordinal: int) -> Any:
            return 0

    class Sized(Recorder):
        def __init__(self, *_arguments: Any) -> None:
            super().__init__()

        def load(self, _text: str) -> None:
            pass

        def free_and_total(self) -> tuple[int, int]:
            return 100 * measuring.MIB, 128 * measuring.MIB

        def close(self) -> None:
            pass

    monkeypatch.setattr(measuring, "Cuda", Integrated)
    monkeypatch.setattr(measuring, "Gpu", Sized)
    monkeypatch.setattr(measuring, "measure_figures", lambda *_arguments: None)
    monkeypatch.setattr(measuring, "check_memory", lambda _gpu, size, _patterns: {"tested_mib": size // measuring.MIB})
    told: list[Any] = []
    options = {"level": "full", "memory_share": share, "soak_s": 0}
    measuring.measure_device(options, told.append)  # type: ignore[arg-type]
    (described,) = [line["device"] for line in told if "integrated" in line.get("device", {})]
    assert described["integrated"] is (None if integrated is None else bool(integrated))
    assert {"device": {"memory": {"tested_mib": tested}}} in told


class Untold(measuring.Cuda):
    def __init__(self) -> None:
        """Loads no library."""

    def attribute(self, _name: str, _device: Any) -> int | None:
        return None

    def name(self, _device: Any) -> str | None:
        return None


def test_a_capability_that_cuda_does_not_tell_is_null() -> None:
    assert measuring.describe(Untold(), 0)["compute_capability"] is None
