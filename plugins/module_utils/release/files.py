# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Files and folders that others read, and the disk that may be full."""

from __future__ import annotations

from pathlib import Path
from typing import IO

from ansible_collections.gpufarm.core.plugins.module_utils.release.addresses import ReleaseError

CHUNK = 1024 * 1024


def write(sink: IO[bytes], chunk: bytes, source: str) -> None:
    """Write what came from a server, or say that there is no room for it."""
    try:
        sink.write(chunk)
    except OSError as error:
        raise ReleaseError(
            found=f"what came from {source} could not be written ({error.strerror})",
            expected="room for the archive and the unpacked program",
            next_step="free disk space, or point Ansible's remote_tmp to a larger file system",
        ) from error


def make_folder(path: Path) -> None:
    """Have a folder, and those above it, that others can read: apt does as a user of its own, whatever our umask."""
    if not path.exists():
        make_folder(path.parent)
        # Another process of this run may have made it meanwhile.
        path.mkdir(exist_ok=True)
        path.chmod(0o755)
