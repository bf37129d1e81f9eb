# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: gate_refusal
short_description: Say why a node's timer cannot probe with these options
version_added: 1.0.0
author:
  - gpufarm contributors (@gpufarm)
description:
  - A probe by the timer of the role P(gpufarm.core.gpu_health#role) has to end before systemd ends it, so it takes no
    long diagnosis of DCGM and no long timeouts. Used by that role before it changes anything.
options:
  _input:
    description: Options of M(gpufarm.core.nvidia_gpu_health).
    type: dict
    required: true
"""

EXAMPLES = r"""
- name: Require options with which a probe by the timer has an end
  ansible.builtin.assert:
    that: gpu_health_options | gpufarm.core.gate_refusal == ''
"""

RETURN = r"""
_value:
  description: What was found, what was expected and what to do; empty where a timer can use the options.
  type: str
  sample: ""
"""

from collections.abc import Callable, Mapping
from typing import Any


def gate_refusal(options: Mapping[str, Any]) -> str:
    # Not where the filter is loaded: design.md.
    from ansible_collections.gpufarm.core.plugins.module_utils import gate_service

    try:
        gate_service.options_of(options)
    except ValueError as error:
        return str(error)
    return ""


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"gate_refusal": gate_refusal}
