# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: upgrade_waves
short_description: Divide nodes into the waves of an upgrade
version_added: 1.0.0
author:
  - gpufarm contributors (@gpufarm)
description:
  - The first waves are small, because what is wrong with a new version shows on one node as well as on all. Nodes keep
    their order, except that one for whose GPU model a wave has no room any more waits for the next.
  - A node with several models counts for each of them.
  - Of nodes that are servers of Nomad as well a wave has one at most, because a majority of the servers must stay.
positional: sizes, per_model
options:
  _input:
    description:
      - The nodes, as dictionaries with C(host), with C(models), a list of the names of its GPUs, and, where it is a
        server of Nomad as well, with C(server), which is V(true) then.
    type: list
    elements: dict
    required: true
  sizes:
    description:
      - How many nodes each wave has at most, as numbers or as percentages of all of them, one at least. The last one
        counts for all further waves. A string, as the command line gives it, has commas between them.
    type: list
    elements: str
    required: true
  per_model:
    description:
      - How many nodes with GPUs of one model a wave has at most, as a number or as a percentage of the nodes with that
        model, one at least. V(100%) is no limit.
    type: str
    default: 100%
"""

EXAMPLES = r"""
- name: Show the waves
  ansible.builtin.debug:
    msg: "{{ nodes | gpufarm.core.upgrade_waves(['1', '10%', '50%'], '25%') }}"
  vars:
    nodes:
      - {host: gpu01, models: [Tesla T4]}
      - {host: gpu02, models: [NVIDIA H200]}
"""

RETURN = r"""
_value:
  description: The names of the hosts of each wave.
  type: list
  elements: list
  sample: [[gpu01], [gpu02]]
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ansible.errors import AnsibleFilterError


def number(limit: object, total: int, name: str) -> int:
    """Return how many of all a limit means."""
    found = re.fullmatch(r"([0-9]+)(%?)", str(limit).strip())
    if not found or int(found[1]) == 0 or (found[2] and int(found[1]) > 100):
        raise AnsibleFilterError(
            f"upgrade_waves: found {name}: {limit!r}. Expected: a number of nodes from 1 on, or a percentage from 1% "
            f"to 100%. Next step: correct upgrade_{name}."
        )
    return max(1, total * int(found[1]) // 100) if found[2] else int(found[1])


def upgrade_waves(
    nodes: Sequence[Mapping[str, Any]], sizes: str | Sequence[object], per_model: object = "100%"
) -> list[list[str]]:
    if isinstance(sizes, str):
        sizes = sizes.split(",")
    if not sizes:
        raise AnsibleFilterError(
            "upgrade_waves: found no size. Expected: one at least. Next step: correct upgrade_waves."
        )
    limits = [number(size, len(nodes), "waves") for size in sizes]
    totals = Counter(model for node in nodes for model in set(node["models"]))
    room = {model: number(per_model, total, "per_model") for model, total in totals.items()}
    number(per_model, 1, "per_model")
    waves: list[list[str]] = []
    left = list(nodes)
    while left:
        limit = limits[min(len(waves), len(limits) - 1)]
        used: Counter[str] = Counter()
        wave: list[str] = []
        has_server = False
        waiting = []
        for node in left:
            models = set(node["models"])
            is_server = node.get("server", False)
            room_left = len(wave) < limit and all(used[model] < room[model] for model in models)
            if room_left and not (is_server and has_server):
                wave.append(node["host"])
                used.update(models)
                has_server = has_server or is_server
            else:
                waiting.append(node)
        waves.append(wave)
        left = waiting
    return waves


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"upgrade_waves": upgrade_waves}
