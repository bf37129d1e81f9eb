# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The pod of NVIDIA's device plugin on a node."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes.client import listing, mapping, text_of


@dataclasses.dataclass(frozen=True)
class Plugin:
    """What runs the device plugin on a node; without a name nothing does."""

    namespace: str = ""
    name: str = ""
    running: bool = False
    state: str = ""

    @property
    def words(self) -> str:
        return f"it with 'kubectl -n {self.namespace} delete pod {self.name}'"

    @property
    def found(self) -> str:
        if not self.name:
            return "no pod of the device plugin"
        return f"the device plugin's pod {self.namespace}/{self.name} {self.state}"

    @property
    def next_step(self) -> str:
        """For one that does not run."""
        if not self.name:
            return (
                "look at the device plugin's DaemonSet, whose node selector and tolerations this node must meet (its "
                "label nvidia.com/gpu.present, its taints)"
            )
        return f"read 'kubectl -n {self.namespace} describe pod {self.name}' and its log"


# The container's name in the chart, or the image where somebody has a manifest of their own. The daemon for MPS and
# GPU feature discovery are in the same image. The role kubernetes_device_plugin asks the same of DaemonSets.
_CONTAINER = re.compile(r"nvidia-device-plugin(?!-mps)")
_IMAGE = re.compile(r"/k8s-device-plugin[:@]")
_OTHERS = re.compile(r"gpu-feature-discovery|gfd|mps|config-manager")


def _is_plugin(spec: Mapping[str, Any]) -> bool:
    for container in map(mapping, listing(spec.get("containers"))):
        name, image = text_of(container.get("name")), text_of(container.get("image"))
        if _CONTAINER.search(name) or (_IMAGE.search(image) and not _OTHERS.search(name)):
            return True
    return False


def plugin_of(pods: Iterable[Mapping[str, Any]]) -> Plugin:
    """The device plugin's pod among those of one node, the one that runs if there are several."""
    found = Plugin()
    for pod in pods:
        metadata, spec, status = (mapping(pod.get(key)) for key in ("metadata", "spec", "status"))
        if not _is_plugin(spec) or found.running:
            continue
        states = [mapping(each) for each in listing(status.get("containerStatuses"))]
        running = text_of(status.get("phase")) == "Running" and all(each.get("ready") is True for each in states)
        found = Plugin(
            text_of(metadata.get("namespace")),
            text_of(metadata.get("name")),
            running and not metadata.get("deletionTimestamp"),
            _state(status, states),
        )
    return found


def _state(status: Mapping[str, Any], states: Iterable[Mapping[str, Any]]) -> str:
    for each in states:
        reason = text_of(mapping(mapping(each.get("state")).get("waiting")).get("reason"))
        if reason:
            return f"is waiting ({reason})"
    return f"is {text_of(status.get('phase')) or 'in no phase'}"
