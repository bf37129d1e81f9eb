#!/usr/bin/python
# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Keep one key as the only one that Nomad's servers encrypt their gossip with."""

from __future__ import annotations

DOCUMENTATION = r"""
module: nomad_gossip_key
short_description: Encrypt the gossip of Nomad's servers with one key
version_added: 1.0.0
author:
  - gpufarm contributors (@gpufarm)
description:
  - Rotates the key of running servers. Those that Nomad has as alive get the key, then use it, then forget all others;
    each step is agreed upon by all of them before the next begins, so none of them is cut off and none restarts. Who is
    away then is cut off until this module runs on it.
  - A server takes the key of its configuration only when it has no keyring yet; this module reads the keyring of the
    server that it runs on and asks Nomad only where that holds another key.
extends_documentation_fragment:
  - gpufarm.core.nomad
  - gpufarm.core.nomad.actiongroup_nomad
attributes:
  check_mode:
    support: full
    description: Can run in C(check_mode) and says whether the keys would change.
  diff_mode:
    support: none
    description: Keys are shown nowhere.
  idempotent:
    support: full
    description: Where the key is the only one already, Nomad is not asked.
  platform:
    description: Runs on a Nomad server, as a user that may read its keyring.
options:
  key:
    description:
      - The key, 16, 24 or 32 bytes in base64.
    type: str
    required: true
  keyring:
    description:
      - File in which the server keeps its keys, C(server/serf.keyring) in its data folder.
    type: path
    required: true
  timeout:
    description:
      - Seconds that all servers together have to agree on a step.
    type: int
    default: 60
notes:
  - The token needs the rule C(agent:write).
"""

EXAMPLES = r"""
- name: Rotate the gossip key
  gpufarm.core.nomad_gossip_key:
    key: "{{ vault_nomad_gossip_key }}"
    keyring: /opt/nomad/data/server/serf.keyring
    token: "{{ vault_nomad_token }}"
"""

RETURN = r"""#"""

import json
import platform
import time
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpufarm.core.plugins.module_utils import nomad, nomad_options

PAUSE_S = 1.0


def read_keyring(path: str) -> list[str]:
    """The keys of a server, the one that it encrypts with first; none where it encrypts nothing."""
    try:
        keys = json.loads(Path(path).read_text(encoding="ascii"))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise nomad.NomadError(
            # What was read is in the text of neither.
            found=f"the keyring {path} cannot be read ({type(error).__name__})",
            expected="the keys of this server, as Nomad writes them",
            next_step="check the option 'keyring' and who may read the file",
        ) from None
    return [str(key) for key in keys]


def step(client: nomad.Client, verb: str, key: str, deadline: float) -> None:
    """One step of the rotation; servers that are busy or just starting are asked again."""
    while True:
        try:
            client.call("PUT", f"/v1/agent/keyring/{verb}", {"Key": key})
        except nomad.NomadError as error:
            if error.status == 403:
                raise nomad.NomadError(
                    found=error.found,
                    expected="a token that may change the keyring",
                    next_step="set 'token' to one whose policy has agent { policy = \"write\" }",
                ) from error
            if not error.transient or time.monotonic() > deadline:
                raise
            time.sleep(PAUSE_S)
        else:
            return


def rotate(client: nomad.Client, key: str, found: list[str], path: str, timeout: float) -> None:
    if not found:
        raise nomad.NomadError(
            found=f"there is no keyring {path}, so this server does not encrypt its gossip",
            expected="a server that was started with a key",
            next_step="set server { encrypt } in its configuration and restart it",
        )
    older = [other for other in found if other != key]
    for verb, which in [("install", key), ("use", key), *(("remove", other) for other in older)]:
        step(client, verb, which, time.monotonic() + timeout)
    left = read_keyring(path)
    if left != [key]:
        raise nomad.NomadError(
            found=f"after the rotation {path} holds {len(left)} keys or another one",
            expected="the given key alone",
            next_step="check that 'keyring' and 'address' are of the same server",
        )


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **nomad_options.argument_spec(),
            "key": {"type": "str", "required": True, "no_log": True},
            "keyring": {"type": "path", "required": True, "no_log": False},
            "timeout": {"type": "int", "default": 60},
        },
        required_together=nomad_options.REQUIRED_TOGETHER,
        supports_check_mode=True,
    )
    params = module.params
    connection = nomad_options.connection_of(params)
    try:
        found = read_keyring(params["keyring"])
        module.no_log_values.update(found)
        changed = found != [params["key"]]
        if module.check_mode:
            # A server that has no keyring makes one of its configuration when it starts.
            changed = changed and bool(found)
        elif changed:
            client = nomad.Client(connection)
            rotate(client, params["key"], found, params["keyring"], params["timeout"])
    except nomad.NomadError as error:
        module.fail_json(msg=f"{platform.node()}: {error}")
    module.exit_json(changed=changed)


if __name__ == "__main__":
    main()
