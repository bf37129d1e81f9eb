"""GPUs behind NVSwitches: nothing computes before Fabric Manager, of exactly the driver's version, has set them up."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ansible_collections.gpufarm.core.tests.unit.patience import wait_for

from tests.simulator.gpu import faults
from tests.simulator.mirror import packages

from .conftest import SIMULATOR, Node
from .test_libraries import CUDA, python

VERSION = "580.159.04"
FIELDS = "fabric.state,fabric.status,fabric.cliqueId,fabric.clusterUuid"
READY = ["Completed", "Success", "0", "00000000-0000-0000-0000-000000000000"]
WAITING = ["In Progress", "[N/A]", "[N/A]", "[N/A]"]


def four_nvswitches(profile: faults.Profile) -> None:
    profile["nvswitches"] = [
        {"pci_bus_id": f"00000000:0{5 + number}:00.0", "pci_device_id": "22A310DE"} for number in range(4)
    ]


class Board:
    """A node with four NVSwitches and the tools of its driver, as it is after a boot."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.tool = node.root / "usr/local/lib/gpufarm-simulator/gpufarm-gpu-profile"
        self.tool.parent.mkdir(parents=True)
        shutil.copy(node.build / "gpufarm-gpu-profile", self.tool)
        (node.root / "dev/nvidia-nvswitch0").touch()
        node.change(four_nvswitches)
        assert self.told("--boot") == ""

    def told(self, *options: str) -> str:
        done = self.node.run(str(self.tool), *options, str(self.node.profile_path))
        assert done.returncode == 0, done.stderr
        return done.stdout

    def fabric_manager(self, *options: str, version: str = VERSION) -> subprocess.CompletedProcess[str]:
        text = packages.fabric_manager(SIMULATOR, "580", version).files["/usr/bin/nv-fabricmanager"].content()
        program = self.node.root / "nv-fabricmanager"
        program.write_bytes(text)
        return self.node.run("sh", str(program), *options, extra={"GPUFARM_FABRIC_SECONDS": "0"})

    @property
    def pid(self) -> Path:
        return self.node.root / "run/nvidia-fabricmanager/nv-fabricmanager.pid"

    @property
    def fabric(self) -> list[list[str]]:
        return self.node.csv(FIELDS)

    def wait_for(self, fabric: list[str]) -> None:
        wait_for(lambda: self.fabric == [fabric] * 8)


@pytest.fixture
def board(node: Callable[[str], Node]) -> Iterator[Board]:
    found = Board(node("h100-x8"))
    yield found
    if found.pid.exists():
        os.kill(int(found.pid.read_text()), signal.SIGKILL)


def test_a_boot_leaves_the_gpus_waiting_where_there_are_nvswitches(board: Board, node: Callable[[str], Node]) -> None:
    assert board.fabric == [WAITING] * 8
    told = board.node.xml().findtext("gpu/fabric/state"), board.node.xml().findtext("gpu/fabric/status")
    assert told == ("In Progress", "N/A")
    answer = python(board.node, CUDA)
    assert (answer["init"], answer["text"], answer["devices"]) == (802, "system not yet initialized", [])
    alone = node("t4-x4")
    before = alone.profile_path.read_text()
    assert board.node.run(str(board.tool), "--boot", str(alone.profile_path)).returncode == 0
    assert alone.profile_path.read_text() == before


def test_a_gpu_that_never_joins_a_fabric_computes_without(node: Callable[[str], Node]) -> None:
    board = Board(node("a100-mig-x2"))
    assert board.node.csv("fabric.state") == [["[N/A]"]] * 2
    assert python(board.node, CUDA)["init"] == 0


def test_fabric_manager_of_the_drivers_version_lets_them_join(board: Board) -> None:
    done = board.fabric_manager("-c", "/usr/share/nvidia/nvswitch/fabricmanager.cfg")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Successfully configured all the available NVSwitches to route GPU NVLink traffic." in done.stdout
    board.wait_for(READY)
    assert python(board.node, CUDA)["init"] == 0
    assert board.fabric_manager("--stopped").returncode == 0
    assert board.fabric == [WAITING] * 8
    assert python(board.node, CUDA)["init"] == 802


def test_fabric_manager_of_another_version_refuses(board: Board) -> None:
    done = board.fabric_manager(version="580.95.05")
    assert done.returncode == 1
    assert done.stdout == (
        "fabric manager NVIDIA GPU driver interface version 580.95.05 don't match with driver version 580.159.04. "
        "Please update with matching NVIDIA driver package.\n"
    )
    assert not board.pid.exists()
    # The driver is the one that is loaded, not the one whose libraries are there.
    board.node.change(lambda profile: faults.mismatch_driver(profile, "580.95.05"))
    assert board.fabric_manager(version="580.95.05").returncode == 0
    assert board.fabric_manager().returncode == 1


@pytest.mark.parametrize(
    ("missing", "told"), [("nvidia-nvswitch0", "NV_WARN_NOTHING_TO_DO"), ("nvidiactl", "control node")]
)
def test_fabric_manager_needs_nvswitches_and_a_driver(board: Board, missing: str, told: str) -> None:
    board.node.hide(missing)
    done = board.fabric_manager()
    assert done.returncode == 1
    assert told in done.stdout
    assert not board.pid.exists()


def test_fabric_manager_tells_its_version(board: Board) -> None:
    assert board.fabric_manager("--version", version="1.2.3").stdout == "Fabric Manager version is : 1.2.3\n"


def test_the_bus_has_gpus_and_nvswitches(board: Board) -> None:
    lines = board.told().splitlines()
    bus = [line.split()[1:] for line in lines if line.startswith("pci ")]
    assert len(bus) == 12
    assert bus[0] == ["0000:1b:00.0", "10de", "2330", "030200"]
    assert bus[-1] == ["0000:08:00.0", "10de", "22a3", "068000"]
    assert "nvswitch 3 00000000:08:00.0" in lines


def test_the_tool_refuses_what_it_does_not_know(board: Board) -> None:
    assert board.node.run(str(board.tool), "--fabric", str(board.node.profile_path)).returncode == 1
