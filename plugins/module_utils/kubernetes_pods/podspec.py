# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The pod, and its marks by which one that was left behind is known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils.gpu_proof.script import compute, payload_of_pod, script
from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes import mapping, text_of
from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes_pods.records import Settings, Slot

PREFIX = "gpufarm-verify-"
LABEL = "gpufarm.core/verify"
"""With the name of the run."""
GIVES_UP_AT = "gpufarm.core/gives-up-at"
CONTAINER = "see"
# In the environment: an argument and a variable may have 128 KiB each on Linux, and an object of Kubernetes' 1 MiB.
PAYLOAD = "GPUFARM_PAYLOAD"
# What ends a proof that was killed: its pods end by themselves, and a later one removes them. One that has no place yet
# does not end (activeDeadlineSeconds counts from the start); as soon as it starts it gives up.
GRACE_S = 60
# Of nobody; nvidia-smi needs no rights.
USER = 65534


def pod_name(run: str, number: int) -> str:
    return f"{PREFIX}{run}-{number}"


def pod_of(name: str, run: str, slot: Slot, settings: Settings, *, seconds: int, gives_up_at: int) -> dict[str, Any]:
    """What C(POST /api/v1/namespaces/NAMESPACE/pods) takes. It fits the strictest of Kubernetes' pod standards."""
    settings = settings.on(slot)
    here = {"key": "metadata.name", "operator": "In", "values": [slot.node]}
    required = {"nodeSelectorTerms": [{"matchFields": [here]}]}
    memory = f"{settings.memory_to_have_mib}Mi"
    environment: dict[str, str] = {}
    if settings.computes:
        # An image that says nothing of it may get no libcuda.
        environment = {"NVIDIA_DRIVER_CAPABILITIES": "compute,utility", PAYLOAD: payload_of_pod()}
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": seconds,
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        # Not nodeName: that would go past the scheduler.
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}},
        "tolerations": [dict(each) for each in settings.tolerations],
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            {
                "name": CONTAINER,
                "image": settings.image_to_run,
                "imagePullPolicy": "IfNotPresent",
                # An entry point of the image could print anything, or run something else.
                "command": [
                    "/bin/sh",
                    "-c",
                    _unless_given_up(gives_up_at) + script(seconds, compute(PAYLOAD, settings)),
                ],
                "env": [{"name": key, "value": value} for key, value in environment.items()],
                "resources": {
                    "requests": {"cpu": "100m", "memory": memory},
                    "limits": {"memory": memory, slot.resource: "1"},
                },
                "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
            }
        ],
    }
    if settings.runtime_class:
        spec["runtimeClassName"] = settings.runtime_class
    if settings.priority_class:
        spec["priorityClassName"] = settings.priority_class
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": settings.namespace,
            "labels": {LABEL: run, "app.kubernetes.io/managed-by": "gpufarm.core"},
            "annotations": {GIVES_UP_AT: str(gives_up_at)},
        },
        "spec": spec,
    }


def _unless_given_up(gives_up_at: int) -> str:
    """Before the script. An image without C(date) goes on. What is written there Kubernetes tells of the pod."""
    over = "by the clock of its node the proof was over when it started"
    return f"""if [ "$(date +%s)" -ge {gives_up_at} ]; then echo '{over}' >/dev/termination-log; exit 1; fi\n"""


def leftovers(pods: Iterable[Mapping[str, Any]], now: float) -> list[str]:
    """Names of pods that a killed run left behind; those of a running one stay."""
    found = []
    for pod in pods:
        metadata = mapping(pod.get("metadata"))
        name = text_of(metadata.get("name"))
        gives_up_at = text_of(mapping(metadata.get("annotations")).get(GIVES_UP_AT))
        if name.startswith(PREFIX) and gives_up_at.isdecimal() and int(gives_up_at) < now:
            found.append(name)
    return sorted(found)
