# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import base64
from typing import Any

import pytest
from ansible.errors import AnsibleFilterError
from ansible_collections.gpufarm.core.plugins.filter import missing_collections as collections
from ansible_collections.gpufarm.core.plugins.filter import wsl_address as address
from ansible_collections.gpufarm.core.plugins.filter import wsl_config as config
from ansible_collections.gpufarm.core.plugins.filter import wsl_config_check as config_check

missing_collections = collections.FilterModule().filters()["missing_collections"]
pytestmark = pytest.mark.controller
wsl_address = address.FilterModule().filters()["wsl_address"]
wsl_config_check = config_check.FilterModule().filters()["wsl_config_check"]
wsl_config = config.FilterModule().filters()["wsl_config"]


def test_collections_that_are_there_are_not_named() -> None:
    names = ["gpufarm.core", "gpufarm.none", "none_of_this.namespace"]
    assert missing_collections(names) == ["gpufarm.none", "none_of_this.namespace"]


def test_a_file_is_changed_and_none_is_made() -> None:
    settings = {"wsl2": {"processors": 4}}
    assert wsl_config(base64.b64encode(b"# \xc3\xa4\n").decode(), settings) == "# \u00e4\n\n[wsl2]\nprocessors=4\n"
    utf16 = base64.b64encode("[wsl2]\nmemory=8GB\n".encode("utf-16")).decode()
    assert wsl_config(utf16, settings) == "[wsl2]\nmemory=8GB\nprocessors=4\n"
    assert wsl_config("", settings) == "[wsl2]\r\nprocessors=4\r\n"


def test_what_cannot_be_changed() -> None:
    with pytest.raises(AnsibleFilterError) as no_utf8:
        wsl_config(base64.b64encode(b"\xe4").decode(), {})
    assert str(no_utf8.value) == (
        ".wslconfig is no UTF-8 (byte 0). Expected: UTF-8, or UTF-16 with a mark, as WSL reads it. "
        "Next step: save it with that encoding."
    )
    with pytest.raises(AnsibleFilterError) as no_name:
        wsl_config("", {"wsl2": {"a b": 1}})
    assert str(no_name.value) == (
        "wsl_config has wsl2.a b with 1. Expected: names of letters and digits. Next step: correct the setting."
    )


@pytest.mark.parametrize(
    ("text", "settings", "error", "mode"),
    [
        ("[WSL2]\nNetworkingMode = Mirrored # mine\n", {}, "", "mirrored"),
        # The first counts, of both sections.
        ("[experimental]\nnetworkingmode=nat\n[wsl2]\nnetworkingMode=mirrored\n", {}, "", "nat"),
        ("[wsl2]\nnetworkingMode=mirrored\n", {"wsl2": {"networkingMode": "nat"}}, "", "nat"),
        ("[general]\nnetworkingMode=mirrored\n", {}, "", ""),
        ("", {"wsl2": {"a b": 1}}, "wsl_config has wsl2.a b with 1. Expected", ""),
    ],
)
def test_what_a_configuration_would_be(text: str, settings: dict[str, Any], error: str, mode: str) -> None:
    found = wsl_config_check(base64.b64encode(text.encode()).decode(), settings)
    assert found["networking_mode"] == mode
    assert found["error"].startswith(error) and bool(found["error"]) is bool(error)


def of(address: str, interface: str, default_route: bool = False, prefix: int = 24) -> dict[str, Any]:
    return {"address": address, "prefix": prefix, "interface": interface, "default_route": default_route}


LAN = of("192.0.2.31", "Ethernet", default_route=True)
LAB = of("198.51.100.7", "Lab")
SECOND = of("192.0.2.200", "Ethernet")
# The first lies in a network that companies use, too.
SWITCH = of("172.20.0.1", "vEthernet (WSL (Hyper-V firewall))", prefix=20)
BRIDGE = of("172.16.9.9", "vEthernet (External)")


@pytest.mark.parametrize(
    ("addresses", "rule", "chosen"),
    [
        ([SWITCH, LAB, LAN], "default_route", "192.0.2.31"),
        ([SWITCH, LAB, LAN], "198.51.100.0/24", "198.51.100.7"),
        ([SWITCH, LAB, LAN], "198.51.100.7", "198.51.100.7"),
        ([SWITCH, LAB, LAN], "198.51.100.1/24", "198.51.100.7"),
        ([SWITCH, LAB, LAN], "lab", "198.51.100.7"),
        # Of several, that of the default route.
        ([SECOND, LAN], "192.0.2.0/24", "192.0.2.31"),
        ([SECOND, LAN], "Ethernet", "192.0.2.31"),
        ([SECOND, LAN], "192.0.2.128/25", "192.0.2.200"),
        # A switch that is bridged to the network is one like others; WSL's own has to be named.
        ([SWITCH, BRIDGE, LAN], "172.16.0.0/12", "172.16.9.9"),
        ([SWITCH, LAN], "vEthernet (WSL (Hyper-V firewall))", "172.20.0.1"),
        # Where nobody has told them, nobody has asked for one.
        ([], "default_route", ""),
    ],
)
def test_one_address_is_chosen(addresses: list[dict[str, Any]], rule: str, chosen: str) -> None:
    assert wsl_address(addresses, rule, host="pc-Debian") == chosen


@pytest.mark.parametrize(
    ("addresses", "rule", "expected"),
    [
        ([LAB], "default_route", "one to which the default route leads"),
        ([LAB], "192.0.2.0/24", "one in 192.0.2.0/24, of several that of the default route"),
        ([LAB, of("198.51.100.8", "Wi-Fi")], "198.51.100.0/24", "one in 198.51.100.0/24, of several that of the d"),
        ([SWITCH], "172.16.0.0/12", "one in 172.16.0.0/12, of several that of the default route"),
        ([LAB], "Ethernet", "one of an interface named Ethernet, of several that of the default route"),
        ([LAN], "ask", "the answer of somebody at a terminal"),
        ([], "Ethernet", "one of an interface named Ethernet, of several that of the default route"),
    ],
)
def test_no_address_is_chosen_by_accident(addresses: list[dict[str, Any]], rule: str, expected: str) -> None:
    with pytest.raises(AnsibleFilterError) as failure:
        wsl_address(addresses, rule, host="pc-Debian")
    there = ", ".join(f"{each['address']}/{each['prefix']} ({each['interface']})" for each in addresses) or "not known"
    assert str(failure.value).startswith(
        f"pc-Debian: the IPv4 addresses of its Windows machine are {there}. Expected: {expected}"
    )
    assert str(failure.value).endswith(
        "Next step: set wsl_address to a subnet or an interface of these, or nomad_advertise_addr to what others reach "
        "it by."
    )
