# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Proof by a job: a task pinned to each GPU says what it sees, and that is compared with the GPU it was pinned to.

A node gets one batch job with one task group for each GPU. C(${device.ids}) of a device holds the IDs of its whole
group; Nomad's scheduler (1.11.3) also checks such a constraint against every single ID before it assigns one, so
C(set_contains) with one UUID leaves no choice. The node is pinned by a constraint of the job, not of the groups: Nomad
remembers for a class of nodes that a group does not fit, and would skip the right node after a look at a similar one.
"""

from __future__ import annotations

from ansible_collections.gpufarm.core.plugins.module_utils.nomad_jobs.choice import (
    busy_finding,
    closed_finding,
    closed_to_work,
    pins_of,
    select_nodes,
    skipped,
    take_sample,
    unhealthy_finding,
)
from ansible_collections.gpufarm.core.plugins.module_utils.nomad_jobs.jobspec import DRIVERS
from ansible_collections.gpufarm.core.plugins.module_utils.nomad_jobs.records import (
    PRIORITY_MAX,
    JobResult,
    Pin,
    Settings,
    result_of,
)
from ansible_collections.gpufarm.core.plugins.module_utils.nomad_jobs.running import (
    Run,
    Stopped,
    held_devices,
    prove,
    purge_leftovers,
)
