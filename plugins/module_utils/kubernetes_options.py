# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The options by which Ansible modules reach Kubernetes, as the documentation fragment tells them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ansible.module_utils.basic import env_fallback
from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes import Connection, KubernetesError


def argument_spec() -> dict[str, Any]:
    """The options of the documentation fragment C(gpufarm.core.kubernetes)."""
    return {
        "kubeconfig": {"type": "path", "fallback": (env_fallback, ["K8S_AUTH_KUBECONFIG"])},
        "context": {"type": "str", "fallback": (env_fallback, ["K8S_AUTH_CONTEXT"])},
        "kubectl": {"type": "path", "default": "kubectl"},
        "request_timeout": {"type": "int", "default": 30},
    }


def connection_of(params: Mapping[str, Any]) -> Connection:
    """The connection that a module's options describe."""
    if params["request_timeout"] < 1:
        # kubectl would wait without end.
        raise KubernetesError(
            f"request_timeout is {params['request_timeout']}", "seconds, 1 or more", "correct the option"
        )
    return Connection(**{field.name: params[field.name] for field in dataclasses.fields(Connection)})
