"""What the tests of a farm with TLS and ACLs ask, and the secrets that nothing may say."""

from __future__ import annotations

import json
import os
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.simulator.docker import docker_binary

SERVER = "secure-server1"
SERVERS = [SERVER, "secure-server2", "secure-server3"]
NODES = [*SERVERS, "secure-t4", "secure-h200"]
TLS = "/etc/nomad.d/tls"
SCENARIO = Path(os.environ["MOLECULE_SCENARIO_DIRECTORY"])
EPHEMERAL = Path(os.environ["MOLECULE_EPHEMERAL_DIRECTORY"])
# Beside the inventory, which is a folder here.
SECRETS = EPHEMERAL / "inventory-secrets"
# Taken away before Testinfra lists the inventory, with all that it holds.
LOG = Path(os.environ.pop("ANSIBLE_LOG_PATH"))


def first_run() -> str:
    """Return what Ansible said when the farm was made."""
    # Molecule keeps its folder: what is before this is of an earlier run.
    _, begin, log = LOG.read_text(encoding="utf-8").rpartition("PLAY [Mirror that wants a password]")
    assert begin
    return log


@cache
def secrets() -> dict[str, str]:
    """Return what nobody may see, by its name."""
    given = yaml.safe_load((SCENARIO / "hosts.yml").read_text(encoding="utf-8"))["farm"]["hosts"][SERVER]
    tokens = {
        path.stem.removesuffix("-token"): path.read_text(encoding="ascii") for path in SECRETS.glob("nomad-*-token.txt")
    }
    assert sorted(tokens) == ["nomad-farm", "nomad-gate", "nomad-jobs", "nomad-management", "nomad-verify"]
    found = {
        **tokens,
        "gossip key": (SECRETS / "nomad-gossip-key.txt").read_text(encoding="ascii"),
        "password": re.sub(r".*:([^@]*)@.*", r"\1", given["nomad_release_url"]),
    }
    keys = {f"key of {node}": on(node, "cat", f"{TLS}/agent-key.pem") for node in NODES}
    keys |= {path.stem: path.read_text(encoding="ascii") for path in SECRETS.glob("*-key.pem")}
    assert {"nomad-ca-key", "nomad-cli-key"} <= set(keys)
    for name, pem in keys.items():
        # One line of it: indented, escaped or quoted it would be found all the same.
        found[name] = next(line for line in pem.splitlines() if not line.startswith("-----"))[-40:]
    assert all(len(secret) > 15 for secret in found.values())
    return found


def seen(text: str) -> list[str]:
    """Return the names of the secrets in a text."""
    found = [name for name, secret in secrets().items() if secret in text]
    # Of use once, and kept nowhere: two parts of JSON that are signed.
    return [*found, *(["introduction"] if re.search(r"eyJ[\w-]{9,}[.]eyJ[\w-]{9,}[.]", text) else [])]


def on(node: str, *command: str, given: str = "") -> str:
    """Return what a command says on a node, whatever its exit code."""
    result = subprocess.run(
        [docker_binary(), "exec", "-i", node, *command], input=given, capture_output=True, text=True, check=False
    )
    return result.stdout


def api(node: str, path: str, token: str = "", method: str = "GET", body: Any = None) -> Any:
    """Return the answer of a node's agent, or the status where it refuses."""
    program = f"""
import json, ssl, sys, urllib.error, urllib.request
given = json.load(sys.stdin)
tls = ssl.create_default_context(cafile="{TLS}/ca.pem")
tls.load_cert_chain("{TLS}/agent.pem", "{TLS}/agent-key.pem")
data = None if given["body"] is None else json.dumps(given["body"]).encode()
request = urllib.request.Request("https://127.0.0.1:4646" + given["path"], data, method=given["method"])
if given["token"]:
    request.add_header("X-Nomad-Token", given["token"])
try:
    print(urllib.request.urlopen(request, context=tls).read().decode() or "null")
except urllib.error.HTTPError as error:
    print(error.code)
"""
    given = json.dumps({"path": path, "token": token, "method": method, "body": body})
    return json.loads(on(node, "python3", "-c", program, given=given))
