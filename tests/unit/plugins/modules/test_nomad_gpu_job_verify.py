# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import dataclasses
import math
import platform
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from ansible_collections.gpufarm.core.plugins.module_utils import gpu_proof, nomad_jobs
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_benchmark import judging
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_proof import work
from ansible_collections.gpufarm.core.plugins.module_utils.nomad import client as nomad_client
from ansible_collections.gpufarm.core.plugins.module_utils.nomad_jobs import (
    choice,
    jobspec,
    listing,
    obstacles,
    running,
)
from ansible_collections.gpufarm.core.plugins.modules import nomad_gpu_job_verify
from ansible_collections.gpufarm.core.tests.unit.patience import PATIENCE_S, wait_for
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils import nomad_helper as farm
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils.nomad_jobs_helper import (
    CODES_OF_WORK,
    RECORDED,
    FakeNomad,
    Fate,
    answer_of,
    codes_in,
    log_that_says,
)
from ansible_collections.gpufarm.core.tests.unit.plugins.modules import program_helper
from ansible_collections.gpufarm.core.tests.unit.plugins.modules import release_helper as helper

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


@pytest.fixture
def nomad_server() -> Iterator[FakeNomad]:
    server = FakeNomad()
    yield server
    server.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in {"LOG_WAIT_S": 0.3, "FREE_WAIT_S": 0.3, "LOOK_S": 0.1, "PAUSE_S": 0.02}.items():
        monkeypatch.setattr(running, name, value)
    monkeypatch.setattr(nomad_client, "FIRST_PAUSE_S", 0.01)
    for name in ("ADDR", "TOKEN", "NAMESPACE", "REGION"):
        monkeypatch.delenv(f"NOMAD_{name}", raising=False)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def run(
    capsys: pytest.CaptureFixture[str], server: FakeNomad, check_mode: bool = False, **arguments: Any
) -> helper.Outcome:
    given = {"address": server.url, "timeout": PATIENCE_S, **arguments}
    return helper.run_module(nomad_gpu_job_verify.main, capsys, given, check_mode=check_mode)


def held(server: FakeNomad, uuid: str, node: int = 0) -> dict[str, Any]:
    """The recorded allocation that holds a GPU, on this one."""
    (allocation,) = [each for each in farm.recorded("allocations-1.11.3") if each["AllocatedResources"]][:1]
    allocation["NodeID"] = server.nodes[node]["ID"]
    for task in allocation["AllocatedResources"]["Tasks"].values():
        task["Devices"][0]["DeviceIDs"] = [uuid]
    return dict(allocation)


def test_a_good_farm(nomad_server: FakeNomad, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(capsys, nomad_server)
    assert "failed" not in result and result["changed"] is False and result["problems"] == []
    assert result["counts"] == {"ok": 4, "failed": 0, "busy": 0, "skipped": 0}
    assert [gpu["uuid"] for gpu in result["gpus"]] == nomad_server.uuids(0) + nomad_server.uuids(1)
    for gpu in result["gpus"]:
        assert gpu["seen"] == gpu["assigned"] == [gpu["uuid"]] and gpu["isolated"] is True
        assert gpu["code"] is None and gpu["message"] is None
    assert nomad_server.jobs == {}


def test_the_failure_says_everything(nomad_server: FakeNomad, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = nomad_server.uuids()
    nomad_server.fates = {one: Fate(fails=True), other: Fate(fails=True)}
    result = run(capsys, nomad_server, nodes=["node00000", "node00001", "lost"])
    assert result["failed"]
    lines = result["msg"].splitlines()
    assert lines[0].startswith(f"{platform.node()}: 3 problems after ")
    assert lines[0].endswith("; of 4 GPUs 2 ok, 2 failed, 0 busy, 0 skipped:")
    assert lines[2].split() == ["NODE", "GPUS", "OK", "FAILED", "BUSY", "SKIPPED", "REASONS"]
    assert [(problem["node"], problem["uuid"], problem["code"]) for problem in result["problems"]] == [
        ("lost", None, "node_missing"),
        ("node00000", one, "task_failed"),
        ("node00000", other, "task_failed"),
    ]
    # One cause is told once.
    told = [line for line in lines if "Failed to pull" in line]
    assert len(told) == 1 and told[0].endswith(" The same on 1 more.")
    assert result["table"] in result["msg"]
    assert nomad_server.jobs == {}


def test_long_failures_are_cut_in_the_message_only(nomad_server: FakeNomad, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = [f"lost{number}" for number in range(100)]
    nomad_server.nodes = [farm.make_node(number, 1) for number in range(100)]
    for number, node in enumerate(nomad_server.nodes):
        node.update(Name=nodes[number], Status="down" if number else "disconnected")
    result = run(capsys, nomad_server, nodes=[*nodes, *(f"none{number}" for number in range(40))])
    assert "... and 110 more nodes" in result["msg"] and " The same on 98 more." in result["msg"]
    assert len(result["problems"]) == 140 and len(result["table"].splitlines()) == 141
    for number, uuid in enumerate(nomad_server.uuids(number)[0] for number in range(100)):
        nomad_server.fates[uuid] = Fate(status="failed", log="gpufarm-verify: end 9\n", stderr=f"reason {number}")
        nomad_server.nodes[number]["Status"] = "ready"
    assert "... and 80 more kinds of problems" in run(capsys, nomad_server)["msg"]


def test_check_mode_asks_and_changes_nothing(nomad_server: FakeNomad, capsys: pytest.CaptureFixture[str]) -> None:
    uuid = nomad_server.uuids()[0]
    nomad_server.allocations = [held(nomad_server, uuid)]
    nomad_server.listed = RECORDED["docker"]["jobs"]
    old = time.time() - 2 * jobspec.LEFTOVER_AGE_S
    leftover = {**nomad_server.listed[0], "SubmitTime": int(old * 1e9)}
    nomad_server.listed = [{**leftover, "Meta": {**leftover["Meta"], "gives_up_at": str(int(old))}}]
    result = run(capsys, nomad_server, check_mode=True)
    assert {method for method, _path, _query in nomad_server.requests} == {"GET"}
    assert [(gpu["verdict"], gpu["code"]) for gpu in result["gpus"]] == [
        ("busy", "gpu_busy"),
        *[("skipped", "check_mode")] * 3,
    ]
    assert result["changed"] is True and result["leftovers"] == [leftover["ID"]]


def test_jobs_of_a_killed_run_are_purged(
    nomad_server: FakeNomad, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Ansible keeps warnings for the life of the process, which here runs other modules too.
    warned: list[str] = []
    monkeypatch.setattr(nomad_gpu_job_verify.AnsibleModule, "warn", lambda _self, text: warned.append(text))
    (job,) = RECORDED["docker"]["jobs"]
    old = time.time() - 2 * jobspec.LEFTOVER_AGE_S
    meta = {**job["Meta"], "gives_up_at": str(int(old))}
    nomad_server.listed = [
        {**job, "ID": "gpufarm-verify-old", "SubmitTime": int(old * 1e9), "Meta": meta},
        {**job, "ID": "gpufarm-verify-new", "SubmitTime": int(time.time() * 1e9), "Meta": meta},
        {**job, "ID": "gpufarm-verify-foreign", "SubmitTime": int(old * 1e9), "Meta": None},
    ]
    result = run(capsys, nomad_server)
    assert result["leftovers"] == ["gpufarm-verify-old"] and result["changed"] is True
    assert nomad_server.purged[0] == "gpufarm-verify-old"
    assert not {"gpufarm-verify-new", "gpufarm-verify-foreign"} & set(nomad_server.purged)
    nomad_server.refuse = {("DELETE", "/v1/job/gpufarm-verify-old"): [403]}
    result = run(capsys, nomad_server)
    assert result["leftovers"] == [] and result["changed"] is False and "failed" not in result
    (warning,) = warned
    assert warning.startswith(f"{platform.node()}: job gpufarm-verify-old of a killed run could not be purged")
    asked = next(query for _method, path, query in nomad_server.requests if path == "/v1/jobs")
    assert asked == {"prefix": "gpufarm-verify-", "meta": "true"}


@pytest.mark.parametrize("skip_busy", [True, False])
def test_a_busy_gpu_is_left_alone(nomad_server: FakeNomad, capsys: pytest.CaptureFixture[str], skip_busy: bool) -> None:
    uuid = nomad_server.uuids()[1]
    nomad_server.allocations = [held(nomad_server, uuid)]
    result = run(capsys, nomad_server, skip_busy=skip_busy)
    busy = result["gpus"][1]
    assert (busy["verdict"], busy["code"]) == ("busy" if skip_busy else "failed", "gpu_busy")
    assert "of job training in namespace default" in busy["message"]
    assert bool(result.get("failed")) is not skip_busy
    assert result["counts"]["ok"] == 3
    pinned = [
        group["Tasks"][0]["Resources"]["Devices"][0]["Constraints"][0]["RTarget"]
        for job in nomad_server.registered
        for group in job["TaskGroups"]
    ]
    assert uuid not in pinned and len(pinned) == 3


def test_no_job_is_run_on_a_gpu_that_its_plugin_calls_unhealthy(
    nomad_server: FakeNomad, capsys: pytest.CaptureFixture[str]
) -> None:
    uuid = nomad_server.uuids()[1]
    nomad_server.nodes[0]["NodeResources"]["Devices"][0]["Instances"][1].update(Healthy=False, HealthDescription="lost")
    nomad_server.allocations = [held(nomad_server, uuid)]
    result = run(capsys, nomad_server)
    (problem,) = result["problems"]
    assert (problem["code"], problem["uuid"], result["counts"]["ok"]) == ("gpu_unhealthy", uuid, 3)
    assert problem["found"] == "that its device plugin calls it unhealthy (lost)" and result["failed"]


def test_a_gpu_held_on_another_node_is_not_busy_here(
    nomad_server: FakeNomad, capsys: pytest.CaptureFixture[str]
) -> None:
    nomad_server.allocations = [held(nomad_server, nomad_server.uuids(0)[0], node=1)]
    assert run(capsys, nomad_server)["counts"]["ok"] == 4


def test_a_sample(nomad_server: FakeNomad, capsys: pytest.CaptureFixture[str]) -> None:
    free = nomad_server.uuids(0)[1]
    nomad_server.allocations = [held(nomad_server, nomad_server.uuids(0)[0])]
    result = run(capsys, nomad_server, sample=1)
    assert result["counts"] == {"ok": 2, "failed": 0, "busy": 0, "skipped": 2}
    assert next(gpu["uuid"] for gpu in result["gpus"] if gpu["verdict"] == "ok") == free
    assert {gpu["code"] for gpu in result["gpus"] if gpu["verdict"] == "skipped"} == {"not_sampled"}


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"SchedulingEligibility": "ineligible"}, "the node is ineligible"),
        ({"Drain": True, "SchedulingEligibility": "ineligible"}, "the node is being drained"),
    ],
)
def test_a_node_that_is_closed_to_work(
    nomad_server: FakeNomad, capsys: pytest.CaptureFixture[str], state: dict[str, Any], words: str
) -> None:
    nomad_server.nodes[0].update(state)
    result = run(capsys, nomad_server)
    assert "failed" not in result and [gpu["code"] for gpu in result["gpus"][:2]] == ["node_closed"] * 2
    assert words in result["gpus"][0]["message"]
    result = run(capsys, nomad_server, nodes=["node00000"])
    assert result["failed"] and [problem["code"] for problem in result["problems"]] == ["not_placed"] * 2
    assert f"nomad node eligibility -enable {nomad_server.nodes[0]['ID']}" in result["msg"]
    assert {job["Constraints"][0]["RTarget"] for job in nomad_server.registered} == {nomad_server.nodes[1]["ID"]}


def test_a_token_without_the_right_to_submit(nomad_server: FakeNomad, capsys: pytest.CaptureFixture[str]) -> None:
    nomad_server.refuse = {("POST", "/v1/jobs"): [403]}
    nomad_server.arrives = False
    result = run(capsys, nomad_server, token="not-good-enough", namespace="ops")
    assert result["failed"] and result["msg"].startswith(f"{platform.node()}: ")
    assert "HTTP 403" in result["msg"] and "submit-job" in result["msg"] and "in namespace ops" in result["msg"]
    assert "not-good-enough" not in str(result)
    assert next(query for method, _path, query in nomad_server.requests if method == "POST")["namespace"] == "ops"


@pytest.mark.parametrize(("statuses", "left"), [([403], False), ([400], False), ([500, 403], True)])
def test_a_job_that_nomad_has_refused_is_not_left(
    nomad_server: FakeNomad, capsys: pytest.CaptureFixture[str], statuses: list[int], left: bool
) -> None:
    """With a token that may only read it would be told to be left, for it may purge none either."""
    nomad_server.nodes = nomad_server.nodes[:1]
    nomad_server.refuse = {("POST", "/v1/jobs"): statuses, ("DELETE", "/v1/job/"): [403]}
    nomad_server.arrives = False
    result = run(capsys, nomad_server)
    assert result["failed"] and ("job is left" in result["msg"]) is left
    assert ".." not in result["msg"]


def test_a_job_that_is_left_is_a_problem(nomad_server: FakeNomad, capsys: pytest.CaptureFixture[str]) -> None:
    nomad_server.nodes = nomad_server.nodes[:1]
    nomad_server.refuse = {("DELETE", "/v1/job/"): [403]}
    result = run(capsys, nomad_server)
    assert result["failed"] and result["counts"]["ok"] == 2
    assert [(problem["uuid"], problem["code"]) for problem in result["problems"]] == [(None, "job_left")]
    assert re.match(rf"{platform.node()}: 1 problem after \d+ s; of 2 GPUs 2 ok, ", result["msg"])


def test_an_aborted_run_tells_what_it_could_not_purge(
    nomad_server: FakeNomad, capsys: pytest.CaptureFixture[str]
) -> None:
    nomad_server.nodes = nomad_server.nodes[:1]
    nomad_server.refuse = {("GET", "/v1/allocation/"): [403], ("DELETE", "/v1/job/"): [403]}
    result = run(capsys, nomad_server)
    (job,) = nomad_server.jobs
    assert result["failed"] and "1 job is left" in result["msg"] and f"nomad job stop -purge {job}" in result["msg"]


def test_a_nomad_that_does_not_answer(nomad_server: FakeNomad, capsys: pytest.CaptureFixture[str]) -> None:
    nomad_server.close()
    result = run(capsys, nomad_server)
    assert result["failed"] and "cannot be reached" in result["msg"] and "gpus" not in result


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("priority", 11, "1 to 10"),
        ("priority", 0, "1 to 10"),
        ("sample", 0, "at least 1"),
        ("timeout", 0, "at least 1"),
        ("parallel", 0, "at least 1"),
        ("cpu_mhz", 0, "at least 1"),
        ("memory_mib", 9, "at least 10"),
        ("image", "", "the name of an image"),
        ("nodes", [], "at least one node"),
    ],
)
def test_options_that_make_no_sense(
    nomad_server: FakeNomad, capsys: pytest.CaptureFixture[str], option: str, value: Any, expected: str
) -> None:
    result = run(capsys, nomad_server, **{option: value})
    assert result["failed"] and f"Expected: {expected}" in result["msg"] and f"'{option}'" in result["msg"]
    assert nomad_server.requests == []


@pytest.mark.parametrize("gpus", [0, 2])
def test_a_farm_without_gpus_proves_nothing(
    nomad_server: FakeNomad, capsys: pytest.CaptureFixture[str], gpus: int
) -> None:
    nomad_server.nodes = [{**farm.make_node(0, gpus), "Status": "down" if gpus else "ready"}]
    result = run(capsys, nomad_server)
    assert result["failed"]
    assert result["msg"].endswith(
        ": Nomad has no ready node with GPUs, so nothing would be proven. Expected: at least one. Next step: check "
        "'nomad node status' and the device plugin on the nodes."
    )


def computed(uuid: str, **changes: Any) -> str:
    """The log of a task whose GPU did what a real H100 did, but for these changes."""
    return log_that_says(uuid, answer_of(uuid, **changes))


def test_a_gpu_that_computes_wrongly_and_its_sibling(
    nomad_server: FakeNomad, capsys: pytest.CaptureFixture[str]
) -> None:
    nomad_server.nodes = nomad_server.nodes[:1]
    well, sick = nomad_server.uuids()
    wrong = computed(sick, wrong_results={"fp32": 3}, figures={"memory_read_gb_per_s": 1000.0})
    nomad_server.fates = {well: Fate(log=computed(well)), sick: Fate(log=wrong)}
    result = run(capsys, nomad_server, level="quick")
    assert [(gpu["verdict"], gpu["code"]) for gpu in result["gpus"]] == [("ok", None), ("failed", "wrong_results")]
    (problem,) = result["problems"]
    assert problem["message"] == (
        f"Node node00000, GPU {sick}: found 3 wrong results of fp32; memory read at 1000 GB/s, 30 % of the 3352.3 that "
        "the card tells. Expected: the same result as worked out on the host; at least 85 %. Next step: drain the node "
        "and run nvidia_gpu_benchmark at level full; if it stays so, reset the GPU, then have the card replaced."
    )
    assert problem["message"] in result["msg"]
    assert [line.split() for line in result["table"].splitlines()] == [
        ["NODE", "GPUS", "OK", "FAILED", "BUSY", "SKIPPED", "MEMORY%", "FP32%", "TENSOR%", "REASONS"],
        ["node00000", "2", "1", "1", "0", "0", "30", "96", "61", "wrong_results"],
    ]
    assert result["gpus"][0]["benchmark"]["percent"]["memory"] > 90
    assert result["gpus"][1]["benchmark"]["wrong_results"]["fp32"] == 3


def test_figures_that_are_returned_are_the_documented_ones(
    nomad_server: FakeNomad, capsys: pytest.CaptureFixture[str]
) -> None:
    nomad_server.fates = {uuid: Fate(log=computed(uuid)) for number in (0, 1) for uuid in nomad_server.uuids(number)}
    documented = yaml.safe_load(nomad_gpu_job_verify.RETURN)["gpus"]["contains"]["benchmark"]["contains"]
    figures = run(capsys, nomad_server, level="quick")["gpus"][0]["benchmark"]
    assert set(documented) == set(figures)
    for name in ("figures", "limits", "percent", "wrong_results", "memory"):
        assert set(documented[name]["sample"]) == set(figures[name]), name
    assert run(capsys, nomad_server)["gpus"][0]["benchmark"] is None


def test_options_reach_the_job(nomad_server: FakeNomad, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, nomad_server, driver="docker", image="cuda:9", priority=3, cpu_mhz=7, memory_mib=77)
    job = nomad_server.registered[0]
    task = job["TaskGroups"][0]["Tasks"][0]
    assert (job["Priority"], task["Driver"], task["Config"]["image"]) == (3, "docker", "cuda:9")
    assert (task["Resources"]["CPU"], task["Resources"]["MemoryMB"]) == (7, 77)


@pytest.mark.parametrize("number", SIGNALS)
def test_an_end_from_outside_leaves_no_job(nomad_server: FakeNomad, number: signal.Signals) -> None:
    for uuid in nomad_server.uuids(0):
        nomad_server.fates[uuid] = Fate(runs_for_s=math.inf)
    arguments = {"address": nomad_server.url, "timeout": 10 * PATIENCE_S}
    with program_helper.start("nomad_gpu_job_verify", arguments) as process:
        wait_for(lambda: nomad_server.jobs)
        process.send_signal(number)
        assert process.wait(timeout=PATIENCE_S) == 128 + number
    assert nomad_server.jobs == {}


def test_another_end_from_outside_waits_for_the_removal(nomad_server: FakeNomad) -> None:
    # No job ends by itself, so one that is deleted tells that the first signal was taken.
    for uuid in (*nomad_server.uuids(0), *nomad_server.uuids(1)):
        nomad_server.fates[uuid] = Fate(runs_for_s=math.inf)
    arguments = {"address": nomad_server.url, "timeout": 10 * PATIENCE_S}
    with program_helper.start("nomad_gpu_job_verify", arguments) as process:
        wait_for(lambda: nomad_server.jobs)
        nomad_server.refuse["DELETE", "/v1/job/"] = [503]
        process.send_signal(signal.SIGTERM)
        wait_for(lambda: any(method == "DELETE" for method, *_path in nomad_server.requests))
        for number in SIGNALS:
            process.send_signal(number)
        nomad_server.refuse["DELETE", "/v1/job/"] = [200]
        assert process.wait(timeout=PATIENCE_S) == 128 + signal.SIGTERM
    assert nomad_server.jobs == {}


def test_documentation_spec_and_settings_have_the_same_options() -> None:
    documented = yaml.safe_load(nomad_gpu_job_verify.DOCUMENTATION)["options"]
    spec = nomad_gpu_job_verify.argument_spec()
    settings = {field.name: field.default for field in dataclasses.fields(nomad_jobs.Settings)}
    for name, option in documented.items():
        assert spec[name]["type"] == option["type"], name
        assert spec[name].get("default") == option.get("default"), name
        assert spec[name].get("choices") == option.get("choices"), name
        assert spec[name].get("default") == settings.get(name), name
    assert set(settings) <= set(spec)
    described = " ".join(documented["image"]["description"])
    for level in gpu_proof.LEVELS:
        image = nomad_jobs.Settings(level=level).image_to_run
        assert f"C({image})" in described and re.fullmatch(r"[a-z/]+:\d.*", image)


def test_returned_keys_are_the_documented_ones(nomad_server: FakeNomad, capsys: pytest.CaptureFixture[str]) -> None:
    documented = yaml.safe_load(nomad_gpu_job_verify.RETURN)
    result = run(capsys, nomad_server, nodes=["node00000", "lost"])
    assert set(documented) == set(result) - {"changed", "failed", "msg", "invocation", "exception"}
    for key in ("gpus", "problems"):
        assert set(documented[key]["contains"]) == set(result[key][0])
    assert set(documented["counts"]["contains"]) == set(result["counts"])


def test_every_code_is_documented() -> None:
    codes = set().union(*map(codes_in, (choice, listing, obstacles, running, work, nomad_gpu_job_verify)))
    assert {"wrong_gpu", "gpu_not_seen", "node_full", "job_left", "node_closed", "no_python"} <= codes
    codes |= {code for code, _step in judging.ERRORS.values()} | CODES_OF_WORK
    notes = " ".join(yaml.safe_load(nomad_gpu_job_verify.DOCUMENTATION)["notes"])
    assert [code for code in sorted(codes) if f"C({code})" not in notes] == []
