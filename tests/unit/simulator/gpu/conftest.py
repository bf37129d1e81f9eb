"""The doubles, built once a session, and nodes of plain files to run them in."""

from __future__ import annotations

import os
import shutil
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.simulator.gpu import faults

SIMULATOR = Path(__file__).parents[3] / "simulator" / "gpu"
FIXTURES = Path(__file__).parent / "fixtures"
PROFILES = sorted(path.stem for path in (SIMULATOR / "profiles").glob("*.yml"))


@dataclass
class Node:
    """A root folder that GPUFARM_SIM_ROOT points to; its device nodes are plain files."""

    root: Path
    build: Path

    @property
    def profile_path(self) -> Path:
        return self.root / "etc/gpufarm-simulator/gpu.yml"

    @property
    def profile(self) -> faults.Profile:
        return faults.load(self.profile_path.read_text())

    @property
    def environment(self) -> dict[str, str]:
        environment = {name: text for name, text in os.environ.items() if not name.startswith("CUDA_")}
        return environment | {
            "LD_LIBRARY_PATH": str(self.build),
            "GPUFARM_SIM_ROOT": str(self.root),
            "LC_ALL": "C",
        }

    def run(
        self, *command: str, timeout: float = 30.0, extra: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            env=self.environment | (extra or {}),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def smi(self, *arguments: str, timeout: float = 30.0) -> subprocess.CompletedProcess[str]:
        return self.run(str(self.build / "nvidia-smi"), *arguments, timeout=timeout)

    def output(self, *arguments: str) -> str:
        done = self.smi(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def csv(self, fields: str, *arguments: str) -> list[list[str]]:
        text = self.output(f"--query-gpu={fields}", "--format=csv,noheader,nounits", *arguments)
        return [line.split(", ") for line in text.splitlines()]

    def xml(self, *arguments: str) -> ET.Element:
        return ET.fromstring(self.output("-q", "-x", *arguments))  # noqa: S314  (our own file)

    def change(self, change: faults.Change) -> None:
        """Change the profile in place, as the faults do in a container."""

        def write(text: str) -> None:
            with self.profile_path.open("r+") as profile:
                profile.truncate(0)
                profile.write(text)

        faults.apply(self.profile_path.read_text, write, change)

    def hide(self, device: str) -> None:
        (self.root / "dev" / device).unlink()


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the doubles; without a compiler or libyaml there is nothing to test."""
    if not shutil.which("gcc") or not shutil.which("make"):
        pytest.skip("gcc and make are needed to build the GPU doubles")
    probe = subprocess.run(
        ["gcc", "-xc", "-", "-o", "/dev/null", "-l:libyaml.a"],
        input="#include <yaml.h>\nint main(void) { return !yaml_get_version_string(); }",
        text=True,
        capture_output=True,
        check=False,
    )
    if probe.returncode:
        pytest.skip("libyaml-dev is needed to build the GPU doubles")
    folder = tmp_path_factory.mktemp("gpu-double")
    made = subprocess.run(
        ["make", "-C", str(SIMULATOR), f"BUILD={folder}"], capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stdout + made.stderr
    return folder


@pytest.fixture
def node(build: Path, tmp_path: Path) -> Callable[[str], Node]:
    """Return a function that makes a node from a profile's name, all its device nodes included."""

    def make(name: str) -> Node:
        root = tmp_path / name
        for folder in ("etc/gpufarm-simulator", "dev/nvidia-caps", "run"):
            (root / folder).mkdir(parents=True)
        shutil.copy(SIMULATOR / "profiles" / f"{name}.yml", root / "etc/gpufarm-simulator/gpu.yml")
        made = Node(root, build)
        profile = made.profile
        if profile["platform"] == "wsl":
            (root / "dev/dxg").touch()
            return made
        (root / "dev/nvidiactl").touch()
        for minor, gpu in enumerate(profile["gpus"]):
            (root / f"dev/nvidia{minor}").touch()
            for mig in gpu.get("mig_devices", []):
                first = 3 + minor * 135 + int(mig["gpu_instance_id"]) * 9
                (root / f"dev/nvidia-caps/nvidia-cap{first}").touch()
                (root / f"dev/nvidia-caps/nvidia-cap{first + 1 + int(mig['compute_instance_id'])}").touch()
        return made

    return make
