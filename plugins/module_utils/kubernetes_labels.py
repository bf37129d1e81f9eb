# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What GPU feature discovery says of nodes, as their labels.

It is in the image of NVIDIA's device plugin, whose pod sees all GPUs of its node. So it is asked there, once, and needs
neither pods of its own nor node-feature-discovery.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes import (
    DOMAIN,
    MARK,
    TIMESTAMP,
    Client,
    KubernetesError,
    Node,
    Plugin,
    change_node,
    in_parts,
    labelled_by_us,
    mapping,
    plugin_of,
    read_nodes,
    read_plugin,
    text_of,
)
from ansible_collections.gpufarm.core.plugins.module_utils.problem import sentences

PROGRAM = "gpu-feature-discovery"
# To standard output, once; the time would be another label with every look.
ASK = (PROGRAM, "--oneshot", "--no-timestamp", "--output-file=")
_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_LINE = re.compile(rf"(nvidia\.com/{_NAME})=(\S*)")
# Not that of a board which calls itself "To Be Filled By O.E.M.", nor a long model with its MIG profile.
_VALUE = re.compile(f"(?:{_NAME})?")


@dataclasses.dataclass(frozen=True)
class Labelled:
    """What became of a node: C(labelled), C(cleared), C(left), C(none), C(waiting), or C(failed)."""

    name: str
    action: str
    message: str
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)


def parse_features(text: str) -> tuple[dict[str, str], list[str]]:
    """The labels that GPU feature discovery prints, one C(name=value) a line; a KubernetesError for anything else.

    Those whose value Kubernetes does not take are named apart: with one of them it would take none. A node without GPUs
    has none. C(text) is its standard output alone, for its log goes to standard error.
    """
    found: dict[str, str] = {}
    refused: list[str] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        match = _LINE.fullmatch(line)
        if match is None:
            raise KubernetesError(
                f"{PROGRAM} printed '{line[:80]}'",
                "labels of nvidia.com, one a line",
                f"try '{' '.join(ASK)}' in the pod of the device plugin",
            )
        if _VALUE.fullmatch(match[2]):
            found[match[1]] = match[2]
        else:
            refused.append(line)
    return found, refused


def patch_to(node: Node, wanted: Mapping[str, str]) -> dict[str, Any] | None:
    """What is to be merged into a node that is to have these labels and none of those that this set before."""
    ours = [name for name in node["annotations"].get(MARK, "").split(",") if name.startswith(DOMAIN)]
    gone = {name: None for name in ours if name not in wanted and name in node["labels"]}
    labels = {**{name: value for name, value in wanted.items() if node["labels"].get(name) != value}, **gone}
    mark = ",".join(sorted(wanted)) or None
    annotations = {MARK: mark} if node["annotations"].get(MARK) != mark else {}
    if not labels and not annotations:
        return None
    given = {"labels": labels, "annotations": annotations}
    return {"metadata": {key: value for key, value in given.items() if value}}


def read_pods(client: Client, namespace: str, selector: str) -> dict[str, Plugin]:
    """Nodes to the device plugin's pod on each."""

    def by_node(items: Iterator[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
        found: dict[str, list[dict[str, Any]]] = {}
        for item in items:
            found.setdefault(text_of(mapping(item.get("spec")).get("nodeName")), []).append(item)
        return found

    pods = client.read(by_node, "api", "v1", "namespaces", namespace, "pods", labelSelector=selector)
    return {node: plugin_of(items) for node, items in pods.items()}


def ask(client: Client, plugins: Sequence[tuple[str, Plugin]]) -> Iterator[tuple[str, str | KubernetesError]]:
    """Nodes with what GPU feature discovery says in the plugin's pod there, some of them side by side."""
    for part in in_parts(plugins):
        calls = [("exec", f"--namespace={plugin.namespace}", plugin.name, "--", *ASK) for _node, plugin in part]
        yield from zip((node for node, _plugin in part), client.calls(calls))


def _apply(client: Client, node: Node, wanted: Mapping[str, str], check_mode: bool) -> bool:
    """Whether a node gets other labels."""
    if patch_to(node, wanted) is None:
        return False
    if not check_mode:
        change_node(client, node["name"], lambda now: patch_to(now, wanted))
    return True


def _refused(error: KubernetesError) -> KubernetesError:
    """What went wrong, with what to do where the image has no such program."""
    if "executable file not found" not in error.found and "no such file or directory" not in error.found:
        return error
    return KubernetesError(
        error.found,
        f"{PROGRAM} in the image of the device plugin, as in NVIDIA's own",
        "take that image, or have no labels by kubernetes_device_plugin_gpu_labels=false",
    )


def label(client: Client, namespace: str, selector: str, check_mode: bool) -> list[Labelled]:
    """Label every node on which the device plugin runs, sorted by name; one without it loses what this has set."""
    nodes = {node["name"]: node for node in read_nodes(client)}
    plugins = {name: plugin for name, plugin in read_pods(client, namespace, selector).items() if name in nodes}
    done = _clear(client, [node for name, node in nodes.items() if name not in plugins], check_mode)
    done += [
        Labelled(name, "left", f"GPU feature discovery labels it by itself ({TIMESTAMP})", nodes[name]["labels"])
        for name in plugins
        if TIMESTAMP in nodes[name]["labels"]
    ]
    left = {each.name for each in done}
    running = [(name, plugin) for name, plugin in plugins.items() if plugin.running and name not in left]
    done += _label(client, nodes, running, check_mode)
    return sorted(done, key=lambda each: each.name)


def refresh(client: Client, names: Collection[str], check_mode: bool) -> list[Labelled]:
    """Label those of these nodes anew whose labels this has set, sorted by name, wherever the device plugin's pods are.

    One that does not run yet is C(waiting), so that the caller can try again.
    """
    nodes = {node["name"]: node for node in read_nodes(client) if node["name"] in names and labelled_by_us(node)}
    plugins = [(name, read_plugin(client, name)) for name in nodes]
    wish = "one that runs, to be asked for the labels"
    done = [
        Labelled(name, "waiting", sentences(plugin.found, wish, plugin.next_step))
        for name, plugin in plugins
        if not plugin.running
    ]
    done += _label(client, nodes, [(name, plugin) for name, plugin in plugins if plugin.running], check_mode)
    return sorted(done, key=lambda each: each.name)


def _label(
    client: Client, nodes: Mapping[str, Node], plugins: Sequence[tuple[str, Plugin]], check_mode: bool
) -> Iterator[Labelled]:
    for name, answer in ask(client, plugins):
        try:
            if isinstance(answer, KubernetesError):
                raise _refused(answer)
            wanted, refused = parse_features(answer)
            changed = _apply(client, nodes[name], wanted, check_mode)
        except KubernetesError as error:
            yield Labelled(name, "failed", str(error))
        else:
            message = f"{len(wanted)} labels" if wanted else f"{PROGRAM} finds no GPU"
            if refused:
                message = f"{len(wanted)} labels, without {', '.join(refused)}, which Kubernetes does not take"
            yield Labelled(name, "labelled" if changed else "none", message, wanted)


def clear(client: Client, check_mode: bool) -> list[Labelled]:
    """Take away what this has set, from every node."""
    return _clear(client, read_nodes(client), check_mode)


def _clear(client: Client, nodes: Iterable[Node], check_mode: bool) -> list[Labelled]:
    done = []
    for node in nodes:
        if _apply(client, node, {}, check_mode):
            done.append(Labelled(node["name"], "cleared", "has none of these labels any more"))
    return done
