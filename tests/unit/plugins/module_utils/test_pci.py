# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.gpufarm.core.plugins.module_utils import pci

# As a ConnectX-7 begins that leads to NVSwitches, and one that is in the network.
BRIDGE = b"\x82\x2d\x00Nvidia ConnectX-7 mezz\x90\x10\x01SMDL\x06SW_MNG"
CARD = b"\x82\x2d\x00NVIDIA ConnectX-7 HHHL Adapter card"


def has(bus: Path, address: str, numbers: str, vpd: bytes | None = None) -> None:
    folder = bus / address
    folder.mkdir(parents=True)
    vendor, device, code = numbers.split()
    for name, text in (("vendor", vendor), ("device", device), ("class", code)):
        (folder / name).write_text(f"0x{text}\n", encoding="ascii")
    if vpd is not None:
        (folder / "vpd").write_bytes(vpd)


def test_devices_of_the_vendors_that_are_asked_for(tmp_path: Path) -> None:
    has(tmp_path, "0000:08:00.0", "10de 22a3 068000")
    has(tmp_path, "0000:05:00.0", "10DE 22A3 068000")
    has(tmp_path, "0000:00:1f.0", "8086 1bb0 060400")
    found = pci.devices_of(["10de"], tmp_path)
    assert [device["address"] for device in found] == ["0000:05:00.0", "0000:08:00.0"]
    assert found[0] == {
        "address": "0000:05:00.0", "vendor": "10de", "device": "22a3", "class": "068000", "nvswitch_bridge": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("numbers", "vpd", "bridge"),
    [
        ("15b3 1021 020700", BRIDGE, True),
        ("15b3 1021 020000", BRIDGE, True),
        ("15b3 1021 020700", CARD, False),
        ("15b3 1021 020700", None, False),
        # Only such a card is asked, because asking takes time.
        ("15b3 1021 010802", BRIDGE, False),
        ("10de 22a3 068000", BRIDGE, False),
    ],
)
def test_a_card_that_leads_to_nvswitches_says_so(tmp_path: Path, numbers: str, vpd: bytes | None, bridge: bool) -> None:
    has(tmp_path, "0000:19:00.0", numbers, vpd)
    (found,) = pci.devices_of(["10de", "15b3"], tmp_path)
    assert found["nvswitch_bridge"] is bridge


def test_a_device_that_goes_meanwhile_is_none(tmp_path: Path) -> None:
    has(tmp_path, "0000:05:00.0", "10de 22a3 068000")
    (tmp_path / "0000:05:00.0/class").unlink()
    assert pci.devices_of(["10de"], tmp_path) == []
    assert pci.devices_of(["10de"], tmp_path / "none") == []
