"""NVIDIA's repository as far as a driver of the distribution's own needs it: the package that pins its branch."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.simulator.cache import ROOT
from tests.simulator.mirror import layout, packages
from tests.simulator.mirror.pki import HOST, pki, signer


def lay_out(www: Path, distribution: str, branch: str, version: str) -> None:
    """Lay out the repository of a distribution with nothing else in it."""
    folder = www / "cuda/repos" / distribution / "x86_64"
    folder.mkdir(parents=True)
    with signer(pki()) as keys:
        layout.build_deb(packages.pinning(branch, f"{branch}.*", f"{version}-1"), folder)
        shutil.copy(pki().packages_key, folder / layout.CUDA_KEY_FILES[distribution])
        layout.flat_repository(folder, "NVIDIA", "NVIDIA CUDA", keys)


@contextmanager
def served(www: Path, port: int, log: Path) -> Iterator[dict[str, object]]:
    """Serve a folder as the mirror does, and give the roles' variables that point at it."""
    keys = pki()
    command = [
        sys.executable, str(ROOT / "tests/simulator/mirror/serve.py"), "--root", str(www),
        "--cert", str(keys.server_cert), "--key", str(keys.server_key), "--bind", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip
    with log.open("ab") as output:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        yield layout.role_variables(keys, f"https://{HOST}:{port}")
    finally:
        server.terminate()
        server.wait()
