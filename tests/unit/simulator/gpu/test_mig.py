"""MIG as the double lists and changes it: held to recordings (H100, driver 580.159, MIG off) and to NVIDIA's guide."""

from __future__ import annotations

import ast
import itertools
import os
import random
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.simulator.gpu import faults

from .conftest import FIXTURES, SIMULATOR, Node
from .test_libraries import CUDA, pynvml, python

MakeNode = Callable[[str], Node]

RECORDED = FIXTURES / "h100-mig"
root = pytest.mark.skipif(os.geteuid() != 0, reason="MIG is changed by root")


@dataclass(frozen=True)
class Call:
    """One recorded call and what it answered."""

    arguments: tuple[str, ...]
    output: str
    code: int


def recorded_calls() -> Iterator[Call]:
    text = (RECORDED / "calls.txt").read_text(encoding="utf-8")
    for command, output, code in re.findall(r"^\$ nvidia-smi(.*)\n((?:.*\n)*?)exit (\d+)\n", text, flags=re.MULTILINE):
        yield Call(tuple(command.split()), output, int(code))


def one_gpu(machine: Node) -> Node:
    """Leave GPU 0 alone visible."""
    for number in range(1, len(machine.profile["gpus"])):
        machine.hide(f"nvidia{number}")
    return machine


@pytest.fixture
def h100(node: MakeNode) -> Node:
    """Return a node with one H100, MIG off, and a /proc/driver as gpufarm-gpu-devices makes it."""
    machine = one_gpu(node("h100-x8"))
    (machine.root / "proc/driver/nvidia/capabilities/gpu0/mig").mkdir(parents=True)
    (machine.root / "proc/driver/nvidia-caps").mkdir()
    return machine


@pytest.fixture
def a100(node: MakeNode) -> Node:
    """Return a node with one A100, MIG off, and no service that makes instances."""
    machine = one_gpu(node("a100-mig-x2"))
    machine.change(lambda profile: faults.set_mig(profile, 0, None))
    machine.change(lambda profile: faults.set_value(profile, 0, "mig_at_boot", "N/A"))
    return machine


def said(machine: Node, *arguments: str) -> tuple[int, str]:
    done = machine.smi(*arguments)
    assert done.stderr == ""
    return done.returncode, done.stdout


def modes(machine: Node) -> list[str]:
    return machine.csv("mig.mode.current,mig.mode.pending", "-i", "0")[0]


def instances(machine: Node) -> list[tuple[str, int, int]]:
    """Return name, ID and start of the GPU instances, as -lgi lists them."""
    done = machine.smi("mig", "-lgi")
    found = re.findall(r"^\|\s+\d+  MIG (\S+)\s+\d+\s+(\d+)\s+(\d+):\d+\s+\|$", done.stdout, flags=re.MULTILINE)
    return [(name, int(number), int(start)) for name, number, start in found]


def free(machine: Node) -> dict[str, int]:
    rows = re.findall(r"MIG (\S+)\s+\d+\s+(\d+)/\d+ ", machine.output("mig", "-lgip"))
    return {name: int(count) for name, count in rows}


def devices(machine: Node) -> list[tuple[str, str]]:
    return re.findall(r"^  MIG (\S+) +Device +\d+: \(UUID: (MIG-\S+)\)$", machine.output("-L"), flags=re.MULTILINE)


def boot(machine: Node) -> None:
    """Change the profile as gpufarm-gpu-devices does, the first time after a boot."""
    tool = machine.build / "gpufarm-gpu-profile"
    subprocess.run([str(tool), "--boot", str(machine.profile_path)], env=machine.environment, check=True)


# -- recordings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", list(recorded_calls()), ids=lambda call: " ".join(call.arguments))
def test_the_double_answers_as_the_recording(h100: Node, call: Call) -> None:
    done = h100.smi(*call.arguments)
    wanted = re.sub(r"GPU-[0-9a-f-]{36}", h100.profile["gpus"][0]["uuid"], call.output)
    assert (done.stdout, done.returncode, done.stderr) == (wanted, call.code, "")


def test_the_recording_is_read_to_its_end() -> None:
    commands = [" ".join(call.arguments) for call in recorded_calls()]
    assert len(commands) == (RECORDED / "calls.txt").read_text().count("$ nvidia-smi") == 19
    assert {"mig -lgip", "mig -lgipp", "mig -cgi", "-mig 7", "-i 9 -mig 1"} <= set(commands)


@pynvml
def test_nvml_answers_as_the_recording(h100: Node) -> None:
    """NVML knows the profiles, their placements and their room with MIG off, too."""
    recorded = [line.split(" ", 2) for line in (RECORDED / "nvml.txt").read_text().splitlines() if line[0].isdigit()]
    details = re.findall(r"place 0 0 (.*)\n +remain 0 (\d+)", (RECORDED / "nvml.txt").read_text())
    answer = python(
        h100,
        """
        import ctypes
        from pynvml import *
        nvmlInit()
        gpu = nvmlDeviceGetHandleByIndex(0)
        library = ctypes.CDLL("libnvidia-ml.so.1")
        answer = []
        for kind in range(20):
            try:
                info = nvmlDeviceGetGpuInstanceProfileInfo(gpu, kind, version=2)
            except NVMLError as error:
                answer.append([error.value])
                continue
            places = (ctypes.c_uint * 64)()
            count = ctypes.c_uint(32)
            library.nvmlDeviceGetGpuInstancePossiblePlacements_v2(gpu, info.id, places, ctypes.byref(count))
            room = ctypes.c_uint()
            library.nvmlDeviceGetGpuInstanceRemainingCapacity(gpu, info.id, ctypes.byref(room))
            answer.append([
                0,
                {name: getattr(info, name) for name, _ in info._fields_ if name != "version"},
                list(zip(places[0:2 * count.value:2], places[1:2 * count.value:2])),
                room.value,
            ])
        """,
    )
    assert [one[0] for one in answer] == [int(line[1]) for line in recorded]
    known = [one for one in answer if len(one) > 1]
    assert len(known) == len(details) == 7
    for (_, found, places, room), line, (wanted_places, wanted_room) in zip(
        known, [line for line in recorded if len(line) > 2 and line[2]], details, strict=True
    ):
        wanted: dict[str, Any] = ast.literal_eval(line[2])
        names = {"mem": "memorySizeMB"}
        assert {names.get(key, key): value for key, value in wanted.items() if key not in ("version", "name")} == {
            key: value for key, value in found.items() if key != "name"
        }
        assert found["name"] == wanted["name"].decode()
        assert [tuple(place) for place in places] == ast.literal_eval(wanted_places)
        assert room == int(wanted_room)


# -- the mode ---------------------------------------------------------------------------------------------------------


@root
@pytest.mark.parametrize("option", ["-mig", "--multi-instance-gpu"])
def test_hopper_switches_at_once(h100: Node, option: str) -> None:
    bus = h100.profile["gpus"][0]["pci"]["pci_bus_id"]
    assert said(h100, "-i", "0", option, "1") == (0, f"Enabled MIG Mode for GPU {bus}\nAll done.\n")
    assert modes(h100) == ["Enabled", "Enabled"]
    assert said(h100, f"{option}=0") == (0, f"Disabled MIG Mode for GPU {bus}\nAll done.\n")
    assert modes(h100) == ["Disabled", "Disabled"]


@root
def test_the_mode_is_that_of_the_gpus_asked_for(node: MakeNode) -> None:
    machine = node("h100-x8")
    assert machine.output("-i", "2,5", "-mig", "ENABLED").count("Enabled MIG Mode") == 2
    assert [line[0] for line in machine.csv("mig.mode.current")] == [
        "Enabled" if number in (2, 5) else "Disabled" for number in range(8)
    ]


@root
@pytest.mark.parametrize("enable", [True, False])
def test_hopper_with_a_client_stays_as_it_is(h100: Node, enable: bool) -> None:
    bus = h100.profile["gpus"][0]["pci"]["pci_bus_id"]
    h100.output("-mig", str(int(not enable)))
    before = modes(h100)
    h100.change(lambda profile: faults.add_process(profile, 0, 4711, "python3", 512))
    assert said(h100, "-mig", str(int(enable))) == (
        19,
        f"Unable to {'enable' if enable else 'disable'} MIG Mode for GPU {bus}: In use by another client\n"
        "Terminating early due to previous errors.\n",
    )
    assert modes(h100) == before


@root
def test_hopper_with_instances_stays_on(h100: Node) -> None:
    h100.output("-mig", "1")
    h100.output("mig", "-cgi", "19")
    assert h100.smi("-mig", "0").returncode == 19
    assert (modes(h100), len(instances(h100))) == (["Enabled", "Enabled"], 1)


def pending(machine: Node, word: str) -> str:
    bus = machine.profile["gpus"][0]["pci"]["pci_bus_id"]
    return (
        f"Warning: MIG mode is in pending {word} state for GPU {bus}:In use by another client\n"
        f"{bus} is currently being used by one or more other processes (e.g. CUDA application or a monitoring "
        "application such as another instance of nvidia-smi). Please first kill all processes using the device and "
        "retry the command or reboot the system to make MIG mode effective.\nAll done.\n"
    )


@root
def test_ampere_with_a_client_waits_for_a_reset(a100: Node) -> None:
    bus = a100.profile["gpus"][0]["pci"]["pci_bus_id"]
    a100.change(lambda profile: faults.add_process(profile, 0, 4711, "python3", 512))
    assert said(a100, "-mig", "1") == (0, pending(a100, "enable"))
    assert modes(a100) == ["Disabled", "Enabled"]
    assert "Disabled* |" in a100.output()
    assert said(a100, "mig", "-cgi", "19") == (0, "No MIG-enabled devices found.\n")
    assert said(a100, "-i", "0", "--gpu-reset") == (
        255,
        f"The following GPUs could not be reset:\n  GPU {bus}: In use by another client\n\n"
        "1 device is currently being used by one or more other processes (e.g., Fabric Manager, CUDA application, "
        "graphics application such as an X server, or a monitoring application such as another instance of "
        "nvidia-smi). Please first kill all processes using this device and all compute applications running in the "
        "system.\n",
    )
    assert modes(a100) == ["Disabled", "Enabled"]
    a100.change(lambda profile: faults.end_processes(profile, 0))
    assert said(a100, "-r") == (0, f"GPU {bus} was successfully reset.\nAll done.\n")
    assert modes(a100) == ["Enabled", "Enabled"]


@root
def test_ampere_that_nobody_uses_resets_itself(a100: Node) -> None:
    assert "Enabled MIG Mode" in a100.output("-mig", "1")
    assert modes(a100) == ["Enabled", "Enabled"]
    a100.output("mig", "-cgi", "9")
    assert said(a100, "-mig", "0") == (0, pending(a100, "disable"))
    assert modes(a100) == ["Enabled", "Disabled"]
    assert "Enabled* |" in a100.output()
    a100.output("mig", "-dgi")
    assert "Disabled MIG Mode" in a100.output("-mig", "0")
    assert modes(a100) == ["Disabled", "Disabled"]


@root
def test_a_mode_that_waits_can_be_taken_back(a100: Node) -> None:
    a100.change(lambda profile: faults.add_process(profile, 0, 4711, "python3", 512))
    a100.output("-mig", "1")
    assert "Disabled MIG Mode" in a100.output("-mig", "0")
    assert modes(a100) == ["Disabled", "Disabled"]


@pytest.mark.parametrize("name", ["t4-x4", "rtx4090-wsl"])
def test_gpus_without_mig(node: MakeNode, name: str) -> None:
    machine = node(name)
    buses = [gpu["pci"]["pci_bus_id"] for gpu in machine.profile["gpus"]]
    refused = "".join(
        f"Unable to enable MIG Mode for GPU {bus}: Not Supported\nTreating as warning and moving on.\n" for bus in buses
    )
    assert said(machine, "-mig", "1") == (0, f"{refused}All done.\n")
    assert modes(machine) == ["[N/A]", "[N/A]"]
    for arguments in (["-lgip"], ["-lgipp"], ["-lgi"], ["-cgi", "19"]):
        assert said(machine, "mig", *arguments) == (6, "No MIG-supported devices found.\n")


@root
def test_a_mode_without_persistence_is_warned_of(h100: Node) -> None:
    bus = h100.profile["gpus"][0]["pci"]["pci_bus_id"]
    h100.output("-pm", "0")
    lines = h100.output("-mig", "1").splitlines()
    assert lines[0:2] == [f"Enabled MIG Mode for GPU {bus}", ""]
    assert lines[2].startswith(f"Warning: persistence mode is disabled on device {bus}. See the Known Issues section")
    assert lines[3:] == ["All done."]


# -- cards ------------------------------------------------------------------------------------------------------------

# As published: NVIDIA's guide (A100 of 40 GB), listings of others (A30), mig-parted#187 with the guide (B200). Name,
# number, how many, GiB, multiprocessors, decoders, copy engines, JPEG, OFA, and where they begin.
CARDS = {
    "a30-x2": """
        1g.6gb      14 4  5.81  14 1  1 0 0  {0,1,2,3}:1
        1g.6gb+me   21 1  5.81  14 1  1 1 1  {0,1,2,3}:1
        2g.12gb      5 2 11.69  28 2  2 0 0  {0,2}:2
        2g.12gb+me   6 1 11.69  28 2  2 1 1  {0,2}:2
        4g.24gb      0 1 23.44  56 4  4 1 1  {0}:4
    """,
    "a100-40gb-x2": """
        1g.5gb      19 7  4.75  14 0  1 0 0  {0,1,2,3,4,5,6}:1
        1g.5gb+me   20 1  4.75  14 1  1 1 1  {0,1,2,3,4,5,6}:1
        1g.10gb     15 4  9.62  14 1  1 0 0  {0,2,4,6}:2
        2g.10gb     14 3  9.62  28 1  2 0 0  {0,2,4}:2
        3g.20gb      9 2 19.50  42 2  3 0 0  {0,4}:4
        4g.20gb      5 1 19.50  56 2  4 0 0  {0}:4
        7g.40gb      0 1 39.25  98 5  7 1 1  {0}:8
    """,
    "b200-x2": """
        1g.23gb     19 7 20.50  18 1  2 1 0  {0,1,2,3,4,5,6}:1
        1g.23gb+me  20 1 20.50  18 1  2 1 1  {0,1,2,3,4,5,6}:1
        1g.45gb     15 4 44.25  30 1  2 1 0  {0,2,4,6}:2
        2g.45gb     14 3 44.25  36 2  4 2 0  {0,2,4}:2
        3g.90gb      9 2 88.50  70 3  6 3 0  {0,4}:4
        4g.90gb      5 1 88.50  72 4  8 4 0  {0}:4
        7g.180gb     0 1 178.00 148 7 16 7 1  {0}:8
    """,
}


@pytest.mark.parametrize("name", CARDS)
def test_a_card_has_the_profiles_that_are_published(node: MakeNode, name: str) -> None:
    machine = one_gpu(node(name))
    profiles, placements = machine.output("mig", "-lgip"), machine.output("mig", "-lgipp")
    starts = dict(re.findall(r"GPU +0 Profile ID +(\d+) Placements? ?: (\{.*\}:\d)", placements))
    listed = re.findall(
        r"\| +0 +MIG (\S+) +(\d+) +\d/(\d) +(\S+) +No +(\d+) +(\d+) +0 +\|\n\| +(\d+) +(\d+) +(\d+) +\|", profiles
    )
    assert [[*each, starts[each[1]]] for each in listed] == [
        line.split() for line in CARDS[name].strip().splitlines()
    ], profiles + placements


@root
def test_an_a30_has_four_slices(node: MakeNode) -> None:
    machine = one_gpu(node("a30-x2"))
    (machine.root / "proc/driver/nvidia/capabilities/gpu0/mig").mkdir(parents=True)
    (machine.root / "proc/driver/nvidia-caps").mkdir()
    machine.output("-mig", "1")
    machine.output("mig", "-cgi", "14,14,5", "-C")
    assert sorted((number, start) for _, number, start in instances(machine)) == [(2, 2), (3, 0), (4, 1)]
    assert said(machine, "mig", "-cgi", "14")[0] == 23
    machine.output("mig", "-dci")
    machine.output("mig", "-dgi")
    # One instance alone has the media engines.
    machine.output("mig", "-cgi", "21")
    assert said(machine, "mig", "-cgi", "6")[0] == 23
    machine.output("mig", "-cgi", "14,5")


# -- placement --------------------------------------------------------------------------------------------------------

GUIDE = [
    # What NVIDIA's guide creates, and the IDs and starts that come of it, in the order of creation.
    ("9,3g.40gb", [(2, 4), (1, 0)]),
    ("19,14,5", [(13, 6), (5, 4), (1, 0)]),
    ("9,19,14,19", [(2, 4), (7, 0), (4, 2), (8, 1)]),
    ("14,19,19,19,19,19", [(5, 4), (13, 6), (7, 0), (8, 1), (9, 2), (10, 3)]),
    # What others have published of an A100 and an H100, both of 80 GB.
    ("14,14,14,20", [(5, 4), (3, 0), (4, 2), (13, 6)]),
    ("19,19,19,19,19", [(13, 6), (11, 4), (12, 5), (7, 0), (8, 1)]),
    ("9,14", [(2, 4), (3, 0)]),
    ("15,15,15", [(5, 4), (3, 0), (4, 2)]),
    ("0", [(0, 0)]),
]


@root
@pytest.mark.parametrize(("profiles", "wanted"), GUIDE, ids=[profiles for profiles, _ in GUIDE])
def test_instances_go_where_the_driver_puts_them(h100: Node, profiles: str, wanted: list[tuple[int, int]]) -> None:
    h100.output("-mig", "1")
    output = h100.output("mig", "-cgi", profiles)
    assert [int(number) for number in re.findall(r"GPU instance ID +(\d+) on", output)] == [one for one, _ in wanted]
    assert sorted((number, start) for _, number, start in instances(h100)) == sorted(wanted)


@root
def test_what_was_made_before_a_failure_stays(h100: Node) -> None:
    """The order in NVIDIA's guide that does not fit; the message names the profile as it was given."""
    h100.output("-mig", "1")
    code, output = said(h100, "mig", "-cgi", "19,19,14,9", "-C")
    assert code == 23
    assert output.splitlines()[-3:] == [
        "Successfully created compute instance ID  0 on GPU  0 GPU instance ID  3 using profile MIG 2g.20gb (ID  1)",
        "Unable to create a GPU instance on GPU  0 using profile 9: Insufficient Resources",
        "Failed to create GPU instances: Insufficient Resources",
    ]
    assert [name for name, _, _ in instances(h100)] == ["1g.10gb", "1g.10gb", "2g.20gb"]


@root
@pytest.mark.parametrize(
    ("profile", "wanted"), [("9", "3g.40gb"), ("3g.40gb", "3g.40gb"), ("MIG 3g.40gb", "3g.40gb"), ("20", "1g.10gb+me")]
)
def test_a_profile_has_a_number_and_two_names(h100: Node, profile: str, wanted: str) -> None:
    h100.output("-mig", "1")
    h100.output("mig", "-cgi", profile)
    assert [name for name, _, _ in instances(h100)] == [wanted]


@root
def test_a_start_can_be_asked_for(h100: Node) -> None:
    h100.output("-mig", "1")
    assert h100.output("mig", "-i", "0", "-cgi", "9:0,1g.10gb:5,19:4", "-C").count("Successfully") == 6
    assert instances(h100) == [("1g.10gb", 11, 4), ("1g.10gb", 12, 5), ("3g.40gb", 1, 0)]
    for specification, code, reason in (
        ("14:4", 23, "Insufficient Resources"),
        ("9:1", 2, "Invalid Argument"),
        ("9:x", 2, "Invalid Argument"),
        ("4g.47gb", 2, "Invalid Argument"),
        ("99", 2, "Invalid Argument"),
    ):
        assert said(h100, "mig", "-cgi", specification) == (
            code,
            f"Unable to create a GPU instance on GPU  0 using profile {specification.partition(':')[0]}: {reason}\n"
            f"Failed to create GPU instances: {reason}\n",
        )
    assert len(instances(h100)) == 3


@root
def test_one_instance_has_the_media_engines(h100: Node) -> None:
    h100.output("-mig", "1")
    assert h100.output("mig", "-cgi", "20", "-C").splitlines() == [
        "Successfully created GPU instance ID 13 on GPU  0 using profile MIG 1g.10gb+me (ID 20)",
        "Successfully created compute instance ID  0 on GPU  0 GPU instance ID 13 using profile MIG 1g.10gb (ID  0)",
    ]
    assert (free(h100)["1g.10gb+me"], free(h100)["1g.10gb"]) == (0, 6)
    assert h100.smi("mig", "-cgi", "20").returncode == 23


@root
def test_a_client_of_the_whole_gpu_keeps_instances_from_being_made(h100: Node) -> None:
    h100.output("-mig", "1")
    h100.change(lambda profile: faults.add_process(profile, 0, 4711, "Xorg", 4))
    assert said(h100, "mig", "-cgi", "14", "-C") == (
        19,
        "Unable to create a GPU instance on GPU  0 using profile 14: In use by another client\n"
        "Failed to create GPU instances: In use by another client\n",
    )


@root
def test_every_gpu_with_mig_is_meant_where_none_is_named(node: MakeNode) -> None:
    machine = node("h100-x8")
    machine.output("-i", "1,3", "-mig", "1")
    output = machine.output("mig", "-cgi", "9", "-C")
    assert re.findall(r"GPU instance ID  2 on GPU +(\d)", output) == ["1", "3"]
    assert machine.output("mig", "-i", "3", "-dci").count("Successfully") == 1
    assert said(machine, "mig", "-i", "0", "-lgi") == (0, "No MIG-enabled devices found.\n")


TABLES = {  # slices, size, starts, at most
    "1g.10gb": (1, 1, range(7), 7),
    "1g.10gb+me": (1, 1, range(7), 1),
    "1g.20gb": (1, 2, (0, 2, 4, 6), 4),
    "2g.20gb": (2, 2, (0, 2, 4), 3),
    "3g.40gb": (3, 4, (0, 4), 2),
    "4g.40gb": (4, 4, (0,), 1),
    "7g.80gb": (7, 8, (0,), 1),
}


def room(made: list[tuple[str, int, int]], name: str) -> int:
    """Count by trying every set of places what fits beside what there is."""
    taken = {start + i for one, _, start in made for i in range(TABLES[one][1])}
    slices = sum(TABLES[one][0] for one, _, _ in made)
    own, size, starts, most = TABLES[name]
    most -= sum(one == name for one, _, _ in made)
    for count in range(most, 0, -1):
        for places in itertools.combinations(starts, count):
            wanted = [place + i for place in places for i in range(size)]
            if len(set(wanted)) == len(wanted) and not taken & set(wanted) and slices + count * own <= 7:
                return count
    return 0


@root
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["h100-x8", "a100-mig-x2"])
def test_free_is_what_still_fits(node: MakeNode, kind: str, seed: int) -> None:
    """A walk through layouts: what -lgip calls free is what fits, and is what can be made."""
    machine = one_gpu(node(kind))
    machine.change(lambda profile: faults.set_mig(profile, 0, []))
    chance = random.Random(seed)  # noqa: S311  (no secret)
    for _ in range(20):
        made = instances(machine)
        left = free(machine)
        assert left == {name: room(made, name) for name in TABLES}
        name = chance.choice(list(TABLES))
        done = machine.smi("mig", "-cgi", name)
        assert (done.returncode == 0) == (left[name] > 0), done.stdout
        if chance.random() < 0.5 and (made := instances(machine)):
            machine.output("mig", "-dgi", "-gi", str(chance.choice(made)[1]))
    assert len({number for _, number, _ in instances(machine)}) == len(instances(machine))


# -- compute instances ------------------------------------------------------------------------------------------------


@root
def test_a_gpu_instance_alone_is_no_device(h100: Node) -> None:
    h100.output("-mig", "1")
    assert said(h100, "mig", "-lgi") == (6, "No GPU instances found: Not Found\n")
    assert said(h100, "mig", "-dci") == (6, "No GPU instances found: Not Found\n")
    assert "No MIG devices found" in h100.output()
    assert h100.output("mig", "-cgi", "9") == (
        "Successfully created GPU instance ID  2 on GPU  0 using profile MIG 3g.40gb (ID  9)\n"
    )
    assert (devices(h100), instances(h100)) == ([], [("3g.40gb", 2, 4)])
    assert said(h100, "mig", "-lci") == (6, "No compute instances found: Not Found\n")
    assert h100.output("mig", "-cci") == (
        "Successfully created compute instance ID  0 on GPU  0 GPU instance ID  2 using profile MIG 3g.40gb (ID  2)\n"
    )
    assert [name for name, _ in devices(h100)] == ["3g.40gb"]


@root
def test_instances_are_destroyed_from_the_inside_out(h100: Node) -> None:
    h100.output("-mig", "1")
    assert h100.output("mig", "-cgi", "9", "-C") == (
        "Successfully created GPU instance ID  2 on GPU  0 using profile MIG 3g.40gb (ID  9)\n"
        "Successfully created compute instance ID  0 on GPU  0 GPU instance ID  2 using profile MIG 3g.40gb (ID  2)\n"
    )
    assert said(h100, "mig", "-dgi") == (
        19,
        "Unable to destroy GPU instance ID  2 from GPU  0: In use by another client\n"
        "Failed to destroy GPU instances: In use by another client\n",
    )
    h100.change(lambda profile: faults.add_process(profile, 0, 4711, "python3", 512, instance="2/0"))
    assert said(h100, "mig", "-dci") == (
        19,
        "Unable to destroy compute instance ID  0 from GPU  0 GPU instance ID  2: In use by another client\n"
        "Failed to destroy compute instances: In use by another client\n",
    )
    # Others can be made meanwhile.
    h100.output("mig", "-cgi", "19", "-C")
    h100.change(lambda profile: faults.end_processes(profile, 0))
    assert h100.output("mig", "-dci", "-gi", "2", "-ci", "0,1") == (
        "Successfully destroyed compute instance ID  0 from GPU  0 GPU instance ID  2\n"
    )
    assert h100.output("mig", "-dgi", "-gi", "2") == "Successfully destroyed GPU instance ID  2 from GPU  0\n"
    assert said(h100, "mig", "-dgi", "-gi", "2") == (6, "No GPU instances found: Not Found\n")
    assert [name for name, _ in devices(h100)] == ["1g.10gb"]


@root
def test_a_gpu_instance_is_shared_by_compute_instances(h100: Node) -> None:
    h100.output("-mig", "1")
    h100.output("mig", "-cgi", "9")
    assert h100.output("mig", "-gi", "2", "-cci", "1c.3g.40gb,1").splitlines() == [
        "Successfully created compute instance ID  0 on GPU  0 GPU instance ID  2 using profile MIG 1c.3g.40gb (ID  0)",
        "Successfully created compute instance ID  1 on GPU  0 GPU instance ID  2 using profile MIG 2c.3g.40gb (ID  1)",
    ]
    assert [name for name, _ in devices(h100)] == ["1c.3g.40gb", "2c.3g.40gb"]
    table = h100.output("mig", "-lci")
    assert [line for line in table.splitlines() if "MIG" in line] == [
        "|   0      2       MIG 1c.3g.40gb       0         0          0:1     |",
        "|   0      2       MIG 2c.3g.40gb       1         1          1:2     |",
    ]
    assert said(h100, "mig", "-cci", "2") == (
        23,
        "Unable to create a compute instance on GPU  0 GPU instance ID  2 using profile 2: Insufficient Resources\n"
        "Failed to create compute instances: Insufficient Resources\n",
    )
    assert h100.smi("mig", "-cci", "7c.7g.80gb").returncode == 2
    second = h100.xml().findall("gpu/mig_devices/mig_device")[1]
    assert second.findtext("device_attributes/shared/multiprocessor_count") == "32"
    assert second.findtext("fb_memory_usage/total") == "40448 MiB"
    answer = python(h100, CUDA, CUDA_VISIBLE_DEVICES=devices(h100)[1][1])
    assert [device[1:] for device in answer["devices"]] == [["NVIDIA H100 80GB HBM3 MIG 2c.3g.40gb", 40448]]


@root
def test_profiles_of_compute_instances(a100: Node) -> None:
    """The rows are those that others have published of driver 580, but for the size of the memory in the names."""
    a100.output("-mig", "1")
    a100.output("mig", "-cgi", "5")
    lines = a100.output("mig", "-lcip").splitlines()
    assert [line for line in lines if not line.startswith("+")][5:] == [
        "|   0      1       MIG 1c.4g.40gb       0      4/4           14        2     0     0   |",
        "|                                                                      4     0         |",
        "|   0      1       MIG 2c.4g.40gb       1      2/2           28        2     0     0   |",
        "|                                                                      4     0         |",
        "|   0      1       MIG 4g.40gb          3*     1/1           56        2     0     0   |",
        "|                                                                      4     0         |",
    ]
    a100.output("mig", "-cci", "0")
    assert re.findall(r" (\d/\d) ", a100.output("mig", "-lcip", "-gi", "1")) == ["3/4", "1/2", "0/1"]
    assert {len(line) for line in lines} == {88}


@root
def test_hopper_has_a_compute_profile_of_its_own_for_much_memory(h100: Node) -> None:
    h100.output("-mig", "1")
    assert h100.output("mig", "-cgi", "15", "-C").endswith("using profile MIG 1g.20gb (ID  7)\n")


# -- all say the same -------------------------------------------------------------------------------------------------


@root
@pynvml
def test_everything_agrees_after_a_change(h100: Node) -> None:
    h100.output("-mig", "1")
    h100.output("mig", "-cgi", "9,14", "-C")
    uuids = [uuid for _, uuid in devices(h100)]
    (gpu,) = h100.xml().findall("gpu")
    listed = [
        (one.findtext("gpu_instance_id"), one.findtext("compute_instance_id"), one.findtext("fb_memory_usage/total"))
        for one in gpu.findall("mig_devices/mig_device")
    ]
    assert listed == [("2", "0", "40448 MiB"), ("3", "0", "20096 MiB")]
    assert gpu.findtext("utilization/gpu_util") == "N/A"
    assert h100.csv("utilization.gpu,mig.mode.current") == [["[N/A]", "Enabled"]]
    text = h100.output("-q")
    assert re.findall(r"GPU Instance ID +: (\d+)", text) == ["2", "3"]
    summary = h100.output()
    assert "|   00000000:1B:00.0 Off |                   On |" in summary
    assert "|  0    2   0   0  |              12MiB / 40448MiB    | 60      0 |  3   0    3    0    3 |" in summary
    assert {len(line) for line in summary.splitlines()[1:] if line} == {91}
    answer = python(
        h100,
        """
        from pynvml import *
        nvmlInit()
        gpu = nvmlDeviceGetHandleByIndex(0)
        migs = [nvmlDeviceGetMigDeviceHandleByIndex(gpu, number) for number in range(2)]
        answer = [[nvmlDeviceGetUUID(mig), nvmlDeviceGetGpuInstanceId(mig), nvmlDeviceGetName(mig)] for mig in migs]
        """,
    )
    name = "NVIDIA H100 80GB HBM3 MIG"
    assert answer == [[uuids[0], 2, f"{name} 3g.40gb"], [uuids[1], 3, f"{name} 2g.20gb"]]
    folder = h100.root / "proc/driver/nvidia/capabilities/gpu0/mig"
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("access")) == [
        "gi2/access",
        "gi2/ci0/access",
        "gi3/access",
        "gi3/ci0/access",
    ]
    assert (folder / "gi2/ci0/access").read_text() == "DeviceFileMinor: 22\nDeviceFileMode: 292\nDeviceFileModify: 1\n"
    minors = (h100.root / "proc/driver/nvidia-caps/mig-minors").read_text().splitlines()
    assert sorted(minors) == [
        "gpu0/gi2/access 21",
        "gpu0/gi2/ci0/access 22",
        "gpu0/gi3/access 30",
        "gpu0/gi3/ci0/access 31",
    ]
    facts = subprocess.run(
        [str(h100.build / "gpufarm-gpu-profile"), str(h100.profile_path)], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert [line for line in facts if "_instance " in line] == [
        "gpu_instance 0 2",
        "gpu_instance 0 3",
        "compute_instance 0 2 0",
        "compute_instance 0 3 0",
    ]
    h100.output("mig", "-dci")
    h100.output("mig", "-dgi")
    assert not list(folder.iterdir())
    assert not list((h100.root / "dev/nvidia-caps").iterdir())
    assert (h100.root / "proc/driver/nvidia-caps/mig-minors").read_text() == ""
    assert h100.profile_path.read_text().count("\n...\n") == 1  # nothing of the longer text before is left


@root
@pynvml
def test_nvml_changes_what_nvidia_smi_shows(h100: Node) -> None:
    answer = python(
        h100,
        """
        import ctypes
        from pynvml import *
        nvmlInit()
        gpu = nvmlDeviceGetHandleByIndex(0)
        nvmlDeviceSetMigMode(gpu, NVML_DEVICE_MIG_ENABLE)
        instance = nvmlDeviceCreateGpuInstance(gpu, 14)
        compute = nvmlGpuInstanceCreateComputeInstance(instance, 1)
        info = nvmlGpuInstanceGetInfo(instance)
        answer = [info.id, info.profileId, info.placement.start, nvmlComputeInstanceGetInfo(compute).id]
        """,
    )
    assert answer == [5, 14, 4, 0]
    assert [name for name, _ in devices(h100)] == ["2g.20gb"]


@root
def test_a_device_that_is_made_again_has_its_uuid(h100: Node) -> None:
    h100.output("-mig", "1")
    seen = []
    for _ in range(2):
        h100.output("mig", "-cgi", "9,9", "-C")
        seen.append(devices(h100))
        h100.output("mig", "-dci")
        h100.output("mig", "-dgi")
    assert seen[0] == seen[1]
    assert len({uuid for _, uuid in seen[0]}) == 2
    pattern = r"MIG-[0-9a-f]{8}-[0-9a-f]{4}-5[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
    assert all(re.fullmatch(pattern, uuid) for _, uuid in seen[0])


@root
def test_uuids_of_two_gpus_differ(node: MakeNode) -> None:
    machine = node("h200-x2")
    machine.output("-mig", "1")
    machine.output("mig", "-cgi", "19,19,19", "-C")
    assert len({uuid for _, uuid in devices(machine)}) == 6


@root
def test_a_running_container_follows(h100: Node) -> None:
    """The profile keeps its inode, and copies that are no links are written, too."""
    copy = h100.root / "lib/firmware/nvidia/580.159.04/gsp_ga10x.bin"
    copy.parent.mkdir(parents=True)
    os.link(h100.profile_path, copy)
    other = h100.root / "usr/lib/wsl/drivers/store/nvcubins.bin"
    other.parent.mkdir(parents=True)
    shutil.copy(h100.profile_path, other)
    h100.output("-mig", "1")
    h100.output("mig", "-cgi", "19", "-C")
    assert copy.samefile(h100.profile_path)
    assert other.read_text() == h100.profile_path.read_text()
    assert h100.profile_path.read_text().endswith("\n...\n")
    # In the container the profile is the copy alone, which nothing there changes.
    h100.profile_path.unlink()
    assert [name for name, _ in devices(h100)] == ["1g.10gb"]
    assert h100.smi("mig", "-cgi", "19").returncode == 4


@root
def test_a_change_leaves_the_rest_of_the_profile(node: MakeNode) -> None:
    machine = node("a100-mig-x2")
    before = machine.profile
    machine.output("mig", "-i", "1", "-dci", "-gi", "9")
    after = machine.profile
    assert after["models"] == before["models"]
    assert after["driver"] == before["driver"]
    assert after["gpus"][0] == before["gpus"][0]
    kept = [mig for mig in before["gpus"][1]["mig_devices"] if mig["gpu_instance_id"] != "9"]
    assert after["gpus"][1]["mig_devices"] == kept


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="mknod needs root and a mount namespace")
def test_a_node_gets_the_device_nodes_of_its_driver(build: Path, tmp_path: Path) -> None:
    """In a mount namespace with a /dev of its own: a boot, changes, the script once more, another boot."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for path in (build / "gpufarm-gpu-profile", SIMULATOR / "gpufarm-gpu-devices", SIMULATOR / "install-profile.sh"):
        shutil.copy(path, tools)
    script = f"""
        set -e
        cp {SIMULATOR}/profiles/h100-x8.yml {tmp_path}/gpu.yml
        for folder in /etc /run; do mount -t tmpfs tmpfs $folder; done
        mkdir -p /etc/gpufarm-simulator
        cp {tmp_path}/gpu.yml /etc/gpufarm-simulator/gpu.yml
        mkdir -p /lib/firmware; mount -t tmpfs tmpfs /lib/firmware
        mount -t tmpfs -o dev,mode=755 tmpfs /dev; mknod -m 666 /dev/null c 1 3
        {tools}/gpufarm-gpu-devices
        export LD_LIBRARY_PATH={build}
        {build}/nvidia-smi -i 0 -mig 1
        {build}/nvidia-smi mig -cgi 19,14 -C
        {build}/nvidia-smi mig -dci -gi 13
        look() {{
            (cd /dev/nvidia-caps && stat -c '%n %t %T %a' *
             cd /proc/driver && grep -r . nvidia-caps nvidia/capabilities) | sort
        }}
        look >/run/after
        {tools}/gpufarm-gpu-devices
        look >/run/again
        diff /run/after /run/again
        cat /run/after
        rm /run/gpufarm-simulator/linked
        {tools}/gpufarm-gpu-devices
        ls /dev/nvidia-caps
    """
    done = subprocess.run(
        ["unshare", "-m", "--propagation", "private", "sh", "-c", script], capture_output=True, text=True, check=False
    )
    if "mount:" in done.stderr:
        pytest.skip(f"no mounts here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    caps = [line for line in lines if re.fullmatch(r"nvidia-cap\d+ 1ff \w+ \d+", line)]
    # config, monitor; GPU instance 13 (6:1), which is empty; GPU instance 5 (4:2) and its compute instance
    assert caps == [
        "nvidia-cap1 1ff 1 400",
        "nvidia-cap120 1ff 78 444",
        "nvidia-cap2 1ff 2 444",
        "nvidia-cap48 1ff 30 444",
        "nvidia-cap49 1ff 31 444",
    ]
    assert "nvidia-caps/mig-minors:gpu0/gi5/ci0/access 49" in lines
    assert "nvidia/capabilities/gpu0/mig/gi5/ci0/access:DeviceFileMinor: 49" in lines
    assert lines[-2:] == ["nvidia-cap1", "nvidia-cap2"]


# -- permissions, locks -----------------------------------------------------------------------------------------------


def as_nobody(machine: Node, *arguments: str) -> tuple[int, str]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        shutil.copytree(machine.root, Path(folder, "root"))
        for path in Path(folder, "root").rglob("*"):
            path.chmod(0o777)  # it is the user that counts
        for name in ("nvidia-smi", "libnvidia-ml.so.1"):
            shutil.copy(machine.build / name, folder)
        done = subprocess.run(
            [f"{folder}/nvidia-smi", *arguments],
            env=machine.environment | {"LD_LIBRARY_PATH": folder, "GPUFARM_SIM_ROOT": f"{folder}/root"},
            user=65534,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    return done.returncode, done.stdout


@root
def test_root_alone_changes_mig(h100: Node) -> None:
    bus = h100.profile["gpus"][0]["pci"]["pci_bus_id"]
    reason = "Insufficient Permissions"
    assert as_nobody(h100, "-mig", "1") == (
        4,
        f"Unable to enable MIG Mode for GPU {bus}: {reason}\nTerminating early due to previous errors.\n",
    )
    h100.output("-mig", "1")
    h100.output("mig", "-cgi", "9", "-C")
    assert as_nobody(h100, "mig", "-cgi", "19") == (
        4,
        f"Unable to create a GPU instance on GPU  0 using profile 19: {reason}\n"
        f"Failed to create GPU instances: {reason}\n",
    )
    for option in ("-dci", "-dgi", "-cci"):
        assert as_nobody(h100, "mig", option)[0] == 4
    assert as_nobody(h100, "-r") == (255, f"The following GPUs could not be reset:\n  GPU {bus}: {reason}\n")
    assert as_nobody(h100, "mig", "-lgi") == said(h100, "mig", "-lgi")


@root
def test_no_change_is_lost_to_another(node: MakeNode) -> None:
    machine = node("h100-x8")
    everyone = [
        subprocess.Popen(
            [str(machine.build / "nvidia-smi"), "-i", str(gpu), "-mig", "1"],
            env=machine.environment,
            stdout=subprocess.DEVNULL,
        )
        for gpu in range(8)
    ]
    assert [one.wait(timeout=300) for one in everyone] == [0] * 8
    assert machine.csv("mig.mode.current") == [["Enabled"]] * 8
    everyone = [
        subprocess.Popen(
            [str(machine.build / "nvidia-smi"), "mig", "-i", str(gpu), "-cgi", "19", "-C"],
            env=machine.environment,
            stdout=subprocess.DEVNULL,
        )
        for gpu in (0, 1)
        for _ in range(8)
    ]
    codes = [one.wait(timeout=300) for one in everyone]
    assert sorted(codes) == [0] * 14 + [23] * 2
    assert len(devices(machine)) == 14


@root
def test_a_reader_sees_a_layout_whole(h100: Node) -> None:
    h100.output("-mig", "1")
    stop = threading.Event()
    wrong: list[str] = []

    def read() -> None:
        while not stop.is_set():
            done = h100.smi("-L")
            if done.returncode or not done.stdout.startswith("GPU 0: NVIDIA H100"):
                wrong.append(done.stdout)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for _ in range(12):
            h100.output("mig", "-cgi", "19,14,5", "-C")
            h100.output("mig", "-dci")
            h100.output("mig", "-dgi")
    finally:
        stop.set()
        reader.join()
    assert not wrong


# -- reset and boot ---------------------------------------------------------------------------------------------------


@root
def test_a_reset_leaves_no_instances(h100: Node) -> None:
    h100.output("-mig", "1")
    h100.output("mig", "-cgi", "9", "-C")
    h100.change(lambda profile: faults.add_process(profile, 0, 4711, "python3", 512, instance="2/0"))
    assert h100.smi("-r").returncode == 255
    assert len(devices(h100)) == 1
    h100.change(lambda profile: faults.end_processes(profile, 0))
    assert h100.output("-i", "0", "-r").endswith("was successfully reset.\nAll done.\n")
    assert (modes(h100), instances(h100), devices(h100)) == (["Enabled", "Enabled"], [], [])
    assert not list((h100.root / "dev/nvidia-caps").iterdir())


@root
def test_a_reset_that_a_gpu_demands(node: MakeNode) -> None:
    machine = node("t4-x4")
    machine.change(lambda profile: faults.require_reset(profile, 1))
    machine.change(lambda profile: faults.ecc_errors(profile, 1, 3))
    machine.output("-i", "1", "--gpu-reset")
    assert machine.csv("pstate,ecc.errors.uncorrected.volatile.total,ecc.errors.uncorrected.aggregate.total")[1] == [
        "P8",
        "0",
        "3",
    ]
    assert "gpu_instances" not in machine.profile["gpus"][1]


@root
def test_hopper_forgets_the_mode_at_a_boot(h100: Node) -> None:
    h100.output("-mig", "1")
    h100.output("mig", "-cgi", "9", "-C")
    boot(h100)
    assert (modes(h100), devices(h100)) == (["Disabled", "Disabled"], [])
    h100.output("-mig", "1")
    assert said(h100, "mig", "-lgi")[0] == 6


@root
def test_ampere_keeps_the_mode_over_a_boot_and_no_instance(a100: Node) -> None:
    a100.output("-mig", "1")
    a100.output("mig", "-cgi", "9", "-C")
    boot(a100)
    assert (modes(a100), instances(a100), devices(a100)) == (["Enabled", "Enabled"], [], [])
    a100.change(lambda profile: faults.add_process(profile, 0, 4711, "python3", 512))
    a100.output("-mig", "0")
    assert modes(a100) == ["Enabled", "Disabled"]
    boot(a100)
    assert modes(a100) == ["Disabled", "Disabled"]


@root
def test_a_service_of_the_node_makes_its_instances_at_each_boot(node: MakeNode) -> None:
    machine = node("a100-mig-x2")
    before = devices(machine)
    machine.output("mig", "-i", "0", "-dci")
    machine.output("mig", "-i", "0", "-dgi")
    assert len(devices(machine)) == 7
    boot(machine)
    for path in (machine.root / "dev/nvidia-caps").iterdir():
        assert path.is_file()
    first = 3 + 7 * 9
    for offset in range(0, 7 * 9, 9):
        for extra in (0, 1):
            (machine.root / f"dev/nvidia-caps/nvidia-cap{first + offset + extra}").touch()
    assert devices(machine) == before


def test_a_boot_leaves_other_profiles_as_they_are(node: MakeNode) -> None:
    for name in ("t4-x4", "h100-x8", "rtx4090-wsl"):
        machine = node(name)
        before = machine.profile_path.read_bytes()
        boot(machine)
        assert machine.profile_path.read_bytes() == before
