# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What GPUs really do: C(measuring) stands alone, also as a job's payload; C(judging) never touches a machine."""

from __future__ import annotations

from ansible_collections.gpufarm.core.plugins.module_utils.gpu_benchmark.judging import (
    Card,
    Thresholds,
    judge_device,
    judge_peers,
    limits_of,
    with_limits,
)
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_benchmark.measuring import (
    LEVELS,
    Tell,
    empty_device,
    measure,
)
