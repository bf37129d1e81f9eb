# Copyright (c) gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""PCI addresses, as sysfs and nvidia-smi write them, and the devices that sysfs has."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

BUS_ID = re.compile(r"(?:([0-9a-fA-F]{4,8}):)?([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-7])")


# Of the GPUs of thousands of nodes few have another address.
@functools.lru_cache(maxsize=4096)
def normal_bus_id(bus_id: str | None) -> str | None:
    """A PCI address as sysfs and /proc write it: nvidia-smi pads the domain to eight digits, its messages do not."""
    match = BUS_ID.search(bus_id or "")
    if not match:
        return None
    domain = int(match.group(1) or "0", 16)
    return f"{domain:04x}:{match.group(2).lower()}:{match.group(3).lower()}.{match.group(4)}"


def padded_bus_id(bus_id: str) -> str:
    """Such an address as nvidia-smi writes it."""
    domain, rest = bus_id.split(":", 1)
    return f"{int(domain, 16):08X}:{rest.upper()}"


# A card of this maker that leads to NVSwitches, as on NVIDIA's boards since Blackwell, tells it in its vital product
# data; in all else it is one of those that are in the network.
_BRIDGE_VENDOR = "15b3"
_BRIDGE_MARK = b"SW_MNG"
_VPD_SIZE = 4096


def devices_of(vendors: Collection[str], folder: Path) -> list[dict[str, Any]]:
    """What sysfs has in this folder of these vendors (four hexadecimal digits each), sorted by address."""
    found = []
    for path in _entries(folder):
        vendor, device, code = (_number_of(path / name) for name in ("vendor", "device", "class"))
        if vendor in vendors and device and code:
            bridge = vendor == _BRIDGE_VENDOR and code.startswith("02") and _BRIDGE_MARK in _vital_product_data(path)
            found.append(
                {"address": path.name, "vendor": vendor, "device": device, "class": code, "nvswitch_bridge": bridge}
            )
    return found


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _number_of(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip().lower().removeprefix("0x")
    except (OSError, UnicodeDecodeError):
        return None


def _vital_product_data(path: Path) -> bytes:
    try:
        with (path / "vpd").open("rb") as file:
            return file.read(_VPD_SIZE)
    except OSError:
        return b""
