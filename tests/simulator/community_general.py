"""A community.general whose connection wsl knows PowerShell (12.2.0); the one for Python 3.11 is older."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from tests.simulator.cache import built

# The package ansible for Python 3.11 has 11.4.2; this one has 12.6.2, which takes ansible-core 2.17 and newer.
RELEASE = "ansible==13.8.0"
PART = "ansible_collections/community/general/"


def newer() -> Path:
    """Return a folder for ANSIBLE_COLLECTIONS_PATH; it holds what `ansible-galaxy collection install` would bring."""

    def fetch(folder: Path) -> None:
        # Of another Python than this one, because nothing of it but the collection is wanted.
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:",
             "--python-version", "3.13", "--dest", folder, RELEASE],
            check=True,
        )  # fmt: skip
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if name.startswith(PART)])
        wheel.unlink()

    return built("community-general", [RELEASE], fetch)
