# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: nomad_agent_state
short_description: How a Nomad client and its device plugin are
version_added: 1.0.0
author:
  - gpufarm contributors (@gpufarm)
description:
  - Tells from the client's own answers whether it and its NVIDIA device plugin work.
  - A device plugin that ends and cannot be started again, or hangs, leaves its GPUs in Nomad for ever, so that Nomad's
    list of devices does not tell. Its statistics get no newer, which does.
positional: stats, max_age
options:
  _input:
    description: Result of M(ansible.builtin.uri) for C(/v1/agent/health) of the client.
    type: dict
    required: true
  stats:
    description: Result of M(ansible.builtin.uri) for C(/v1/client/stats) of the client.
    type: dict
    required: true
  max_age:
    description: How many seconds older than the client's own statistics those of the GPUs may be.
    type: float
    default: 60
"""

EXAMPLES = r"""
- name: Show how the client is
  ansible.builtin.debug:
    msg: "{{ health | gpufarm.core.nomad_agent_state(stats) }}"
"""

RETURN = r"""
_value:
  description: >-
    V(ok); V(stopped), nothing answers; V(unhealthy), the client answers that it is not well; V(plugin_stopped), the
    device plugin gives no statistics any more. Where a client never had statistics of GPUs, as with MIG, it counts as
    V(ok).
  type: str
  sample: ok
"""

from collections.abc import Callable, Mapping
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils import gate


def nomad_agent_state(
    health: Mapping[str, Any], stats: Mapping[str, Any], max_age: float = gate.PLUGIN_AGE_MAX_S
) -> str:
    return gate.agent_state(health.get("status"), stats.get("json"), float(max_age))


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"nomad_agent_state": nomad_agent_state}
