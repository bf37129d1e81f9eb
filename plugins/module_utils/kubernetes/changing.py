# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A node changed all at once, by what it is at that moment, and pods that are asked to leave one."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes.client import (
    Client,
    KubernetesError,
    in_parts,
    path_of,
)
from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes.nodes import Node
from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes.pods import Work
from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes.reading import read_node

# So often somebody else may change the node between a look and a change. The kubelet does it now and then, and each
# second where something changes there all the time; with the pauses these are some 15 seconds.
ATTEMPTS = 20
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
# Refusals, by no right that lacks, of one pod alone: it goes with its namespace, or somebody has to mend its budgets.
OF_ONE_POD = re.compile("is being terminated|more than one PodDisruptionBudget")


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
        time.sleep(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (attempt - 1)))
    return None


def eviction_of(work: Work) -> tuple[str, dict[str, Any]]:
    """Where a pod's end is asked for, and how: of this very pod, not of a later one of its name."""
    body = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": work.name, "namespace": work.namespace},
        "deleteOptions": {"preconditions": {"uid": work.uid}},
    }
    return path_of("api", "v1", "namespaces", work.namespace, "pods", work.name, "eviction"), body


def evict(client: Client, work: Sequence[Work]) -> str:
    """Ask for the end of pods; what holds the first of those that are held, for the end of a sentence."""
    asked = [each for each in work if not each.ending]
    held = ""
    for part in in_parts(asked):
        for each, answer in zip(part, client.create([eviction_of(each) for each in part])):  # Python 3.9 has no strict
            # Not found is gone, and a conflict is another pod of that name.
            if not isinstance(answer, KubernetesError) or answer.reason in ("NotFound", "Conflict"):
                continue
            if not answer.transient and not OF_ONE_POD.search(answer.found):
                raise answer
            held = held or f"; of {each}, {answer.found}"
    return held
