# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A verdict on each GPU of this node, from what nvidia-smi, the kernel log, DCGM and Fabric Manager say.

C(probe) asks the sources and C(judge), which touches nothing, weighs their answers. A source that could not be asked is
told in C(checks) and is a problem itself; what the platform does not give (null) is none.
Nothing here needs Ansible, and nothing beyond Python's standard library: a timer on the node runs the same code.
"""

from __future__ import annotations

from ansible_collections.gpufarm.core.plugins.module_utils.health.options import (
    HealthOptions,
    defaults,
    longest_probe,
    refuse_longer,
)
from ansible_collections.gpufarm.core.plugins.module_utils.health.probing import probe
from ansible_collections.gpufarm.core.plugins.module_utils.health.problems import PROBLEMS
from ansible_collections.gpufarm.core.plugins.module_utils.health.verdict import add, judge
