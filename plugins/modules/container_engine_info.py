#!/usr/bin/python
# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: container_engine_info
short_description: Ask running container engines for their runtimes, and a node for its CDI devices
version_added: 1.0.0
author:
  - gpufarm contributors (@gpufarm)
description:
  - Tells what the daemons go by that run now, which is not what their files say before they have read them. Docker and
    CRI-O are asked by their own clients. containerd has none that tells its runtimes, so it is asked by the Container
    Runtime Interface on its socket. Podman has no daemon.
  - An engine that does not answer is no error.
attributes:
  check_mode:
    support: full
    description: Changes nothing in any mode.
  diff_mode:
    support: N/A
    description: Changes nothing.
  idempotent:
    support: full
    description: Changes nothing.
  platform:
    platforms: posix
    support: full
    description: Runs on Linux, as root.
options:
  engines:
    description: The engines to ask.
    type: list
    elements: str
    choices: [docker, containerd, crio, podman]
    required: true
  containerd_socket:
    description: The socket of containerd.
    type: path
    default: /run/containerd/containerd.sock
  timeout:
    description: Seconds that an answer may take.
    type: float
    default: 120
seealso:
  - module: gpufarm.core.nvidia_container_runtime
"""

EXAMPLES = r"""
- name: Ask Docker and containerd
  gpufarm.core.container_engine_info:
    engines: [docker, containerd]
  register: asked

- name: Require that containerd has read that there is a runtime nvidia
  ansible.builtin.assert:
    that: "'nvidia' in asked.engines.containerd.runtimes"
"""

RETURN = r"""
engines:
  description: What each of O(engines) answers, by its name.
  type: dict
  returned: success
  contains:
    answers:
      description: Whether it answers.
      type: bool
      sample: true
    reason:
      description: Why it does not; null where it does.
      type: str
      sample: null
    runtimes:
      description: >-
        Its runtimes by name, each with its program; an empty text is the engine's own choice. Of Podman the only one.
      type: dict
      sample: {nvidia: /usr/bin/nvidia-container-runtime, runc: ""}
    default:
      description: The name of the runtime that containers have that ask for none; null where it is not known.
      type: str
      sample: runc
    version:
      description: The version of Podman; null of others, and where it does not answer.
      type: str
      sample: null
  sample:
    containerd:
      answers: true
      reason: null
      runtimes: {nvidia: /usr/bin/nvidia-container-runtime, runc: ""}
      default: runc
      version: null
cdi_devices:
  description: What C(nvidia-ctk cdi list) lists; null where it does not answer.
  type: list
  elements: str
  returned: success
  sample: [nvidia.com/gpu=0, nvidia.com/gpu=GPU-4f1b0d5c-6a0e-4b87-9d5a-5e5b7f0c1a2d, nvidia.com/gpu=all]
cdi_by_index:
  description: >-
    Whether the settings of C(nvidia-cdi-refresh.service) have devices named by index, as they are by default.
  type: bool
  returned: success
  sample: true
cdi_version:
  description: >-
    The version of CDI that the file of C(nvidia-cdi-refresh.service) has, for which engines have to be new enough; null
    where there is no such file.
  type: str
  returned: success
  sample: 0.5.0
cdi_current:
  description: >-
    Whether the file that C(nvidia-cdi-refresh.service) writes says what C(nvidia-ctk cdi generate) says now, with that
    service's settings. It does not after a change of the driver, of Windows' driver or of MIG. The sockets of
    nvidia-persistenced and Fabric Manager and the folder of MPS do not count, because they come and go. V(null) where
    nothing can be made, as without a driver, and where a drop-in gives that service another environment or command.
  type: bool
  returned: success
  sample: true
"""

import re

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpufarm.core.plugins.module_utils.container_engines import answers


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "engines": {
                "type": "list",
                "elements": "str",
                "choices": ["docker", "containerd", "crio", "podman"],
                "required": True,
            },
            "containerd_socket": {"type": "path", "default": answers.SOCKET},
            "timeout": {"type": "float", "default": 120},
        },
        supports_check_mode=True,
    )
    params = module.params
    engines, devices, current, version = answers.ask(params["engines"], params["containerd_socket"], params["timeout"])
    listed = re.findall(r"^\s*(\S+=\S+)\s*$", devices.stdout, re.MULTILINE)
    module.exit_json(
        changed=False,
        engines={name: engine.told for name, engine in engines.items()},
        cdi_devices=listed if devices.returncode == 0 else None,
        cdi_current=current,
        cdi_by_index=answers.by_index(),
        cdi_version=version,
    )


if __name__ == "__main__":
    main()
