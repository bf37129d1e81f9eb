# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What roles work out: their variables as Ansible finds, loads and templates them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar

ROLES = Path(__file__).resolve().parents[3] / "roles"


def variables(*roles: str, folder: Path = ROLES) -> dict[str, Any]:
    """Return the variables of the roles that are in a folder."""
    loader = DataLoader()
    paths = [
        path for role in roles for part in ("defaults", "vars")
        for path in loader.find_vars_files(str(folder / role / part), "main")
    ]  # fmt: skip
    return {
        name: text for path in paths for name, text in loader.load_from_file(path, trusted_as_template=True).items()
    }


def value(name: str, given: dict[str, Any]) -> Any:
    """Return what a variable is worth among the given ones."""
    return Templar(DataLoader(), variables=given).template(given[name])


def facts(platform: str, kernel: str = "6.12.0") -> dict[str, str]:
    """Return what Ansible tells of a host, by family, distribution and version, as in ``Debian: Linux Mint 22``."""
    family, _colon, rest = platform.partition(": ")
    distribution, _space, version = rest.rpartition(" ")
    return {
        "architecture": "x86_64",
        "distribution": distribution,
        "distribution_major_version": version.partition(".")[0],
        "distribution_version": version,
        "kernel": kernel,
        "os_family": family,
    }
