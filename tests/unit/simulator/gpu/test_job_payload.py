"""What nomad_gpu_job_verify has a task run, by a real shell and a real Python, on the double of CUDA."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
from ansible_collections.gpufarm.core.plugins.module_utils import nomad_jobs
from ansible_collections.gpufarm.core.plugins.module_utils.nomad_jobs import jobspec, listing

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
        "NOMAD_META_measuring": jobspec.payload(),
        "NVIDIA_VISIBLE_DEVICES": uuid if visible is None else visible,
        "PATH": f"{node.root}:{node.build}:{node.environment['PATH']}",
    }
    done = node.run("/bin/sh", "-c", jobspec.script(0, jobspec.compute(pin, chosen)), extra=given, timeout=120)
    assert done.returncode == 0, done.stderr
    read = listing.read_listing(done.stdout)
    return read, *listing.judge_work(pin, read, chosen, done.stderr)


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


def test_a_gpu_that_was_given_to_another_is_left_alone(node: MakeNode) -> None:
    """Without a container every GPU is in reach."""
    made = node("h200-x2")
    read, _finding, _benchmark = ran(made, uuids(made)[1], visible=uuids(made)[0])
    assert (read.exit_code, read.computed, read.answer) == (0, None, None)


def python(node: Node, text: str) -> None:
    """Have a python3 of one's own before all others."""
    path = node.root / "python3"
    path.write_text(text, encoding="utf-8")
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
    python(made, "#!/bin/sh\nexit 127\n")
    _read, finding, benchmark = ran(made, uuids(made)[0], driver)
    assert (finding.code, benchmark) == ("no_python", None)
    assert finding.found.startswith(says) and finding.next_step.startswith(step)


def test_a_python_that_cannot_do_it(node: MakeNode) -> None:
    made = node("h200-x2")
    python(made, "#!/bin/sh\necho 'SyntaxError: invalid syntax' >&2\nexit 1\n")
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
    pin = nomad_jobs.Pin("id", "gpu01", uuids(made)[0], "any")
    finding, _benchmark = listing.judge_work(pin, killed, nomad_jobs.Settings(level="start"), "")
    assert finding is not None and finding.code == "crashed"
    assert finding.next_step.startswith("raise memory_mib (1024) if signal 9 ended it; ")
