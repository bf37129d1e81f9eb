# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The gate of a node: closed, the scheduler places nothing new on it; and the gate opens only what it closed itself."""

from __future__ import annotations

from ansible_collections.gpufarm.core.plugins.module_utils.gate.acting import (
    carry_out,
    find_nodes,
    marked_nodes,
    node_path,
    nodes_with_devices,
    read_node,
    with_meta,
)
from ansible_collections.gpufarm.core.plugins.module_utils.gate.agent import (
    PLUGIN_AGE_MAX_S,
    PLUGIN_STOPPED,
    agent_state,
    plugin_age_s,
)
from ansible_collections.gpufarm.core.plugins.module_utils.gate.braking import brake, most_closed
from ansible_collections.gpufarm.core.plugins.module_utils.gate.deciding import (
    FARM,
    KEYS,
    MAINTENANCE_KEY,
    MEASURED,
    NODE,
    OPEN,
    SINCE_KEY,
    STATES,
    Decision,
    GateNode,
    Memory,
    Wish,
    clean_reason,
    closed_for,
    decide,
    gate_node,
    state_after,
)
from ansible_collections.gpufarm.core.plugins.module_utils.gate.farm import (
    CRITICAL,
    HARMLESS,
    KUBERNETES,
    NOMAD,
    WARNING,
    closes,
    judge_farm,
)
