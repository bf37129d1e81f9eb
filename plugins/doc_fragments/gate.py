# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations


class ModuleDocFragment:
    """What a gate is told of the nodes, and when it opens one, whichever scheduler has them."""

    DOCUMENTATION = r"""
options:
  nodes:
    type: list
    elements: dict
    required: true
    suboptions:
      node:
        description:
          - Name of the node, for which Nomad also takes its ID.
        type: str
        required: true
      healthy:
        description:
          - Whether the node may have work.
        type: bool
        required: true
      reason:
        description:
          - Why not, in a line of at most 500 characters. Needed with O(nodes[].healthy=false).
        type: str
      drain:
        description:
          - Whether what runs on this node is moved away, instead of O(drain).
        type: bool
      drain_deadline:
        description:
          - Seconds for this node, instead of O(drain_deadline).
        type: int
      index:
        description:
          - C(ModifyIndex) of the node in Nomad, or its C(resourceVersion) in Kubernetes, read before its probe began.
            So a probe never opens what a newer one has closed, and each counts once, whatever the clocks of the
            machines say. Without it a probe counts as one of this moment.
        type: int
      uptime:
        description:
          - Seconds that the node had been up when it was probed, which Nomad has as C(Uptime) in C(/v1/client/stats) of
            the node. Needed with O(closed_min), because a node that is closed for an unknown time stays closed.
        type: int
  open_after:
    description:
      - Clean probes in a row, this one included, after which a node is opened.
    type: int
    default: 1
  closed_min:
    description:
      - The shortest time, in seconds, that a node stays closed.
    type: int
    default: 0
"""
