# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Nomad's HTTP API as far as GPUs need it: a small client, and pure functions over its answers.

C(gpus_of_node) reads one node, C(compare) judges a whole farm. Both are linear in the number of GPUs, and the client
hands nodes out one by one, because one node with many cores is 45 KB of JSON and a farm has thousands. Nothing of
Ansible is needed, so that the health gate on the nodes uses it too.
"""

from __future__ import annotations

from ansible_collections.gpufarm.core.plugins.module_utils.gpu_verdicts import Expected, NodeVerdict, table
from ansible_collections.gpufarm.core.plugins.module_utils.nomad.client import (
    DEFAULT_ADDRESS,
    Client,
    Connection,
    NomadError,
    is_own,
    name_filter,
    skips_verification,
)
from ansible_collections.gpufarm.core.plugins.module_utils.nomad.comparison import (
    compare,
    expected_of_facts,
    extra_gpu_nodes,
)
from ansible_collections.gpufarm.core.plugins.module_utils.nomad.nodes import (
    ALLOCATIONS_QUERY,
    ENDED,
    GPU_DEVICE_TYPE,
    JOBS_OWNER_KEY,
    Gpu,
    Node,
    describe_node,
    devices_in_use,
    gpus_of_node,
    owner_of,
    rank,
)
from ansible_collections.gpufarm.core.plugins.module_utils.nomad.usage import (
    BUDGET_KEY,
    NamespaceUse,
    Usage,
    budget_of,
    usage_of,
)
from ansible_collections.gpufarm.core.plugins.module_utils.nomad.waiting import wait_until
