# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Kubernetes as far as GPUs need it: a small client, and pure functions over its answers.

C(describe_node) reads one node, C(compare) judges a whole farm. Lists are read a page at a time and each node is
described at once, because one with its list of images is up to 50 KB of JSON and a farm has thousands.
"""

from __future__ import annotations

from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes.changing import change_node, evict
from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes.client import (
    Client,
    Connection,
    KubernetesError,
    in_parts,
    listing,
    mapping,
    path_of,
    text_of,
)
from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes.comparison import (
    compare,
    expected_of_facts,
    extra_gpu_nodes,
    not_compared,
    unhealthy,
)
from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes.nodes import (
    DOMAIN,
    MARK,
    READY,
    TIMESTAMP,
    Node,
    Resource,
    describe_node,
    devices,
    labelled_by_us,
    may_be_shared,
    profile_key,
)
from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes.plugin import Plugin, plugin_of
from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes.pods import (
    NOT_ENDED,
    PodUse,
    Work,
    gpus_of_pod,
    pod_uses,
    with_uses,
    work_of,
)
from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes.reading import (
    read_node,
    read_nodes,
    read_plugin,
    read_plugins,
    read_uses,
    read_work,
)
