"""TLS, ACLs and gossip encryption work together, and the secrets are nowhere where others look."""

from __future__ import annotations

import json
import os
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from testinfra.host import Host

from tests.simulator.docker import docker, docker_binary
from tests.testinfra.playbooks import run_in_scenario, words

SERVER, NODE = "secure-server", "secure-t4"
NODES = [SERVER, NODE]
TLS = "/etc/nomad-tls"
SCENARIO = Path(os.environ["MOLECULE_SCENARIO_DIRECTORY"])
EPHEMERAL = Path(os.environ["MOLECULE_EPHEMERAL_DIRECTORY"])
# Taken away before Testinfra lists the inventory, with all that it holds.
LOG = Path(os.environ.pop("ANSIBLE_LOG_PATH"))


@cache
def secrets() -> dict[str, str]:
    """Return what nobody may see, by its name."""
    given = yaml.safe_load((SCENARIO / "hosts.yml").read_text(encoding="utf-8"))["farm"]["hosts"][SERVER]
    found = {
        "token": given["nomad_token"],
        "gossip key": given["nomad_server_gossip_key"],
        "password": re.sub(r".*:([^@]*)@.*", r"\1", given["nomad_release_url"]),
    }
    for kind in ("server", "client"):
        pem = (EPHEMERAL / f"tls/global-{kind}-nomad-key.pem").read_text(encoding="ascii").splitlines()
        # One line of it: indented, escaped or quoted it would be found all the same.
        found[f"{kind} key"] = next(line for line in pem if not line.startswith("-----"))[-40:]
    assert all(len(secret) > 15 for secret in found.values())
    return found


def seen(text: str) -> list[str]:
    """Return the names of the secrets in a text."""
    return [name for name, secret in secrets().items() if secret in text]


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


def test_farm_is_closed_to_who_has_no_certificate_or_no_token(host: Host) -> None:
    assert host.run("python3 -c 'import urllib.request as r; r.urlopen(\"http://127.0.0.1:4646/v1/nodes\")'").rc != 0
    insecure = "import ssl, urllib.request as r; r.urlopen('https://127.0.0.1:4646/v1/nodes', context=%s)"
    refused = host.run("python3 -c %s", insecure % "ssl._create_unverified_context()")
    assert refused.rc != 0
    assert "certificate required" in refused.stderr or "bad certificate" in refused.stderr, refused.stderr
    name = str(host.check_output("hostname"))
    assert api(name, "/v1/nodes") == 403
    assert api(name, "/v1/nodes", secrets()["token"])[0]["Name"] == NODE


def test_mirror_is_closed_to_who_has_no_password() -> None:
    address = "https://mirror.gpufarm.test/releases/pgp-key.txt"
    fetch = ["python3", "-c", f"import urllib.request as r; r.urlopen('{address}')"]
    refused = subprocess.run([docker_binary(), "exec", NODE, *fetch], capture_output=True, check=False)
    assert b"HTTP Error 401" in refused.stderr


def test_first_run_said_no_secret() -> None:
    # Molecule keeps its folder: what is before this is of an earlier run.
    _, begin, log = LOG.read_text(encoding="utf-8").rpartition("PLAY [A CA]")
    assert begin
    assert "Have the gossip key" in log
    assert "Using module file" in log, "not as verbose as it gets"
    assert "+++ after" in log, "no differences were shown"
    assert seen(log) == []


@pytest.mark.parametrize("playbook", [SCENARIO / "converge.yml", "playbooks/health.yml", "playbooks/report.yml"])
def test_another_run_changes_nothing_and_says_no_secret(playbook: Path | str, tmp_path: Path) -> None:
    run = run_in_scenario(playbook, "-vvv", "--diff", "--extra-vars", f"report_path={tmp_path}/report.html")
    assert run.code == 0, run.output
    assert seen(run.output) == []
    if playbook == SCENARIO / "converge.yml":
        assert set(run.changed.values()) == {0}, run.output
    for written in tmp_path.iterdir():
        assert seen(written.read_text(encoding="utf-8")) == []


def test_a_failed_download_says_no_secret() -> None:
    options = ("--limit", SERVER, "--extra-vars", "nomad_version=1.99.99")
    run = run_in_scenario("playbooks/site.yml", "-vvv", "--diff", *options)
    assert run.code != 0
    assert "mirror.gpufarm.test/releases/nomad/1.99.99/" in run.output
    assert seen(run.output) == []


def given(variables: dict[str, Any]) -> Path:
    """Return a file with variables; a command line would show them."""
    path = EPHEMERAL / "given.json"
    path.write_text(json.dumps(variables), encoding="utf-8")
    return path


@pytest.mark.parametrize("node", NODES)
def test_others_can_read_no_secret_on_a_node(node: str) -> None:
    patterns = "\n".join(secrets().values()) + "\n"
    search = ["grep", "--recursive", "--files-with-matches", "--fixed-strings", "--devices=skip", "--file=-"]
    folders = ["/etc", "/var", "/opt", "/usr/local", "/srv", "/tmp", "/run", "/root", "/home"]
    # That it would find them: root does, in the files that hold them.
    assert f"{TLS}/agent-key.pem" in on(node, *search, TLS, given=patterns)
    assert on(node, "runuser", "-u", "nobody", "--", *search, *folders, given=patterns) == ""


@pytest.mark.parametrize("node", NODES)
def test_processes_units_and_journal_hold_no_secret(node: str) -> None:
    processes = on(node, "sh", "-c", "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ | tr '\\0' '\\n'")
    assert "agent\n-config=/etc/nomad.d" in processes
    assert seen(processes) == []
    units = on(node, "systemctl", "show", "nomad.service", "gpufarm-health.service")
    assert "ExecStart=" in units
    assert seen(units) == []
    journal = on(node, "journalctl", "--boot", "--output", "cat")
    assert "Invoked with" in journal, "modules write what they were called with to it"
    assert seen(journal) == []


def narrow(name: str, rules: str) -> str:
    """Return a token that has only these rights."""
    token = secrets()["token"]
    api(SERVER, f"/v1/acl/policy/{name}", token, "POST", {"Name": name, "Rules": rules})
    made = api(SERVER, "/v1/acl/token", token, "POST", {"Name": name, "Type": "client", "Policies": [name]})
    return str(made["SecretID"])


def node() -> dict[str, Any]:
    """Return the GPU node as Nomad lists it."""
    return dict(api(SERVER, "/v1/nodes", secrets()["token"])[0])


@pytest.mark.parametrize(
    ("name", "rules"),
    [
        ("verify", 'agent { policy = "read" } node { policy = "read" }'),
        ("none", 'operator { policy = "read" }'),
    ],
)
def test_a_token_with_the_rights_that_are_documented_verifies(name: str, rules: str) -> None:
    """And one that lacks them is told so."""
    token = narrow(name, rules)
    run = run_in_scenario("playbooks/verify.yml", "-vvv", "--extra-vars", f"@{given({'nomad_token': token})}")
    assert (run.code == 0) is (name == "verify"), run.output
    assert token not in run.output
    assert name == "verify" or "nomad_token of the roles, to one with agent:read" in words(run.output)


def test_a_token_with_the_rights_that_are_documented_closes_and_opens() -> None:
    token = narrow("gate", 'agent { policy = "read" } node { policy = "write" }')
    for expected in (5, 4):
        file = given({"nomad_token": token, "gpu_node_gpus": expected})
        run = run_in_scenario("playbooks/health.yml", "-vvv", "--diff", "--extra-vars", f"@{file}")
        assert (run.code == 0) is (expected == 4), run.output
        assert token not in run.output
        assert node()["SchedulingEligibility"] == ("eligible" if expected == 4 else "ineligible"), run.output


def test_gossip_key_rotates_with_tls_and_a_token() -> None:
    key = "YW5vdGhlci1zZWNyZXQtZm9yLXRoaXMtc2NlbmFyaW8="
    token = narrow("gossip", 'agent { policy = "write" } node { policy = "read" }')
    run = run_in_scenario(
        SCENARIO / "converge.yml", "--tags", "servers", "-vvv", "--diff",
        "--extra-vars", f"@{given({'nomad_server_gossip_key': key, 'nomad_token': token})}",
    )  # fmt: skip
    assert run.code == 0, run.output
    assert key not in run.output
    assert token not in run.output
    assert seen(run.output) == []
    assert json.loads(docker("exec", SERVER, "cat", "/opt/nomad/data/server/serf.keyring")) == [key]
