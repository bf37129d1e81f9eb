# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The brake of the gate: where so many nodes are to be closed that one cause is likely, it closes none."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ansible_collections.gpufarm.core.plugins.module_utils import nomad
from ansible_collections.gpufarm.core.plugins.module_utils.gate.deciding import GateNode

_MAX_CLOSED = re.compile(r"([0-9]{1,6})(%?)\Z")


def most_closed(text: str, nodes: int) -> int:
    """How many nodes C(max_closed) lets the gate close, of so many.

    Of a percentage it is the whole number below, and one at least: a farm of three nodes may close its sick one.
    """
    match = _MAX_CLOSED.match(text)
    if not match or (match[2] and int(match[1]) > 100):
        raise nomad.NomadError(
            found=f"max_closed is '{text}'",
            expected="a number of nodes such as 5, or a percentage such as 20%",
            next_step="correct the option",
        )
    number = int(match[1])
    return number if not match[2] else max(nodes * number // 100, min(number, 1))


def brake(closing: Iterable[GateNode], closed: Iterable[str], farm: int, max_closed: str) -> str:
    """Why none of these nodes may be closed; empty when they may. C(closed) are the IDs of those that stay closed."""
    new = {node.id for node in closing}
    before = set(closed) - new
    limit = most_closed(max_closed, farm)
    if not new or len(new) + len(before) <= limit:
        return ""
    return str(
        nomad.NomadError(
            found=f"{len(new)} to close beside {len(before)} that the gate has closed, of {farm} nodes; none is closed",
            expected=f"at most {limit} that the gate has closed (max_closed is {max_closed})",
            next_step="look for one cause of all in the reasons below, such as an update of the driver or of Nomad; if "
            "these nodes are all sick, raise max_closed for one run (gate_max_closed in playbooks/health.yml)",
        )
    )
