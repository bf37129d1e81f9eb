# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The options by which Ansible modules reach Nomad, as the documentation fragment C(gpufarm.core.nomad) tells them."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from ansible.module_utils.basic import env_fallback
from ansible.module_utils.errors import AnsibleFallbackNotFound
from ansible_collections.gpufarm.core.plugins.module_utils.nomad import DEFAULT_ADDRESS, Connection, skips_verification


def argument_spec() -> dict[str, Any]:
    """The options of the documentation fragment C(gpufarm.core.nomad)."""

    def option(kind: str, variable: str, **more: Any) -> dict[str, Any]:
        return {"type": kind, "fallback": (env_fallback, [variable]), **more}

    return {
        "address": option("str", "NOMAD_ADDR", default=DEFAULT_ADDRESS),
        "token": option("str", "NOMAD_TOKEN", no_log=True),
        "namespace": option("str", "NOMAD_NAMESPACE"),
        "region": option("str", "NOMAD_REGION"),
        "ca_cert": option("path", "NOMAD_CACERT"),
        "ca_path": option("path", "NOMAD_CAPATH"),
        "client_cert": option("path", "NOMAD_CLIENT_CERT"),
        "client_key": option("path", "NOMAD_CLIENT_KEY", no_log=False),
        "tls_server_name": option("str", "NOMAD_TLS_SERVER_NAME"),
        "validate_certs": {"type": "bool", "default": True, "fallback": (_verify_fallback, ["NOMAD_SKIP_VERIFY"])},
        "request_timeout": {"type": "int", "default": 30},
    }


REQUIRED_TOGETHER = [("client_cert", "client_key")]


def _verify_fallback(variable: str) -> bool:
    value = os.environ.get(variable)
    if not value:
        raise AnsibleFallbackNotFound
    return not skips_verification(value)


def connection_of(params: dict[str, Any]) -> Connection:
    """The connection that a module's options describe.

    It is asked for before anything can fail: an address with a login, which C(Client) refuses, is hidden in the options
    that Ansible shows at C(-vvv).
    """
    connection = Connection(**{field.name: params[field.name] for field in dataclasses.fields(Connection)})
    if "@" in connection.address:
        params["address"] = f"{connection.address.partition(':')[0]}:..."
    return connection
