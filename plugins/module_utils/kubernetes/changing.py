# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A node changed all at once, by what it is at that moment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes.client import Client, KubernetesError
from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes.nodes import Node
from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes.reading import read_node

# So often somebody else may change the node between a look and a change. The kubelet does it now and then.
ATTEMPTS = 5


def change_node(client: Client, name: str, patch_of: Callable[[Node], Mapping[str, Any] | None]) -> Node | None:
    """Merge into a node what C(patch_of) makes of it, or nothing; the node as it was before, None where there is none.

    Kubernetes refuses the change where somebody else has changed the node meanwhile, and the node is looked at again.
    """
    for attempt in range(1, ATTEMPTS + 1):
        node = read_node(client, name)
        patch = patch_of(node) if node else None
        if node is None or patch is None:
            return node
        metadata = {**patch.get("metadata", {}), "resourceVersion": node["resource_version"]}
        try:
            client.patch_node(name, {**patch, "metadata": metadata})
        except KubernetesError as error:
            if error.reason != "Conflict" or attempt == ATTEMPTS:
                raise
        else:
            return node
    return None
