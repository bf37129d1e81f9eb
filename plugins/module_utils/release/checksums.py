# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Checksums: as a release lists them, as somebody has pinned one, and of a file."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import IO

from ansible_collections.gpufarm.core.plugins.module_utils.release.addresses import ReleaseError
from ansible_collections.gpufarm.core.plugins.module_utils.release.files import CHUNK


def parse_sums(text: str) -> dict[str, str]:
    """File name to SHA-256 of a list as sha256sum writes it."""
    sums = {}
    for line in text.splitlines():
        match = re.match(r"^([0-9A-Fa-f]{64})[ \t]+\*?(\S+)$", line.strip())
        if match:
            sums[match.group(2)] = match.group(1).lower()
    return sums


def listed_sum(sums: dict[str, str], product: str, version: str, architecture: str, url: str) -> str:
    """The checksum of this architecture's archive, or an error that says which ones there are."""
    name = f"{product}_{version}_linux_{architecture}.zip"
    if name in sums:
        return sums[name]
    prefix, suffix = f"{product}_{version}_linux_", ".zip"
    there = sorted(
        file[len(prefix) : -len(suffix)] for file in sums if file.startswith(prefix) and file.endswith(suffix)
    )
    raise ReleaseError(
        found=f"{url} lists no {name}; it has these Linux architectures: {', '.join(there) or 'none'}",
        expected=f"a checksum for linux_{architecture}",
        next_step=f"choose a version of {product} that is released for {architecture}, or another architecture",
    )


def normalize_checksum(text: str) -> str:
    """A pinned SHA-256, written plain or as C(sha256:...)."""
    plain = text.strip().lower()
    if plain.startswith("sha256:"):
        plain = plain[len("sha256:") :]
    if not re.match(r"^[0-9a-f]{64}$", plain):
        raise ReleaseError(
            found=f"the option 'checksum' is '{text}'",
            expected="64 hexadecimal digits, plain or after 'sha256:'",
            next_step="copy the line of this architecture from the SHA256SUMS file of the release",
        )
    return plain


def sha256(file: IO[bytes]) -> str:
    """The checksum of an open file from its beginning on."""
    file.seek(0)
    digest = hashlib.sha256()
    for chunk in iter(lambda: file.read(CHUNK), b""):
        digest.update(chunk)
    return digest.hexdigest()


def checksum_of(path: Path) -> str | None:
    """The SHA-256 of a file, None where there is none."""
    try:
        with path.open("rb") as file:
            return sha256(file)
    except FileNotFoundError:
        return None
