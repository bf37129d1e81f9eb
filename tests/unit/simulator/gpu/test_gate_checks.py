"""The node's gate that lets GPUs without work compute, against the doubles of nvidia-smi, CUDA and Nomad."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ansible_collections.gpufarm.core.plugins.module_utils import gate_checks, gate_service, gpu_benchmark, health
from ansible_collections.gpufarm.core.plugins.module_utils import nomad_programs as nomad_programs_file
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_benchmark import measuring
from ansible_collections.gpufarm.core.plugins.module_utils.nomad_programs import Program, nomad_programs
from ansible_collections.gpufarm.core.plugins.module_utils.problem import Finding
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils.gate_helper import Farm

from tests.simulator.gpu import faults

from .conftest import Node

MakeNode = Callable[[str], Node]
START = {"check_start": 3600}
QUICK = {"check_quick": 3600}
HUNG_AFTER_S = 20


class Gate:
    """The program of the gate on a node of plain files, whose agent is a double."""

    def __init__(self, node: Node, nomads: Farm, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.node, self.nomads, self._folder, self._monkeypatch = node, nomads, folder, monkeypatch
        self.programs: list[Program] = []
        self.pods: dict[str, str] = {}
        self.clock = time.time()
        self._gpus = len(node.profile["gpus"])
        for name, text in node.environment.items():
            monkeypatch.setenv(name, text)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(measuring, "LIBRARIES", (str(node.build / "libcuda.so.1"),))
        for name, mib in (("PEER_BYTES", 4), ("HOST_BYTES", 8), ("BANDWIDTH_BYTES", 128)):
            monkeypatch.setattr(measuring, name, mib * measuring.MIB)
        # Device memory is the machine's own here.
        monkeypatch.setattr(gate_checks, "MEMORY_SHARE", 0.0001)
        clock = SimpleNamespace(time=lambda: self.clock, strptime=time.strptime)
        monkeypatch.setattr(gate_checks, "time", clock)
        monkeypatch.setattr(gate_service, "nomad_programs", lambda *, others: iter(self.programs) if others else None)
        monkeypatch.setattr(gate_service, "kubelet_devices", lambda: self.pods)
        monkeypatch.setattr(gate_service, "NOMAD_WAIT_S", 0)

    @property
    def uuids(self) -> list[str]:
        return [faults.value(self.node.profile, index, "uuid") or "" for index in range(self._gpus)]

    def run(self, **changes: Any) -> dict[str, Any]:
        """Run once, and return the status."""
        instances = [{"ID": uuid, "Healthy": True} for uuid in self.uuids]
        group = {"Vendor": "nvidia", "Type": "gpu", "Name": "one", "Instances": instances, "Attributes": {}}
        self.nomads.nodes["id-0"]["NodeResources"] = {"Devices": [group]}
        config = {
            "connection": {"address": self.nomads.agent.url}, "close_on": "critical", "drain": False,
            "drain_deadline": 3600, "plugin_age_max": 60, "open_after": 1, "closed_min": 0, "ignored": [],
            "textfile_dir": str(self._folder), "check_start": 0, "check_quick": 0,
            "health": {"path": str(self.node.build / "nvidia-smi"), "dcgm": False}, **changes,
        }  # fmt: skip
        path, status = self._folder / "config.json", self._folder / "status.json"
        path.write_text(json.dumps(config))

        def probe(options: Any) -> Any:
            return health.probe(options, root=str(self.node.root), search=str(self.node.build))

        self._monkeypatch.setattr(gate_service.run, "__defaults__", (probe,))
        gate_service.main([str(path), str(status)])
        told: dict[str, Any] = json.loads(status.read_text())
        return told

    def codes(self, status: dict[str, Any]) -> list[tuple[str, str | None]]:
        return [(each["code"], each["uuid"]) for each in status["problems"] if each["code"].startswith("benchmark_")]

    @property
    def metrics(self) -> str:
        return (self._folder / "gpufarm.prom").read_text()


@pytest.fixture
def nomads() -> Iterator[Farm]:
    running = Farm(1)
    yield running
    running.agent.close()


@pytest.fixture
def gate(node: MakeNode, nomads: Farm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gate:
    folder = tmp_path / "gate"
    folder.mkdir()
    return Gate(node("h200-x2"), nomads, folder, monkeypatch)


def levels(status: dict[str, Any]) -> list[dict[str, str]]:
    """Return the verdict at each level of each GPU."""
    return [{level: record["verdict"] for level, record in gpu["checks"].items()} for gpu in status["gpus"]]


def test_nothing_computes_unless_it_is_asked_for(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_benchmark, "measure", None)
    status = gate.run()
    assert levels(status) == [{}, {}] and status["healthy"] is True, status
    assert [path for path in gate.nomads.asked if "allocations" in path] == []


def test_idle_gpus_compute_when_it_is_time(gate: Gate) -> None:
    first = gate.run(**START)
    assert levels(first) == [{"start": "ok"}, {"start": "ok"}] and first["healthy"] is True
    assert [gpu["check_left_out"] for gpu in first["gpus"]] == [None, None]
    assert gate.metrics.count('level="start"} 1\n') == 2
    gate.clock += 3590
    assert gate.run(**START)["gpus"] == first["gpus"]
    gate.clock += 10
    later = gate.run(**START)["gpus"][0]["checks"]["start"]
    assert later["checked_at"] > first["gpus"][0]["checks"]["start"]["checked_at"]
    # What computes less often counts for what computes more often.
    both = gate.run(check_start=3600, check_quick=604800)
    assert levels(both) == [{"start": "ok", "quick": "ok"}] * 2
    assert both["gpus"][0]["checks"]["start"]["level"] == "quick"


@pytest.mark.parametrize(
    ("change", "level", "code"),
    [
        (lambda it: faults.compute_wrongly(it, 1, "memory"), START, "memory_errors"),
        (lambda it: faults.refuse_context(it, 1), START, "context_failed"),
        (lambda it: faults.hang_cuda(it, 1), START, "hung"),
        (lambda it: faults.compute_wrongly(it, 1), QUICK, "wrong_results"),
        # What an acceptance would not open it with.
        (lambda it: faults.slow_memory(it, 1), QUICK, "slow_memory"),
    ],
)
def test_a_sick_gpu_closes_the_node_until_it_passes(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, change: faults.Change, level: dict[str, int], code: str
) -> None:
    if code == "hung":
        monkeypatch.setattr(gate_checks, "STEP_S", HUNG_AFTER_S)
    gate.node.change(change)
    status = gate.run(**level)
    assert gate.codes(status) == [(f"benchmark_{code}", gate.uuids[1])]
    assert (status["action"], status["state"], status["verdict"]) == ("close", "node", "critical")
    assert [gpu["verdict"] for gpu in status["gpus"]] == ["ok", "critical"]
    assert f"benchmark_{code} {gate.uuids[1][:12]}" in status["reason"]
    message = status["problems"][0]["message"]
    assert "Expected: " in message and "Next step: " in message and "when it was checked at " in message
    assert f"'touch /var/lib/gpufarm/health-acknowledged-{gate.uuids[1]}' after the repair" in message
    # A run without a check does not forget.
    assert gate.run(**level)["state"] == "node"
    gate.node.change(lambda it: faults.recover_cuda(it, 1))
    assert gate.run(**level)["healthy"] is False
    gate.clock += 3600
    status = gate.run(**level)
    assert (status["action"], gate.codes(status)) == ("open", [])


def test_a_part_of_a_card_is_not_called_slow(gate: Gate) -> None:
    gate.node.change(lambda it: faults.slow_memory(it, 0))
    gate.node.change(lambda it: faults.set_value(it, 0, "gpu_virtualization_mode.virtualization_mode", "VGPU"))
    status = gate.run(**QUICK)
    assert gate.codes(status) == [] and levels(status) == [{"quick": "ok"}] * 2


@pytest.mark.parametrize(
    ("age", "verdict", "acknowledged", "level"),
    [
        (3599, "ok", "none", None),
        (3600, "ok", "none", "start"),
        # The clock was put back.
        (-1, "ok", "none", "start"),
        (10, "failed", "1970-01-12T13:46:41Z", "start"),
        (10, "failed", "1970-01-12T13:46:39Z", None),
        (10, "failed", "ignored: 2038", None),
        (10, "ok", "1970-01-12T13:46:41Z", None),
    ],
)
def test_when_it_is_time(age: int, verdict: str, acknowledged: str, level: str | None) -> None:
    record = {"verdict": verdict, "checked_at": "1970-01-12T13:46:40Z"}
    every = {"start": 3600, "quick": 0}
    assert gate_checks.due({"start": record}, every, acknowledged, 1_000_000 + age) == level


@pytest.mark.parametrize(("age", "level"), [(3599, None), (3600, "quick")])
def test_what_failed_is_tried_again_within_the_hour_at_its_level(age: int, level: str | None) -> None:
    at = {"checked_at": "1970-01-12T13:46:40Z"}
    records = {"start": {"verdict": "ok", **at}, "quick": {"verdict": "failed", **at}}
    assert gate_checks.due(records, {"start": 86400, "quick": 604800}, "none", 1_000_000 + age) == level


def test_what_is_slow_once_only_is_not(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that came and went meanwhile had its share."""
    gate.node.change(lambda it: faults.slow_memory(it, 1))
    measure, measured = gpu_benchmark.measure, []

    def once(uuids: list[str], *args: Any, **options: Any) -> Any:
        measured.append(uuids)
        answer = measure(uuids, *args, **options)
        gate.node.change(lambda it: faults.recover_cuda(it, 1))
        return answer

    monkeypatch.setattr(gpu_benchmark, "measure", once)
    status = gate.run(**QUICK)
    assert (gate.codes(status), status["healthy"], measured) == ([], True, [gate.uuids, gate.uuids[1:]])


def test_a_slow_gpu_that_nobody_could_measure_again_is_not_well(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    measure, measured = gate_checks._measure, []

    def no_more(facts: Any, uuids: Any, *given: Any) -> Any:
        measured.append(list(uuids))
        if len(measured) == 1:
            return measure(facts, uuids, *given)
        return {uuid: [] for uuid in uuids}, dict.fromkeys(uuids, gate_checks.OVER)

    monkeypatch.setattr(gate_checks, "_measure", no_more)
    gate.node.change(lambda it: faults.slow_memory(it, 1))
    status = gate.run(**QUICK)
    assert measured == [gate.uuids, gate.uuids[1:]] and gate.codes(status) == []
    assert levels(status) == [{"quick": "ok"}, {}]
    assert status["gpus"][1]["check_left_out"] == f"slow, and not measured again: {gate_checks.OVER}"


def test_of_two_measurements_the_better_one_decides_for_each_part_and_both_are_told() -> None:
    def found(code: str, text: str, part: str = "MIG-a", peer: str | None = None) -> Finding:
        return Finding(code, text, "least", "step", uuid=part, peer=peer)

    first = [
        found("slow_fp32", "40 %"), found("slow_fp32", "MIG-b: 41 %", "MIG-b"), found("peer_wrong", "x", peer="p"),
        found("peer_wrong", "y", peer="q"),
    ]  # fmt: skip
    again = [found("slow_fp32", "44 %"), found("slow_fp32", "MIG-c: 45 %", "MIG-c"), found("memory_errors", "z")]
    assert sorted((each.code, each.found) for each in gate_checks._slow_twice(first, again)) == [
        ("memory_errors", "z"),
        ("peer_wrong", "x"),
        ("peer_wrong", "y"),
        ("slow_fp32", "40 %, and when measured again: 44 %"),
    ]


def test_a_level_that_is_asked_for_no_more_is_forgotten(gate: Gate) -> None:
    gate.node.change(lambda it: faults.compute_wrongly(it, 0, "copies"))
    assert ("benchmark_peer_wrong", gate.uuids[0]) in gate.codes(gate.run(check_quick=604800))
    status = gate.run(**START)
    assert gate.codes(status) == [] and levels(status) == [{"start": "ok"}] * 2


@pytest.mark.parametrize(
    ("change", "level", "code"),
    [
        (lambda it: faults.compute_wrongly(it, 1, "memory"), START, "benchmark_memory_errors"),
        (lambda it: faults.slow_memory(it, 1), QUICK, "benchmark_slow_memory"),
    ],
)
def test_severities_and_close_on_count(gate: Gate, change: faults.Change, level: dict[str, int], code: str) -> None:
    gate.node.change(change)
    options = {"path": str(gate.node.build / "nvidia-smi"), "dcgm": False}
    mild = {**options, "severities": {code: "warning"}}
    assert gate.run(**level, health=mild)["healthy"] is True
    assert gate.run(**level, health=mild, close_on="warning")["healthy"] is False


def test_a_repair_that_was_declared_is_checked_at_once(gate: Gate, tmp_path: Path) -> None:
    options = {"path": str(gate.node.build / "nvidia-smi"), "dcgm": False, "acknowledged_file": str(tmp_path / "done")}
    gate.node.change(lambda it: faults.compute_wrongly(it, 1, "memory"))
    assert gate.run(**START, health=options)["healthy"] is False
    gate.node.change(lambda it: faults.recover_cuda(it, 1))
    later = time.time() + 30
    for uuid, healthy in ((gate.uuids[0], False), (gate.uuids[1], True)):
        done = tmp_path / f"done-{uuid}"
        done.touch()
        os.utime(done, (later, later))
        assert gate.run(**START, health=options)["healthy"] is healthy


def test_a_repair_is_declared_for_all_or_for_one() -> None:
    told = {"all": "2026-01-02T00:00:00Z", "GPU-1": "2026-01-03T00:00:00Z", "GPU-2": "ignored: in the future"}
    assert [gate_checks._repaired_at(told, f"GPU-{number}")[:10] for number in range(3)] == [
        "2026-01-02", "2026-01-03", "2026-01-02",
    ]  # fmt: skip
    assert gate_checks._repaired_at({"all": "none"}, "GPU-1") == "none"


def allocation(*uuids: str, state: str = "running") -> dict[str, Any]:
    devices = [{"Vendor": "nvidia", "Type": "gpu", "Name": "one", "DeviceIDs": list(uuids)}]
    resources = {"Tasks": {"task": {"Devices": devices}}}
    return {
        "ID": "5ddb8a0c-0000", "NodeID": "id-0", "JobID": "job", "ClientStatus": state, "DesiredStatus": "run",
        "AllocatedResources": resources,
    }  # fmt: skip


def make_busy(gate: Gate, how: str) -> None:
    if how == "process":
        gate.node.change(lambda it: faults.add_process(it, 0, 4711, "python", 1024))
    elif how == "allocation":
        gate.nomads.allocations["id-0"] = [allocation(gate.uuids[0], state="pending")]
    else:
        devices = {
            "program": gate.uuids[0], "index": "0", "all": "all", "void": "void", "cdi": "nvidia.com/gpu=0",
        }[how]  # fmt: skip
        gate.programs = [Program("5ddb8a0c-0000", "python (process 4711)", devices)]


@pytest.mark.parametrize(
    ("how", "who"),
    [
        ("process", "python (pid 4711)"),
        ("allocation", "allocation 5ddb8a0c"),
        ("program", "python (process 4711) of allocation 5ddb8a0c"),
        ("index", "python (process 4711) of allocation 5ddb8a0c"),
        ("all", "python (process 4711) of allocation 5ddb8a0c"),
        # What the container toolkit makes of it with CDI, of an allocation that the token may not see.
        ("void", "python (process 4711) of allocation 5ddb8a0c"),
        ("cdi", "python (process 4711) of allocation 5ddb8a0c"),
    ],
)
def test_a_busy_gpu_keeps_its_last_verdict(gate: Gate, how: str, who: str) -> None:
    before = gate.run(**START)
    gate.clock += 3600
    gate.node.change(lambda it: faults.compute_wrongly(it, 0, "memory"))
    make_busy(gate, how)
    status = gate.run(**START)
    assert status["gpus"][0]["checks"] == before["gpus"][0]["checks"]
    assert status["gpus"][0]["check_left_out"] == f"busy: {who}"
    assert gate.codes(status) == [] and status["healthy"] is True
    assert (status["gpus"][1]["check_left_out"] is None) is (how not in ("all", "void", "cdi"))


@pytest.mark.parametrize(
    ("percent", "then", "left_out"),
    [
        (20, 20, None),
        (98, 98, "busy: 98 % busy with what is not listed here, as Windows' programs"),
        (20, 98, "busy meanwhile: 98 % busy with what is not listed here, as Windows' programs"),
    ],
)
def test_a_gpu_that_works_for_windows_is_not_called_slow(
    node: MakeNode, nomads: Farm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *,
    percent: int, then: int, left_out: str | None,
) -> None:  # fmt: skip
    made = node("rtx4090-wsl")
    (made.root / "usr/lib/wsl/lib").mkdir(parents=True)
    gate = Gate(made, nomads, tmp_path, monkeypatch)
    collect, measure = gate_service.collect, gpu_benchmark.measure
    monkeypatch.setattr(gate_service, "collect", lambda *args, **named: collect(*args, **named, root=str(made.root)))
    waited: list[float] = []
    monkeypatch.setattr(gate_service, "time", SimpleNamespace(sleep=waited.append))

    def use(percent: int) -> None:
        made.change(lambda it: faults.set_value(it, 0, "utilization.gpu_util", f"{percent} %"))

    def and_a_game(*given: Any, **named: Any) -> Any:
        answer = measure(*given, **named)
        use(then)
        return answer

    monkeypatch.setattr(gpu_benchmark, "measure", and_a_game)
    made.change(lambda it: faults.slow_memory(it, 0))
    use(percent)
    status = gate.run(**QUICK)
    assert status["gpus"][0]["check_left_out"] == left_out
    assert gate.codes(status) == ([] if left_out else [("benchmark_slow_memory", gate.uuids[0])])
    # What the check itself was is no game.
    assert waited == ([] if percent == 98 else [gate_service.UTILIZATION_S])


@pytest.mark.parametrize(
    ("then", "left_out"), [("0 %", None), ("98 %", "busy meanwhile: nvidia-cuda-mps-server (pid 4711)")]
)
def test_a_gpu_that_works_for_unseen_clients_of_mps_is_not_called_slow(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, then: str, left_out: str | None
) -> None:
    """Before Volta only the server is listed."""
    measure, waited = gpu_benchmark.measure, []
    monkeypatch.setattr(gate_service, "time", SimpleNamespace(sleep=waited.append))

    def and_a_client(*given: Any, **named: Any) -> Any:
        answer = measure(*given, **named)
        gate.node.change(lambda it: faults.set_value(it, 0, "utilization.gpu_util", then))
        return answer

    monkeypatch.setattr(gpu_benchmark, "measure", and_a_client)
    gate.node.change(lambda it: faults.slow_memory(it, 0))
    gate.node.change(lambda it: faults.add_process(it, 0, 4711, "nvidia-cuda-mps-server", 30))
    status = gate.run(**QUICK)
    assert [gpu["check_left_out"] for gpu in status["gpus"]] == [left_out, None]
    assert gate.codes(status) == ([] if left_out else [("benchmark_slow_memory", gate.uuids[0])])
    assert waited == [gate_service.UTILIZATION_S]


def test_a_container_of_an_allocation_that_nomad_tells_of_has_its_own_gpus_alone(gate: Gate) -> None:
    gate.nomads.allocations["id-0"] = [allocation(gate.uuids[0])]
    gate.programs = [Program("5ddb8a0c-0000", "python (process 4711)", "void")]
    status = gate.run(**START)
    assert [gpu["check_left_out"] for gpu in status["gpus"]] == ["busy: allocation 5ddb8a0c", None]


def test_an_allocation_that_has_ended_holds_nothing(gate: Gate) -> None:
    gate.nomads.allocations["id-0"] = [allocation(gate.uuids[0], state="complete")]
    gate.programs = [Program("5ddb8a0c-0000", "python (process 4711)", None)]
    assert levels(gate.run(**START)) == [{"start": "ok"}, {"start": "ok"}]


@pytest.mark.parametrize("how", ["allocations", "away", "maintenance", "others", "processes"])
def test_what_is_unknown_or_somebody_elses_is_left_alone(gate: Gate, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(gpu_benchmark, "measure", None)
    if how == "allocations":
        gate.nomads.refuse = "/allocations"
    elif how == "away":
        gate.nomads.leader = False
    elif how == "processes":
        known = gate_service.health.probe

        def blind(options: Any, **given: Any) -> Any:
            found = known(options, **given)
            for gpu in found["nvidia_smi"]["gpus"]:
                gpu["processes"] = None
            return found

        monkeypatch.setattr(gate_service.health, "probe", blind)
    else:
        gate.nomads.nodes["id-0"]["SchedulingEligibility"] = "ineligible"
        if how == "maintenance":
            gate.nomads.clients["id-0"]["gpufarm_maintenance"] = "a driver"
    said = {
        "allocations": "unknown whether it is busy: ", "away": "unknown whether it is busy: ",
        "maintenance": "busy: in maintenance (a driver)", "others": "busy: closed by somebody else",
        "processes": "busy: nobody knows who",
    }  # fmt: skip
    status = gate.run(**START)
    assert [gpu["check_left_out"].startswith(said[how]) for gpu in status["gpus"]] == [True, True], status
    assert levels(status) == [{}, {}]


@pytest.mark.parametrize(
    ("change", "left"),
    [
        (lambda it: faults.refuse_context(it, 0, 2), None),
        (lambda it: faults.compute_wrongly(it, 0, "memory"), "benchmark_memory_errors"),
    ],
)
def test_a_gpu_that_got_a_job_meanwhile_is_blamed_for_wrong_results_alone(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, change: faults.Change, left: str | None
) -> None:
    measure = gpu_benchmark.measure

    def and_a_job(*given: Any, **named: Any) -> Any:
        answer = measure(*given, **named)
        make_busy(gate, "allocation")
        return answer

    monkeypatch.setattr(gpu_benchmark, "measure", and_a_job)
    gate.node.change(change)
    status = gate.run(**START)
    assert [code for code, _uuid in gate.codes(status)] == ([left] if left else [])
    assert levels(status) == [{"start": "failed"} if left else {}, {"start": "ok"}]
    assert (status["gpus"][0]["check_left_out"] == "busy meanwhile: allocation 5ddb8a0c") is (left is None)


def test_a_defect_of_ours_is_no_sick_gpu(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_given: Any) -> Any:
        raise KeyError("size")

    monkeypatch.setattr(measuring, "check_memory", broken)
    status = gate.run(**START)
    assert gate.codes(status) == [] and levels(status) == [{}, {}] and status["healthy"] is True
    assert [gpu["check_left_out"] for gpu in status["gpus"]] == ["the check failed by itself: KeyError: 'size'"] * 2


def test_a_gpu_that_cannot_be_measured_keeps_no_other_from_it(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one whose check fails each time, at the level that goes first, nor a divided one without parts."""
    measure_figures = measuring.measure_figures

    def broken(*given: Any) -> Any:
        if os.environ["CUDA_VISIBLE_DEVICES"] == gate.uuids[0]:
            raise KeyError("size")
        return measure_figures(*given)

    monkeypatch.setattr(measuring, "measure_figures", broken)
    both = {"check_start": 3600, "check_quick": 604800}
    assert levels(gate.run(**both)) == [{}, {"start": "ok", "quick": "ok"}]
    gate.clock += 3600
    status = gate.run(**both)
    assert status["gpus"][1]["checks"]["start"]["level"] == "start"

    known = gate_service.health.probe

    def divided(options: Any, **given: Any) -> Any:
        found = known(options, **given)
        found["nvidia_smi"]["gpus"][0].update(mig_mode="Enabled", mig_devices=None)
        return found

    monkeypatch.setattr(gate_service.health, "probe", divided)
    status = gate.run(**both)
    assert status["gpus"][0]["check_left_out"] == "MIG mode is on, and no MIG device of it is known"


def test_a_sick_node_is_closed_before_anything_computes(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a GPU that the probe calls sick is not computed on."""
    measure, seen = gpu_benchmark.measure, []

    def watched(devices: Any, *given: Any, **named: Any) -> Any:
        seen.append((list(devices), gate.nomads.nodes["id-0"]["SchedulingEligibility"]))
        return measure(devices, *given, **named)

    monkeypatch.setattr(gpu_benchmark, "measure", watched)
    gate.node.change(lambda it: faults.remap_rows(it, 0))
    status = gate.run(**START)
    assert seen == [([gate.uuids[1]], "ineligible")] and status["action"] == "close"
    assert [gpu["check_left_out"] for gpu in status["gpus"]] == ["critical by the probe", None]
    gate.clock += 3600
    gate.node.change(lambda it: faults.compute_wrongly(it, 1, "memory"))
    status = gate.run(**START)
    assert status["action"] == "update" and "benchmark_memory_errors" in status["reason"]


@pytest.mark.parametrize(("lanes", "c2c", "number"), [(None, None, 0), (16, "Disabled", 2), (16, "Enabled", 0)])
def test_copies_are_judged_by_the_lanes_that_the_slot_has(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, lanes: int | None, c2c: str | None, number: int
) -> None:
    """Unless the operator has said how many there should be. Those by NVLink-C2C are not judged by lanes."""
    known = gate_service.health.probe

    def few_lanes(options: Any, **given: Any) -> Any:
        found = known(options, **given)
        for gpu in found["nvidia_smi"]["gpus"]:
            gpu["pcie"].update(width_max=16, width_current=2)
            gpu["c2c_mode"] = c2c
        return found

    def measure_host(*_given: Any) -> Any:
        # What two lanes of generation 5 carry.
        return {"host_to_device_gb_per_s": 7.0, "device_to_host_gb_per_s": 7.0, "errors": 0}

    monkeypatch.setattr(gate_service.health, "probe", few_lanes)
    monkeypatch.setattr(measuring, "measure_host", measure_host)
    options = {"path": str(gate.node.build / "nvidia-smi"), "dcgm": False, "pcie_width_min": lanes}
    status = gate.run(check_quick=604800, health=options)
    slow = [each for each in status["problems"] if each["code"] == "benchmark_slow_host_copies"]
    assert len(slow) == number
    assert all("severities: {benchmark_slow_host_copies: ignore}" in each["message"] for each in slow)


def test_two_runs_at_once_check_once(gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_benchmark, "measure", None)
    path = tmp_path / "gate/status.json.lock"
    hold = (
        "import fcntl, sys; file = open(sys.argv[1], 'a'); fcntl.lockf(file, fcntl.LOCK_EX); print(); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", hold, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout and other.stdout.readline()
        status = gate.run(**START)
        assert [gpu["check_left_out"] for gpu in status["gpus"]] == ["busy: another run of the gate checks"] * 2
        other.communicate()


def test_copies_that_arrive_wrong_are_found_by_the_level_quick(gate: Gate) -> None:
    gate.node.change(lambda it: faults.compute_wrongly(it, 0, "copies"))
    assert gate.codes(gate.run(**START)) == []
    assert ("benchmark_peer_wrong", gate.uuids[0]) in gate.codes(gate.run(check_quick=604800))


def test_a_divided_gpu_is_checked_by_its_parts(
    node: MakeNode, nomads: Farm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(node("a100-mig-x2"), nomads, tmp_path, monkeypatch)
    monkeypatch.setattr(gate_checks, "MEMORY_SHARE", 0.001)
    assert levels(gate.run(**START)) == [{"start": "ok"}, {"start": "ok"}]
    gate.clock += 3600
    (part, *_others) = [each["uuid"] for each in faults.find_gpu(gate.node.profile, 1)["mig_devices"]]
    nomads.allocations["id-0"] = [allocation(part)]
    told = [gpu["check_left_out"] for gpu in gate.run(**START)["gpus"]]
    assert told == [None, "busy: allocation 5ddb8a0c"]
    nomads.allocations["id-0"], gate.pods = [], {part: "pod 4f3c35b2"}
    told = [gpu["check_left_out"] for gpu in gate.run(**START)["gpus"]]
    assert told == [None, "busy: pod 4f3c35b2"]


def test_all_of_it_has_an_end(gate: Gate) -> None:
    """Also where each step comes before its own limit, and the rest is then not blamed."""
    gate.node.change(lambda it: faults.hang_cuda(it, 0))
    begun = time.monotonic()
    answer = gpu_benchmark.measure(gate.uuids, "start", memory_share=0.0001, timeout=600, limit_s=3, shared={
        uuid: "one after another" for uuid in gate.uuids
    })  # fmt: skip
    assert time.monotonic() - begun < 300
    assert [(device["error"] or {}).get("code") for device in answer["devices"]] == ["over", None]
    assert answer["devices"][0]["error"]["message"] == "all of it was over before"
    assert answer["devices"][1]["memory"] is None


@pytest.mark.parametrize("over", [False, True])
def test_who_waits_behind_a_gpu_that_hangs_is_not_blamed(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, over: bool
) -> None:
    """Nor is one that was still at work when all of it was over."""
    measure_host = measuring.measure_host

    def hang(*given: Any) -> Any:
        if over or os.environ["CUDA_VISIBLE_DEVICES"] == gate.uuids[0]:
            time.sleep(600)
        return measure_host(*given)

    monkeypatch.setattr(measuring, "measure_host", hang)
    monkeypatch.setattr(gate_checks, "STEP_S", 600 if over else HUNG_AFTER_S)
    monkeypatch.setattr(gate_checks, "LIMIT_S", HUNG_AFTER_S if over else 600)
    status = gate.run(check_quick=604800)
    hung = [code for code in gate.codes(status) if "slow" not in code[0]]
    assert hung == ([] if over else [("benchmark_hung", gate.uuids[0])])
    why = "the check was over before it had come to its end"
    assert [gpu["check_left_out"] for gpu in status["gpus"]] == [why if over else None] * 2


def test_programs_are_told_by_their_environment(tmp_path: Path) -> None:
    for pid, environment in (
        ("1", b"A=b"),
        ("2", b"NOMAD_ALLOC_ID=abc\0NVIDIA_VISIBLE_DEVICES=GPU-1,GPU-2"),
        ("3", b"NVIDIA_VISIBLE_DEVICES=0,MIG-1"),
        # As images have it, and what CDI leaves.
        ("4", b"NVIDIA_VISIBLE_DEVICES=all"),
        ("5", b"NVIDIA_VISIBLE_DEVICES=void"),
        ("x", b""),
    ):
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "environ").write_bytes(environment)
        (tmp_path / pid / "comm").write_text("python\n")
    own = Program("abc", "python (process 2)", "GPU-1,GPU-2", "2")
    assert list(nomad_programs(tmp_path)) == [own]
    found = sorted(nomad_programs(tmp_path, others=True), key=lambda program: program.name)
    assert found == [own, Program("", "python (process 3)", "0,MIG-1", "3")]


def test_what_others_were_given_is_left_alone_before_they_compute(gate: Gate) -> None:
    gate.programs = [Program("", "sleep (process 7)", "0")]
    gate.pods = {gate.uuids[1]: "pod 4f3c35b2"}
    status = gate.run(**START)
    assert levels(status) == [{}, {}]
    told = [gpu["check_left_out"] for gpu in status["gpus"]]
    assert told == ["busy: sleep (process 7)", "busy: pod 4f3c35b2"]
    gate.programs, gate.pods = [], {"all": "nobody knows which pod"}
    assert [gpu["check_left_out"] for gpu in gate.run(**START)["gpus"]] == ["busy: nobody knows which pod"] * 2


@pytest.mark.parametrize("how", ["part", "address", "short address", "capitals", "small letters", "spaces"])
def test_all_names_that_the_container_toolkit_takes_are_known(gate: Gate, how: str) -> None:
    address = faults.value(gate.node.profile, 0, "pci.pci_bus_id") or ""
    name = {
        "part": "0:0", "address": address, "short address": address.partition("0000")[2].lower(),
        "capitals": gate.uuids[0].upper(), "small letters": gate.uuids[0].lower(), "spaces": "7, 0 ",
    }[how]  # fmt: skip
    gate.programs = [Program("", "sleep (process 7)", name), Program("", "sleep (process 8)", "none,2,10:0,GPU-1")]
    status = gate.run(**START)
    assert [gpu["check_left_out"] for gpu in status["gpus"]] == ["busy: sleep (process 7)", None]


def test_what_another_device_plugin_calls_by_a_number_is_no_gpu(gate: Gate) -> None:
    gate.pods = {"0": "pod 4f3c35b2", "1": "pod 4f3c35b2"}
    assert levels(gate.run(**START)) == [{"start": "ok"}, {"start": "ok"}]


@pytest.mark.parametrize(
    ("minors", "name", "busy"),
    [
        (("0", "1"), "gpu-1", [False, True]),
        # Older releases of the driver count by index.
        (("1", "0"), "gpu-1", [True, True]),
        # What nobody can find may be any.
        (("0", "1"), "gpu-7", [True, True]),
        (("0", "N/A"), "gpu-0", [True, True]),
    ],
)
def test_a_gpu_that_a_pod_claims_is_found_by_its_number(
    gate: Gate, minors: tuple[str, str], name: str, busy: list[bool]
) -> None:
    for index, minor in enumerate(minors):
        gate.node.change(partial(faults.set_value, which=index, key="minor_number", text=minor))
    gate.pods = {f"gpu.nvidia.com/{name}": "pod 4f3c35b2, by a claim"}
    told = [gpu["check_left_out"] for gpu in gate.run(**START)["gpus"]]
    assert told == ["busy: pod 4f3c35b2, by a claim" if each else None for each in busy]


def test_a_program_that_cannot_be_looked_at_is_not_waited_for(
    gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that hangs in the driver can hold up who reads its environment, as a pipe without a writer does here."""
    for pid in ("2", "3", "4"):
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "comm").write_text("python\n")
        (tmp_path / pid / "environ").write_bytes(b"NOMAD_ALLOC_ID=abc\0NVIDIA_VISIBLE_DEVICES=GPU-1")
    (tmp_path / "3/environ").unlink()
    os.mkfifo(tmp_path / "3/environ")
    monkeypatch.setattr(nomad_programs_file, "READ_S", 1)
    found = list(nomad_programs(tmp_path))
    (stuck,) = [each for each in found if each.allocation == "unknown"]
    assert stuck == Program("unknown", "python (process 3), whose environment cannot be read,", "all")
    assert sorted(each.name for each in found if each != stuck) == ["python (process 2)", "python (process 4)"]
    gate.programs = [stuck]
    told = [gpu["check_left_out"] for gpu in gate.run(**START)["gpus"]]
    assert told == [f"busy: {stuck.name} of allocation unknown"] * 2


def test_looking_at_programs_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for pid in range(9):
        (tmp_path / str(pid)).mkdir()
        os.mkfifo(tmp_path / str(pid) / "environ")
    monkeypatch.setattr(nomad_programs_file, "READ_S", 0.5)
    assert len(list(nomad_programs(tmp_path))) == nomad_programs_file.STUCK_MAX
