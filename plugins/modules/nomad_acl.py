#!/usr/bin/python
# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Keep the ACLs of a Nomad region: the first token, policies, and tokens that have them."""

from __future__ import annotations

DOCUMENTATION = r"""
module: nomad_acl
short_description: Bootstrap Nomad's ACLs and keep policies and tokens
version_added: 1.0.0
author:
  - gpufarm contributors (@gpufarm)
description:
  - Makes the token that it is given the first management token of a region that has none, then keeps policies and
    tokens that have them. As the secret is known before Nomad is, a run that breaks off anywhere loses nothing.
  - Policies and tokens of other names are left alone. Of what is to be absent all is checked before the first change.
extends_documentation_fragment:
  - gpufarm.core.nomad
  - gpufarm.core.nomad.actiongroup_nomad
attributes:
  check_mode:
    support: full
    description: Can run in C(check_mode) and says whether something would change.
  diff_mode:
    support: none
    description: Tokens are shown nowhere.
  idempotent:
    support: full
    description: Where all is as wanted nothing is written.
  platform:
    description: Runs where the API of a server answers.
options:
  token:
    description:
      - The Secret ID of the management token. Where the region has no token yet it becomes the first one; it has to be
        a UUID then.
  policies:
    description:
      - Rules by the name of their policy, in the language of Nomad's ACL policies.
    type: dict
    default: {}
  tokens:
    description:
      - The names of policies that a token has, by the name of the token. It holds in all regions of a federation. Of
        several such tokens of a name the oldest is kept so, unless it is in O(own_tokens); management tokens, and those
        that end, are left alone.
    type: dict
    default: {}
  own_tokens:
    description:
      - The Secret IDs of those of O(tokens) that were made before, by their name, an empty one where there is none yet.
        Of a name that is here no other token is kept so. Where Nomad has another that this module could have made, and
        not this one, that is an error before anything changes, because it may be somebody's own.
    type: dict
    default: {}
    version_added: 1.0.0
  absent_policies:
    description:
      - Names of policies to delete. One that a role or a token still has, other than those of O(absent_tokens), stays,
        and is an error.
    type: list
    elements: str
    default: []
    version_added: 1.0.0
  absent_tokens:
    description:
      - The Secret IDs of tokens to delete, by their name. One of another name is an error, as is a management token.
        Where Nomad does not know one it is gone, and it is an error if there is another token of that name which this
        module could have made.
      - With an empty one, where nobody has the Secret ID, nothing is deleted. Of a token of that name which this module
        could have made there is a warning.
    type: dict
    default: {}
    version_added: 1.0.0
notes:
  - Its answer holds secrets. Use C(no_log) and C(register).
"""

EXAMPLES = r"""
- name: Have a token that may only look
  gpufarm.core.nomad_acl:
    token: "{{ vault_nomad_management_token }}"
    policies:
      verify: |
        agent { policy = "read" }
        node { policy = "read" }
    tokens:
      verify: [verify]
  register: acl
  no_log: true
"""

RETURN = r"""
secrets:
  description: >-
    The Secret IDs of O(tokens), by name, without those that O(own_tokens) has. In check mode one that is only to come
    is missing.
  type: dict
  returned: success
  sample: {verify: 9184ec35-65d4-9258-61e3-0c066d0a45c5}
"""

import dataclasses
import platform
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpufarm.core.plugins.module_utils import nomad, nomad_options
from ansible_collections.gpufarm.core.plugins.module_utils.text import clean

# What a token is answered that Nomad does not know: 404 until 1.10.0.
UNKNOWN = (403, 404)


class Acl:
    """The ACLs of a region, whether something of them was to be written, and what somebody has to look at."""

    def __init__(self, connection: nomad.Connection, check_mode: bool) -> None:
        self._client = nomad.Client(connection)
        self._check_mode = check_mode
        self.changed = False
        self.warnings: list[str] = []

    def _write(self, path: str, body: Any, method: str = "POST") -> Any:
        self.changed = True
        return None if self._check_mode else self._client.call(method, path, body)

    def bootstrap(self) -> bool:
        """Have a management token; false where that is only to come."""
        try:
            found = self._client.call("GET", "/v1/acl/token/self")
        except nomad.NomadError as error:
            if error.status not in UNKNOWN:
                raise
            try:
                self._write("/v1/acl/bootstrap", {"BootstrapSecret": self._client.connection.token})
            except nomad.NomadError as refusal:
                raise nomad.NomadError(
                    found=f"Nomad does not know the token, and takes it as its first one neither ({refusal.said})",
                    expected="the management token that this region was bootstrapped with, or a region without any",
                    next_step="bring that token, or see 'nomad acl bootstrap' on how a lost one is replaced",
                    status=refusal.status,
                ) from None
            return not self._check_mode
        if found["Type"] != "management":
            raise nomad.NomadError(
                found=f"the token '{found['Name']}' is of type {found['Type']}",
                expected="a management token, which alone may change policies and tokens",
                next_step="set 'token' to the one that the region was bootstrapped with",
            )
        return True

    def policy(self, name: str, rules: str) -> None:
        found = self._client.find(f"/v1/acl/policy/{name}")
        # What Nomad answers is without control characters here.
        if not found or found["Rules"] != clean(rules):
            self._write(f"/v1/acl/policy/{name}", {"Name": name, "Rules": rules})

    def require_own(self, tokens: dict[str, str]) -> dict[str, Any]:
        """Find nobody else's token of these names; those that are there."""
        own = {}
        for name, secret in tokens.items():
            own[name] = self._client_of(name, secret, "given for", "own_tokens")
            accessors = "" if own[name] else ", ".join(token["AccessorID"] for token in self._made(name))
            if accessors:
                why = "and does not know the Secret ID that was given" if secret else "whose Secret ID was not given"
                raise nomad.NomadError(
                    found=f"Nomad has a token of the name {name} ({accessors}), {why}",
                    expected="none of that name, or one whose Secret ID is given, which tells it from somebody's own",
                    next_step="where it is the token that the role nomad_tenancy has made, copy nomad_secrets_dir/"
                    f"team-{name}-token.txt from the control machine that made it, or write its Secret ID (`nomad acl "
                    "token info` with the ID that is named here) into that file, with mode 0600; where it is "
                    "somebody's own choose another name, and only where nobody uses it run `nomad acl token "
                    "delete` with that ID",
                )
        return own

    def _client_of(self, name: str, secret: str, what: str, option: str) -> Any:
        found = self._of_secret(secret) if secret else None
        if found and (found["Name"], found["Type"]) != (name, "client"):
            raise nomad.NomadError(
                found=f"the token {what} '{name}' is '{found['Name']}', of type {found['Type']}",
                expected="a client token of that name",
                next_step=f"look whose Secret ID was given, and take it out of '{option}'",
            )
        return found

    def require_leave(
        self, policies: list[str], tokens: dict[str, str], had: dict[str, list[str]], own: dict[str, Any]
    ) -> list[str]:
        """Find nothing that speaks against taking these away; the accessors of the tokens that are there."""
        accessors = []
        for name, secret in tokens.items():
            found = self._client_of(name, secret, "to delete as", "absent_tokens")
            if not found:
                self._tell_left(name, bool(secret))
            accessors += [str(found["AccessorID"])] if found else []
        if policies:
            every = self._client.call("GET", "/v1/acl/tokens")
            roles = self._client.call("GET", "/v1/acl/roles") or []
            # What a token is about to have counts.
            kept = {token["AccessorID"]: had[name] for name in had for token in self._had(name, own)}
            users = [
                f"the token {token['Name']} ({token['AccessorID']})"
                for token in every
                if token["AccessorID"] not in accessors
                and set(policies) & set(kept.get(token["AccessorID"], token["Policies"] or []))
            ]
            users += [
                f"the role {role['Name']}"
                for role in roles
                if set(policies) & {policy["Name"] for policy in role["Policies"] or []}
            ]
            if users:
                raise nomad.NomadError(
                    found=f"policies that are to go ({', '.join(policies)}) are still those of {', '.join(users)}",
                    expected="policies that nobody has any more",
                    next_step="take away those tokens and roles as well, or give them other policies",
                )
        return accessors

    def _tell_left(self, name: str, known: bool) -> None:
        """Tell of tokens that may be the one to delete. Of a Secret ID that is given somebody thinks that it is."""
        accessors = ", ".join(token["AccessorID"] for token in self._made(name))
        if accessors and known:
            raise nomad.NomadError(
                found=f"Nomad does not know the Secret ID that was given for {name}, and has a token of that name "
                f"({accessors})",
                expected="the Secret ID of the token that is to be absent, which tells it from somebody's own",
                next_step="give that (the role nomad_tenancy reads it from "
                f"nomad_secrets_dir/team-{name}-token.txt), or run `nomad acl token delete` with the ID that is named "
                "here; where that token is somebody's own, give none and delete that file",
            )
        if accessors:
            self.warnings.append(
                f"The token {name} ({accessors}) is left, because its Secret ID was not given, which tells it from "
                "somebody's own. If it is to be absent run `nomad acl token delete` with the ID that is named here."
            )

    def _made(self, name: str) -> list[dict[str, Any]]:
        """Tokens of a name that may be ours: one that ends, or may do everything, is somebody's own."""
        every = self._client.call("GET", "/v1/acl/tokens")
        return [
            token
            for token in every
            if token["Name"] == name
            and token["Global"]
            and token["Type"] == "client"
            and not token.get("ExpirationTime")
        ]

    def _of_secret(self, secret: str) -> Any:
        connection = dataclasses.replace(self._client.connection, token=secret)
        try:
            return nomad.Client(connection).call("GET", "/v1/acl/token/self")
        except nomad.NomadError as error:
            if error.status not in UNKNOWN:
                raise
            return None

    def lack(self, policies: list[str], accessors: list[str]) -> None:
        for accessor in accessors:
            self._write(f"/v1/acl/token/{accessor}", None, "DELETE")
        for name in policies:
            if self._client.find(f"/v1/acl/policy/{name}"):
                self._write(f"/v1/acl/policy/{name}", None, "DELETE")

    def _had(self, name: str, own: dict[str, Any]) -> list[dict[str, Any]]:
        """The token that is to have the policies of a name; none where it is only to come."""
        listed = ([own[name]] if own[name] else []) if name in own else self._made(name)
        return sorted(listed, key=lambda each: each["CreateIndex"])[:1]

    def secret(self, name: str, policies: list[str], own: dict[str, Any]) -> str | None:
        """The Secret ID of the token of a name, which has these policies then; None where it is only to come."""
        listed = self._had(name, own)
        wanted = {"Name": name, "Type": "client", "Global": True, "Policies": policies}
        if not listed:
            made = self._write("/v1/acl/token", wanted)
            return made and str(made["SecretID"])
        (token,) = listed
        path = f"/v1/acl/token/{token['AccessorID']}"
        if sorted(token["Policies"] or []) != sorted(policies):
            self._write(path, {**wanted, "AccessorID": token["AccessorID"], "Roles": token.get("Roles")})
        return str(self._client.call("GET", path)["SecretID"])


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **nomad_options.argument_spec(),
            "policies": {"type": "dict", "default": {}},
            "tokens": {"type": "dict", "default": {}, "no_log": False},
            "own_tokens": {"type": "dict", "default": {}, "no_log": True},
            "absent_policies": {"type": "list", "elements": "str", "default": []},
            "absent_tokens": {"type": "dict", "default": {}, "no_log": True},
        },
        required_together=nomad_options.REQUIRED_TOGETHER,
        supports_check_mode=True,
    )
    params = module.params
    connection = nomad_options.connection_of(params)
    secrets: dict[str, str] = {}
    try:
        acl = Acl(connection, module.check_mode)
        if acl.bootstrap():
            gone = params["absent_policies"]
            own = acl.require_own(params["own_tokens"])
            accessors = acl.require_leave(gone, params["absent_tokens"], params["tokens"], own)
            for name, rules in params["policies"].items():
                acl.policy(name, rules)
            for name, policies in params["tokens"].items():
                secret = acl.secret(name, policies, own)
                # Ansible would show it as a value that it hides.
                if secret and secret != params["own_tokens"].get(name):
                    secrets[name] = secret
            acl.lack(gone, accessors)
    except nomad.NomadError as error:
        module.fail_json(msg=f"{platform.node()}: {error}")
    for warning in acl.warnings:
        module.warn(f"{platform.node()}: {warning}")
    module.exit_json(changed=acl.changed, secrets=secrets)


if __name__ == "__main__":
    main()
