"""A docker client whose ``exec`` costs next to nothing, for runs that do it ten thousand times (docker.c)."""

from __future__ import annotations

from pathlib import Path

from tests.simulator.cache import built
from tests.simulator.docker import docker_client
from tests.simulator.tools import need, run

SOURCE = Path(__file__).with_name("docker.c")
COMPILER = ("gcc", "-O2", "-Wall", "-Wextra", "-Werror")


def quick_docker() -> Path:
    """Return the program, building it if it is missing."""
    client = docker_client()

    def build(folder: Path) -> None:
        need("gcc", "/usr/include/stdio.h")
        run([*COMPILER, f'-DDOCKER="{client}"', "-o", folder / "docker", SOURCE])

    return built("exec", [SOURCE, client], build) / "docker"
