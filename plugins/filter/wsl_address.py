# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: wsl_address
short_description: Choose one of a Windows machine's IPv4 addresses
version_added: 1.0.0
author:
  - gpufarm contributors (@gpufarm)
description:
  - Returns the one address that a rule means, by which others reach the WSL distributions of the machine.
  - Where several fit, it is that to which the default route leads. One of WSL's own virtual switch, which no other
    machine reaches, is chosen by the name of its interface only.
  - It fails where none fits, and says which there are.
options:
  _input:
    description: Addresses as C(wsl_addresses) of P(gpufarm.core.wsl#inventory) has them.
    type: list
    elements: dict
    required: true
  rule:
    description:
      - V(default_route), a subnet or an address such as V(192.0.2.0/24), or the name of an interface.
    type: str
    default: default_route
  host:
    description: Who is named in an error.
    type: str
    required: true
"""

EXAMPLES = r"""
- name: Show what the distributions of a Windows machine advertise
  ansible.builtin.debug:
    msg: "{{ wsl_addresses | gpufarm.core.wsl_address('192.0.2.0/24', host=inventory_hostname) }}"
"""

RETURN = r"""
_value:
  description: The address; empty where no addresses are known, and the default route alone was asked for.
  type: str
  sample: 192.0.2.31
"""

import ipaddress
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.gpufarm.core.plugins.module_utils.problem import sentences

# How Windows names its end of WSL's switch, with more behind it in newer ones: "vEthernet (WSL (Hyper-V firewall))".
OWN_SWITCH = "vethernet (wsl"


def wsl_address(addresses: Sequence[Mapping[str, Any]], rule: str = "default_route", *, host: str) -> str:
    if not addresses and rule == "default_route":
        return ""
    network = _network(rule)
    if rule == "default_route":
        fits, expected = list(addresses), "one to which the default route leads"
    elif rule == "ask":
        fits, expected = [], "the answer of somebody at a terminal"
    elif network:
        fits = [each for each in addresses if ipaddress.IPv4Address(each["address"]) in network]
        fits = [each for each in fits if not each["interface"].casefold().startswith(OWN_SWITCH)]
        expected = f"one in {network}, of several that of the default route"
    else:
        fits = [each for each in addresses if each["interface"].casefold() == rule.casefold()]
        expected = f"one of an interface named {rule}, of several that of the default route"
    if rule == "default_route" or len(fits) > 1:
        fits = [each for each in fits if each["default_route"]]
    if len(fits) == 1:
        return str(fits[0]["address"])
    found = ", ".join(f"{each['address']}/{each['prefix']} ({each['interface']})" for each in addresses)
    raise AnsibleFilterError(
        f"{host}: "
        + sentences(
            f"the IPv4 addresses of its Windows machine are {found or 'not known'}",
            expected,
            "set wsl_address to a subnet or an interface of these, or nomad_advertise_addr to what others reach it by",
        )
    )


def _network(rule: str) -> ipaddress.IPv4Network | None:
    try:
        return ipaddress.IPv4Network(rule, strict=False)
    except ValueError:
        return None


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"wsl_address": wsl_address}
