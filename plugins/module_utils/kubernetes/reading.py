# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Nodes and pods, read page by page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes.client import Client, KubernetesError, path_of
from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes.nodes import Node, describe_node
from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes.plugin import Plugin, plugin_of
from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes.pods import (
    NOT_ENDED,
    PodUse,
    Work,
    pod_uses,
    work_of,
)

# So many nodes are asked for their pods one by one; of more, the pods of all nodes are read.
SINGLE_NODES = 8
# As many as somebody still reads.
PLUGIN_NODES = 20


def read_nodes(client: Client, selector: str | None = None, name: str | None = None) -> list[Node]:
    """All nodes, or those with these labels, or the one of this name, sorted by name; that takes the right to list."""
    field = None if name is None else f"metadata.name={name}"

    def described(items: Iterator[dict[str, Any]]) -> dict[str, Node]:
        return {node["name"]: node for node in map(describe_node, items) if node["name"]}

    by_name = client.read(described, "api", "v1", "nodes", labelSelector=selector or None, fieldSelector=field)
    return [by_name[name] for name in sorted(by_name)]


def read_node(client: Client, name: str) -> Node | None:
    """One node as it is now; None where there is none of this name."""
    try:
        return describe_node(client.get(path_of("api", "v1", "nodes", name)))
    except KubernetesError as error:
        if error.reason != "NotFound":
            raise
        return None


def read_uses(client: Client, names: Iterable[str]) -> dict[str, list[PodUse]]:
    """Nodes to the pods on them that hold GPUs."""
    wanted = set(names)
    selectors = [f"spec.nodeName={name}," for name in sorted(wanted)] if len(wanted) <= SINGLE_NODES else [""]
    uses: dict[str, list[PodUse]] = {}
    for selector in selectors:
        uses.update(client.read(pod_uses, "api", "v1", "pods", fieldSelector=f"{selector}{NOT_ENDED}"))
    return {name: uses.get(name, []) for name in wanted}


def read_work(client: Client, node: str) -> list[Work]:
    """What runs on a node and ends with it."""
    return client.read(work_of, "api", "v1", "pods", fieldSelector=f"spec.nodeName={node},{NOT_ENDED}")


def read_plugin(client: Client, node: str) -> Plugin:
    """The device plugin's pod on a node, in whatever namespace."""
    return client.read(plugin_of, "api", "v1", "pods", fieldSelector=f"spec.nodeName={node}")


def read_plugins(client: Client, names: Iterable[str]) -> dict[str, Plugin]:
    """The device plugin's pod on each of these nodes, as far as the user may see it."""
    found: dict[str, Plugin] = {}
    for name in sorted(set(names))[:PLUGIN_NODES]:
        try:
            found[name] = read_plugin(client, name)
        except KubernetesError:
            # It only helps to name the cause.
            return found
    return found
