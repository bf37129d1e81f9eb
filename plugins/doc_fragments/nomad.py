# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations


class ModuleDocFragment:
    """How to reach Nomad's HTTP API; the same for every module that asks it."""

    DOCUMENTATION = r"""
options:
  address:
    description:
      - Address of Nomad's HTTP API, with its scheme. One that holds a login is refused.
      - If not set, the environment variable E(NOMAD_ADDR) of the machine that runs the module is used.
    type: str
    default: http://127.0.0.1:4646
  token:
    description:
      - ACL token. It needs the rule C(node:read), and C(namespace:read-job) where allocations are read.
      - If not set, the environment variable E(NOMAD_TOKEN) is used.
    type: str
  namespace:
    description:
      - Namespace of jobs and allocations. Nodes belong to no namespace.
      - If not set, the environment variable E(NOMAD_NAMESPACE) is used.
    type: str
  region:
    description:
      - Region to ask; the request is forwarded to it.
      - If not set, the environment variable E(NOMAD_REGION) is used.
    type: str
  ca_cert:
    description:
      - File with the CA certificates that may have signed the server's certificate.
      - If not set, the environment variable E(NOMAD_CACERT) is used.
    type: path
  ca_path:
    description:
      - Folder with such CA certificates, as C(openssl rehash) makes it.
      - If not set, the environment variable E(NOMAD_CAPATH) is used.
    type: path
  client_cert:
    description:
      - File with the client certificate for mutual TLS. Needs O(client_key).
      - If not set, the environment variable E(NOMAD_CLIENT_CERT) is used.
    type: path
  client_key:
    description:
      - File with the private key of O(client_cert).
      - If not set, the environment variable E(NOMAD_CLIENT_KEY) is used.
    type: path
  tls_server_name:
    description:
      - Name that the server's certificate must carry, where it is not the one in O(address),
        such as V(server.global.nomad).
      - If not set, the environment variable E(NOMAD_TLS_SERVER_NAME) is used.
    type: str
  validate_certs:
    description:
      - Whether the server's certificate must be trusted. With V(false) anyone in between can read the token.
      - If not set, V(false) is used when the environment variable E(NOMAD_SKIP_VERIFY) says so.
    type: bool
    default: true
  request_timeout:
    description:
      - Seconds to wait for an answer, on top of the time that a blocking query may take.
    type: int
    default: 30
"""

    ACTIONGROUP_NOMAD = r"""
attributes:
  action_group:
    support: full
    description: >-
      Use C(group/gpufarm.core.nomad) in C(module_defaults) to set the connection once for all modules that ask Nomad.
    membership:
      - gpufarm.core.nomad
  platform:
    platforms: posix
    support: full
    description: Runs wherever Nomad's HTTP API can be reached, usually on localhost.
"""
