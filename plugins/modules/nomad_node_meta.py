#!/usr/bin/python
# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: nomad_node_meta
short_description: Set metadata of a Nomad node while its agent runs
version_added: 1.0.0
author:
  - gpufarm contributors (@gpufarm)
description:
  - Changes what C(nomad node meta apply) changes, dynamic metadata, on the node of the agent that is asked. Jobs
    constrain on it as on that of the configuration, and no agent is restarted for it.
  - Run it on the node itself. What is not named stays as it is.
extends_documentation_fragment:
  - gpufarm.core.nomad
  - gpufarm.core.nomad.actiongroup_nomad
attributes:
  check_mode:
    support: full
    description: Reads as without and writes nothing.
  diff_mode:
    support: full
    description: Shows the metadata that O(meta) names.
  idempotent:
    support: full
    description: Nothing is written where all is as it should be.
  platform:
    platforms: Linux, WSL 2
    support: full
    description: Runs on the node.
options:
  meta:
    description:
      - Texts by their names. Null takes one away, also one of the agent's configuration.
    type: dict
    required: true
notes:
  - The token needs the rules C(node:read) and C(node:write).
  - Servers know of it some seconds later.
seealso:
  - module: gpufarm.core.nomad_agent_info
"""

EXAMPLES = r"""
- name: Say where the node stands
  gpufarm.core.nomad_node_meta:
    meta:
      rack: r12
      row:
"""

RETURN = r"""
meta:
  description: All metadata of the node after this run, by C(/v1/client/metadata); in check mode as it would be.
  type: dict
  returned: success
  sample: {rack: r12}
"""

import platform
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpufarm.core.plugins.module_utils import gate_service, nomad, nomad_options


def check(meta: dict[str, Any]) -> None:
    for name, value in meta.items():
        if value is not None and not isinstance(value, str):
            raise nomad.NomadError(
                found=f"meta.{name} is of type {type(value).__name__}",
                expected="a text, as all metadata of Nomad is",
                next_step="put quotes around it",
            )


def main() -> None:
    module = AnsibleModule(
        argument_spec={**nomad_options.argument_spec(), "meta": {"type": "dict", "required": True}},
        required_together=nomad_options.REQUIRED_TOGETHER,
        supports_check_mode=True,
    )
    wanted: dict[str, Any] = module.params["meta"]
    connection = nomad_options.connection_of(module.params)
    try:
        check(wanted)
        client = nomad.Client(connection, direct=True)
        before: dict[str, str] = (client.call("GET", "/v1/client/metadata") or {}).get("Meta") or {}
        changes = {name: value for name, value in wanted.items() if before.get(name) != value}
        if changes and not module.check_mode:
            node_id = gate_service.own_node(client)["ID"]
            client.call("POST", "/v1/client/metadata", {"NodeID": node_id, "Meta": changes})
    except nomad.NomadError as error:
        module.fail_json(msg=f"{platform.node()}: {error}")
    meta = {name: value for name, value in {**before, **changes}.items() if value is not None}
    module.exit_json(
        changed=bool(changes),
        meta=meta,
        diff={"before": {name: before.get(name) for name in changes}, "after": changes},
    )


if __name__ == "__main__":
    main()
