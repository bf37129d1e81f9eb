"""A user who has nothing but Ansible, and types what the README prints."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.simulator.cache import ROOT, cache_dir
from tests.simulator.galaxy import archive_of, galaxy

BIN = Path(sys.executable).parent

Shell = Callable[[str], str]


@contextmanager
def user_shell(home: Path, inventory: Path, *programs: Path, **lent: str) -> Iterator[Shell]:
    """Give a shell in an empty home, with an inventory as my-lab.yml and a server that stands for Galaxy.

    What is run in it must succeed; its output is returned. Folders of programs come first on PATH.
    """
    shutil.copytree(inventory, home / "my-lab.yml")
    subprocess.run(
        [str(BIN / "ansible-galaxy"), "collection", "build", str(ROOT), "--output-path", str(home)],
        check=True, capture_output=True,
    )  # fmt: skip
    (archive,) = home.glob("gpufarm-core-*.tar.gz")
    ours = ("ANSIBLE_", "MOLECULE_", "PYTEST_", "PYTHONPATH")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    path = os.pathsep.join([str(BIN), *map(str, programs), os.environ["PATH"]])
    with galaxy(archive, archive_of("community.crypto", home)) as server:
        environment = {
            **kept, "HOME": str(home), "PATH": path, "GPUFARM_CACHE": str(cache_dir()),
            "ANSIBLE_GALAXY_SERVER": server, **lent,
        }  # fmt: skip

        def run(script: str) -> str:
            result = subprocess.run(
                ["sh", "-eu", "-c", script], cwd=home, env=environment,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True, check=False,
            )  # fmt: skip
            assert result.returncode == 0, f"{script}\n{result.stdout}"
            return result.stdout

        yield run
