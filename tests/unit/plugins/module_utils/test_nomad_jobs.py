# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import math
import os
import secrets
import socket
import subprocess
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from ansible_collections.gpufarm.core.plugins.module_utils import gpu_proof, nomad, nomad_jobs
from ansible_collections.gpufarm.core.plugins.module_utils import problem as problem_utils
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_proof import script
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_proof.listing import Listing, read_listing
from ansible_collections.gpufarm.core.plugins.module_utils.nomad import client as nomad_client
from ansible_collections.gpufarm.core.plugins.module_utils.nomad_jobs import jobspec, obstacles, running
from ansible_collections.gpufarm.core.plugins.module_utils.nomad_jobs import listing as job_listing
from ansible_collections.gpufarm.core.tests.hardware import jobs as hardware
from ansible_collections.gpufarm.core.tests.unit.patience import PATIENCE_S, wait_for
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils import nomad_helper as farm
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils import nomad_jobs_helper as helper
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils.nomad_jobs_helper import FakeNomad, Fate

PIN = nomad_jobs.Pin(helper.RECORDED_NODE, "t4", helper.RECORDED_UUIDS[0], "Tesla T4")
MIG_LOG = """\
gpufarm-verify: visible MIG-11111111-2222-3333-4444-555555555555
GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-aaaaaaaa-2222-3333-4444-555555555555)
  MIG 1g.10gb     Device  0: (UUID: MIG-11111111-2222-3333-4444-555555555555)
{more}gpufarm-verify: end 0
"""
MIG_PIN = nomad_jobs.Pin("id", "gpu01", "MIG-11111111-2222-3333-4444-555555555555", "NVIDIA A100-SXM4-80GB MIG 1g.10gb")


def described(number: int = 0, gpus: int = 2) -> dict[str, Any]:
    return nomad.describe_node(farm.make_node(number, gpus))


# --- which GPUs ------------------------------------------------------------------------------


def test_all_ready_nodes_with_gpus_are_meant() -> None:
    nodes = [farm.make_node(number, 0 if number == 1 else 2) for number in range(4)]
    nodes[2]["Status"] = "down"
    selected, problems = nomad_jobs.select_nodes(nodes, None)
    assert [node["name"] for node in selected] == ["node00000", "node00003"] and problems == []


def test_named_nodes_are_found_by_name_and_by_id_once() -> None:
    nodes = [farm.make_node(number, 2) for number in range(3)]
    selected, problems = nomad_jobs.select_nodes(nodes, ["node00002", nodes[0]["ID"], nodes[2]["ID"], "node00002"])
    assert [node["name"] for node in selected] == ["node00002", "node00000"] and problems == []


def test_named_nodes_that_cannot_be_proven() -> None:
    nodes = [farm.make_node(0, 2), farm.make_node(1, 0)]
    nodes[0]["Status"] = "down"
    selected, problems = nomad_jobs.select_nodes(nodes, ["node00000", "node00001", "lost"])
    assert selected == []
    assert [(problem.node, problem.code) for problem in problems] == [
        ("node00000", "node_down"),
        ("node00001", "no_devices"),
        ("lost", "node_missing"),
    ]
    for problem in problems:
        assert problem.uuid is None
        assert problem.message.startswith(f"Node {problem.node}: found {problem.found}. Expected: ")
        assert "Next step: " in problem.message


def test_the_living_one_of_several_nodes_with_one_name() -> None:
    former, present = farm.make_node(7, 2), farm.make_node(3, 2)
    former.update(Name=present["Name"], Status="down")
    selected, problems = nomad_jobs.select_nodes([former, present], [present["Name"]])
    assert [node["id"] for node in selected] == [present["ID"]] and problems == []


def test_a_sample_is_of_free_gpus_first_and_not_always_the_same() -> None:
    pins = nomad_jobs.pins_of(described(gpus=8))
    chance = secrets.SystemRandom()

    def held(pin: nomad_jobs.Pin) -> bool:
        return pin in pins[:5]

    taken = {tuple(nomad_jobs.take_sample(pins, 1, held, chance.sample)) for _ in range(60)}
    assert taken == {(pin,) for pin in pins[5:]}
    assert nomad_jobs.take_sample(pins, 4, held, chance.sample)[1:] == pins[5:]
    assert nomad_jobs.take_sample(pins, None, held, chance.sample) == pins
    assert nomad_jobs.take_sample(pins, 9, held, chance.sample) == pins


# --- the job ---------------------------------------------------------------------------------


def test_the_job_is_pinned_and_tried_once() -> None:
    node = described()
    pins = nomad_jobs.pins_of(node)
    settings = nomad_jobs.Settings(image="images.example.com/cuda:1", namespace="ops", cpu_mhz=50, memory_mib=64)
    job = jobspec.job_of("gpufarm-verify-x", node, pins, settings, gives_up_at=99, linger=2)["Job"]
    assert job["Type"] == "batch" and job["Priority"] == 10 and job["Namespace"] == "ops"
    assert job["Datacenters"] == ["dc1"] and job["NodePool"] == "default"
    # With the job, not with the groups: see the module.
    assert job["Constraints"] == [{"LTarget": "${node.unique.id}", "Operand": "=", "RTarget": node["id"]}]
    assert job["Meta"] == {"created_by": "gpufarm.core.nomad_gpu_job_verify", "gives_up_at": "99"}
    assert [group["Name"] for group in job["TaskGroups"]] == ["gpu-0", "gpu-1"]
    for index, pin in enumerate(pins):
        group = job["TaskGroups"][index]
        assert group["RestartPolicy"]["Attempts"] == 0 and group["RestartPolicy"]["Mode"] == "fail"
        assert group["ReschedulePolicy"] == {"Attempts": 0, "Unlimited": False}
        (task,) = group["Tasks"]
        assert task["Config"]["image"] == "images.example.com/cuda:1" and task["Config"]["network_mode"] == "none"
        resources = task["Resources"]
        assert (resources["CPU"], resources["MemoryMB"]) == (50, 64)
        assert resources["Devices"] == [
            {
                "Name": "nvidia/gpu",
                "Count": 1,
                "Constraints": [{"LTarget": "${device.ids}", "Operand": "set_contains", "RTarget": pin.uuid}],
            }
        ]


def test_the_payload_comes_once_with_the_job() -> None:
    node = described()
    pins = nomad_jobs.pins_of(node)
    job = jobspec.job_of("x", node, pins, nomad_jobs.Settings(level="quick"), gives_up_at=0, linger=2)["Job"]
    assert job["Meta"]["measuring"] == script.payload_of_task()
    # One string of an environment has 128 KiB on Linux.
    assert len(script.payload_of_task()) < 32768 and script.payload_of_task() not in str(job["TaskGroups"])
    (task,) = job["TaskGroups"][1]["Tasks"]
    assert task["Config"]["image"].startswith("python:") and task["Resources"]["MemoryMB"] == 1024
    assert task["Env"] == {"NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
    assert f"--level quick --format json --timeout 60 --devices {pins[1].uuid})" in task["Config"]["args"][-1]
    assert "${" not in task["Config"]["args"][-1]
    own = nomad_jobs.Settings(level="start", image="own:1", memory_mib=64, timeout=8)
    (task,) = jobspec.job_of("x", node, pins, own, gives_up_at=0, linger=2)["Job"]["TaskGroups"][0]["Tasks"]
    assert (task["Config"]["image"], task["Resources"]["MemoryMB"]) == ("own:1", 64)
    assert "--timeout 2 " in task["Config"]["args"][-1]


def test_what_only_lists_has_no_payload() -> None:
    node = described()
    job = jobspec.job_of("x", node, nomad_jobs.pins_of(node), nomad_jobs.Settings(), gives_up_at=0, linger=2)["Job"]
    (task,) = job["TaskGroups"][0]["Tasks"]
    assert set(job["Meta"]) == {"created_by", "gives_up_at"} and "Env" not in task
    assert task["Config"]["args"] == [script.script(2)] and "python" not in str(job)
    assert task["Resources"]["MemoryMB"] == 256


def test_raw_exec_has_no_image() -> None:
    node = described()
    settings = nomad_jobs.Settings(driver="raw_exec")
    job = jobspec.job_of("x", node, nomad_jobs.pins_of(node), settings, gives_up_at=0, linger=2)["Job"]
    task = job["TaskGroups"][0]["Tasks"][0]
    assert task["Driver"] == "raw_exec" and set(task["Config"]) == {"command", "args"}
    assert "Namespace" not in job


def test_the_script_finds_the_folder_of_wsl() -> None:
    begin = script.script(0).splitlines()[:2]
    ended = subprocess.run(
        ["/bin/sh", "-c", "\n".join([*begin, 'printf %s "$PATH"'])],
        env={"PATH": "/own"},
        capture_output=True,
        check=True,
    )
    assert ended.stdout.decode() == "/own:/usr/bin:/bin:/usr/lib/wsl/lib"


@pytest.mark.parametrize(("ends", "seen"), [(0, ["GPU-1"]), (6, []), (127, [])])
def test_the_script_in_a_real_shell(tmp_path: Path, ends: int, seen: list[str]) -> None:
    if ends != 127:
        shim = tmp_path / "nvidia-smi"
        listing = "GPU 0: Tesla T4 (UUID: GPU-1)" if seen else "No devices were found"
        shim.write_text(f'#!/bin/sh\n[ "$*" = -L ] || exit 2\necho "{listing}"\nexit {ends}\n', encoding="utf-8")
        shim.chmod(0o755)
    if ends == 127 and Path("/usr/bin/nvidia-smi").exists():
        pytest.skip("this machine has nvidia-smi")
    environment = {**os.environ, "PATH": str(tmp_path), "NVIDIA_VISIBLE_DEVICES": "GPU-1"}
    text = script.script(0)
    answer = subprocess.run(
        ["/bin/sh", "-c", text], capture_output=True, text=True, env=environment, check=False, timeout=PATIENCE_S
    )
    listing_read = read_listing(answer.stdout)
    assert answer.returncode == listing_read.exit_code == ends
    assert job_listing.devices_seen(listing_read, "GPU-1") == seen
    assert listing_read.visible == "GPU-1"
    # Nomad replaces ${...} in a task's arguments before any shell sees it.
    assert "${" not in text


# --- leftovers -------------------------------------------------------------------------------


def test_only_old_jobs_of_our_own_are_leftovers() -> None:
    (job,) = helper.RECORDED["docker"]["jobs"]
    submitted = job["SubmitTime"] / 1e9
    hour = jobspec.LEFTOVER_AGE_S
    assert jobspec.leftovers([job], submitted + hour + 1) == [job["ID"]]
    assert jobspec.leftovers([job], submitted + hour - 1) == []
    running = {**job, "Meta": {**job["Meta"], "gives_up_at": str(int(submitted + 3 * hour))}}
    assert jobspec.leftovers([running], submitted + 2 * hour) == []
    assert jobspec.leftovers([running], submitted + 3 * hour + 2) == [job["ID"]]
    odd = {**job, "Meta": {**job["Meta"], "gives_up_at": "tomorrow"}}
    assert jobspec.leftovers([odd], submitted + hour + 1) == [job["ID"]]
    for other in ({"Meta": None}, {"Meta": {"created_by": "somebody"}}, {"ID": "training"}):
        assert jobspec.leftovers([{**job, **other}], submitted + 9 * hour) == []


# --- what the task saw -----------------------------------------------------------------------


def listing(name: str) -> Listing:
    return read_listing(helper.RECORDED[name]["stdout"]["text"])


def test_recorded_logs() -> None:
    assert listing("docker") == Listing([(PIN.uuid, ())], "void", False, 0)
    assert listing("wsl") == Listing([(helper.RECORDED_WSL_UUID, ())], "void", True, 0)
    raw = listing("raw_exec")
    assert [gpu for gpu, _migs in raw.gpus] == list(helper.RECORDED_UUIDS) and raw.visible == PIN.uuid


def test_a_log_that_is_cut_off_and_one_with_carriage_returns() -> None:
    text = helper.RECORDED["docker"]["stdout"]["text"]
    assert read_listing(text.rpartition("gpufarm")[0]).exit_code is None
    assert read_listing(text.replace("\n", "\r\n")) == listing("docker")
    assert read_listing("").gpus == []


def test_a_log_with_characters_that_steer_a_terminal() -> None:
    text = (
        "GPU 0: A100\x1b[2J (UUID: GPU-\x9b1)\n\tMIG 1g.10gb\x00 Device 0: (UUID: MIG-2)\ngpufarm-verify: end 0\x00\n"
    )
    listing_read = read_listing(text)
    assert listing_read.exit_code == 0 and all(gpu.isprintable() for gpu, _migs in listing_read.gpus)
    assert read_listing(text.replace("\x9b", "")).gpus == [("GPU-1", ("MIG-2",))]
    assert obstacles.failed_task([], "gone\x1b[2J\x07 wrong.", None).found.isprintable()


def judged(
    pin: nomad_jobs.Pin, text: str, driver: str = "docker", assigned: Sequence[str] | None = None
) -> tuple[str | None, list[str], bool | None]:
    given = [pin.uuid] if assigned is None else assigned
    finding, seen, isolated = job_listing.judge_listing(pin, given, read_listing(text), driver)
    return finding.code if finding else None, seen, isolated


def text_of(*uuids: str, wsl: bool = False, visible: str = "void") -> str:
    lines = [f"gpufarm-verify: visible {visible}", *(["gpufarm-verify: wsl"] if wsl else [])]
    lines += [f"GPU {number}: Tesla T4 (UUID: {uuid})" for number, uuid in enumerate(uuids)]
    return "\n".join([*lines, "gpufarm-verify: end 0", ""])


A, B, C = helper.RECORDED_UUIDS[:3]


@pytest.mark.parametrize(
    ("text", "driver", "code", "isolated"),
    [
        (text_of(A), "docker", None, True),
        (text_of(A.upper()), "docker", None, True),
        (text_of(A, B), "docker", "extra_gpus_seen", False),
        (text_of(B), "docker", "wrong_gpu", False),
        (text_of(), "docker", "gpu_not_seen", None),
        (text_of(A, wsl=True), "docker", None, False),
        (text_of(A, B, wsl=True), "docker", None, False),
        (text_of(B, wsl=True), "docker", "gpu_not_seen", False),
        (text_of(A, B, visible=A), "raw_exec", None, False),
        (text_of(A, visible=A), "raw_exec", None, False),
        (text_of(A, B, visible=B), "raw_exec", "wrong_gpu", False),
        (text_of(A, B, visible=""), "raw_exec", "wrong_gpu", False),
        (text_of(B, C, visible=A), "raw_exec", "gpu_not_seen", False),
        (text_of(visible=A), "raw_exec", "gpu_not_seen", None),
    ],
)
def test_what_a_task_may_see(text: str, driver: str, code: str | None, isolated: bool | None) -> None:
    found, _seen, alone = judged(PIN, text, driver)
    assert (found, alone) == (code, isolated)


def test_what_nomad_assigned_comes_first() -> None:
    assert judged(PIN, text_of(A), assigned=[B])[0] == "wrong_gpu"
    assert judged(PIN, text_of(A), assigned=[])[0] == "wrong_gpu"
    assert judged(PIN, text_of(A), assigned=[A, B])[0] == "wrong_gpu"


def test_mig_devices() -> None:
    assert judged(MIG_PIN, MIG_LOG.format(more="")) == (None, [MIG_PIN.uuid], True)
    second = "  MIG 1g.10gb     Device  1: (UUID: MIG-99999999-2222-3333-4444-555555555555)\n"
    assert judged(MIG_PIN, MIG_LOG.format(more=second))[0] == "extra_gpus_seen"
    whole = "GPU 1: NVIDIA A100-SXM4-80GB (UUID: GPU-bbbbbbbb-2222-3333-4444-555555555555)\n"
    code, seen, isolated = judged(MIG_PIN, MIG_LOG.format(more=whole))
    assert code == "extra_gpus_seen" and len(seen) == 2 and isolated is False


def test_a_whole_gpu_is_not_taken_for_its_mig_devices() -> None:
    pin = nomad_jobs.Pin("id", "gpu01", "GPU-aaaaaaaa-2222-3333-4444-555555555555", "NVIDIA A100-SXM4-80GB")
    assert judged(pin, MIG_LOG.format(more=""))[:2] == (None, [pin.uuid])


def test_nothing_computes_on_a_gpu_whose_mig_mode_is_on_without_a_device() -> None:
    on = f"gpufarm-verify: divided {A}\n"
    assert judged(PIN, on + text_of(A))[0] == "mig_empty"
    assert read_listing(on + text_of(A)).empty == (A,) and read_listing(text_of(A)).empty == ()
    # What another GPU has is that one's.
    assert judged(PIN, on.replace(A, B) + text_of(A, B, visible=A), "raw_exec")[0] is None
    divided = on + f"GPU 0: A100 (UUID: {A})\n  MIG 1g.10gb Device 0: (UUID: MIG-1)\n"
    assert read_listing(divided).empty == ()


# --- why a task did not run ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "driver", "code", "exhausted", "found", "next_step"),
    [
        (
            "drivers", "java", "not_placed", False, "the task driver java is missing or unhealthy on the node",
            "check 'nomad node status -verbose'",
        ),
        (
            "drivers", "docker", "not_placed", False, "the task driver docker is missing or unhealthy on the node",
            "check that Docker runs on the node, then 'nomad node status -verbose'",
        ),
        (
            "devices", "docker", "not_placed", False, "it has no healthy GPU with this UUID on the node any more",
            "check nvidia-smi and the kernel log on the node, then restart Nomad there",
        ),
        (
            "memory", "docker", "node_full", True, "no room on the node, memory exhausted",
            "run the proof again when other work has ended, or lower cpu_mhz and memory_mib",
        ),
        (
            "gpu", "docker", "not_placed", True, "the GPU is not free",
            "look for its holder with 'nomad node status'",
        ),
        (
            "ineligible", "docker", "not_placed", False,
            "the node is not ready, not eligible, or not in its datacenter and pool",
            f"check 'nomad node status {PIN.node_id}'",
        ),
    ],
)  # fmt: skip
def test_nomads_own_account_of_a_placement(
    *, name: str, driver: str, code: str, exhausted: bool, found: str, next_step: str
) -> None:
    """Each of them was recorded on a real farm."""
    failures = obstacles.newest_failures(helper.RECORDED[name]["evaluations"])
    assert failures is not None
    assert obstacles.explain_placement(failures["gpu-0"], PIN, driver) == obstacles.Obstacle(
        not_placed(code, found, next_step), exhausted, device=name == "gpu"
    )


def not_placed(code: str, found: str, next_step: str) -> problem_utils.Finding:
    expected = f"a placement on node {PIN.node_id} with this GPU"
    return problem_utils.Finding(code, f"that Nomad did not place the job: {found}", expected, next_step)


@pytest.mark.parametrize(
    ("metric", "code", "found", "next_step"),
    [
        (
            {"ConstraintFiltered": {"missing network": 1, "missing host volumes": 1}, "DimensionExhausted": None},
            "not_placed", "missing host volumes, missing network",
            "run 'nomad job plan' with a job of your own on that node to see the same",
        ),
        ({"NodesEvaluated": 1}, "not_placed", "it does not say why (1 nodes evaluated)", "look at the server's log"),
        (
            {"QuotaExhausted": ["gpu limit"], "DimensionExhausted": {"memory": 1}}, "node_full",
            "no room on the node, gpu limit, memory exhausted",
            "run the proof again when other work has ended, or lower cpu_mhz and memory_mib",
        ),
    ],
)  # fmt: skip
def test_accounts_that_were_not_recorded(metric: dict[str, Any], code: str, found: str, next_step: str) -> None:
    obstacle = obstacles.explain_placement({"NodesEvaluated": 3, **metric}, PIN, "docker")
    assert obstacle == obstacles.Obstacle(not_placed(code, found, next_step), exhausted=code == "node_full")


def test_an_evaluation_that_is_not_over_decides_nothing() -> None:
    recorded = helper.RECORDED["memory"]["evaluations"]
    assert obstacles.newest_failures([*recorded, {"Status": "pending", "ModifyIndex": 10**6}]) is None
    assert obstacles.newest_failures([]) is None
    assert obstacles.newest_failures([each for each in recorded if each["Status"] == "blocked"]) is None


def test_the_newest_account_counts() -> None:
    old, new = {"NodesEvaluated": 1}, {"NodesEvaluated": 2}
    evaluations = [
        {"Status": "complete", "ModifyIndex": 9, "FailedTGAllocs": {"gpu-0": new}},
        {"Status": "complete", "ModifyIndex": 5, "FailedTGAllocs": {"gpu-0": old, "gpu-1": old}},
    ]
    assert obstacles.newest_failures(evaluations) == {"gpu-0": new, "gpu-1": old}


def test_the_telling_event_is_not_the_last_one() -> None:
    events = helper.RECORDED["image"]["allocations"][0]["TaskStates"]["see"]["Events"]
    assert events[-1]["DisplayMessage"] == "Policy allows no restarts"
    told = obstacles.telling_event(events)
    assert told is not None and told.startswith("Failed to pull `gpufarm-none:1`: Error response from daemon")
    finished = helper.RECORDED["docker"]["allocations"][0]["TaskStates"]["see"]["Events"]
    assert obstacles.telling_event(finished) == "Exit Code: 0"
    assert obstacles.telling_event([]) is None
    # One without words says nothing, whatever it is.
    assert obstacles.telling_event([{"Type": "Driver Failure"}, {"Type": "Killing", "DisplayMessage": "x"}]) == "x"


def test_the_end_of_a_task_hides_nothing() -> None:
    events = [
        {"Type": "Driver", "DisplayMessage": "Downloading image"},
        {"Type": "Killing", "DisplayMessage": "Sent interrupt"},
        {"Type": "Not Restarting", "DisplayMessage": "Policy allows no restarts"},
    ]
    assert obstacles.telling_event(events) == "Downloading image"


def test_a_failure_tells_more_than_the_end_that_it_led_to() -> None:
    failed = {"Type": "Setup Failure", "DisplayMessage": "no such volume"}
    ended = {"Type": "Terminated", "DisplayMessage": "Exit Code: 1"}
    assert obstacles.telling_event([failed, ended]) == "no such volume"


def test_an_event_without_a_text_tells_nothing() -> None:
    silent = {"Type": "Setup Failure", "DisplayMessage": ""}
    assert obstacles.telling_event([event("no such image"), silent]) == "no such image"
    assert obstacles.telling_event([silent]) is None


def test_running_out_of_memory_is_telling() -> None:
    killed = {"Type": "Terminated", "DisplayMessage": "OOM Killed", "Details": {"oom_killed": "true"}}
    last = {"Type": "Terminated", "DisplayMessage": "Exit Code: 137", "Details": {"oom_killed": "false"}}
    assert obstacles.telling_event([killed, last]) == "OOM Killed"
    assert obstacles.telling_event([killed, {"Type": "Killed", "DisplayMessage": None}]) == "OOM Killed"


def event(text: str) -> dict[str, Any]:
    return {"Type": "Driver Failure", "DisplayMessage": text}


CHECK_TOOLKIT = "check nvidia-smi, the container toolkit and its CDI specification on the node"


@pytest.mark.parametrize(
    ("text", "stderr", "step"),
    [
        (
            "Failed to pull `cuda:9`: manifest unknown", "",
            "check the image's name, and that the node reaches its registry or has the image already",
        ),
        (
            'Failed to create container configuration for image "cuda:9": requested docker runtime "nvidia" was not '
            "found", "",
            "run 'nvidia-ctk runtime configure --runtime=docker' on the node, restart Docker, then Nomad",
        ),
        (
            "Exit Code: 127", "sh: 5: nvidia-smi: not found",
            "check that the container toolkit is set up for Docker, because it brings nvidia-smi into the container",
        ),
        ("failed to create shim task: OCI runtime create failed: unresolvable CDI devices", "", CHECK_TOOLKIT),
        ("Exit Code: 9", "NVIDIA-SMI has failed", CHECK_TOOLKIT),
        (
            "Exit Code: 1", "",
            "look at the task with 'nomad alloc status' and at the log of Nomad on the node",
        ),
    ],
)  # fmt: skip
def test_the_next_step_after_a_failed_task(text: str, stderr: str, step: str) -> None:
    end = f"; its stderr ends with '{stderr}'" if stderr else ""
    assert obstacles.failed_task([event(text)], stderr, None) == problem_utils.Finding(
        "task_failed", f"that the task failed ({text}{end})", "a task that lists its GPU and ends well", step
    )


def test_a_task_of_which_nothing_is_told() -> None:
    assert obstacles.failed_task([], "", None).found == "that the task failed (a failed task without any event)"


def test_long_texts_keep_their_end() -> None:
    finding = obstacles.failed_task([], "x" * 2000 + "\n  the reason.\n", "the node was lost")
    assert "the node was lost; its stderr ends with '...x" in finding.found and "x the reason')" in finding.found
    assert len(finding.found) < 600


# --- running ---------------------------------------------------------------------------------


@pytest.fixture
def nomad_server() -> Iterator[FakeNomad]:
    server = FakeNomad()
    yield server
    server.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"LOG_WAIT_S": 0.3, "FREE_WAIT_S": 0.3, "LOOK_S": 0.1, "PAUSE_S": 0.02}
    for name, value in values.items():
        monkeypatch.setattr(running, name, value)
    monkeypatch.setattr(nomad_client, "FIRST_PAUSE_S", 0.01)


def run_of(server: FakeNomad, **settings: Any) -> nomad_jobs.Run:
    chosen = nomad_jobs.Settings(**{"timeout": PATIENCE_S, **settings})
    client = nomad.Client(nomad.Connection(address=server.url))
    return nomad_jobs.Run(client, chosen, "0a1b2c3d", time.monotonic() + chosen.timeout)


def work_of(server: FakeNomad) -> list[tuple[Mapping[str, Any], Sequence[nomad_jobs.Pin]]]:
    nodes = [nomad.describe_node(node) for node in server.nodes]
    return [(node, nomad_jobs.pins_of(node)) for node in nodes]


def proven(server: FakeNomad, **settings: Any) -> dict[str, nomad_jobs.JobResult]:
    """Results by UUID, after the one thing that must hold in every case."""
    results = nomad_jobs.prove(run_of(server, **settings), work_of(server))
    assert server.jobs == {}
    return {pin.uuid: result for pin, result in results.items()}


def test_every_gpu_is_proven(nomad_server: FakeNomad) -> None:
    results = proven(nomad_server)
    assert list(results) == [*nomad_server.uuids(0), *nomad_server.uuids(1)]
    for uuid, result in results.items():
        assert (result.verdict, result.code, result.message, result.isolated) == ("ok", None, None, True)
        assert result.assigned == result.seen == [uuid]
        assert result.allocation_id and result.duration_s is not None
    assert len(nomad_server.registered) == 2
    assert [job["ID"].startswith("gpufarm-verify-0a1b2c3d-") for job in nomad_server.registered] == [True, True]


def test_a_running_job_is_waited_for_by_its_index() -> None:
    """And one whose log may still come is looked at without waiting for a change."""

    class Client:
        def items(self, _path: str, _query: Mapping[str, str], index: int, _wait: float) -> nomad_client.Nodes:
            asked.append(index)
            return nomad_client.Nodes(items=[{"TaskGroup": "gpu0", "ClientStatus": "running"}], index=9)

    asked: list[int] = []
    pin = nomad_jobs.pins_of(nomad.describe_node(farm.make_node(0, 1)))[0]
    job = running._Watched({"gpu0": pin})
    run = nomad_jobs.Run(cast(Any, Client()), nomad_jobs.Settings(), "0a1b2c3d", time.monotonic() + PATIENCE_S)
    for _ in range(2):
        assert running._look(run, "job", job) == {}
    job.ended["gpu0"] = 0.0
    for _ in range(2):
        assert running._look(run, "job", job) == {}
    assert asked == [0, 9, 9, 0]


def test_how_logs_are_asked_for(nomad_server: FakeNomad) -> None:
    """The whole of what a task says, and of its errors the end."""
    uuid = nomad_server.uuids()[1]
    nomad_server.fates[uuid] = Fate(status="failed", log="", stderr="sh: nvidia-smi: not found\n")
    assert proven(nomad_server)[uuid].verdict == "failed"
    asked = [query for _, path, query in nomad_server.requests if path.startswith("/v1/client/fs/logs/")]
    whole = {"task": jobspec.TASK, "plain": "true", "follow": "false"}
    expected = [
        {**whole, "type": "stdout", "origin": "start"},
        {**whole, "type": "stderr", "origin": "end", "offset": "2000"},
    ]
    for query in expected:
        assert any(query.items() <= each.items() for each in asked), asked


def test_errors_of_a_task_that_ended_well_are_not_asked_for(nomad_server: FakeNomad) -> None:
    assert {result.verdict for result in proven(nomad_server).values()} == {"ok"}
    streams = [query["type"] for _, path, query in nomad_server.requests if path.startswith("/v1/client/fs/logs/")]
    assert set(streams) == {"stdout"}


def test_a_log_that_comes_late(nomad_server: FakeNomad, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "LOG_WAIT_S", PATIENCE_S)
    uuid = nomad_server.uuids()[1]
    nomad_server.fates[uuid] = Fate(log_after_looks=3)
    assert proven(nomad_server)[uuid].verdict == "ok"
    assert len(nomad_server.registered) == 2


@pytest.mark.parametrize("status", [404, 500])
def test_a_log_that_is_not_there_yet(nomad_server: FakeNomad, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    monkeypatch.setattr(running, "LOG_WAIT_S", PATIENCE_S)
    nomad_server.refuse = {("GET", "/v1/client/fs/logs"): [status, status, 200]}
    assert {result.verdict for result in proven(nomad_server).values()} == {"ok"}
    assert len(nomad_server.registered) == 2


def test_a_lost_log_is_no_verdict(nomad_server: FakeNomad) -> None:
    """hashicorp/nomad#6931: a second task on that GPU alone stays longer."""
    uuid = nomad_server.uuids()[1]
    nomad_server.fates[uuid] = Fate(log_from_job=2)
    assert proven(nomad_server)[uuid].verdict == "ok"
    again = nomad_server.registered[-1]
    assert len(nomad_server.registered) == 3 and len(again["TaskGroups"]) == 1
    assert "sleep 15" in again["TaskGroups"][0]["Tasks"][0]["Config"]["args"][-1]
    assert again["ID"] not in {job["ID"] for job in nomad_server.registered[:-1]}


def test_a_log_that_is_lost_again(nomad_server: FakeNomad) -> None:
    uuid = nomad_server.uuids()[1]
    nomad_server.fates[uuid] = Fate(log_from_job=9)
    result = proven(nomad_server)[uuid]
    assert (result.verdict, result.code) == ("failed", "log_unreadable")
    assert "without its end" in (result.found or "")


@pytest.mark.parametrize(("status", "step"), [(403, "read-logs"), (500, "check that the servers reach")])
def test_a_log_that_cannot_be_read(nomad_server: FakeNomad, status: int, step: str) -> None:
    uuid = nomad_server.uuids()[0]
    nomad_server.fates[uuid] = Fate(log_status=status)
    result = proven(nomad_server)[uuid]
    assert result.code == "log_unreadable" and step in (result.message or "")
    assert f"HTTP {status}" in (result.found or "")


def test_an_image_that_cannot_be_pulled(nomad_server: FakeNomad) -> None:
    uuid = nomad_server.uuids()[0]
    nomad_server.fates[uuid] = Fate(fails=True)
    results = proven(nomad_server)
    assert (results[uuid].verdict, results[uuid].code) == ("failed", "task_failed")
    told = results[uuid].message or ""
    assert told.startswith(f"Node node00000, GPU {uuid}: found that the task failed (Failed to pull `gpufarm-none:1`: ")
    assert "Next step: check the image's name" in told
    assert [result.verdict for result in results.values()].count("ok") == 3
    assert len(nomad_server.registered) == 2


def test_a_container_that_does_not_start_is_tried_once_more(nomad_server: FakeNomad) -> None:
    uuids = nomad_server.uuids()
    nomad_server.fates[uuids[0]] = Fate(starts_from_job=2)
    nomad_server.fates[uuids[1]] = Fate(starts_from_job=3)
    results = proven(nomad_server)
    assert (results[uuids[0]].verdict, results[uuids[0]].code) == ("ok", None)
    assert (results[uuids[1]].verdict, results[uuids[1]].code) == ("failed", "task_failed")
    assert "(Failed to start container 40fbd" in (results[uuids[1]].found or "")
    assert CHECK_TOOLKIT in (results[uuids[1]].message or "")
    again = [job for job in nomad_server.registered if job["ID"].endswith("-2")]
    assert [len(job["TaskGroups"]) for job in again] == [2]


def test_a_gpu_that_another_has_meanwhile_has_not_become_a_busy_one(nomad_server: FakeNomad) -> None:
    """Who waits for a GPU has it as soon as the job whose container did not start is purged."""
    uuid = nomad_server.uuids()[0]
    nomad_server.fates[uuid] = Fate(starts_from_job=9, unplaced="gpu", unplaced_from_job=2)
    result = proven(nomad_server)[uuid]
    assert (result.verdict, result.code) == ("failed", "task_failed")
    assert "(Failed to start container 40fbd" in (result.found or "")


def test_a_container_that_does_not_start_for_its_gpu_is_not_tried_again() -> None:
    said = "Failed to start container 1: Error response from daemon: OCI runtime create failed: "
    for cause in (
        "nvidia-container-cli: device error: GPU-1: unknown device",
        "unresolvable CDI devices nvidia.com/gpu",
    ):
        assert not obstacles.not_started([event(said + cause)])
    assert obstacles.not_started([event(said + "read init-p: connection reset by peer")])
    assert not obstacles.not_started([{"Type": "Terminated", "DisplayMessage": said}])


def test_a_container_without_nvidia_smi(nomad_server: FakeNomad) -> None:
    uuid = nomad_server.uuids()[0]
    nomad_server.fates[uuid] = Fate(
        status="failed", log="gpufarm-verify: visible \ngpufarm-verify: end 127\n", stderr="sh: nvidia-smi: not found\n"
    )
    result = proven(nomad_server)[uuid]
    assert result.code == "task_failed" and "nvidia-smi: not found" in (result.found or "")


def test_a_failed_task_without_a_log_has_failed(nomad_server: FakeNomad) -> None:
    """Its log did not get lost: it never had one, so another task would tell nothing more."""
    uuid = nomad_server.uuids()[0]
    nomad_server.fates[uuid] = Fate(status="failed", log="")
    assert proven(nomad_server)[uuid].code == "task_failed"
    assert len(nomad_server.registered) == 2


def test_a_program_that_could_not_measure_says_why(nomad_server: FakeNomad) -> None:
    uuid = nomad_server.uuids()[0]
    log = helper.log_of("docker", uuid).replace(
        "gpufarm-verify: end", "gpufarm-verify: computed 1\ngpufarm-verify: end"
    )
    nomad_server.fates[uuid] = Fate(log=log, stderr="SyntaxError: invalid syntax\n")
    result = proven(nomad_server, level="start")[uuid]
    assert (result.verdict, result.code, result.benchmark) == ("failed", "no_answer", None)
    assert "ended with 1 and without an answer; its stderr ends with 'SyntaxError" in (result.found or "")


def test_a_hostile_answer_costs_its_own_gpu_alone(nomad_server: FakeNomad) -> None:
    good, bad, *others = [*nomad_server.uuids(0), *nomad_server.uuids(1)]
    for uuid in (good, *others):
        nomad_server.fates[uuid] = Fate(log=helper.log_that_says(uuid, helper.answer_of(uuid)))
    nomad_server.fates[bad] = Fate(log=helper.log_that_says(bad, '{"devices": ["x"]}'))
    results = proven(nomad_server, level="quick")
    codes = {uuid: result.code for uuid, result in results.items()}
    assert codes == {good: None, bad: "no_answer", **dict.fromkeys(others)}
    assert results[bad].benchmark is None and "it does not tell of one device" in (results[bad].message or "")


def test_what_cannot_be_judged_costs_its_own_gpu_alone(
    nomad_server: FakeNomad, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that nobody has thought of, here one of Nomad's own answer."""
    bad, *others = [*nomad_server.uuids(0), *nomad_server.uuids(1)]
    answer = nomad_server.allocation

    def allocation(name: str) -> tuple[int, Any]:
        status, told = answer(name)
        given = told["AllocatedResources"]["Tasks"]["see"]["Devices"][0]["DeviceIDs"]
        return status, {**told, "TaskStates": ["odd"]} if given == [bad] else told

    monkeypatch.setattr(nomad_server, "allocation", allocation)
    results = proven(nomad_server)
    assert {uuid: result.code for uuid, result in results.items()} == {bad: "failed", **dict.fromkeys(others)}
    assert "could not be judged (AttributeError: 'list' object has no attribute 'get')" in (results[bad].found or "")
    assert results[bad].allocation_id


def test_where_nomad_does_not_tell_what_it_gave_nothing_is_proven(
    nomad_server: FakeNomad, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is not that somebody else has the GPU."""
    answer = nomad_server.allocation
    monkeypatch.setattr(nomad_server, "allocation", lambda name: (200, {**answer(name)[1], "AllocatedResources": None}))
    results = proven(nomad_server).values()
    assert {(result.code, result.found) for result in results} == {("wrong_gpu", "that Nomad assigned no GPU")}


def test_what_a_log_says_that_is_half_there_is_not_judged(
    nomad_server: FakeNomad, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last line may end in a brace and be cut all the same; at the next look all of it is there."""
    monkeypatch.setattr(running, "LOG_WAIT_S", PATIENCE_S)
    nomad_server.nodes = nomad_server.nodes[:1]
    uuid = nomad_server.uuids()[0]
    whole = helper.log_that_says(uuid, helper.answer_of(uuid))
    half = whole[: whole.index('"figures"')].replace('"memory": {', '"memory": {}')
    cut = half[: half.index('"memory": {}') + len('"memory": {}')]
    assert cut.endswith("{}") and read_listing(cut).answer is not None
    logs, answer = [cut, cut], nomad_server.log

    def log(name: str, stream: str) -> tuple[int, str]:
        status, text = answer(name, stream)
        return status, logs.pop() if text == whole and logs else text

    monkeypatch.setattr(nomad_server, "log", log)
    other = nomad_server.uuids()[1]
    nomad_server.fates = {each: Fate(log=helper.log_that_says(each, helper.answer_of(each))) for each in (uuid, other)}
    assert {result.verdict for result in proven(nomad_server, level="quick").values()} == {"ok"}
    assert logs == [] and len(nomad_server.registered) == 1


def test_a_container_without_devices(nomad_server: FakeNomad) -> None:
    uuid = nomad_server.uuids()[0]
    nomad_server.fates[uuid] = Fate(status="failed", log="No devices were found\ngpufarm-verify: end 6\n")
    assert proven(nomad_server)[uuid].code == "gpu_not_seen"


def test_gpus_that_are_not_kept_apart(nomad_server: FakeNomad) -> None:
    one, other = nomad_server.uuids()
    nomad_server.fates[one] = Fate(log=text_of(one, other))
    nomad_server.fates[other] = Fate(log=text_of(one))
    third, fourth = nomad_server.uuids(1)
    nomad_server.fates[third] = Fate(assigned=fourth)
    nomad_server.fates[fourth] = Fate(log=text_of(third, fourth, wsl=True))
    results = proven(nomad_server)
    assert {uuid: result.code for uuid, result in results.items()} == {
        one: "extra_gpus_seen",
        other: "wrong_gpu",
        third: "wrong_gpu",
        fourth: None,
    }
    assert results[one].seen == [one, other] and results[third].assigned == [fourth]
    assert results[fourth].isolated is False


def test_a_task_that_somebody_stopped(nomad_server: FakeNomad) -> None:
    uuid = nomad_server.uuids()[0]
    nomad_server.fates[uuid] = Fate(log="", desired=("stop", "alloc is being migrated"))
    result = proven(nomad_server)[uuid]
    assert result.code == "task_failed" and "Nomad wanted it to stop, alloc is being migrated" in (result.found or "")


def test_a_node_that_was_lost(nomad_server: FakeNomad) -> None:
    uuid = nomad_server.uuids()[0]
    nomad_server.fates[uuid] = Fate(status="lost", log="")
    assert "the node was lost" in (proven(nomad_server)[uuid].found or "")


def test_no_placement_is_told_at_once(nomad_server: FakeNomad) -> None:
    uuid = nomad_server.uuids()[0]
    nomad_server.fates[uuid] = Fate(unplaced="drivers")
    result = proven(nomad_server)[uuid]
    assert (result.verdict, result.code) == ("failed", "not_placed")
    assert "the task driver docker is missing" in (result.found or "") and result.allocation_id is None


@pytest.mark.parametrize(("skip_busy", "verdict"), [(True, "busy"), (False, "failed")])
def test_no_room_on_the_node(nomad_server: FakeNomad, skip_busy: bool, verdict: str) -> None:
    uuid = nomad_server.uuids()[0]
    nomad_server.fates[uuid] = Fate(unplaced="memory")
    result = proven(nomad_server, skip_busy=skip_busy)[uuid]
    assert (result.verdict, result.code) == (verdict, "node_full")


def test_what_another_task_of_the_job_holds_is_waited_for(nomad_server: FakeNomad) -> None:
    """A small node has room for one task after the other; Nomad places the second when the first has ended."""
    first, second = nomad_server.uuids()
    nomad_server.fates[first] = Fate(runs_for_s=1.0)
    nomad_server.fates[second] = Fate(unplaced="memory", unplaced_for_s=1.0)
    assert proven(nomad_server)[second].verdict == "ok"


@pytest.mark.parametrize(("skip_busy", "verdict"), [(True, "busy"), (False, "failed")])
def test_placed_without_a_gpu_is_busy(nomad_server: FakeNomad, skip_busy: bool, verdict: str) -> None:
    """Nomad before 1.11 counts the free GPUs of the node before it looks for the one that was asked for."""
    uuid = nomad_server.uuids()[0]
    nomad_server.fates[uuid] = Fate(assigned="")
    result = proven(nomad_server, skip_busy=skip_busy)[uuid]
    assert (result.verdict, result.code) == (verdict, "gpu_busy")


@pytest.mark.parametrize("visible", [True, False])
def test_a_gpu_that_was_taken_meanwhile(nomad_server: FakeNomad, visible: bool) -> None:
    uuid = nomad_server.uuids()[0]
    nomad_server.fates[uuid] = Fate(unplaced="gpu")
    if visible:
        (held,) = [each for each in farm.recorded("allocations-1.11.3") if each["AllocatedResources"]][:1]
        held["NodeID"] = nomad_server.nodes[0]["ID"]
        for task in held["AllocatedResources"]["Tasks"].values():
            task["Devices"][0]["DeviceIDs"] = [uuid]
        nomad_server.allocations = [held]
    result = proven(nomad_server)[uuid]
    assert (result.verdict, result.code) == ("busy", "gpu_busy")
    assert ("of job training in namespace" if visible else "the token may not see") in (result.message or "")
    asked = [query for method, path, query in nomad_server.requests if path == "/v1/allocations"]
    assert asked[0]["namespace"] == "*" and nomad_server.nodes[0]["ID"] in asked[0]["filter"]


@pytest.mark.parametrize("fate", [Fate(unplaced="gpu"), Fate(assigned="")])
def test_a_gpu_that_got_sick_meanwhile_is_not_busy(nomad_server: FakeNomad, fate: Fate) -> None:
    """Nomad takes it for one that is not free."""
    uuid = nomad_server.uuids()[0]
    nomad_server.fates[uuid] = fate
    sick = nomad_server.nodes[0]["NodeResources"]["Devices"][0]["Instances"][0]
    sick.update(Healthy=False, HealthDescription="off the bus")
    result = proven(nomad_server)[uuid]
    assert (result.verdict, result.code) == ("failed", "gpu_unhealthy") and "(off the bus)" in (result.message or "")


def overdue(
    server: FakeNomad, unproven: list[problem_utils.Problem] | None = None, **settings: Any
) -> dict[str, nomad_jobs.JobResult]:
    """Results of a run whose time is over as soon as Nomad has told of the first job's allocations."""

    class Overdue(nomad_jobs.Run):
        def seconds_left(self) -> float:
            told = any(method == "GET" and path.startswith("/v1/job/") for method, path, _query in server.requests)
            return 0 if told else PATIENCE_S

    run = run_of(server, timeout=1, **settings)
    told = run.unproven if unproven is None else unproven
    over = Overdue(run.client, run.settings, run.name, run.deadline, unproven=told)
    results = nomad_jobs.prove(over, work_of(server))
    assert server.jobs == {}
    return {pin.uuid: result for pin, result in results.items()}


def test_the_time_is_over(nomad_server: FakeNomad) -> None:
    nomad_server.nodes = nomad_server.nodes[:1]
    uuid = nomad_server.uuids()[0]
    nomad_server.fates[uuid] = Fate(runs_for_s=math.inf)
    result = overdue(nomad_server)[uuid]
    assert (result.verdict, result.code) == ("failed", "timeout")
    assert "still running (Task started by client) when the 1 s were over" in (result.found or "")
    assert result.allocation_id


def test_a_task_that_cannot_end_has_said_why(nomad_server: FakeNomad) -> None:
    """A process that hangs in the driver is reached by no signal; Nomad calls its task running for ever."""
    nomad_server.nodes = nomad_server.nodes[:1]
    uuid, other = nomad_server.uuids()
    error = {"code": "timeout", "step": "context", "cuda_error": None, "message": "no answer within 60 s"}
    log = helper.log_that_says(uuid, {"devices": [{"uuid": uuid, "error": error}]}, 1)
    odd = helper.log_that_says(other, "{}", 1)
    nomad_server.fates = {uuid: Fate(runs_for_s=math.inf, log=log), other: Fate(runs_for_s=math.inf, log=odd)}
    results = overdue(nomad_server, level="start")
    assert (results[uuid].verdict, results[uuid].code) == ("failed", "hung")
    assert results[other].code == "timeout"


def test_nodes_that_had_no_turn(nomad_server: FakeNomad) -> None:
    for uuid in nomad_server.uuids(0):
        nomad_server.fates[uuid] = Fate(runs_for_s=math.inf)
    unproven: list[problem_utils.Problem] = []
    results = overdue(nomad_server, unproven, parallel=1)
    # Nobody knows anything of their GPUs, so these have not failed.
    untried = [results[uuid] for uuid in nomad_server.uuids(1)]
    assert [(each.verdict, each.code) for each in untried] == [("skipped", "not_begun")] * len(untried)
    assert all("no job of this node had begun" in (each.found or "") for each in untried)
    assert [(each.node, each.code, each.uuid) for each in unproven] == [("node00001", "not_begun", None)]
    assert len(nomad_server.registered) == 1


def test_no_more_nodes_at_once_than_asked(nomad_server: FakeNomad) -> None:
    nomad_server.nodes = [farm.make_node(number, 1) for number in range(7)]
    for number in range(7):
        nomad_server.fates[nomad_server.uuids(number)[0]] = Fate(runs_for_s=math.inf)
    nomad_server.release_at = 3
    assert {result.verdict for result in proven(nomad_server, parallel=3).values()} == {"ok"}
    assert nomad_server.most_jobs == 3


def test_a_moment_without_a_leader_is_survived(nomad_server: FakeNomad) -> None:
    nomad_server.refuse = {
        ("POST", "/v1/jobs"): [500, 200],
        ("GET", "/v1/job/"): [500, 500, 200],
        ("GET", "/v1/allocation/"): [500, 200],
        ("DELETE", "/v1/job/"): [500, 200],
    }
    assert {result.verdict for result in proven(nomad_server).values()} == {"ok"}


@pytest.mark.parametrize("arrives", [True, False])
def test_a_refused_registration_ends_the_run_and_leaves_nothing(nomad_server: FakeNomad, arrives: bool) -> None:
    nomad_server.refuse = {("POST", "/v1/jobs"): [403]}
    nomad_server.arrives = arrives
    run = run_of(nomad_server)
    with pytest.raises(nomad.NomadError, match="HTTP 403"):
        nomad_jobs.prove(run, work_of(nomad_server))
    assert nomad_server.jobs == {} and run.left == []
    assert len(nomad_server.purged) >= 1


@pytest.mark.parametrize(("status", "times"), [(403, 1), (500, running.ATTEMPTS)])
def test_a_registration_is_tried_again_where_that_can_help(nomad_server: FakeNomad, status: int, times: int) -> None:
    nomad_server.nodes = nomad_server.nodes[:1]
    nomad_server.refuse = {("POST", "/v1/jobs"): [status]}
    with pytest.raises(nomad.NomadError, match=f"HTTP {status}"):
        nomad_jobs.prove(run_of(nomad_server), work_of(nomad_server))
    assert [method for method, _path, _query in nomad_server.requests].count("POST") == times


@pytest.mark.parametrize(
    ("allocation", "why"),
    [
        ({}, None),
        ({"DesiredStatus": ""}, None),
        ({"DesiredStatus": "run", "ClientStatus": "failed"}, None),
        ({"DesiredStatus": "stop"}, "Nomad wanted it to stop"),
        (
            {"DesiredStatus": "evict", "DesiredDescription": "preempted\nby x."},
            "Nomad wanted it to evict, preempted by x",
        ),
        ({"DesiredStatus": "run", "ClientStatus": "lost"}, "the node was lost"),
    ],
)
def test_why_a_task_was_stopped(allocation: dict[str, str], why: str | None) -> None:
    assert running._why_stopped(allocation) == why


def test_an_error_of_one_node_purges_the_jobs_of_all(nomad_server: FakeNomad) -> None:
    for uuid in nomad_server.uuids(1):
        nomad_server.fates[uuid] = Fate(runs_for_s=math.inf)
    nomad_server.refuse = {("GET", "/v1/allocation/"): [403]}
    run = run_of(nomad_server, timeout=60)
    with pytest.raises(nomad.NomadError, match="HTTP 403"):
        nomad_jobs.prove(run, work_of(nomad_server))
    assert run.stop.is_set() and nomad_server.jobs == {}
    assert len(set(nomad_server.purged)) == len(nomad_server.registered) == 2


class Interrupted(list[Any]):
    """Work of which the second part is handed out by a signal, when the first part's job runs."""

    def __init__(self, server: FakeNomad) -> None:
        super().__init__(work_of(server))
        self._server = server

    def __iter__(self) -> Iterator[Any]:
        yield self[0]
        wait_for(lambda: self._server.jobs)
        raise SystemExit(143)


def test_an_end_while_the_jobs_are_still_registered_purges_them(nomad_server: FakeNomad) -> None:
    for uuid in nomad_server.uuids(0):
        nomad_server.fates[uuid] = Fate(runs_for_s=math.inf)
    run = run_of(nomad_server, timeout=60)
    with pytest.raises(SystemExit):
        nomad_jobs.prove(run, Interrupted(nomad_server))
    assert run.stop.is_set() and nomad_server.jobs == {} and len(nomad_server.registered) == 1


def test_a_job_that_cannot_be_purged_is_told(nomad_server: FakeNomad) -> None:
    nomad_server.nodes = nomad_server.nodes[:1]
    nomad_server.refuse = {("DELETE", "/v1/job/"): [500]}
    run = run_of(nomad_server)
    nomad_jobs.prove(run, work_of(nomad_server))
    (problem,) = run.left
    (job,) = nomad_server.jobs
    assert (problem.node, problem.uuid, problem.code) == ("node00000", None, "job_left")
    assert problem.message == (
        f"Node node00000: found that job {job} could not be purged ({nomad_server.url}/v1/job/{job}?purge=true "
        "answered HTTP 500: rpc error: No cluster leader). Expected: no job of this proof to be left. Next step: run "
        f"'nomad job stop -purge {job}'; a later proof does it too, an hour from now."
    )
    assert len([each for each in nomad_server.requests if each[0] == "DELETE"]) == running.ATTEMPTS


def test_what_a_killed_run_left_is_purged_or_told(nomad_server: FakeNomad) -> None:
    (job,) = helper.RECORDED["docker"]["jobs"]
    nomad_server.listed = [{**job, "ID": f"gpufarm-verify-{name}"} for name in ("b", "a", "c")]
    client, later = run_of(nomad_server).client, job["SubmitTime"] / 1e9 + 2 * jobspec.LEFTOVER_AGE_S
    ids = ["gpufarm-verify-a", "gpufarm-verify-b", "gpufarm-verify-c"]
    assert nomad_jobs.purge_leftovers(client, later, True) == (ids, [])
    assert nomad_server.purged == []
    nomad_server.refuse = {("DELETE", "/v1/job/gpufarm-verify-b"): [403]}
    assert nomad_jobs.purge_leftovers(client, later, False) == (
        [ids[0], ids[2]],
        [
            f"job gpufarm-verify-b of a killed run could not be purged: {nomad_server.url}/v1/job/gpufarm-verify-b"
            "?purge=true was refused (HTTP 403: Permission denied)"
        ],
    )
    assert nomad_server.purged == [ids[0], ids[2]]


def test_nothing_to_do_asks_nothing(nomad_server: FakeNomad) -> None:
    assert nomad_jobs.prove(run_of(nomad_server), []) == {}
    assert nomad_server.requests == []


def test_no_gpus_of_an_agent_that_is_there_already_are_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the check on real hardware, whose own agent would end, while the other answered."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        monkeypatch.setattr(hardware, "ADDRESS", other.getsockname())
        with pytest.raises(SystemExit, match="answers already"), hardware.agent(Path("nomad"), Path("plugin")):
            pass
    hardware.refuse_another(hardware.ADDRESS)


# --- for people ------------------------------------------------------------------------------


def test_the_table_has_failed_nodes_first() -> None:
    pins = nomad_jobs.pins_of(described(0, 2)) + nomad_jobs.pins_of(described(1, 3))
    bad = problem_utils.Finding("wrong_gpu", "that", "this", "do")
    results = [
        nomad_jobs.result_of(pins[0], None),
        nomad_jobs.result_of(pins[1], nomad_jobs.busy_finding(None), "busy"),
    ]
    results += [nomad_jobs.result_of(pin, bad) for pin in pins[2:4]] + [nomad_jobs.result_of(pins[4], None)]
    lost = problem_utils.problem_of("lost", "node_missing", "none", "one", "look")
    problems = [*gpu_proof.problems_of(results), lost]
    assert [line.split() for line in gpu_proof.table(results, problems).splitlines()] == [
        ["NODE", "GPUS", "OK", "FAILED", "BUSY", "SKIPPED", "REASONS"],
        ["lost", "0", "0", "0", "0", "0", "node_missing"],
        ["node00001", "3", "1", "2", "0", "0", "wrong_gpu", "(2x)"],
        ["node00000", "2", "1", "0", "1", "0", "gpu_busy"],
    ]
    assert gpu_proof.table(results, problems, 1).splitlines()[-1] == "... and 2 more nodes"
    assert gpu_proof.table(results, problems, 3) == gpu_proof.table(results, problems)
    assert gpu_proof.counts(results) == {"ok": 2, "failed": 2, "busy": 1, "skipped": 0}


def test_job_of_which_nomad_tells_no_evaluation_has_no_obstacle() -> None:
    run: Any = types.SimpleNamespace(client=types.SimpleNamespace(call=lambda *_request: None))
    assert running._obstacles(run, "job", {}) == {}
