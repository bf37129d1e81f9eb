"""The module nvidia_gpu_benchmark against the double of CUDA, which computes what its kernels say."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpufarm.core.plugins.module_utils import gpu_benchmark
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_benchmark import measuring
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_benchmark.devices import Device
from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi import empty_gpu
from ansible_collections.gpufarm.core.plugins.module_utils.xid_events import read_events
from ansible_collections.gpufarm.core.plugins.modules import nvidia_gpu_benchmark
from ansible_collections.gpufarm.core.tests.unit.patience import wait_for
from ansible_collections.gpufarm.core.tests.unit.plugins.modules import release_helper as helper

from tests.simulator.cache import ROOT
from tests.simulator.gpu import faults
from tests.testinfra import printed

from .conftest import Node

MakeNode = Callable[[str], Node]
# Device memory is the machine's own here.
SMALL = 0.0001


class Machine:
    """The module on a node of plain files."""

    def __init__(self, node: Node, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.node, self._capsys = node, capsys
        for name, text in node.environment.items():
            monkeypatch.setenv(name, text)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(nvidia_gpu_benchmark, "ROOT", str(node.root))
        monkeypatch.setattr(measuring, "LIBRARIES", (str(node.build / "libcuda.so.1"),))
        monkeypatch.setattr(measuring, "PEER_BYTES", 4 * measuring.MIB)
        monkeypatch.setattr(measuring, "BANDWIDTH_BYTES", 128 * measuring.MIB)
        monkeypatch.setattr(measuring, "HOST_BYTES", 8 * measuring.MIB)

    def run(self, **arguments: Any) -> helper.Outcome:
        given = {"path": str(self.node.build / "nvidia-smi"), "memory_share": SMALL, **arguments}
        return helper.run_module(nvidia_gpu_benchmark.main, self._capsys, given)


@pytest.fixture
def machine(
    node: MakeNode, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], Machine]:
    return lambda profile: Machine(node(profile), monkeypatch, capsys)


def verdicts(outcome: helper.Outcome) -> list[str | None]:
    return [gpu["verdict"] for gpu in outcome["gpus"]]


def told(outcome: helper.Outcome) -> list[tuple[str, str | None]]:
    return [(problem["code"], problem["uuid"]) for problem in outcome["problems"]]


def test_healthy_gpus_reach_what_real_ones_do(machine: Callable[[str], Machine]) -> None:
    outcome = machine("h200-x2").run()
    assert (outcome["problems"], outcome["passed"], outcome["changed"]) == ([], True, False)
    for gpu in outcome["gpus"]:
        assert gpu["verdict"] == "ok" and gpu["memory"]["errors"] == 0
        assert gpu["percent"]["memory"] >= 93 and gpu["percent"]["fp32"] >= 90 and gpu["percent"]["tensor"] >= 60
        assert gpu["limits"]["memory_gb_per_s"] == pytest.approx(4814, abs=1)
        assert not any(gpu["wrong_results"].values()) and gpu["sm_clock_mhz"] == 1980
        assert None not in gpu["figures"].values()
    assert [(pair["nvlink"], pair["errors"]) for pair in outcome["peers"]] == [(True, 0), (True, 0)]
    for pair in outcome["peers"]:
        assert pair["gb_per_s"] > pair["by_host_gb_per_s"]
        assert (pair["way"], pair["limit_gb_per_s"]) == ("NV18", 478.1) and 70 < pair["percent"] < 90


def test_nvlinks_that_are_slower_than_they_say(machine: Callable[[str], Machine]) -> None:
    made = machine("h200-x2")
    made.node.change(lambda it: faults.set_value(it, 1, "nvlink.speed_mbps", "13281"))
    outcome = made.run()
    assert told(outcome) == [("slow_peer", outcome["gpus"][1]["uuid"])]
    assert outcome["problems"][0]["peer"] == outcome["gpus"][0]["uuid"]
    assert "% of the 478.1 of 18 NVLinks. Expected: at least 66 %. Next step: " in outcome["problems"][0]["message"]


LINK = "pci.pci_gpu_link_info.link_widths.current_link_width"


@pytest.mark.parametrize(("mode", "codes", "limit"), [("Enabled", [], None), ("Disabled", ["slow_host_copies"], 63.0)])
def test_copies_by_nvlink_c2c_are_not_judged_by_pci_express(
    machine: Callable[[str], Machine], mode: str, codes: list[str], limit: float | None
) -> None:
    def change(profile: faults.Profile) -> None:
        faults.set_value(profile, 1, LINK, "4x")
        faults.set_value(profile, 1, "c2c_mode", mode)

    made = machine("h200-x2")
    made.node.change(change)
    outcome = made.run(peers=False)
    assert [code for code, _uuid in told(outcome)] == codes
    by_pci_express, other = outcome["gpus"]
    assert by_pci_express["limits"]["host_gb_per_s"] == 63.0
    assert other["limits"] == {**by_pci_express["limits"], "host_gb_per_s": limit}
    assert (other["percent"]["host"] is None) is (limit is None)


def test_a_part_of_a_card_is_not_judged_by_all_of_it(machine: Callable[[str], Machine]) -> None:
    made = machine("h200-x2")
    made.node.change(lambda it: faults.slow_memory(it, 1))
    made.node.change(lambda it: faults.set_value(it, 1, "gpu_virtualization_mode.virtualization_mode", "VGPU"))
    outcome = made.run(peers=False)
    assert outcome["problems"] == [] and outcome["gpus"][1]["figures"]["memory_read_gb_per_s"] > 0
    assert set(outcome["gpus"][1]["percent"].values()) == {None} and None not in outcome["gpus"][0]["percent"].values()


def throttle(profile: faults.Profile) -> None:
    """Half the clock, because the card is hot."""
    faults.set_value(profile, 1, "cuda.clock_speed", "0.5")
    reasons = "clocks_event_reasons.clocks_event_reason"
    faults.set_value(profile, 1, f"{reasons}_gpu_idle", "Not Active")
    faults.set_value(profile, 1, f"{reasons}_hw_thermal_slowdown", "Active")


def test_turing_has_fewer_tensor_products(machine: Callable[[str], Machine]) -> None:
    # Its slots have half of the card's lanes.
    outcome = machine("t4-x4").run(peers=False, host_min_percent=40)
    assert outcome["problems"] == [] and outcome["peers"] == []
    figures = outcome["gpus"][0]["figures"]
    assert figures["fp16_tensor_tflop_per_s"] > 30 and figures["bf16_tensor_tflop_per_s"] is None
    assert 65 < outcome["gpus"][0]["percent"]["memory"] < 75 and outcome["gpus"][0]["percent"]["tensor"] is None


@pytest.mark.parametrize(
    ("change", "arguments", "code", "says"),
    [
        (lambda it: faults.compute_wrongly(it, 1), {}, "wrong_results", "fp32"),
        (lambda it: faults.compute_wrongly(it, 1, "tensor"), {}, "wrong_results", "fp16_tensor"),
        (lambda it: faults.compute_wrongly(it, 1, "copies"), {}, "wrong_results", "host_copies"),
        (lambda it: faults.compute_wrongly(it, 1, "memory"), {"level": "start"}, "memory_errors", "where 0x"),
        (lambda it: faults.slow_memory(it, 1), {}, "slow_memory", "47 % of the 4814"),
        (throttle, {}, "slow_clock", "990 MHz"),
        (lambda it: faults.set_value(it, 1, LINK, "4x"), {}, "slow_host_copies", "if its slot has fewer lanes"),
        (lambda it: faults.refuse_context(it, 1), {"level": "start"}, "context_failed", "999 (CUDA_ERROR_UNKNOWN"),
        (lambda it: faults.refuse_context(it, 1, 46), {}, "context_failed", "look with nvidia-smi for a process"),
        # In that time the sibling has to come to its end, however busy the machine is.
        (lambda it: faults.hang_cuda(it, 1), {"level": "start", "timeout": 30}, "hung", "step context"),
        (lambda it: faults.hang_cuda(it, 1, "launch"), {"level": "start", "timeout": 30}, "hung", "step memory"),
    ],
)
def test_a_fault_is_named_and_the_sibling_is_not(
    machine: Callable[[str], Machine], change: faults.Change, arguments: dict[str, Any], code: str, says: str
) -> None:
    made = machine("h200-x2")
    made.node.change(change)
    outcome = made.run(**{"peers": False, **arguments})
    sick = outcome["gpus"][1]["uuid"]
    assert told(outcome) == [(code, sick)] and verdicts(outcome) == ["ok", "failed"] and not outcome["passed"]
    message = outcome["problems"][0]["message"]
    for part in (sick, says, "Expected: ", "Next step: "):
        assert part in message


@pytest.mark.parametrize(("defect", "code"), [("library", "no_cuda"), ("internal", "failed")])
def test_a_gpu_on_which_nothing_could_be_tried_is_neither_well_nor_sick(
    machine: Callable[[str], Machine], monkeypatch: pytest.MonkeyPatch, defect: str, code: str
) -> None:
    made = machine("h200-x2")
    if defect == "library":
        monkeypatch.setattr(measuring, "LIBRARIES", ("/nowhere/libcuda.so.1",))
    else:
        monkeypatch.setattr(measuring, "check_memory", None)
    outcome = made.run(level="start")
    assert [each for each, _uuid in told(outcome)] == [code] * 2 and not outcome["passed"]
    assert verdicts(outcome) == [None, None]


def test_without_fabric_manager_no_gpu_starts(machine: Callable[[str], Machine]) -> None:
    made = machine("h200-x2")
    made.node.change(lambda it: faults.set_value(it, 0, "fabric.state", "In Progress"))
    outcome = made.run(level="start")
    assert [code for code, _uuid in told(outcome)] == ["context_failed"] * 2
    assert "802 (CUDA_ERROR_SYSTEM_NOT_READY" in outcome["problems"][0]["message"]
    assert "Fabric Manager" in outcome["problems"][0]["message"]


def test_faults_are_taken_back(machine: Callable[[str], Machine]) -> None:
    made = machine("h200-x2")
    made.node.change(lambda it: faults.compute_wrongly(it, 0, "memory"))
    assert not made.run(level="start")["passed"]
    made.node.change(lambda it: faults.recover_cuda(it, 0))
    assert made.run(level="start")["passed"]


def test_copies_between_gpus_that_arrive_wrong(machine: Callable[[str], Machine]) -> None:
    made = machine("h200-x2")
    made.node.change(lambda it: faults.compute_wrongly(it, 0, "copies"))
    outcome = made.run()
    sick = outcome["gpus"][0]["uuid"]
    assert ("peer_wrong", sick) in told(outcome) and {uuid for _code, uuid in told(outcome)} == {sick}


def test_a_busy_gpu_is_left_alone_unless_told(machine: Callable[[str], Machine]) -> None:
    made = machine("h200-x2")
    made.node.change(lambda it: faults.add_process(it, 0, 4711, "python", 1024))
    outcome = made.run(level="start")
    assert verdicts(outcome) == ["busy", "ok"] and outcome["passed"]
    assert outcome["gpus"][0]["context_s"] is None and "pid 4711" in outcome["problems"][0]["found"]
    assert verdicts(made.run(level="start", busy=True)) == ["ok", "ok"]


@pytest.mark.parametrize(("profile", "percent", "verdict"), [
    ("rtx4090-wsl", 20, "ok"), ("rtx4090-wsl", 21, "busy"), ("t4-x4", 21, "ok"),
])  # fmt: skip
def test_a_gpu_that_works_for_windows_is_left_alone_unless_told(
    machine: Callable[[str], Machine], profile: str, percent: int, verdict: str
) -> None:
    """Whose processes nobody sees in WSL. Elsewhere the first call after a while may find one busy with itself."""
    made = machine(profile)
    if profile.endswith("wsl"):
        (made.node.root / "usr/lib/wsl/lib").mkdir(parents=True)
    made.node.change(lambda it: faults.set_value(it, 0, "utilization.gpu_util", f"{percent} %"))
    outcome = made.run(level="start")
    assert verdicts(outcome)[0] == verdict and outcome["passed"]
    if verdict == "busy":
        assert outcome["problems"][0]["message"].partition(": ")[2] == (
            "found it 21 % busy with what is not listed here, as Windows' programs. Expected: a GPU without work, "
            "at most 20 %. Next step: end what Windows' task manager shows on it, or measure it nevertheless with "
            "busy=true."
        )
        assert verdicts(made.run(level="start", busy=True)) == ["ok"]


@pytest.mark.parametrize(("percent", "verdict"), [("3 %", "ok"), ("90 %", "busy"), ("N/A", "unknown")])
def test_under_wsl_utilisation_tells_where_no_processes_are_listed(
    machine: Callable[[str], Machine], monkeypatch: pytest.MonkeyPatch, percent: str, verdict: str
) -> None:
    made = machine("rtx4090-wsl")
    (made.node.root / "usr/lib/wsl/lib").mkdir(parents=True)
    made.node.change(lambda it: faults.set_value(it, 0, "utilization.gpu_util", percent))
    without_processes(monkeypatch)
    assert verdicts(made.run(level="start")) == [verdict]


def without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nvidia-smi may have words where the first GPU's processes should be."""
    collect = nvidia_gpu_benchmark.collect

    def and_no_processes(*args: Any, **given: Any) -> Any:
        facts = collect(*args, **given)
        facts["gpus"][0]["processes"] = None
        return facts

    monkeypatch.setattr(nvidia_gpu_benchmark, "collect", and_no_processes)


def test_a_gpu_of_which_nobody_knows_who_computes_is_left_alone_unless_told(
    machine: Callable[[str], Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = machine("h200-x2")
    without_processes(monkeypatch)
    outcome = made.run(level="start")
    assert verdicts(outcome) == ["unknown", "ok"] and not outcome["passed"]
    assert told(outcome) == [("gpu_unknown", outcome["gpus"][0]["uuid"])]
    assert outcome["problems"][0]["message"].partition(": ")[2] == (
        "found that nvidia-smi lists no processes of it, so whether it is busy is unknown. Expected: the processes on "
        "it, or none. Next step: see what nvidia-smi -q -d PIDS tells and mend it, or drain the node and measure it "
        "with busy=true."
    )
    assert outcome["gpus"][0]["context_s"] is None
    assert verdicts(made.run(level="start", busy=True)) == ["ok", "ok"]


def test_memory_errors_that_come_meanwhile_are_counted(
    machine: Callable[[str], Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = machine("h200-x2")
    measure = nvidia_gpu_benchmark.gpu_benchmark.measure

    def and_an_error(*args: Any, **given: Any) -> Any:
        answer = measure(*args, **given)
        made.node.change(lambda it: faults.ecc_errors(it, 1, 3))
        return answer

    monkeypatch.setattr(nvidia_gpu_benchmark.gpu_benchmark, "measure", and_an_error)
    outcome = made.run(level="start")
    assert [gpu["ecc_uncorrected"] for gpu in outcome["gpus"]] == [0, 3]
    assert told(outcome) == [("ecc_errors", outcome["gpus"][1]["uuid"])]


def test_mig_devices_are_judged_by_what_they_are(machine: Callable[[str], Machine]) -> None:
    made = machine("a100-mig-x2")
    outcome = made.run(memory_share=0.001)
    assert outcome["problems"] == [] and outcome["peers"] == []
    by_kind = {gpu["uuid"].startswith("MIG-"): gpu for gpu in outcome["gpus"]}
    assert by_kind[True]["sm_count"] < 108 and by_kind[True]["percent"]["fp32"] > 90
    assert by_kind[True]["limits"]["memory_gb_per_s"] < 2039 / 2


@pytest.mark.parametrize(
    ("uuid", "number", "told"),
    [("MIG-1", 31, False), ("MIG-1", 94, True), ("MIG-1", 79, True), ("GPU-1", 31, True), ("GPU-1", 79, True)],
)
def test_a_fault_of_a_job_is_not_laid_on_its_neighbours(uuid: str, number: int, told: bool) -> None:
    """The Xid names the address of the GPU, which all its MIG devices share."""
    (event,) = read_events([(1.0, f"NVRM: Xid (PCI:0000:3b:00 GPU-I:07): {number}, pid=1, name=a, words")])
    device = Device(uuid, {**empty_gpu(), "pci_bus_id": "00000000:3B:00.0"})
    found = nvidia_gpu_benchmark.xids_of([event], device)
    assert found == ([f"xid_{number}: pid=1, name=a, words"] if told else [])
    measured = {**gpu_benchmark.empty_device(uuid), "error": None}
    judged = gpu_benchmark.judge_device(measured, gpu_benchmark.Card(xids=found), gpu_benchmark.Thresholds(), "quick")
    assert [finding.code for finding in judged] == (["xid"] if told else [])
    assert nvidia_gpu_benchmark.xids_of([event], Device(uuid, None)) == []


def test_only_those_that_were_named(machine: Callable[[str], Machine]) -> None:
    made = machine("h200-x2")
    uuid = faults.value(made.node.profile, 1, "uuid")
    outcome = made.run(level="start", devices=[uuid, "GPU-00000000-0000-0000-0000-000000000000"])
    assert verdicts(outcome) == ["ok", "unknown"] and not outcome["passed"]
    assert told(outcome) == [("gpu_unknown", "GPU-00000000-0000-0000-0000-000000000000")]


def test_one_that_nvidia_smi_does_not_tell_of_is_left_alone(machine: Callable[[str], Machine]) -> None:
    """CUDA takes a UUID that is cut off, by which no process was looked for."""
    made = machine("h200-x2")
    made.node.change(lambda it: faults.add_process(it, 0, 4711, "python", 1024))
    uuid = (faults.value(made.node.profile, 0, "uuid") or "")[:12]
    outcome = made.run(level="start", devices=[uuid])
    assert told(outcome) == [("gpu_unknown", uuid)] and verdicts(outcome) == ["unknown"] and not outcome["passed"]
    assert outcome["gpus"][0]["context_s"] is None and "busy=true" in outcome["problems"][0]["message"]
    assert verdicts(made.run(level="start", devices=[uuid], busy=True)) == ["ok"]


def test_a_gpu_that_is_lost_is_missed(machine: Callable[[str], Machine]) -> None:
    made = machine("h200-x2")
    made.node.change(lambda it: faults.lose_gpu(it, 1))
    outcome = made.run(level="start")
    (problem,) = [problem for problem in outcome["problems"] if problem["code"] == "not_measured"]
    assert faults.value(made.node.profile, 1, "pci.pci_bus_id") in problem["found"] and "lost" in problem["found"]
    assert len(outcome["gpus"]) == 1 and not outcome["passed"]


def test_a_divided_gpu_without_a_device_is_missed(machine: Callable[[str], Machine]) -> None:
    made = machine("a100-mig-x2")
    made.node.change(lambda it: faults.set_mig(it, 1, []))
    outcome = made.run(level="start", memory_share=0.001)
    assert told(outcome) == [("not_measured", faults.value(made.node.profile, 1, "uuid"))] and not outcome["passed"]
    assert "MIG mode on" in outcome["problems"][0]["found"]


def test_nearly_all_memory_and_a_soak(machine: Callable[[str], Machine]) -> None:
    made = machine("h200-x2")
    outcome = made.run(level="full", soak=0.1, peers=False)
    assert outcome["problems"] == []
    for gpu in outcome["gpus"]:
        assert gpu["memory"]["patterns"] == ["linear", "random", "walking"]
        assert gpu["soak"]["rounds"] >= 1 and gpu["soak"]["errors"] == 0 and gpu["soak"]["seconds"] == 0.1
        assert gpu["soak"]["fp32_tflop_per_s_min"] > 1 and gpu["soak"]["sm_clock_mhz_min"] > 100
        assert len(gpu["soak"]) == 5


def test_the_start_tests_more_than_the_cache_holds(machine: Callable[[str], Machine]) -> None:
    outcome = machine("h200-x2").run(level="start", memory_share=0.01)
    assert [gpu["memory"]["tested_mib"] for gpu in outcome["gpus"]] == [4 * 60] * 2


def test_compute_instances_of_one_gpu_instance_are_not_measured_at_once(
    machine: Callable[[str], Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = machine("a100-mig-x2")

    def divide(profile: faults.Profile) -> None:
        faults.set_mig(profile, 1, ["3g.40gb"])
        (whole,) = faults.find_gpu(profile, 1)["mig_devices"]
        whole |= {"compute_start": "0", "compute_slices": "1"}
        uuid = "MIG-00000000-0000-4000-8000-000000000001"
        other = {**whole, "compute_instance_id": "1", "compute_start": "1", "compute_slices": "2", "uuid": uuid}
        faults.find_gpu(profile, 1)["mig_devices"].append(other)

    made.node.change(divide)
    # The capability of the second compute instance in GPU instance 7 of GPU 1.
    (made.node.root / "dev/nvidia-caps/nvidia-cap203").touch()
    shared: dict[str, Any] = {}
    measure = nvidia_gpu_benchmark.gpu_benchmark.measure

    def keep(*args: Any, **given: Any) -> Any:
        shared.update(given["shared"])
        return measure(*args, **given)

    monkeypatch.setattr(nvidia_gpu_benchmark.gpu_benchmark, "measure", keep)
    made.run(level="start", memory_share=0.001)
    parts = [device["uuid"] for device in faults.find_gpu(made.node.profile, 1)["mig_devices"]]
    assert len(parts) == 2 and len({shared[uuid] for uuid in parts}) == 1
    others = [key for uuid, key in shared.items() if uuid not in parts]
    assert len(set(others)) == len(others) and shared[parts[0]] not in others


def test_what_the_sensors_say_meanwhile(machine: Callable[[str], Machine]) -> None:
    outcome = machine("h200-x2").run(level="quick", peers=False)
    load = outcome["gpus"][0]["load"]
    assert load["power_draw_max_w"] > 0 and load["temperature_gpu_max_c"] > 0
    assert outcome["checks"]["nvidia_smi"] == "ok"


def test_no_call_of_nvidia_smi_outlives_the_measurement(
    machine: Callable[[str], Machine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made, measure = machine("h200-x2"), gpu_benchmark.measure
    slow, told, program = tmp_path / "slow", tmp_path / "pid", tmp_path / "nvidia-smi"
    program.write_text(
        f"#!/bin/sh\nif [ -e {slow} ]; then echo $$ >{told}.new; mv {told}.new {told}; exec sleep 900; fi\n"
        f'exec {made.node.build}/nvidia-smi "$@"\n'
    )
    program.chmod(0o755)

    def meanwhile(*given: Any, **named: Any) -> Any:
        slow.touch()
        answer = measure(*given, **named)
        slow.unlink()
        return answer

    monkeypatch.setattr(measuring, "measure_device", lambda _options, _tell: wait_for(told.exists))
    monkeypatch.setattr(gpu_benchmark, "measure", meanwhile)
    made.run(level="start", path=str(program), timeout=900)

    def runs() -> bytes:
        with contextlib.suppress(OSError):
            return Path("/proc", told.read_text().strip(), "cmdline").read_bytes()
        return b""

    wait_for(lambda: not runs())


def test_without_a_gpu_it_fails(machine: Callable[[str], Machine]) -> None:
    made = machine("h200-x2")
    made.node.change(faults.unload_driver)
    outcome = made.run()
    assert outcome["failed"] and "no GPU to measure" in outcome["msg"] and "Next step: " in outcome["msg"]


@pytest.mark.parametrize(
    "wrong", [{"memory_share": 0}, {"memory_share": 1.5}, {"timeout": 0}, {"soak": -1}, {"fp32_min_percent": -1}]
)
def test_wrong_options(machine: Callable[[str], Machine], wrong: dict[str, Any]) -> None:
    outcome = machine("h200-x2").run(**wrong)
    assert outcome["failed"] and next(iter(wrong)) in outcome["msg"] and "Expected: " in outcome["msg"]


def test_as_the_payload_of_a_job(node: MakeNode) -> None:
    """The file alone, in a container that was given one GPU, whose memory is nearly full."""
    made = node("h200-x2")
    made.change(lambda it: faults.add_process(it, 0, 4242, "train", 142000))
    uuid = faults.value(made.profile, 0, "uuid")
    assert uuid is not None
    script = Path(measuring.__file__)
    done = made.run(
        sys.executable, "-I", str(script), "--level", "quick", "--format", "json",
        extra={"NVIDIA_VISIBLE_DEVICES": uuid},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert [device["uuid"] for device in answer["devices"]] == [uuid] and answer["devices"][0]["error"] is None
    made.change(lambda it: faults.compute_wrongly(it, 0))
    done = made.run(sys.executable, str(script), "--devices", uuid)
    assert done.returncode == 1 and "fp32: " in done.stdout


def test_as_printed(node: MakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's own command, on a GPU whose memory is nearly full: how much there is of it is this machine's own."""
    made = node("t4-x4")
    made.change(lambda it: faults.add_process(it, 0, 4242, "train", 14800))
    uuid = faults.value(made.profile, 0, "uuid")
    assert uuid is not None
    monkeypatch.chdir(ROOT)
    command = printed.block(ROOT / "docs/benchmark.md", "python3")
    done = made.run("sh", "-euc", command, extra={"CUDA_VISIBLE_DEVICES": uuid}, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    devices = json.loads(done.stdout)["devices"]
    assert [(device["uuid"], device["error"]) for device in devices] == [(uuid, None)]
    assert devices[0]["memory_free_mib"] < 15360 - 14800


# -- the double itself, held to what the real library does ----------------------------------------------------------

PROGRAM = """
import ctypes, json, os
cuda = ctypes.CDLL("libcuda.so.1")
u64, size = ctypes.c_uint64, ctypes.c_size_t
told = {}
def call(key, name, *arguments): told[key] = getattr(cuda, name)(*arguments)
context, function, module = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
address = u64()
call("before init", "cuCtxCreate_v2", ctypes.byref(context), 0, 0)
cuda.cuInit(0)
call("no context", "cuMemAlloc_v2", ctypes.byref(address), size(16))
call("no device", "cuCtxCreate_v2", ctypes.byref(context), 0, 7)
cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0)
call("too much", "cuMemAlloc_v2", ctypes.byref(address), size(1 << 45))
call("nothing", "cuMemAlloc_v2", ctypes.byref(address), size(0))
call("free what is not", "cuMemFree_v2", u64(4096))
call("no ptx", "cuModuleLoadDataEx", ctypes.byref(module), b"int main", 0, None, None)
call("too new", "cuModuleLoadDataEx", ctypes.byref(module), b".version 8.7\\n.target sm_120\\n", 0, None, None)
text = b".version 6.0\\n.target sm_60\\n.visible .entry fill_linear(.param .u64 p)\\n.visible .entry mine()\\n"
cuda.cuModuleLoadDataEx(ctypes.byref(module), text, 0, None, None)
call("no such kernel", "cuModuleGetFunction", ctypes.byref(function), module, b"other")
cuda.cuModuleGetFunction(ctypes.byref(function), module, b"fill_linear")
arguments = (u64(1 << 40), u64(64), u64(0), ctypes.c_uint32(0))
pointers = (ctypes.c_void_p * 4)(*(ctypes.cast(ctypes.pointer(a), ctypes.c_void_p) for a in arguments))
call("no block", "cuLaunchKernel", function, 1, 1, 1, 0, 1, 1, 0, None, pointers, None)
call("large block", "cuLaunchKernel", function, 1, 1, 1, 2048, 1, 1, 0, None, pointers, None)
if not os.fork():
    os._exit(cuda.cuMemAlloc_v2(ctypes.byref(address), size(16)))
told["forked"] = os.waitstatus_to_exitcode(os.wait()[1])
call("launch", "cuLaunchKernel", function, 1, 1, 1, 32, 1, 1, 0, None, pointers, None)
call("after a bad address", "cuStreamSynchronize", None)
call("and ever after", "cuMemAlloc_v2", ctypes.byref(address), size(16))
print(json.dumps(told))
"""


def test_the_double_is_no_kinder_than_the_driver(node: MakeNode) -> None:
    done = node("h200-x2").run(sys.executable, "-c", PROGRAM)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "before init": 3,
        "no context": 201,
        "no device": 101,
        "too much": 2,
        "nothing": 1,
        "free what is not": 1,
        "no ptx": 218,
        "too new": 218,
        "no such kernel": 500,
        "no block": 1,
        "large block": 1,
        "forked": 3,
        "launch": 0,
        "after a bad address": 700,
        "and ever after": 700,
    }
