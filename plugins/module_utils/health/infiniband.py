# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the kernel says of the ports of InfiniBand, and of those of the same adapters that carry Ethernet (RoCE)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ansible_collections.gpufarm.core.plugins.module_utils.health.options import HealthOptions
from ansible_collections.gpufarm.core.plugins.module_utils.problem import Finding
from ansible_collections.gpufarm.core.plugins.module_utils.text import clean

ACTIVE = "ACTIVE"
ETHERNET = "Ethernet"


@dataclasses.dataclass(frozen=True)
class Port:
    """One port of an adapter."""

    adapter: str
    number: str
    state: str
    """As the kernel writes it, without its number: ACTIVE, DOWN, INIT, ARMED; empty where it cannot be read."""
    downed: int | None
    """How often its link went down since the counters were reset, on Ethernet since the driver was loaded; None where
    nothing tells.
    """
    layer: str

    @property
    def name(self) -> str:
        return f"{self.adapter} port {self.number}"


def ports(root: Path) -> list[Port]:
    """Every port of an adapter that can RDMA."""
    found = []
    for folder in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        adapter = folder.parents[1]
        # A virtual function has no cable of its own, and is down until a machine uses it.
        if (adapter / "device/physfn").exists():
            continue
        layer = _read(folder / "link_layer")
        # The counter of InfiniBand stands still where the link is Ethernet.
        device = _read(folder / "gid_attrs/ndevs/0") if layer == ETHERNET else None
        counter = folder / "counters/link_downed" if device is None else root / "sys/class/net" / device
        downed = _read(counter if device is None else counter / "carrier_down_count")
        found.append(
            Port(
                adapter.name,
                folder.name,
                _read(folder / "state").partition(": ")[2],
                int(downed) if downed.isdigit() else None,
                layer,
            )
        )
    return found


def _read(path: Path) -> str:
    try:
        return clean(path.read_text(encoding="utf-8", errors="replace").strip())
    except OSError:
        return ""


def infiniband_findings(options: HealthOptions, root: Path) -> tuple[str, list[Finding]]:
    """What is wrong with the node's ports of InfiniBand, and how many there are."""
    return _findings(
        "infiniband", options.infiniband_ports, options.infiniband_link_downed_max, root,
        "look at the port's cable and transceiver, and reset its counters with 'perfquery -R -C {port.adapter} -P "
        "{port.number}'",
    )  # fmt: skip


def roce_findings(options: HealthOptions, root: Path) -> tuple[str, list[Finding]]:
    """The same of those that carry Ethernet."""
    return _findings(
        "roce", options.roce_ports, options.roce_link_downed_max, root,
        "look at the port's cable and transceiver with 'ethtool -m', and at the switch; the count begins anew with the "
        "driver of the adapter",
    )  # fmt: skip


def _findings(kind: str, wanted: int | None, most: int | None, root: Path, step: str) -> tuple[str, list[Finding]]:
    if wanted is None and most is None:
        return "skipped", []
    there = [port for port in ports(root) if (port.layer == ETHERNET) == (kind == "roce")]
    active = sum(port.state == ACTIVE for port in there)
    findings = []
    if wanted is not None and active < wanted:
        others = [f"{port.name} {port.state or 'unreadable'}" for port in there if port.state != ACTIVE]
        findings.append(Finding(f"{kind}_ports", ", ".join([str(active), *others])))
    findings += [
        Finding(
            f"{kind}_link_downed",
            f"that the link of {port.name} went down {port.downed} times",
            next_step=step.format(port=port),
        )
        for port in there
        if most is not None and port.downed is not None and port.downed > most
    ]
    return f"{active} of {len(there)} ports active", findings
