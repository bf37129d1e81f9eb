# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""How a node's own agent is, and how old what its device plugin told it last."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils import nomad

AGENT_OK = "ok"
AGENT_STOPPED = "stopped"
AGENT_UNHEALTHY = "unhealthy"
PLUGIN_STOPPED = "plugin_stopped"

PLUGIN_AGE_MAX_S = 60.0
"""Nomad's agent collects statistics every second, or as its telemetry block says."""

_NANOSECONDS = 1_000_000_000
_TIME = re.compile(r"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.\d+)?(Z|[+-]\d\d:\d\d)$")


def agent_state(status: int | None, stats: Mapping[str, Any] | None, max_age_s: float = PLUGIN_AGE_MAX_S) -> str:
    """How a client agent is, by the HTTP status of C(/v1/agent/health) and by what C(/v1/client/stats) says.

    C(ok), C(stopped), C(unhealthy), or C(plugin_stopped): a device plugin that hangs leaves its devices in Nomad for
    ever, and one that ends and cannot be started again does so at times; only its statistics get no newer. An agent
    without statistics of devices tells nothing; with MIG the plugin has none.
    """
    if status is None or status < 100:
        return AGENT_STOPPED
    if status != 200:
        return AGENT_UNHEALTHY
    age = plugin_age_s(stats or {})
    return PLUGIN_STOPPED if age is not None and age > max_age_s else AGENT_OK


def plugin_age_s(stats: Mapping[str, Any]) -> float | None:
    """Seconds between the agent's own statistics and the newest of GPUs; None where there are none of GPUs."""
    times = [
        seconds
        for group in stats.get("DeviceStats") or []
        if group.get("Type") == nomad.GPU_DEVICE_TYPE
        for instance in (group.get("InstanceStats") or {}).values()
        if (seconds := _seconds((instance or {}).get("Timestamp"))) is not None
    ]
    taken = stats.get("Timestamp")
    return max(0.0, taken / _NANOSECONDS - max(times)) if times and isinstance(taken, int) else None


def _seconds(text: Any) -> float | None:
    match = _TIME.match(text) if isinstance(text, str) else None
    if not match:
        return None
    zone = "+00:00" if match[2] == "Z" else match[2]
    return datetime.datetime.fromisoformat(match[1] + zone).timestamp()
