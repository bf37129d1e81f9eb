# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the kernel says of the ports of InfiniBand."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ansible_collections.gpufarm.core.plugins.module_utils.health.options import HealthOptions
from ansible_collections.gpufarm.core.plugins.module_utils.problem import Finding
from ansible_collections.gpufarm.core.plugins.module_utils.text import clean

ACTIVE = "ACTIVE"


@dataclasses.dataclass(frozen=True)
class Port:
    """One port of an adapter."""

    adapter: str
    number: str
    state: str
    """As the kernel writes it, without its number: ACTIVE, DOWN, INIT, ARMED; empty where it cannot be read."""
    downed: int | None
    """How often its link went down since the counters were reset; None where the adapter does not tell."""

    @property
    def name(self) -> str:
        return f"{self.adapter} port {self.number}"


def ports(root: Path) -> list[Port]:
    """Every port whose link is InfiniBand; adapters with Ethernet are in the same folder."""
    found = []
    for folder in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        adapter = folder.parents[1]
        # A virtual function has no cable of its own, and is down until a machine uses it.
        if (adapter / "device/physfn").exists() or _read(folder / "link_layer") not in ("InfiniBand", ""):
            continue
        downed = _read(folder / "counters/link_downed")
        found.append(
            Port(
                adapter.name,
                folder.name,
                _read(folder / "state").partition(": ")[2],
                int(downed) if downed.isdigit() else None,
            )
        )
    return found


def _read(path: Path) -> str:
    try:
        return clean(path.read_text(encoding="utf-8", errors="replace").strip())
    except OSError:
        return ""


def infiniband_findings(options: HealthOptions, root: Path) -> tuple[str, list[Finding]]:
    """What is wrong with the node's ports, and how many there are."""
    wanted, most = options.infiniband_ports, options.infiniband_link_downed_max
    if wanted is None and most is None:
        return "skipped", []
    there = ports(root)
    active = sum(port.state == ACTIVE for port in there)
    findings = []
    if wanted is not None and active < wanted:
        others = [f"{port.name} {port.state or 'unreadable'}" for port in there if port.state != ACTIVE]
        findings.append(Finding("infiniband_ports", ", ".join([str(active), *others])))
    findings += [
        Finding(
            "infiniband_link_downed",
            f"that the link of {port.name} went down {port.downed} times",
            next_step="look at the port's cable and transceiver, and reset its counters with "
            f"'perfquery -R -C {port.adapter} -P {port.number}'",
        )
        for port in there
        if most is not None and port.downed is not None and port.downed > most
    ]
    return f"{active} of {len(there)} ports active", findings
