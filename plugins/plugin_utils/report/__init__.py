# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The farm's report as one document of data; C(records.py) describes it.

C(build) puts the answers of the nodes and of Nomad together, and adds one line to the history. Nothing here needs
Ansible or touches the machine. It runs on the control node only, in a filter.

A host that gave no answer stays in the report with the reason. What nobody told is null and never guessed: sums and
shares say of how many GPUs they are.
"""

from __future__ import annotations

from ansible_collections.gpufarm.core.plugins.plugin_utils.report.document import Options, build
from ansible_collections.gpufarm.core.plugins.plugin_utils.report.nodes import may_have_pods
from ansible_collections.gpufarm.core.plugins.plugin_utils.report.records import (
    VERDICTS,
    Benchmark,
    Document,
    Gpu,
    JobUse,
    NamespaceUse,
    Node,
    Problem,
)
from ansible_collections.gpufarm.core.plugins.plugin_utils.report.sums import mean, parse_time, total
from ansible_collections.gpufarm.core.plugins.plugin_utils.report.users import is_over
