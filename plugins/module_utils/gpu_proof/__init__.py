# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a task of Nomad's and a pod that prove a GPU have in common: what they run and say, how it is judged, shown."""

from __future__ import annotations

from ansible_collections.gpufarm.core.plugins.module_utils.gpu_proof.records import (
    LEVELS,
    ProofSettings,
    Result,
    counts,
    message,
    problems_of,
    table,
)
