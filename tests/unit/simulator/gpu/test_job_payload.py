"""What the proofs by jobs and by pods have run, by a real shell and a real Python, on the double of CUDA."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
from ansible_collections.gpufarm.core.plugins.module_utils import nomad_jobs
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_proof import script
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_proof.listing import Listing, read_listing
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_proof.work import judge_work
from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes_pods import PodResult, Slot, judging, podspec
from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes_pods import Settings as PodSettings
from ansible_collections.gpufarm.core.plugins.module_utils.nomad_jobs import jobspec

from tests.simulator.gpu import faults

from .conftest import Node

MakeNode = Callable[[str], Node]


def small(profile: faults.Profile) -> None:
    for gpu in range(len(profile["gpus"])):
        faults.fill_memory(profile, gpu, 628)


def ran(node: Node, uuid: str, driver: str = "raw_exec", visible: str | None = None, **settings: Any) -> Any:
    """What a task on a GPU printed, as the module reads it, and how the module judges it."""
    chosen = nomad_jobs.Settings(driver=driver, **{"level": "start", **settings})
    pin = nomad_jobs.Pin("id", "gpu01", uuid, "any")
    given = {
        "NOMAD_META_measuring": script.payload_of_task(),
        "NVIDIA_VISIBLE_DEVICES": uuid if visible is None else visible,
        "PATH": f"{node.root}:{node.build}:{node.environment['PATH']}",
    }
    done = node.run("/bin/sh", "-c", script.script(0, jobspec.compute_on(pin, chosen)), extra=given, timeout=120)
    assert done.returncode == 0, done.stderr
    read = read_listing(done.stdout)
    image = chosen.image_to_run if driver == "docker" else None
    return read, *judge_work(uuid, read, chosen, done.stderr, image=image)


def uuids(node: Node) -> list[str]:
    return [gpu["uuid"] for gpu in node.profile["gpus"]]


def test_a_gpu_that_is_well(node: MakeNode) -> None:
    made = node("h200-x2")
    made.change(small)
    read, finding, benchmark = ran(made, uuids(made)[1], level="quick")
    assert (finding, read.exit_code, read.computed) == (None, 0, 0)
    assert benchmark["percent"]["memory"] > 85 and None not in benchmark["figures"].values()
    assert benchmark["name"] == "NVIDIA H200" and benchmark["limits"]["host_gb_per_s"] is None


@pytest.mark.parametrize(
    ("change", "settings", "code", "says"),
    [
        (lambda it: faults.compute_wrongly(it, 1), {"level": "quick"}, "wrong_results", "fp32"),
        (lambda it: faults.compute_wrongly(it, 1, "memory"), {}, "memory_errors", "where 0x"),
        (lambda it: faults.slow_memory(it, 1), {"level": "quick"}, "slow_memory", "of the 4814"),
        (lambda it: faults.refuse_context(it, 1), {}, "context_failed", "999 (CUDA_ERROR_UNKNOWN"),
        (lambda it: faults.hang_cuda(it, 1), {"timeout": 8}, "hung", "at step context: no answer within 2 s"),
    ],
)
def test_a_fault_is_named(
    node: MakeNode, change: faults.Change, settings: dict[str, Any], code: str, says: str
) -> None:
    made = node("h200-x2")
    made.change(small)
    made.change(change)
    _read, finding, _benchmark = ran(made, uuids(made)[1], **settings)
    assert finding.code == code and says in finding.found and finding.expected and finding.next_step


def test_the_sibling_of_a_sick_gpu_is_well(node: MakeNode) -> None:
    made = node("h200-x2")
    made.change(lambda it: faults.compute_wrongly(it, 1, "memory"))
    assert ran(made, uuids(made)[0])[1] is None


def test_a_mig_device(node: MakeNode) -> None:
    made = node("a100-mig-x2")
    made.change(small)
    uuid = made.profile["gpus"][0]["mig_devices"][1]["uuid"]
    _read, finding, benchmark = ran(made, uuid, level="quick")
    assert finding is None and " MIG " in benchmark["name"] and benchmark["memory"]["errors"] == 0
    assert benchmark["percent"]["fp32"] > 90 and benchmark["percent"]["memory"] is None


def test_a_gpu_that_nobody_has_divided(node: MakeNode) -> None:
    made = node("a100-mig-x2")
    made.change(lambda it: faults.find_gpu(it, 0).update(mig_devices=[]))
    read, *_rest = ran(made, uuids(made)[0], level="list")
    assert read.exit_code == 0 and read.empty == (uuids(made)[0],)


def test_a_gpu_that_was_given_to_another_is_left_alone(node: MakeNode) -> None:
    """Without a container every GPU is in reach."""
    made = node("h200-x2")
    read, _finding, _benchmark = ran(made, uuids(made)[1], visible=uuids(made)[0])
    assert (read.exit_code, read.computed, read.answer) == (0, None, None)


def program(node: Node, name: str, text: str) -> None:
    """Have a program of one's own before all others."""
    path = node.root / name
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("driver", "says", "step"),
    [
        ("docker", "no python3 in the image python:", "name an image that has it"),
        ("raw_exec", "no python3 in the PATH of the Nomad client", "install python3 on the node"),
    ],
)
def test_a_task_without_python(node: MakeNode, driver: str, says: str, step: str) -> None:
    made = node("h200-x2")
    # What a shell ends with that finds none.
    program(made, "python3", "exit 127")
    _read, finding, benchmark = ran(made, uuids(made)[0], driver)
    assert (finding.code, benchmark) == ("no_python", None)
    assert finding.found.startswith(says) and finding.next_step.startswith(step)


def test_a_python_that_cannot_do_it(node: MakeNode) -> None:
    made = node("h200-x2")
    program(made, "python3", "echo 'SyntaxError: invalid syntax' >&2\nexit 1")
    _read, finding, _benchmark = ran(made, uuids(made)[0])
    assert finding.code == "no_answer"
    assert "ended with 1 and without an answer; its stderr ends with 'SyntaxError: invalid syntax'" in finding.found


def test_a_program_whose_memory_ends(node: MakeNode) -> None:
    """The kernel kills the one that measures, and the one that started it tells."""
    made = node("h200-x2")
    read, *_rest = ran(made, uuids(made)[0])
    error = {"code": "crashed", "cuda_error": None, "step": "memory", "message": "was ended by signal 9"}
    answer = json.loads(read.answer)
    answer["devices"][0]["error"] = error
    killed = dataclasses.replace(read, answer=json.dumps(answer), computed=1)
    settings = nomad_jobs.Settings(level="start")
    finding, _benchmark = judge_work(uuids(made)[0], killed, settings, "", image=None)
    assert finding is not None and finding.code == "crashed"
    assert finding.next_step.startswith("raise memory_mib (1024) if signal 9 ended it; ")


# --- pods ------------------------------------------------------------------------------------

RUNNING = judging.State("Running", started=True, ended=False, waiting="", why="", unscheduled="")


def ran_in_pod(
    node: Node, slot: Slot | None = None, visible: str = "void", ends: int = 0, **settings: Any
) -> tuple[Listing, PodResult]:
    """What a pod printed that sees all GPUs of a node, as the module reads it, and how the module judges it."""
    slot = slot or Slot("gpu01", "nvidia.com/gpu", 0)
    chosen = PodSettings(**{"level": "start", **settings})
    pod = podspec.pod_of("pod", "run", slot, chosen, seconds=0, gives_up_at=2**33)
    (container,) = pod["spec"]["containers"]
    shell, option, text = container["command"]
    given = {each["name"]: each["value"] for each in container["env"]}
    # A container has neither the collection nor, for a user without a name, a place to write to.
    nothing = dict.fromkeys(("HOME", "TMPDIR"), "/nonexistent") | {"PYTHONPATH": "", "NVIDIA_VISIBLE_DEVICES": visible}
    path = {"PATH": f"{node.root}:{node.build}:{node.environment['PATH']}"}
    # Its log has both streams.
    done = node.run(shell, option, f"exec 2>&1\n{text}", extra=given | nothing | path, timeout=120)
    assert done.returncode == ends, done.stdout
    read = read_listing(done.stdout)
    result = judging.judge_log(slot, read, done.stdout, state=RUNNING, pod="pod", settings=chosen)
    assert result is not None
    return read, result


def with_one_gpu(node: MakeNode, name: str = "h200-x2") -> Node:
    made = node(name)
    made.hide("nvidia1")
    made.change(small)
    return made


def test_a_pod_whose_gpu_is_well(node: MakeNode) -> None:
    made = with_one_gpu(node)
    read, result = ran_in_pod(made, level="quick")
    assert (result.verdict, result.uuid, result.message) == ("ok", uuids(made)[0], None)
    assert (read.exit_code, read.computed) == (0, 0) and result.isolated
    assert result.benchmark is not None and result.benchmark["percent"]["memory"] > 85
    assert result.benchmark["name"] == "NVIDIA H200" and None not in result.benchmark["figures"].values()


@pytest.mark.parametrize(
    ("change", "settings", "code"),
    [
        (lambda it: faults.compute_wrongly(it, 0), {"level": "quick"}, "wrong_results"),
        (lambda it: faults.slow_memory(it, 0), {"level": "quick"}, "slow_memory"),
        (lambda it: faults.hang_cuda(it, 0), {"timeout": 8}, "hung"),
    ],
)
def test_a_fault_is_named_by_a_pod(node: MakeNode, change: faults.Change, settings: dict[str, Any], code: str) -> None:
    made = with_one_gpu(node)
    made.change(change)
    _read, result = ran_in_pod(made, **settings)
    assert (result.verdict, result.code) == ("failed", code) and result.benchmark is not None
    assert (result.message or "").startswith(f"Node gpu01, GPU {uuids(made)[0]}: found ")


def test_a_gpu_that_is_shared_is_only_listed(node: MakeNode) -> None:
    """As under MPS, where CUDA hangs for a client of another user, and the GPU is well."""
    made = with_one_gpu(node)
    made.change(lambda it: faults.hang_cuda(it, 0))
    read, result = ran_in_pod(made, Slot("gpu01", "nvidia.com/gpu", 0, shared=True), level="quick")
    assert (read.exit_code, read.computed, read.answer) == (0, None, None)
    assert (result.verdict, result.uuid, result.benchmark) == ("ok", uuids(made)[0], None), result.message


def test_a_pod_that_sees_the_gpus_of_others_leaves_them_alone(node: MakeNode) -> None:
    made = node("h200-x2")
    read, result = ran_in_pod(made)
    assert (result.code, read.answer, read.computed, result.benchmark) == ("extra_gpus_seen", None, 2, None)
    assert result.seen == tuple(uuids(made)) and not result.uuid


def test_a_pod_without_a_working_nvidia_smi_computes_nothing(node: MakeNode) -> None:
    made = with_one_gpu(node)
    program(made, "nvidia-smi", f"echo 'GPU 0: NVIDIA H200 (UUID: {uuids(made)[0]})'; echo 'Unknown Error'; exit 15")
    program(made, "python3", f"touch {made.root}/begun")
    read, result = ran_in_pod(made, ends=15)
    assert (read.exit_code, read.computed) == (15, None) and not (made.root / "begun").exists()
    assert (result.code, result.uuid) == ("task_failed", uuids(made)[0])
    assert "nvidia-smi -L ended with 15; Unknown Error" in (result.found or "")


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("exit 127", "no_python", "no python3 in the image docker.io/library/python:"),
        ("echo 'SyntaxError: odd' >&2; exit 1", "no_answer", "answer; its stderr ends with 'SyntaxError: odd'"),
    ],
)  # fmt: skip
def test_a_pod_whose_python_cannot_do_it(node: MakeNode, text: str, code: str, says: str) -> None:
    made = with_one_gpu(node)
    program(made, "python3", text)
    _read, result = ran_in_pod(made)
    assert (result.code, result.benchmark) == (code, None) and says in (result.found or "")


def test_a_pod_with_a_mig_device(node: MakeNode) -> None:
    made = node("a100-mig-x2")
    made.hide("nvidia1")
    uuid = made.profile["gpus"][0]["mig_devices"][0]["uuid"]

    def one(profile: faults.Profile) -> None:
        del profile["gpus"][0]["mig_devices"][1:]
        small(profile)

    made.change(one)
    _read, result = ran_in_pod(made, level="quick")
    assert (result.verdict, result.uuid) == ("ok", uuid), result.message
    assert result.benchmark is not None and " MIG " in result.benchmark["name"]


def under_wsl(node: MakeNode, gpus: int) -> Node:
    made = node("rtx4090-wsl")
    program(made, "uname", "echo 6.6.87.2-microsoft-standard-WSL2")
    first = made.profile["gpus"][0]
    more = [{**first, "index": number, "uuid": f"GPU-{number:08x}{first['uuid'][12:]}"} for number in range(1, gpus)]
    made.change(lambda it: it["gpus"].extend(more))
    made.change(small)
    return made


@pytest.mark.parametrize("level", ["start", "quick"])
def test_a_pod_under_wsl(node: MakeNode, level: str) -> None:
    made = under_wsl(node, 1)
    read, result = ran_in_pod(made, level=level)
    assert (result.verdict, result.uuid, result.isolated) == ("ok", uuids(made)[0], False), result.message
    assert read.wsl and read.computed == 0 and result.benchmark is not None


def test_a_pod_under_wsl_that_sees_several(node: MakeNode) -> None:
    made = under_wsl(node, 2)
    one, other = uuids(made)
    read, result = ran_in_pod(made)
    assert (result.code, read.answer, result.uuid) == ("no_answer", None, "")
    assert f"sees {one}, {other}, and nothing says which is its own" in (result.found or "")
    for uuid in (one, other):
        read, result = ran_in_pod(made, visible=uuid)
        assert (result.verdict, result.uuid) == ("ok", uuid) and uuid in (read.answer or ""), result.message
