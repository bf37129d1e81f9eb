#!/usr/bin/python
# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Have Nomad's servers sign a token with which a client may register that they do not know yet."""

from __future__ import annotations

DOCUMENTATION = r"""
module: nomad_client_introduction
short_description: Have a token with which a Nomad client may join
version_added: 1.0.0
author:
  - gpufarm contributors (@gpufarm)
description:
  - Does what C(nomad node intro create) does, for Nomad 1.11 and newer. A client needs the token once, when it
    registers for the first time with servers of C(client_introduction.enforcement=strict). It reads it when it starts,
    from C(client/intro_token.jwt) in its data folder.
  - Ask the agent of another machine that is in the farm.
extends_documentation_fragment:
  - gpufarm.core.nomad
  - gpufarm.core.nomad.actiongroup_nomad
attributes:
  check_mode:
    support: full
    description: Can run in C(check_mode), tells whether it would make a token, and makes none.
  diff_mode:
    support: none
    description: The token is shown nowhere.
  idempotent:
    support: partial
    description: With O(again=false) a client that has joined gets none. Without, each token is a new one.
  platform:
    description: Runs wherever Nomad's HTTP API can be reached, usually on a server, so no proxy is used.
options:
  name:
    description:
      - Name in Nomad of the client that may register with it.
    type: str
    required: true
  node_pool:
    description:
      - Its node pool.
    type: str
    default: default
  again:
    description:
      - Whether a client gets a token also where the servers have a node of its name that is not down, as for a machine
        that was set up anew.
    type: bool
    default: true
  ttl:
    description:
      - Seconds for which the token holds. The servers' C(client_introduction.max_identity_ttl), 30 minutes by default,
        bounds it. Without it their C(default_identity_ttl) holds, which is 5 minutes.
    type: int
notes:
  - The token of O(token) needs the rule C(node:write).
  - Its answer is a secret. Use C(no_log) and C(register).
seealso:
  - module: gpufarm.core.nomad_deregister
"""

EXAMPLES = r"""
- name: Let a new machine in
  gpufarm.core.nomad_client_introduction:
    name: gpu01
    node_pool: research
  delegate_to: server01
  register: introduction
  no_log: true
"""

RETURN = r"""
known:
  description: Whether the servers have a node of that name already that is not down.
  type: bool
  returned: success
  sample: false
jwt:
  description: The token, a JSON Web Token that the servers have signed.
  type: str
  returned: changed, but in check mode
  sample: eyJhbGciOiJSUzI1NiIsImtpZCI6Ijk...
"""

import json
import platform
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpufarm.core.plugins.module_utils import nomad, nomad_options

PATH = "/v1/acl/identity/client-introduction-token"
NOT_FOUND = 404
NANOSECONDS = 1_000_000_000


def is_known(client: nomad.Client, name: str) -> bool:
    wanted = f'Name == {json.dumps(name)} and Status != "down"'
    return any(True for _node in client.items("/v1/nodes", {"filter": wanted}).items)


def introduce(client: nomad.Client, name: str, node_pool: str, ttl: int | None) -> str:
    """The token for a client; raise NomadError where the servers make none."""
    wanted: dict[str, Any] = {"NodeName": name, "NodePool": node_pool}
    if ttl is not None:
        if ttl <= 0:
            raise nomad.NomadError(
                found=f"ttl is {ttl}", expected="seconds, more than 0", next_step="leave it out, or correct it"
            )
        wanted["TTL"] = ttl * NANOSECONDS
    try:
        answer = client.call("POST", PATH, wanted)
    except nomad.NomadError as error:
        if error.status == NOT_FOUND:
            raise nomad.NomadError(
                found="the agent knows no tokens of introduction",
                expected="Nomad 1.11 or newer",
                next_step="upgrade the servers, or set nomad_client_introduction to the empty text",
                status=error.status,
            ) from None
        raise
    return str(answer["JWT"])


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **nomad_options.argument_spec(),
            "name": {"type": "str", "required": True},
            "node_pool": {"type": "str", "default": "default"},
            "again": {"type": "bool", "default": True},
            "ttl": {"type": "int"},
        },
        required_together=nomad_options.REQUIRED_TOGETHER,
        supports_check_mode=True,
    )
    params = module.params
    try:
        client = nomad.Client(nomad_options.connection_of(params), direct=True)
        known = is_known(client, params["name"])
        wanted = params["again"] or not known
        if module.check_mode or not wanted:
            module.exit_json(changed=wanted, known=known)
        jwt = introduce(client, params["name"], params["node_pool"], params["ttl"])
    except nomad.NomadError as error:
        module.fail_json(msg=f"{platform.node()}: {error}")
    module.exit_json(changed=True, known=known, jwt=jwt)


if __name__ == "__main__":
    main()
