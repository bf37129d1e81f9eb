# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Names and addresses of the files of a release."""

from __future__ import annotations

import dataclasses
import re

from ansible_collections.gpufarm.core.plugins.module_utils.release.addresses import ReleaseError

ARCHITECTURES = {"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64", "arm64": "arm64"}


def architecture_of(machine: str) -> str:
    """The architecture in release file names for what C(platform.machine()) says."""
    try:
        return ARCHITECTURES[machine.lower()]
    except KeyError:
        raise ReleaseError(
            found=f"this machine's architecture is '{machine}'",
            expected="x86_64 (amd64) or aarch64 (arm64)",
            next_step="set the option 'architecture' if the releases server has files for this machine",
        ) from None


@dataclasses.dataclass(frozen=True)
class ReleaseFiles:
    """Names and addresses of one release, laid out as on releases.hashicorp.com."""

    archive: str
    archive_url: str
    sums_url: str
    signature_url: str


def check_name(option: str, value: str, pattern: str, expected: str) -> None:
    """Refuse an option that is no such name, before it becomes a part of an address or of a path."""
    if not re.match(pattern, value):
        raise ReleaseError(
            found=f"the option '{option}' is '{value}'",
            expected=expected,
            next_step=f"correct the option '{option}'",
        )


def release_files(base_url: str, product: str, version: str, architecture: str) -> ReleaseFiles:
    check_name("product", product, r"^[a-z0-9][a-z0-9-]*$", "a product name such as nomad or nomad-device-nvidia")
    check_name("version", version, r"^[0-9][0-9A-Za-z.+~-]*$", "a version such as 1.11.3, without a leading v")
    check_name("architecture", architecture, r"^[a-z0-9_]+$", "an architecture such as amd64 or arm64")
    folder = f"{base_url.rstrip('/')}/{product}/{version}"
    archive = f"{product}_{version}_linux_{architecture}.zip"
    sums = f"{folder}/{product}_{version}_SHA256SUMS"
    return ReleaseFiles(archive=archive, archive_url=f"{folder}/{archive}", sums_url=sums, signature_url=f"{sums}.sig")
