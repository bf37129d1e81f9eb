"""``python -m tests.simulator.wandb NODE``: puts the double of W&B and wandb's own packages on a node of the farm."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.simulator.cache import built
from tests.simulator.docker import docker
from tests.simulator.tools import BuildError, run

HERE = Path(__file__).resolve().parent
VERSION = "0.31.0"
# Of Debian 12, whatever this machine's own is.
PYTHON = "3.11"
PLATFORMS = ("manylinux_2_36_x86_64", "manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
FOLDER = "/srv/wandb"


def wheels() -> Path:
    """Return the folder of wandb's wheels, which are downloaded once."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", f"--python-version={PYTHON}",
               *(f"--platform={name}" for name in PLATFORMS), f"wandb=={VERSION}"]  # fmt: skip

    def download(folder: Path) -> None:
        run([*command, "--dest", folder])

    return built("wandb", command[3:], download)


def main(node: str) -> None:
    docker("exec", node, "mkdir", "-p", FOLDER)
    # As one archive, because each file would be a task for Ansible.
    docker("cp", f"{wheels()}/.", f"{node}:{FOLDER}/wheels")
    docker("cp", str(HERE / "server.py"), f"{node}:{FOLDER}/server.py")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except BuildError as error:
        raise SystemExit(str(error)) from error
