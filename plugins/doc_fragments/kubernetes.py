# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations


class ModuleDocFragment:
    """How to reach Kubernetes; the same for every module that asks it."""

    DOCUMENTATION = r"""
options:
  kubeconfig:
    description:
      - File that tells the address of the cluster and how to log in there.
      - If not set, the environment variable E(K8S_AUTH_KUBECONFIG) of the machine that runs the module is used, and
        otherwise what C(kubectl) itself uses, which is E(KUBECONFIG) or C(~/.kube/config).
    type: path
  context:
    description:
      - Context in that file.
      - If not set, the environment variable E(K8S_AUTH_CONTEXT) is used, and otherwise the file's current context.
    type: str
  kubectl:
    description:
      - C(kubectl) by its name in E(PATH) or by its path, or both words of V(k3s kubectl). It knows every way to log
        in, so nothing else is needed.
    type: path
    default: kubectl
  request_timeout:
    description:
      - Seconds to wait for an answer of the apiserver.
    type: int
    default: 30
requirements:
  - C(kubectl) on the machine that runs the module
"""

    ACTIONGROUP_KUBERNETES = r"""
attributes:
  action_group:
    support: full
    description: >-
      Use C(group/gpufarm.core.kubernetes) in C(module_defaults) to say once for all modules which cluster they ask.
    membership:
      - gpufarm.core.kubernetes
  platform:
    platforms: posix
    support: full
    description: Runs wherever the apiserver can be reached, usually on localhost.
"""
