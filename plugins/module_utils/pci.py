# Copyright (c) gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""PCI addresses, as sysfs and nvidia-smi write them."""

from __future__ import annotations

import re

BUS_ID = re.compile(r"(?:([0-9a-fA-F]{4,8}):)?([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-7])")


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
