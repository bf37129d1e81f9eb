# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations


class ModuleDocFragment:
    """What takes a node out of work and puts it back is asked so, whichever scheduler has the node."""

    DOCUMENTATION = r"""
options:
  state:
    description:
      - V(out), no work; V(in), back.
    type: str
    choices: [out, in]
    required: true
  owner:
    description:
      - Who takes the node out, and alone may put it back. The roles of this collection are C(gpufarm.core).
    type: str
    default: gpufarm.core
  change:
    description:
      - What is to be done there, in words, as for the sentence "which ... would end". Needed with O(state=out).
    type: str
attributes:
  idempotent:
    support: full
    description: A node that is as it should be is not touched.
"""
