# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: gc_frozen
short_description: Have Python look for no garbage among what a process has by now
version_added: 1.0.0
author:
  - gpufarm contributors (@gpufarm)
description:
  - Returns what it is given. Ansible runs each task of each host in a process of its own, in which Python's garbage
    collector may look through all that came from the parent, plays, inventory and facts, and so copies it. Worked out
    by the parent, as in the condition of M(ansible.builtin.meta), this keeps it from that (C(gc.freeze)).
  - What comes later is collected as before.
options:
  _input:
    description: Any value.
    type: raw
    required: true
"""

EXAMPLES = r"""
- name: Have tasks look for no garbage among what their parent has
  ansible.builtin.meta: end_play
  when: not (true | gpufarm.core.gc_frozen)
"""

RETURN = r"""
_value:
  description: The same value.
  type: raw
  sample: true
"""

import gc
from collections.abc import Callable
from typing import Any


def gc_frozen(value: Any) -> Any:
    gc.collect()
    gc.freeze()
    return value


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"gc_frozen": gc_frozen}
