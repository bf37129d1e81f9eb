# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Proof by pods: as many at once as a node has free GPUs, each with one, say what they see.

Nobody can ask Kubernetes for a certain GPU, because the device plugin's choice is not the scheduler's. So no pod ends
before all of its node have spoken: then each has another GPU, and together they have seen all that were free.
"""

from __future__ import annotations

from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes_pods.choice import plan, select_nodes
from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes_pods.records import PodResult, Settings, Slot
from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes_pods.running import Run, prove, remove_leftovers
