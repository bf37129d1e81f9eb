# Copyright (c) gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which calls are made, and what becomes of their answers; then real processes that hang, crash and linger."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpufarm.core.plugins.module_utils import commands, health, nvidia_smi
from ansible_collections.gpufarm.core.plugins.module_utils.commands import Command
from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi import (
    collect,
    failures,
    gathering,
    node,
    resolve_subsets,
)
from ansible_collections.gpufarm.core.plugins.module_utils.problem import FoundError
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils.recorded import assert_recorded

CORPUS = Path(__file__).parent / "nvidia_smi_corpus"
BINARY = "/usr/bin/nvidia-smi"
QUERY = (
    "--query-gpu=index,name,uuid,pci.bus_id,driver_version,memory.total,memory.used,serial,persistence_mode,"
    "compute_mode,mig.mode.current,mig.mode.pending,compute_cap,pstate",
    "--format=csv,noheader,nounits",
)
FULL = ("-q", "-x")
VERSION = ("--version",)
LIST = ("-L",)
NVLINK = ("nvlink", "-s", "-e")
WAYS = ("topo", "-m")
DEFAULT = resolve_subsets(nvidia_smi.DEFAULT_SUBSETS)
ALL = resolve_subsets(["all"])
LOST = "Unable to determine the device handle for GPU 0000:0B:00.0: GPU is lost.  Reboot the system to recover this GPU"


def recorded(name: str) -> str:
    return (CORPUS / name).read_text(encoding="utf-8")


H100 = recorded("580.159.04-h100-queried.xml")
# The state was recorded in a call of its own (580.159.04-h100-queried.query.json).
H100_ROW = recorded("580.159.04-h100-queried.csv").strip() + ", P0\n"
H100_UUID = "GPU-c380f658-bd4a-b014-68f9-4074e00168ab"
A100_MIG = recorded("510.47.03-a100-40gb-mig.xml")
A100_UUID = re.search("<uuid>(.*)</uuid>", A100_MIG)[1]  # type: ignore[index]


def row(index: int, bus: str, mig: str = "Disabled") -> str:
    """The recorded line as another GPU of the same host would give it."""
    uuid = f"GPU-{index:08d}"
    line = H100_ROW.replace(H100_UUID, uuid).replace("00000000:00:06.0", f"00000000:{bus}:00.0")
    return line.replace("0, NVIDIA", f"{index}, NVIDIA", 1).replace("Disabled, Disabled", f"{mig}, {mig}")


class Recorder:
    """Stands in for run_commands: answers by arguments and remembers every call, batch by batch."""

    def __init__(self, answers: dict[tuple[str, ...], Any]) -> None:
        self.answers = answers
        self.batches: list[list[tuple[str, ...]]] = []
        self.timeouts: list[float] = []

    def __call__(self, argvs: Sequence[Sequence[str]], timeout: float) -> list[Command]:
        self.batches.append([tuple(argv) for argv in argvs])
        self.timeouts.append(timeout)
        commands = []
        for argv in argvs:
            assert argv[0] == BINARY
            answer = self.answers.get(tuple(argv[1:]), (255, "ERROR: Option is not recognized."))
            if not isinstance(answer, Command):
                answer = Command((), *answer)
            commands.append(Command(tuple(argv), *list(vars(answer).values())[1:]))
        return commands

    @property
    def calls(self) -> list[list[tuple[str, ...]]]:
        return [[argv[1:] for argv in batch] for batch in self.batches]


@pytest.fixture(autouse=True)
def _found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "find_nvidia_smi", lambda *_: BINARY)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def kernel_gpu(root: Path, minor: int, bus: str, device: bool = True, excluded: str = "No") -> None:
    text = recorded("580.159.04-h100-queried.information.txt").replace(H100_UUID, f"GPU-{minor:08d}")
    text = text.replace("Device Minor: 	 0", f"Device Minor: 	 {minor}").replace(
        "Excluded:	 No", f"Excluded:	 {excluded}"
    )
    write(root / f"proc/driver/nvidia/gpus/0000:{bus}:00.0/information", text)
    if device:
        write(root / f"dev/nvidia{minor}", "")


# Which calls are made


def test_default_is_one_listing_call_with_the_version_beside_it(tmp_path: Path) -> None:
    run = Recorder({QUERY: (0, H100_ROW), VERSION: (0, recorded("580.159.04-h100-queried.version.txt"))})
    facts = collect(DEFAULT, run=run, root=str(tmp_path))
    assert run.calls == [[QUERY, VERSION]]
    assert (facts["available"], facts["reason"], facts["message"]) == (True, None, None)
    assert (facts["driver_version"], facts["cuda_version"], facts["platform"]) == ("580.159.04", "13.0", "linux")
    (gpu,) = facts["gpus"]
    assert (gpu["name"], gpu["memory_total_mib"], gpu["mig_devices"]) == ("NVIDIA H100 80GB HBM3", 81559, [])
    assert gpu["power_draw_w"] is None


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (nixbld@)  \n", "open"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23 10:11:16 UTC 2025\n", "proprietary"),
        ("", None),
        (None, None),
    ],
)
def test_of_which_kind_the_loaded_module_is(tmp_path: Path, said: str | None, kind: str | None) -> None:
    """An H200's words, and NVIDIA's own of a proprietary one."""
    if said is not None:
        write(tmp_path / "proc/driver/nvidia/version", said)
    run = Recorder({QUERY: (0, H100_ROW), VERSION: (0, "")})
    assert collect(DEFAULT, run=run, root=str(tmp_path))["kernel_modules"] == kind


def test_all_is_the_full_query_with_the_links_beside_it(tmp_path: Path) -> None:
    run = Recorder({FULL: (0, H100), NVLINK: (0, ""), WAYS: (0, "")})
    facts = collect(ALL, run=run, root=str(tmp_path))
    assert run.calls == [[FULL, NVLINK, WAYS]]
    (gpu,) = facts["gpus"]
    assert (gpu["power_draw_w"], gpu["nvlinks"], facts["cuda_version"]) == (70.53, [], "13.0")


@pytest.mark.parametrize("subset", sorted(set(nvidia_smi.SUBSETS) - {"min", "mig", "topology", "nvlink", "peers"}))
def test_each_other_subset_is_the_full_query_alone(tmp_path: Path, subset: str) -> None:
    run = Recorder({FULL: (0, H100)})
    facts = collect(resolve_subsets(["!min", subset]), run=run, root=str(tmp_path))
    assert run.calls == [[FULL]]
    gpu = facts["gpus"][0]
    assert gpu["memory_total_mib"] is None
    assert gpu["uuid"] == H100_UUID
    known = [key for key in nvidia_smi.SUBSETS[subset] if gpu[key] not in (None, [])]
    assert known or subset in ("fabric", "processes")


def test_nvlink_alone_needs_no_full_query(tmp_path: Path) -> None:
    links = recorded("590.48.01-h200.nvlink.txt")
    uuid = re.search(r"UUID: (.*)\)", links)[1]  # type: ignore[index]
    run = Recorder({QUERY: (0, H100_ROW.replace(H100_UUID, uuid)), NVLINK: (0, links)})
    facts = collect(resolve_subsets(["nvlink"]), run=run, root=str(tmp_path))
    assert run.calls == [[QUERY, VERSION, NVLINK]]
    assert len(facts["gpus"][0]["nvlinks"]) == 18


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (2, "Option -e is not recognized."),
        (0, "GPU 0: X (UUID: {uuid})\n Link 0: Replay Errors: 0\n"),
        (0, "GPU 0: X (UUID: {uuid})\n Link 0: 26.562 GB/s\n Link 0: cut"),
    ],
)
def test_links_of_a_driver_that_does_not_tell_errors_too(tmp_path: Path, code: int, told: str) -> None:
    links = f"GPU 0: X (UUID: {H100_UUID})\n Link 0: 26.562 GB/s\n"
    run = Recorder({FULL: (0, H100), NVLINK: (code, told.format(uuid=H100_UUID)), NVLINK[:2]: (0, links)})
    (gpu,) = collect(ALL, run=run, root=str(tmp_path))["gpus"]
    assert [(link["active"], link["recovery_errors"]) for link in gpu["nvlinks"]] == [(True, None)]


def test_a_gpu_without_links_is_asked_once(tmp_path: Path) -> None:
    run = Recorder({FULL: (0, H100), NVLINK: (0, f"GPU 0: X (UUID: {H100_UUID})\n")})
    (gpu,) = collect(ALL, run=run, root=str(tmp_path))["gpus"]
    assert gpu["nvlinks"] == []
    assert [call for batch in run.calls for call in batch if call[0] == "nvlink"] == [NVLINK]


@pytest.mark.parametrize("answer", [(255, "ERROR"), (0, f"GPU 0: X (UUID: {H100_UUID})\n Link 0: dam"), (None, "")])
def test_links_that_cannot_be_had_are_null_and_no_failure(tmp_path: Path, answer: tuple[int | None, str]) -> None:
    run = Recorder({FULL: (0, H100), NVLINK: answer})
    facts = collect(ALL, run=run, root=str(tmp_path))
    assert (facts["available"], facts["gpus"][0]["nvlinks"]) == (True, None)


L40S, IN_MIG = (recorded(f"{name}.nvlink.txt") for name in ("595.80-l40s", "590.48.01-h200-mig"))
HUNG = Command((), None, timed_out=True, limit=60.0)
VGPU = H100.replace("<virtualization_mode>Pass-Through<", "<virtualization_mode>VGPU<")


@pytest.mark.parametrize(
    ("xml", "wsl", "answer", "why"),
    [
        (H100, False, (255, "ERROR"), "nvidia-smi nvlink -s ended with exit code 255 and said: ERROR"),
        (H100, False, (15, LOST), f"nvidia-smi nvlink -s ended with exit code 15 and said: {LOST}".replace("  ", " ")),
        (H100, False, (-11, ""), "nvidia-smi nvlink -s was ended by signal 11"),
        (H100, False, HUNG, "nvidia-smi nvlink -s -e gave no answer within 60 s and was killed"),
        (H100, False, (0, f"GPU 0: X (UUID: {H100_UUID})\n Link 0: dam"), "no link's state: 'Link 0: dam'."),
        # As recorded, with the codes that came with it; nothing is wrong there.
        (H100, False, (0, L40S.replace("GPU-00000000-0000-0000-0000-000000000000", H100_UUID)), None),
        (H100, False, (0, IN_MIG.replace("GPU-00000000-0000-0000-0000-000000000000", H100_UUID)), None),
        (H100, False, (0, "NVML: Unable to retrieve Nvlink information as all links are inActive"), None),
        (H100, False, (2, 'Option "-s" is not recognized.'), None),
        (H100, False, (255, "ERROR: Option nvlink is not recognized. Please run 'nvidia-smi -h'."), None),
        (H100, False, (14, f"GPU 0: X (UUID: {H100_UUID})\nWARNING: infoROM is corrupted at gpu 0000:00:06.0"), None),
        # The words and codes of NVML.
        (H100, False, (3, ""), None),
        (H100, False, (255, "Unable to retrieve NVLink information: Not Supported"), None),
        (H100, False, (255, L40S), None),
        (H100, False, (255, IN_MIG), None),
        (H100, True, (255, "ERROR"), None),
        (VGPU, False, (255, "ERROR"), None),
    ],
)
def test_links_that_could_not_be_asked_are_told(
    tmp_path: Path, xml: str, wsl: bool, answer: Any, why: str | None
) -> None:
    assert VGPU != H100
    if wsl:
        write(tmp_path / "proc/sys/kernel/osrelease", "6.6.87.2-microsoft-standard-WSL2\n")
    failed: dict[str, str] = {}
    run = Recorder({FULL: (0, xml), NVLINK: answer, NVLINK[:2]: answer})
    facts = collect(ALL, run=run, root=str(tmp_path), failed=failed)
    assert facts["available"]
    assert list(failed) == (["nvlink"] if why else [])
    assert (why or "") in failed.get("nvlink", "")


def test_driver_without_version_option_leaves_cuda_version_null(tmp_path: Path) -> None:
    run = Recorder({QUERY: (0, H100_ROW)})
    facts = collect(DEFAULT, run=run, root=str(tmp_path))
    assert (facts["available"], facts["driver_version"], facts["cuda_version"]) == (True, "580.159.04", None)


def test_fields_that_an_old_driver_refuses_are_left_out_one_by_one(tmp_path: Path) -> None:
    without_one = (QUERY[0].replace(",compute_cap", ""), QUERY[1])
    without_both = (without_one[0].replace(",mig.mode.pending", ""), QUERY[1])
    refusal = recorded("580.159.04-unknown-field.failure.txt").split("exit code")[0]
    run = Recorder(
        {
            QUERY: (2, refusal.replace("foo.bar", "compute_cap")),
            without_one: (2, refusal.replace("foo.bar", "mig.mode.pending")),
            without_both: (0, H100_ROW.replace(", Disabled, 9.0", "")),
        }
    )
    facts = collect(DEFAULT, run=run, root=str(tmp_path))
    assert run.calls == [[QUERY, VERSION], [without_one], [without_both]]
    gpu = facts["gpus"][0]
    assert (gpu["mig_mode"], gpu["mig_mode_pending"], gpu["architecture"]) == ("Disabled", None, None)
    assert gpu["memory_total_mib"] == 81559


@pytest.mark.parametrize("field", ["uuid", "no.such"])
def test_a_refused_field_that_cannot_be_left_out_ends_it(tmp_path: Path, field: str) -> None:
    run = Recorder({QUERY: (2, f'Field "{field}" is not a valid field to query.\n')})
    facts = collect(DEFAULT, run=run, root=str(tmp_path))
    assert run.calls == [[QUERY, VERSION]]
    assert (facts["available"], facts["reason"]) == (False, "unsupported")


# MIG


def mig_list(uuid: str) -> str:
    lines = recorded("590.48.01-h100-mig.list.txt").splitlines()
    return "\n".join([re.sub("GPU-[0-9-]+", uuid, lines[0]), *lines[1:3]]) + "\n"


def test_mig_known_to_the_kernel_is_listed_beside_the_main_call(tmp_path: Path) -> None:
    write(tmp_path / "proc/driver/nvidia/capabilities/gpu0/mig/gi1/access", "")
    run = Recorder({QUERY: (0, row(0, "00", "Enabled")), LIST: (0, mig_list("GPU-00000000"))})
    facts = collect(DEFAULT, run=run, root=str(tmp_path))
    assert run.calls == [[QUERY, VERSION, LIST]]
    profiles = [device["profile"] for device in facts["gpus"][0]["mig_devices"]]
    assert profiles == ["3g.40gb", "2g.20gb"]


def test_mig_that_only_nvidia_smi_knows_is_listed_afterwards(tmp_path: Path) -> None:
    run = Recorder({FULL: (0, A100_MIG), LIST: (0, mig_list(A100_UUID)), NVLINK: (0, ""), WAYS: (0, "")})
    facts = collect(ALL, run=run, root=str(tmp_path))
    assert run.calls == [[FULL, NVLINK, WAYS], [LIST]]
    device = facts["gpus"][0]["mig_devices"][1]
    assert (device["profile"], device["gpu_instance_id"], device["memory_total_mib"]) == ("2g.20gb", 2, 19968)
    assert device["uuid"] == "MIG-00000001-0000-0000-0000-000000000001"


def test_mig_list_that_fails_leaves_what_the_xml_has(tmp_path: Path) -> None:
    run = Recorder({FULL: (0, A100_MIG), LIST: (0, "GPU 0: dam")})
    facts = collect(ALL, run=run, root=str(tmp_path))
    device = facts["gpus"][0]["mig_devices"][0]
    assert (device["uuid"], device["gpu_instance_id"]) == (None, 1)


@pytest.mark.parametrize(
    ("mig", "answer", "why"),
    [
        ("Enabled", (255, "ERROR"), "nvidia-smi -L ended with exit code 255 and said: ERROR"),
        ("Enabled", HUNG, "nvidia-smi -L gave no answer within 60 s and was killed"),
        ("Enabled", (0, "GPU 0: dam"), "nvidia-smi -L printed a line that names no GPU or MIG device: 'GPU 0: dam'."),
        # Another GPU is lost.
        ("Enabled", (15, mig_list("GPU-00000000")), None),
        ("Enabled", (0, mig_list("GPU-another")), None),
        ("Disabled", (255, "ERROR"), None),
    ],
)
def test_mig_devices_that_could_not_be_asked_are_told(tmp_path: Path, mig: str, answer: Any, why: str | None) -> None:
    failed: dict[str, str] = {}
    collect(DEFAULT, run=Recorder({QUERY: (0, row(0, "00", mig)), LIST: answer}), root=str(tmp_path), failed=failed)
    assert list(failed) == (["mig"] if why else [])
    assert (why or "") in failed.get("mig", "")


def test_mig_is_not_listed_when_not_asked_for(tmp_path: Path) -> None:
    write(tmp_path / "proc/driver/nvidia/capabilities/gpu0/mig/gi1/access", "")
    run = Recorder({QUERY: (0, row(0, "00", "Enabled"))})
    facts = collect(resolve_subsets(["min"]), run=run, root=str(tmp_path))
    assert run.calls == [[QUERY, VERSION]]
    assert facts["gpus"][0]["mig_devices"] is None


# What the kernel adds


def test_minor_number_numa_node_and_cpus_come_from_the_kernel(tmp_path: Path) -> None:
    kernel_gpu(tmp_path, 3, "0a")
    device = tmp_path / "sys/bus/pci/devices/0000:0a:00.0"
    write(device / "numa_node", "1\n")
    write(device / "local_cpulist", "32-63\n")
    facts = collect(DEFAULT, run=Recorder({QUERY: (0, row(0, "0A"))}), root=str(tmp_path))
    gpu = facts["gpus"][0]
    assert (gpu["minor_number"], gpu["numa_node"], gpu["cpu_affinity"]) == (3, 1, "32-63")


@pytest.mark.parametrize(("online", "node"), [("0\n", 0), ("0-1\n", None)])
def test_a_device_without_node_is_on_the_only_one(tmp_path: Path, online: str, node: int | None) -> None:
    write(tmp_path / "sys/bus/pci/devices/0000:00:06.0/numa_node", "-1\n")
    write(tmp_path / "sys/devices/system/node/online", online)
    facts = collect(DEFAULT, run=Recorder({QUERY: (0, H100_ROW)}), root=str(tmp_path))
    assert facts["gpus"][0]["numa_node"] == node


def test_the_root_bus_is_that_of_the_place_to_which_the_address_leads(tmp_path: Path) -> None:
    place = tmp_path / "sys/devices/pci0000:16/0000:16:01.0/0000:17:00.0/0000:0a:00.0"
    place.mkdir(parents=True)
    (tmp_path / "sys/bus/pci/devices").mkdir(parents=True)
    (tmp_path / "sys/bus/pci/devices/0000:0a:00.0").symlink_to(place)
    run = Recorder({QUERY: (0, row(0, "0A") + row(1, "0B"))})
    facts = collect(DEFAULT, run=run, root=str(tmp_path))
    assert [gpu["pci_root"] for gpu in facts["gpus"]] == ["0000:16", None]


MATRIX = """
\tGPU0\tGPU1\tGPU2\tCPU Affinity
GPU0\t X \tNV18\tSYS\t0-31
GPU1\tNV18\t X \tNODE\t0-31
GPU2\tSYS\tNODE\t X \t32
"""


@pytest.mark.parametrize(
    ("answer", "peers"),
    [
        ((0, MATRIX), [[{"index": 1, "links": 18}], [{"index": 0, "links": 18}], []]),
        ((0, ""), [[], [], []]),
        ((255, ""), [None] * 3),
        ((None, ""), [None] * 3),
    ],
)
def test_whom_nvlink_reaches(tmp_path: Path, answer: tuple[int | None, str], peers: list[Any]) -> None:
    rows = "".join(row(number, f"0{number}") for number in range(3))
    run = Recorder({QUERY: (0, rows), WAYS: answer})
    facts = collect(resolve_subsets(["peers"]), run=run, root=str(tmp_path))
    assert run.calls == [[QUERY, VERSION, WAYS]]
    assert [gpu["nvlink_peers"] for gpu in facts["gpus"]] == peers


@pytest.mark.parametrize(
    ("namespace", "cpus"), [(node.HOST_PID_NAMESPACE, "32-63"), ("pid:[4026532001]", None), ("", None)]
)
def test_where_a_process_may_run_is_told_by_the_host_alone(tmp_path: Path, namespace: str, cpus: str | None) -> None:
    (tmp_path / "proc/self/ns").mkdir(parents=True)
    if namespace:
        (tmp_path / "proc/self/ns/pid").symlink_to(namespace)
    write(tmp_path / "proc/29907/status", "Name:\tpython3\nCpus_allowed:\tff\nCpus_allowed_list:\t32-63\n")
    process = "<process_info><pid>{}</pid><type>C</type><process_name>a</process_name></process_info>"
    document = re.sub(
        r"<processes>.*?</processes>", f"<processes>{process.format(29907)}{process.format(4)}</processes>", H100,
        flags=re.DOTALL,
    )  # fmt: skip
    (gpu,) = collect(resolve_subsets(["processes"]), run=Recorder({FULL: (0, document)}), root=str(tmp_path))["gpus"]
    assert [process["cpu_affinity"] for process in gpu["processes"]] == [cpus, None]


def test_topology_is_null_when_not_asked_for(tmp_path: Path) -> None:
    write(tmp_path / "sys/bus/pci/devices/0000:00:06.0/numa_node", "1\n")
    facts = collect(resolve_subsets(["min"]), run=Recorder({QUERY: (0, H100_ROW)}), root=str(tmp_path))
    assert facts["gpus"][0]["numa_node"] is None


@pytest.mark.parametrize(
    ("files", "platform"),
    [
        ({}, "linux"),
        ({"proc/sys/kernel/osrelease": "6.1.0-18-amd64"}, "linux"),
        ({"proc/sys/kernel/osrelease": "5.15.167.4-microsoft-standard-WSL2"}, "wsl"),
        ({"proc/sys/kernel/osrelease": "6.6.1-mine", "dev/dxg": "", "usr/lib/wsl/lib/nvidia-smi": ""}, "wsl"),
        ({"proc/sys/kernel/osrelease": "6.6.1-mine", "dev/dxg": ""}, "linux"),
    ],
)
def test_platform(tmp_path: Path, files: dict[str, str], platform: str) -> None:
    for name, text in files.items():
        write(tmp_path / name, text)
    assert collect(DEFAULT, run=Recorder({}), root=str(tmp_path))["platform"] == platform


# Failures


@pytest.mark.parametrize("subsets", [DEFAULT, ALL])
@pytest.mark.parametrize(
    ("code", "words", "reason"),
    [
        (9, "535.261.03-driver-not-loaded", "driver_not_loaded"),
        (12, "550.163.01-library-not-found", "library_not_found"),
        (6, "580.159.04-no-devices", "no_devices"),
        (18, "Failed to initialize NVML: Driver/library version mismatch", "library_mismatch"),
        (255, "Failed to initialize NVML: GPU access blocked by the operating system", "access_blocked"),
        (255, "Failed to initialize NVML: Unknown Error", "unknown_error"),
        (4, "Failed to initialize NVML: Insufficient Permissions", "permission_denied"),
        (0, "No devices were found", "no_devices"),
        (0, "", "no_devices"),
        (0, "Something quite different", "invalid_output"),
        (-11, "", "crashed"),
    ],
)
def test_failures_are_facts(tmp_path: Path, subsets: frozenset[str], code: int, words: str, reason: str) -> None:
    if words[:1].isdigit():
        words = recorded(f"{words}.failure.txt").rsplit("exit code", 1)[0]
    run = Recorder({QUERY: (code, words), FULL: (code, words)})
    facts = collect(subsets, run=run, root=str(tmp_path))
    assert (facts["available"], facts["reason"], facts["gpus"]) == (False, reason, [])
    assert facts["message"].startswith(f"{BINARY} -")
    assert facts["message"].endswith(nvidia_smi.NEXT_STEPS[reason])
    assert " ".join(words.split()).rstrip(".") in facts["message"]
    assert len(run.calls) == 1


def test_every_failure_as_recorded() -> None:
    told: dict[str, Any] = {}
    for needle, _reason in failures._MESSAGES:
        told[f"1, {needle}"] = failures.classify(1, f"X {needle.upper()} y")
    for code in [None, *range(-1, 21), 255]:
        told[str(code)] = failures.classify(code, "nothing known")
    for reason in nvidia_smi.REASONS:
        for command in (
            Command(("/x/nvidia-smi", "-q"), 9),
            Command(("/x/nvidia-smi", "-q"), -11),
            Command(("/x/nvidia-smi",), None, timed_out=True, limit=59.98765),
            Command(("/x/nvidia-smi",), None, error="Permission denied"),
        ):
            told.setdefault(f"explained {reason}", []).append(
                failures.explain(command, reason, " said\n so. ", "linux")
            )
        told[f"explained {reason}"].append(failures.explain(command, reason, "y" * 500, "linux"))
        told[f"explained {reason}"].append(failures.explain(command, reason, "", "linux"))
    assert_recorded("nvidia-smi-failures", told)


MIXED = "Unable to determine the device handle for GPU{}: 0000:{}1:00.0: Unknown Error\n"


@pytest.mark.parametrize("subsets", [DEFAULT, ALL])
@pytest.mark.parametrize(
    ("code", "words", "reason", "step"),
    [
        (12, "NVIDIA-SMI couldn't find libnvidia-ml.so library in your system.", "library_not_found", "never one here"),
        (
            9,
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
            "driver_not_loaded",
            "driver in Windows",
        ),
        (18, "Failed to initialize NVML: Driver/library version mismatch", "library_mismatch", "go to Windows"),
        (255, "Failed to initialize NVML: GPU access blocked by the operating system", "access_blocked", "TCC mode"),
        # One card is in TCC mode and one is not, WSL#13027.
        (6, MIXED.format(0, "C") + MIXED.format(1, "E") + "No devices were found", "gpu_lost", "TCC mode"),
    ],
)
def test_what_fails_under_wsl_is_mended_in_windows(
    tmp_path: Path, subsets: frozenset[str], *, code: int, words: str, reason: str, step: str
) -> None:
    write(tmp_path / "proc/sys/kernel/osrelease", "5.15.167.4-microsoft-standard-WSL2")
    answers = dict.fromkeys((QUERY, FULL, LIST), (code, words))
    facts = collect(subsets, run=Recorder(answers), root=str(tmp_path))
    assert (facts["available"], facts["reason"], facts["gpus"]) == (False, reason, [])
    found, advice = str(facts["message"]).removesuffix(failures.WSL_STEPS[reason]), failures.WSL_STEPS[reason]
    assert found != facts["message"] and " ".join(words.split()).rstrip(".") in found and step in advice
    (problem,) = health.judge(facts, [], [], health.HealthOptions(), host="pc")["problems"]
    assert problem["message"].partition("Next step: ")[2][1:] == advice[1:] and advice not in problem["found"]


def test_under_wsl_nothing_of_linux_is_advised() -> None:
    advised = [failures.next_step(reason, "wsl") for reason in nvidia_smi.REASONS]
    assert not re.findall("modprobe|lspci|Xid|einstall|/dev/nvidia|gpu-reset|Reboot", "\n".join(advised))


def test_mismatch_names_the_loaded_module(tmp_path: Path) -> None:
    write(tmp_path / "sys/module/nvidia/version", "535.129.03\n")
    run = Recorder({QUERY: (18, "Failed to initialize NVML: Driver/library version mismatch\n")})
    assert "The loaded kernel module is 535.129.03." in collect(DEFAULT, run=run, root=str(tmp_path))["message"]


def test_timeout_is_a_fact_and_nothing_is_tried_after_it(tmp_path: Path) -> None:
    kernel_gpu(tmp_path, 0, "00")
    run = Recorder({FULL: Command((), None, LOST, timed_out=True, limit=5.0)})
    facts = collect(ALL, timeout=5, run=run, root=str(tmp_path))
    assert (facts["available"], facts["reason"]) == (False, "timeout")
    assert "gave no answer within 5 s and was killed" in facts["message"]
    assert len(run.calls) == 1
    assert run.timeouts[0] <= 5


@pytest.mark.parametrize(("error", "reason"), [("Permission denied", "permission_denied"), ("No", "unknown_error")])
def test_a_program_that_cannot_be_started_is_a_fact(tmp_path: Path, error: str, reason: str) -> None:
    run = Recorder({QUERY: Command((), None, error=error)})
    facts = collect(DEFAULT, run=run, root=str(tmp_path))
    assert facts["reason"] == reason
    assert f"could not be started: {error}. " in facts["message"]


def test_no_program_is_a_fact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "find_nvidia_smi", lambda *_: None)
    facts = collect(DEFAULT, run=Recorder({}), root=str(tmp_path))
    assert (facts["available"], facts["reason"]) == (False, "not_installed")
    assert "in PATH and in /usr/lib/wsl/lib" in facts["message"]


@pytest.mark.parametrize("position", [20, 500, len(H100) - 30])
def test_truncated_output_is_a_fact(tmp_path: Path, position: int) -> None:
    facts = collect(ALL, run=Recorder({FULL: (0, H100[:position])}), root=str(tmp_path))
    assert (facts["available"], facts["reason"], facts["gpus"]) == (False, "invalid_output", [])


def test_a_warning_after_the_answer_is_no_failure(tmp_path: Path) -> None:
    warning = "WARNING: infoROM is corrupted at gpu 0000:00:06.0\n"
    run = Recorder({FULL: (14, H100 + warning), QUERY: (14, H100_ROW + warning)})
    assert collect(ALL, run=run, root=str(tmp_path))["available"]
    assert collect(DEFAULT, run=run, root=str(tmp_path))["available"]


@pytest.mark.parametrize(("bus", "corrupted"), [("0000:00:06.0", True), ("0000:00:07.0", False)])
def test_a_corrupted_inforom_is_told_of_its_gpu(tmp_path: Path, bus: str, corrupted: bool) -> None:
    run = Recorder({FULL: (14, f"{H100}\nWARNING: infoROM is corrupted at gpu {bus}\n")})
    assert collect(ALL, run=run, root=str(tmp_path))["gpus"][0]["inforom_corrupted"] is corrupted
    assert collect(ALL, run=Recorder({FULL: (0, H100)}), root=str(tmp_path))["gpus"][0]["inforom_corrupted"] is False


SENSORS = ("gpu_temp", "average_power_draw", "instant_power_draw", "gpu_util", "performance_state", "sm_clock", "used")


def test_a_gpu_whose_sensors_all_fail_is_a_reason(tmp_path: Path) -> None:
    document = H100
    for tag in SENSORS:
        document = re.sub(rf"<{tag}>[^<]*</{tag}>", f"<{tag}>ERR!</{tag}>", document)
    facts = collect(ALL, run=Recorder({FULL: (0, document)}), root=str(tmp_path))
    assert (facts["available"], facts["reason"], facts["gpus"][0]["status"]) == (False, "unknown_error", "unreadable")
    assert facts["message"] == (
        "GPU 00000000:00:06.0: Its sensors answer with errors only: temperature_gpu_c, power_draw_w, "
        "utilization_gpu_percent, performance_state, clocks.sm_mhz, memory_used_mib. "
        + nvidia_smi.NEXT_STEPS["unknown_error"]
    )


def test_words_are_clean(tmp_path: Path) -> None:
    write(tmp_path / "sys/module/nvidia/version", "535\x1b[2J\n")
    words = "Failed to initialize NVML: Driver/library version mismatch\x1b]0;title\x07"
    message = collect(DEFAULT, run=Recorder({QUERY: (18, words)}), root=str(tmp_path))["message"]
    assert message.isprintable() and "mismatch ]0;title" in message and "kernel module is 535 [2J." in message


# A GPU that is lost


@pytest.mark.parametrize("words", [LOST, "Unable to determine the device handle for GPU0000:0B:00.0: Unknown Error"])
@pytest.mark.parametrize("code", [15, 255, 0])
def test_a_lost_gpu_that_fails_the_call_for_all_leaves_the_others(tmp_path: Path, words: str, code: int) -> None:
    for minor, bus in enumerate(("0a", "0b", "0c")):
        kernel_gpu(tmp_path, minor, bus)
    alone = {bus: (*QUERY, "-i", f"0000:{bus}:00.0") for bus in ("0a", "0b", "0c")}
    run = Recorder(
        {
            QUERY: (code, words + "\n"),
            alone["0a"]: (0, row(0, "0A")),
            alone["0b"]: (15, words + "\n"),
            alone["0c"]: (0, row(2, "0C")),
        }
    )
    facts = collect(DEFAULT, run=run, root=str(tmp_path))
    assert run.calls == [[QUERY, VERSION], [alone["0a"], alone["0b"], alone["0c"]]]
    assert (facts["available"], facts["reason"], facts["driver_version"]) == (True, "gpu_lost", "580.159.04")
    assert facts["message"].startswith("GPU 00000000:0B:00.0: ")
    assert facts["message"].endswith(nvidia_smi.NEXT_STEPS["gpu_lost"])
    assert [gpu["index"] for gpu in facts["gpus"]] == [0, 1, 2]
    assert [gpu["status"] for gpu in facts["gpus"]] == ["ok", "lost", "ok"]
    lost = facts["gpus"][1]
    assert (lost["uuid"], lost["minor_number"], lost["memory_total_mib"]) == ("GPU-00000001", 1, None)
    assert lost["name"] == "NVIDIA H100 80GB HBM3"
    assert "unable to determine the device handle" in lost["status_message"].lower()
    assert lost.keys() == nvidia_smi.empty_gpu().keys()


def test_a_lost_gpu_that_breaks_the_xml_off_leaves_the_others(tmp_path: Path) -> None:
    kernel_gpu(tmp_path, 0, "00")
    kernel_gpu(tmp_path, 1, "0b")
    alone = {bus: (*FULL, "-i", f"0000:{bus}:00.0") for bus in ("00", "0b")}
    broken = H100[: H100.index("<product_brand>")] + LOST + "\n"
    second = H100.replace("00000000:00:06.0", "00000000:00:00.0")
    run = Recorder({FULL: (255, broken), alone["00"]: (0, second), alone["0b"]: (15, LOST)})
    facts = collect(resolve_subsets(["power"]), run=run, root=str(tmp_path))
    assert run.calls == [[FULL], [alone["00"], alone["0b"]]]
    assert [(gpu["index"], gpu["status"], gpu["power_draw_w"]) for gpu in facts["gpus"]] == [
        (0, "ok", 70.53),
        (1, "lost", None),
    ]
    assert (facts["reason"], facts["cuda_version"]) == ("gpu_lost", "13.0")


def test_without_the_kernels_list_the_others_come_from_the_listing(tmp_path: Path) -> None:
    listing = f"{LOST}\nGPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-00000001)\n"
    alone = (*QUERY, "-i", "GPU-00000001")
    run = Recorder({QUERY: (15, LOST), LIST: (15, listing), alone: (0, row(1, "0C"))})
    facts = collect(DEFAULT, run=run, root=str(tmp_path))
    assert run.calls == [[QUERY, VERSION], [LIST], [alone]]
    assert [(gpu["index"], gpu["pci_bus_id"], gpu["status"]) for gpu in facts["gpus"]] == [
        (0, "00000000:0B:00.0", "lost"),
        (1, "00000000:0C:00.0", "ok"),
    ]


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        ((0, H100[:2000]), "unreadable"),
        ((4, "Insufficient Permissions"), "unreadable"),
        ((17, ""), "unreadable"),
        ((-11, ""), "unreadable"),
        ((3, ""), "unreadable"),
        ((None, "", "", True), "unreadable"),
        ((16, ""), "reset_required"),
        ((15, ""), "lost"),
        ((10, ""), "lost"),
        ((255, "what?"), "lost"),
    ],
)
def test_why_a_gpu_does_not_answer_alone(tmp_path: Path, answer: tuple[Any, ...], status: str) -> None:
    kernel_gpu(tmp_path, 0, "0b")
    run = Recorder({FULL: (15, LOST), (*FULL, "-i", "0000:0b:00.0"): answer})
    facts = collect(resolve_subsets(["power"]), run=run, root=str(tmp_path))
    assert [gpu["status"] for gpu in facts["gpus"]] == [status]
    assert (facts["available"], facts["reason"] is None) == (False, False)


def test_a_gpu_about_which_nothing_is_said_is_lost(tmp_path: Path) -> None:
    kernel_gpu(tmp_path, 0, "0a")
    empty = H100[: H100.index("<gpu ")] + "</nvidia_smi_log>"
    run = Recorder({FULL: (15, LOST), (*FULL, "-i", "0000:0a:00.0"): (0, empty)})
    facts = collect(resolve_subsets(["power"]), run=run, root=str(tmp_path))
    found = {gpu["pci_bus_id"]: (gpu["status"], gpu["status_message"]) for gpu in facts["gpus"]}
    assert found["00000000:0A:00.0"] == ("lost", "nvidia-smi says nothing about 0000:0a:00.0.")


def test_gpus_behind_a_lost_one_keep_their_index(tmp_path: Path) -> None:
    """Asked alone, each GPU is the first of its document."""
    for minor, bus in enumerate(("0a", "0b")):
        kernel_gpu(tmp_path, minor, bus)
    alone = {bus: (*FULL, "-i", f"0000:{bus}:00.0") for bus in ("0a", "0b")}
    second = H100.replace("00000000:00:06.0", "00000000:0B:00.0")
    run = Recorder({FULL: (15, LOST), alone["0a"]: (15, LOST), alone["0b"]: (0, second)})
    facts = collect(resolve_subsets(["power"]), run=run, root=str(tmp_path))
    assert [(gpu["index"], gpu["status"]) for gpu in facts["gpus"]] == [(0, "lost"), (1, "ok")]


def test_a_listed_gpu_that_fails_alone_keeps_its_uuid(tmp_path: Path) -> None:
    listing = "".join(f"GPU {number}: NVIDIA H100 (UUID: GPU-0000000{number})\n" for number in (0, 1))
    alone = {number: (*QUERY, "-i", f"GPU-0000000{number}") for number in (0, 1)}
    run = Recorder({QUERY: (16, ""), LIST: (0, listing), alone[0]: (16, ""), alone[1]: (0, row(1, "0C"))})
    facts = collect(DEFAULT, run=run, root=str(tmp_path))
    found = {gpu["uuid"]: gpu["status"] for gpu in facts["gpus"]}
    assert found == {"GPU-00000000": "reset_required", "GPU-00000001": "ok"}
    assert (facts["available"], facts["reason"]) == (True, "reset_required")
    assert "GPU GPU-00000000: " in facts["message"]


def test_only_gpus_of_this_place_are_asked_alone(tmp_path: Path) -> None:
    kernel_gpu(tmp_path, 0, "0a")
    kernel_gpu(tmp_path, 1, "0b", device=False)
    alone = (*QUERY, "-i", "0000:0a:00.0")
    run = Recorder({QUERY: (15, ""), alone: (0, row(0, "0A"))})
    facts = collect(DEFAULT, run=run, root=str(tmp_path))
    assert run.calls == [[QUERY, VERSION], [alone]]
    assert [gpu["status"] for gpu in facts["gpus"]] == ["ok"]


def test_a_gpu_that_may_not_be_read_is_not_called_lost(tmp_path: Path) -> None:
    words = "Unable to determine the device handle for GPU 0000:0B:00.0: Insufficient Permissions"
    kernel_gpu(tmp_path, 0, "0a")
    kernel_gpu(tmp_path, 1, "0b")
    alone = {bus: (*QUERY, "-i", f"0000:{bus}:00.0") for bus in ("0a", "0b")}
    run = Recorder({QUERY: (4, words), alone["0a"]: (0, row(0, "0A")), alone["0b"]: (4, words)})
    facts = collect(DEFAULT, run=run, root=str(tmp_path))
    assert [gpu["status"] for gpu in facts["gpus"]] == ["ok", "unreadable"]
    assert (facts["available"], facts["reason"]) == (True, "permission_denied")
    assert "Insufficient Permissions" in facts["message"]


def test_a_gpu_that_hangs_alone_is_unreadable(tmp_path: Path) -> None:
    kernel_gpu(tmp_path, 0, "0a")
    alone = (*QUERY, "-i", "0000:0a:00.0")
    run = Recorder({QUERY: (16, ""), alone: Command((), None, timed_out=True, limit=1.0)})
    facts = collect(DEFAULT, run=run, root=str(tmp_path))
    assert (facts["gpus"][0]["status"], facts["available"], facts["reason"]) == ("unreadable", False, "reset_required")


def test_when_every_gpu_is_lost_none_is_available(tmp_path: Path) -> None:
    kernel_gpu(tmp_path, 0, "0b")
    alone = (*QUERY, "-i", "0000:0b:00.0")
    facts = collect(DEFAULT, run=Recorder({QUERY: (15, LOST), alone: (15, LOST)}), root=str(tmp_path))
    assert (facts["available"], facts["reason"], len(facts["gpus"])) == (False, "gpu_lost", 1)


def test_when_nothing_can_be_listed_the_failure_stays(tmp_path: Path) -> None:
    run = Recorder({QUERY: (15, LOST), LIST: (15, LOST)})
    facts = collect(DEFAULT, run=run, root=str(tmp_path))
    assert (facts["available"], facts["reason"], facts["gpus"]) == (False, "gpu_lost", [])


@pytest.mark.parametrize("subsets", [DEFAULT, ALL])
def test_a_lost_gpu_with_an_element_of_its_own_is_named(tmp_path: Path, subsets: frozenset[str]) -> None:
    lost = re.sub(r"<(gpu_temp|total|product_name)>[^<]*<", r"<\1>GPU is lost<", H100)
    gpus = H100[H100.index("<gpu ") : H100.index("</nvidia_smi_log>")]
    both = lost.replace("</nvidia_smi_log>", "\t" + gpus.replace("00:06.0", "00:07.0") + "</nvidia_smi_log>")
    both = both.replace("<attached_gpus>1<", "<attached_gpus>2<")
    first = row(0, "00").replace("81559, 0", "[GPU is lost], [GPU is lost]")
    run = Recorder({FULL: (0, both), QUERY: (0, first + row(1, "01"))})
    facts = collect(subsets, run=run, root=str(tmp_path))
    assert (facts["available"], facts["reason"]) == (True, "gpu_lost")
    assert [gpu["status"] for gpu in facts["gpus"]] == ["lost", "ok"]
    assert facts["gpus"][0]["pci_bus_id"] in facts["message"]
    assert facts["gpus"][0]["memory_total_mib"] is None


def test_a_gpu_that_must_be_reset_is_named(tmp_path: Path) -> None:
    run = Recorder({QUERY: (0, H100_ROW.replace("81559, 0", "[GPU requires reset], [GPU requires reset]"))})
    facts = collect(DEFAULT, run=run, root=str(tmp_path))
    assert (facts["available"], facts["reason"]) == (False, "reset_required")
    assert facts["message"].endswith(nvidia_smi.NEXT_STEPS["reset_required"])


def test_a_gpu_that_nvidia_smi_does_not_list_any_more_is_named(tmp_path: Path) -> None:
    kernel_gpu(tmp_path, 0, "0a")
    kernel_gpu(tmp_path, 1, "0b")
    facts = collect(DEFAULT, run=Recorder({QUERY: (0, row(0, "0A"))}), root=str(tmp_path))
    assert (facts["available"], facts["reason"]) == (True, "gpu_lost")
    assert [(gpu["index"], gpu["uuid"], gpu["status"]) for gpu in facts["gpus"]] == [
        (0, "GPU-00000000", "ok"),
        (None, "GPU-00000001", "lost"),
    ]
    assert "0000:0b:00.0, but nvidia-smi does not list it" in facts["message"]


@pytest.mark.parametrize("hidden", [{"device": False}, {"excluded": "Yes"}])
def test_a_gpu_that_is_kept_from_this_place_is_not_missing(tmp_path: Path, hidden: dict[str, Any]) -> None:
    kernel_gpu(tmp_path, 0, "0a")
    kernel_gpu(tmp_path, 1, "0b", **hidden)
    facts = collect(DEFAULT, run=Recorder({QUERY: (0, row(0, "0A"))}), root=str(tmp_path))
    assert (facts["reason"], len(facts["gpus"])) == (None, 1)


def test_an_empty_log_is_no_devices(tmp_path: Path) -> None:
    run = Recorder(
        {FULL: (0, "<?xml version='1.0'?><nvidia_smi_log><attached_gpus>0</attached_gpus></nvidia_smi_log>")}
    )
    facts = collect(ALL, run=run, root=str(tmp_path))
    assert (facts["available"], facts["reason"]) == (False, "no_devices")


# Real processes

LONG = 300.0
"""Seconds in which a machine that is busy with other things starts a process, too."""


class Clock:
    """Stands in for the time, which is up at once when what a process prints was read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, until: bytes, then: Callable[[], None] = lambda: None) -> None:
        self.late = 0.0
        monotonic, read = time.monotonic, os.read

        def read_on(descriptor: int, size: int) -> bytes:
            data = read(descriptor, size)
            if until in data:
                then()
                self.late = 2 * LONG
            return data

        monkeypatch.setattr(commands.time, "monotonic", lambda: monotonic() + self.late)
        monkeypatch.setattr(commands.os, "read", read_on)


def script(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def alive(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def assert_ends(pid: int) -> None:
    for _ in range(int(LONG / 0.02)):
        if not alive(pid):
            return
        time.sleep(0.02)
    raise AssertionError(f"{pid} still runs")


def test_output_code_and_environment_of_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    monkeypatch.setenv("GPUFARM_TEST", "kept")
    program = script(
        tmp_path / "smi", 'echo "$LC_ALL $GPUFARM_TEST $*"; echo err >&2; read line || echo no-input; exit 7'
    )
    (command,) = commands.run_commands([[program, "-q", "-x"]], LONG)
    assert (command.returncode, command.stdout, command.stderr) == (7, "C kept -q -x\nno-input\n", "err\n")
    assert command.argv == (program, "-q", "-x")
    assert not command.timed_out


def test_processes_run_at_the_same_time_and_keep_their_order(tmp_path: Path) -> None:
    others = " && ".join(f"[ -e {tmp_path}/{name} ]" for name in "abc")
    program = script(tmp_path / "smi", f'touch "{tmp_path}/$1"; until {others}; do sleep 0.02; done; echo "$1"')
    ended = commands.run_commands([[program, "c"], [program, "a"], [program, "b"]], LONG)
    assert [command.stdout.strip() for command in ended] == ["c", "a", "b"]


def test_a_process_that_hangs_is_killed_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = script(tmp_path / "smi", f"sleep 600 & echo $! > {tmp_path}/child; echo partly; wait")
    Clock(monkeypatch, b"partly")
    (command,) = commands.run_commands([[program]], LONG)
    assert (command.timed_out, command.returncode, command.stdout) == (True, None, "partly\n")
    assert command.limit == LONG
    assert_ends(int((tmp_path / "child").read_text()))


def test_a_child_that_keeps_the_pipe_open_does_not_make_it_a_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path
    program = script(folder / "smi", f"sleep 600 & echo $! > {folder}/child; echo $$ > {folder}/self; echo whole; exit")
    Clock(monkeypatch, b"whole", lambda: assert_ends(int((folder / "self").read_text())))
    (command,) = commands.run_commands([[program]], LONG)
    assert (command.timed_out, command.returncode, command.stdout) == (False, 0, "whole\n")
    assert_ends(int((tmp_path / "child").read_text()))


def test_a_process_that_ignores_signals_is_killed(tmp_path: Path) -> None:
    program = script(tmp_path / "smi", "trap '' TERM INT HUP; while :; do sleep 0.05; done")
    (command,) = commands.run_commands([[program]], 0.3)
    assert command.timed_out


def test_one_call_that_does_not_end_in_time_is_told(tmp_path: Path) -> None:
    program = script(tmp_path / "rpm", "exec sleep 600")
    with pytest.raises(
        FoundError, match=rf"^{program} did not end within 0.2 s. Expected: an answer. Next step: see what"
    ):
        commands.answer_of([program], 0.2)
    assert commands.answer_of([script(tmp_path / "true", "echo yes; exit 3")], LONG).returncode == 3


class Stuck:
    """A process that hangs in the driver, where no signal reaches it."""

    def __init__(self) -> None:
        self.returncode: int | None = None
        self.waited: list[float] = []

    def wait(self, timeout: float) -> int:
        self.waited.append(timeout)
        raise subprocess.TimeoutExpired("nvidia-smi", timeout)


def test_a_process_that_no_signal_reaches_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands.time, "monotonic", lambda: 100.0)
    process = Stuck()
    commands.reap(process, 102.5)  # type: ignore[arg-type]
    commands.reap(process, 90.0)  # type: ignore[arg-type]
    assert (process.waited, process.returncode) == ([2.5, 0.05], -9)


def test_a_crash_shows_its_signal(tmp_path: Path) -> None:
    (command,) = commands.run_commands([[script(tmp_path / "smi", "kill -SEGV $$")]], LONG)
    assert command.returncode == -11


def test_what_is_no_program_is_an_error_and_not_an_exception(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_bytes(b"\x7fELF nothing")
    broken.chmod(0o755)
    ended = commands.run_commands([[str(tmp_path / "none")], [str(broken)]], LONG)
    assert [command.returncode for command in ended] == [None, None]
    assert all(command.error and not command.timed_out for command in ended)


def test_endless_output_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "MAX_OUTPUT_BYTES", 200_000)
    (command,) = commands.run_commands([[script(tmp_path / "smi", "yes")]], LONG)
    assert len(command.stdout) < 1_000_000
    assert command.returncode == -9


def test_large_output_arrives_whole(tmp_path: Path) -> None:
    program = script(
        tmp_path / "smi", "i=0; while [ $i -lt 20000 ]; do echo 0123456789012345678901234567890; i=$((i+1)); done"
    )
    (command,) = commands.run_commands([[program]], LONG)
    assert len(command.stdout) == 20000 * 32


def test_bytes_that_are_no_text_are_replaced(tmp_path: Path) -> None:
    (command,) = commands.run_commands([[script(tmp_path / "smi", "printf 'a\\377b'")]], LONG)
    assert command.stdout == "a\ufffdb"


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    program = script(tmp_path / "smi", "sleep 60")
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  # a count, not paths
    commands.run_commands([[program], [str(tmp_path / "none")]], 0.1)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208  # a count, not paths


def test_the_kernel_tells_of_gpus_in_folders_with_an_address_only(tmp_path: Path) -> None:
    text = "Model: \t\t Tesla T4\n"
    for name in ("0000:01:00.0", "by-uuid"):
        write(tmp_path / f"proc/driver/nvidia/gpus/{name}/information", text)
    (tmp_path / "proc/driver/nvidia/gpus/0000:02:00.0").mkdir()
    assert list(node.kernel_gpus(tmp_path)) == ["0000:01:00.0"]
