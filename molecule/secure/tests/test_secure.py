"""TLS, ACLs and gossip encryption work together, and the secrets are nowhere where others look."""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
import re
import shutil
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from testinfra.host import Host

from tests.simulator.cache import ROOT
from tests.simulator.docker import docker, docker_binary
from tests.simulator.farm import jobs
from tests.simulator.mirror import build
from tests.testinfra import printed
from tests.testinfra.helpers import wait_for
from tests.testinfra.playbooks import Run, run_in_scenario, words
from tests.testinfra.secure import (
    EPHEMERAL,
    NODES,
    SCENARIO,
    SECRETS,
    SERVER,
    SERVERS,
    TLS,
    api,
    first_run,
    on,
    secrets,
    seen,
)

NODE = "secure-t4"


def test_farm_is_asked_by_hand_as_it_is_printed() -> None:
    """On a host with the folder that the control machine keeps, and nothing else."""
    folder = "/run/by-hand/my-lab-secrets"
    for path in SECRETS.iterdir():
        write = f"umask 077; mkdir -p {folder}; cat >{folder}/{path.name}"
        on(NODE, "sh", "-c", write, given=path.read_text(encoding="ascii"))
    script = printed.block(ROOT / "README.md", "cd my-lab-secrets").replace("192.0.2.10", SERVER)
    told = on(NODE, "sh", "-euc", f"cd /run/by-hand; {script}")
    on(NODE, "rm", "-r", "/run/by-hand")
    assert len(re.findall(r"secure-(?:t4|h200) .* ready$", told, re.MULTILINE)) == 2, told


def test_secrets_on_the_control_machine_are_their_owners_alone() -> None:
    modes = {path.name: f"{path.stat().st_mode & 0o777:o}" for path in SECRETS.iterdir()}
    known = {f"{name}-token.txt" for name in ("nomad-management", "nomad-farm", "nomad-verify", "nomad-gate")}
    known |= {"nomad-gossip-key.txt", "nomad-ca-key.pem", "nomad-cli-key.pem"}
    assert known <= set(modes)
    assert f"{SECRETS.stat().st_mode & 0o777:o}" == "700"
    assert {name for name, mode in modes.items() if mode != "600"} == {"nomad-ca.pem", "nomad-cli.pem"}


def test_farm_is_closed_to_who_has_no_certificate_or_no_token(host: Host) -> None:
    assert host.run("python3 -c 'import urllib.request as r; r.urlopen(\"http://127.0.0.1:4646/v1/nodes\")'").rc != 0
    insecure = "import ssl, urllib.request as r; r.urlopen('https://127.0.0.1:4646/v1/nodes', context=%s)"
    refused = host.run("python3 -c %s", insecure % "ssl._create_unverified_context()")
    assert refused.rc != 0
    assert "certificate required" in refused.stderr or "bad certificate" in refused.stderr, refused.stderr
    name = str(host.check_output("hostname"))
    assert api(name, "/v1/nodes") == 403
    found = api(name, "/v1/nodes", secrets()["nomad-verify"])
    assert {node["Name"] for node in found} == {NODE, "secure-h200"}


def test_mirror_is_closed_to_who_has_no_password() -> None:
    address = "https://mirror.gpufarm.test/releases/pgp-key.txt"
    fetch = ["python3", "-c", f"import urllib.request as r; r.urlopen('{address}')"]
    refused = subprocess.run([docker_binary(), "exec", NODE, *fetch], capture_output=True, check=False)
    assert b"HTTP Error 401" in refused.stderr


def test_first_run_said_no_secret() -> None:
    log = first_run()
    assert "Have the gossip key" in log
    assert "Using module file" in log, "not as verbose as it gets"
    assert "+++ after" in log, "no differences were shown"
    assert seen(log) == []


@pytest.mark.parametrize(
    "playbook", [SCENARIO / "converge.yml", *(f"playbooks/{name}.yml" for name in ("upgrade", "health", "report"))]
)
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
    token = secrets()["nomad-management"]
    api(SERVER, f"/v1/acl/policy/{name}", token, "POST", {"Name": name, "Rules": rules})
    made = api(SERVER, "/v1/acl/token", token, "POST", {"Name": name, "Type": "client", "Policies": [name]})
    return str(made["SecretID"])


def node() -> dict[str, Any]:
    """Return the GPU node as Nomad lists it."""
    listed = api(SERVER, "/v1/nodes", secrets()["nomad-verify"])
    return dict(next(found for found in listed if found["Name"] == NODE))


@pytest.mark.parametrize(
    ("name", "rules"),
    [
        ("verify", 'agent { policy = "read" } node { policy = "read" }'),
        ("none", 'operator { policy = "read" }'),
        # Of another farm, or of one that was made anew.
        ("unknown", ""),
    ],
)
def test_a_token_with_the_rights_that_are_documented_verifies(name: str, rules: str) -> None:
    """And one that lacks them is told so, as is one that Nomad does not know."""
    token = narrow(name, rules) if rules else str(uuid.uuid4())
    run = run_in_scenario("playbooks/verify.yml", "-vvv", "--extra-vars", f"@{given({'nomad_token': token})}")
    assert (run.code == 0) is (name == "verify"), run.output
    assert token not in run.output
    if name != "verify":
        assert "was refused (HTTP 403" in words(run.output), run.output
        assert "nomad_token of the roles, to one with agent:read" in words(run.output), run.output


def test_a_token_with_the_rights_that_are_documented_closes_and_opens() -> None:
    reads = 'namespace "*" { capabilities = ["read-job"] }'
    token = narrow("gate", f'agent {{ policy = "read" }} node {{ policy = "write" }} {reads}')
    for expected in (5, 4):
        file = given({"nomad_token": token, "gpu_node_gpus": expected})
        options = ("--limit", NODE, "-vvv", "--diff", "--extra-vars", f"@{file}")
        run = run_in_scenario("playbooks/health.yml", *options)
        assert (run.code == 0) is (expected == 4), run.output
        assert token not in run.output
        assert node()["SchedulingEligibility"] == ("eligible" if expected == 4 else "ineligible"), run.output


def test_gossip_key_rotates_with_tls_and_a_token() -> None:
    key = "YW5vdGhlci1zZWNyZXQtZm9yLXRoaXMtc2NlbmFyaW8="
    token = narrow("gossip", 'agent { policy = "write" } node { policy = "read" }')
    run = run_in_scenario(
        SCENARIO / "converge.yml", "--limit", "nomad_servers", "-vvv", "--diff",
        "--extra-vars", f"@{given({'nomad_server_gossip_key': key, 'nomad_token': token})}",
    )  # fmt: skip
    assert run.code == 0, run.output
    assert key not in run.output
    assert token not in run.output
    assert seen(run.output) == []
    for server in SERVERS:
        assert json.loads(docker("exec", server, "cat", "/opt/nomad/data/server/serf.keyring")) == [key]


def authority() -> tuple[x509.Certificate, Any]:
    """Return the farm's CA and its key."""
    ca = x509.load_pem_x509_certificate((SECRETS / "nomad-ca.pem").read_bytes())
    return ca, serialization.load_pem_private_key((SECRETS / "nomad-ca-key.pem").read_bytes(), None)


def bring(node: str, folder: str, region: str = "global", days: float = 1, signed_by: Any = None) -> None:
    """Put a certificate of a client on a node that the farm's CA has signed, or another one."""
    ca, ca_key = authority()
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"client.{region}.nomad")])
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    subjects = [x509.DNSName(f"client.{region}.nomad"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    made = x509.CertificateBuilder(
        ca.subject, name, key.public_key(), x509.random_serial_number(), now - 9 * day, now + days * day,
        [x509.Extension(kind.oid, False, kind) for kind in (
            x509.SubjectAlternativeName(subjects),
            # Python 3.13 wants it.
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca.public_key()),
        )],
    ).sign(signed_by or ca_key, hashes.SHA256())  # fmt: skip
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    docker("exec", node, "mkdir", "-p", folder)
    for file, content in {"ca": ca.public_bytes(pem), "agent": made.public_bytes(pem), "agent-key": private}.items():
        on(node, "sh", "-c", f"umask 077; cat >{folder}/{file}.pem", given=content.decode())


# What a colleague has in the wrong place, by what is told.
TROUBLES = {
    "expired": ({"days": -1}, "expired"),
    "of another CA": ({"signed_by": ec.generate_private_key(ec.SECP256R1())}, "TLS with https://127.0.0.1:4646/"),
}


BROUGHT = {
    "nomad_tls": "files",
    **{
        f"nomad_tls_{option}_file": f"/run/brought/{file}.pem"
        for option, file in {"ca": "ca", "cert": "agent", "key": "agent-key"}.items()
    },
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_verification_with_a_certificate_that_does_not_hold_is_told(trouble: str) -> None:
    wrong, told = TROUBLES[trouble]
    for node in NODES:
        bring(node, "/run/brought", **wrong)
    run = run_in_scenario("playbooks/verify.yml", "--extra-vars", f"@{given(BROUGHT)}")
    assert run.code != 0
    assert told in words(run.output), run.output
    assert "Next step: " in words(run.output)


def test_verification_of_an_agent_with_a_certificate_of_another_region_is_told() -> None:
    bring(NODE, "/run/elsewhere", region="elsewhere")
    tls = "\n".join(f'  {option}_file = "/run/elsewhere/{file}.pem"' for option, file in
                    {"ca": "ca", "cert": "agent", "key": "agent-key"}.items())  # fmt: skip
    on(NODE, "sh", "-c", "cat >/etc/nomad.d/zz-elsewhere.hcl", given=f"tls {{\n{tls}\n}}\n")
    docker("exec", NODE, "systemctl", "restart", "nomad")
    run = run_in_scenario("playbooks/verify.yml", "--limit", f"{SERVER},{NODE}")
    docker("exec", NODE, "sh", "-c", "rm /etc/nomad.d/zz-elsewhere.hcl && systemctl restart nomad")
    assert run.code != 0
    assert f"{NODE}: no heartbeats in " in words(run.output), run.output
    assert "with TLS, also that its certificate has the name of this region." in words(run.output), run.output


def test_a_certificate_of_another_region_is_refused_before_anything_changes() -> None:
    bring(NODE, "/run/brought", region="elsewhere")
    before = on(NODE, "sh", "-c", "sha256sum /etc/nomad.d/*.hcl; systemctl show nomad --property=MainPID")
    run = run_in_scenario("playbooks/site.yml", "--limit", NODE, "--extra-vars", f"@{given(BROUGHT)}")
    assert run.code != 0
    told = "agent.pem is for client.elsewhere.nomad. Expected: one for client.global.nomad, because the servers of"
    assert f"{NODE}: the certificate in /run/brought/{told}" in words(run.output), run.output
    assert on(NODE, "sh", "-c", "sha256sum /etc/nomad.d/*.hcl; systemctl show nomad --property=MainPID") == before


def test_an_agent_without_a_certificate_of_the_farm_cannot_join() -> None:
    """Neither as it is, nor with a certificate of a CA that has the same name; and none that nobody has introduced."""
    bring(NODE, "/run/foreign", signed_by=ec.generate_private_key(ec.SECP256R1()))
    files = {"ca": "ca", "cert": "agent", "key": "agent-key"}.items()
    for name, folder in {"plain": "", "foreign": "/run/foreign", "stranger": TLS}.items():
        tls = "\n".join(f'{kind}_file = "{folder}/{file}.pem"' for kind, file in files)
        block = f"tls {{\nrpc = true\n{tls}\n}}" if folder else ""
        config = f"""
name = "{name}"
data_dir = "/run/{name}"
ports {{
  http = 14646
  rpc = 14647
}}
client {{
  enabled = true
  servers = ["{SERVER}:4647"]
}}
{block}
"""
        on(NODE, "sh", "-c", f"cat >/run/{name}.hcl", given=config)
        # It tries for ever; what its log says of the first time is enough.
        log = on(NODE, "sh", "-c", f"""
            env -u AWS_CA_BUNDLE nomad agent -config /run/{name}.hcl >/run/{name}.log 2>&1 & agent=$!
            until grep -q -e 'error registering' -e 'error performing RPC' /run/{name}.log; do
                kill -0 $agent || break
                sleep 0.2
            done
            kill -KILL $agent
            cat /run/{name}.log""")  # fmt: skip
        assert "error registering" in log or "error performing RPC" in log, log
        assert ("Permission denied" in log) == (name == "stranger"), log
        assert {found["Name"] for found in api(SERVER, "/v1/nodes", secrets()["nomad-verify"])} == {NODE, "secure-h200"}


def test_a_client_that_was_not_let_in_is_introduced_by_the_next_run() -> None:
    """Its servers know it no more, as those of a machine that was set up anew and started by hand."""
    former, data = node()["ID"], "/opt/nomad/data"
    begun = on(NODE, "date", "+%s").strip()
    on(NODE, "sh", "-c", f"systemctl stop nomad && mv {data}/client {data}/former && systemctl start nomad")
    log = ["journalctl", "--unit", "nomad", "--since", f"@{begun}"]
    wait_for(f"{NODE} is not let in", lambda: "Permission denied" in on(NODE, *log))
    token = secrets()["nomad-management"]
    wait_for(f"the former {NODE} is down", lambda: api(SERVER, f"/v1/node/{former}", token)["Status"] == "down")

    run = run_in_scenario(SCENARIO / "converge.yml", "--limit", NODE)
    assert run.code == 0, run.output
    assert seen(run.output) == []
    known = {found["ID"]: found["Status"] for found in api(SERVER, "/v1/nodes", token) if found["Name"] == NODE}
    own = on(NODE, "cat", f"{data}/client/client-id").strip()
    assert known == {former: "down", own: "ready"}
    assert on(NODE, "ls", f"{data}/client/intro_token.jwt") == ""
    api(SERVER, f"/v1/node/{former}/purge", token, "PUT")
    on(NODE, "rm", "-r", f"{data}/former")
    assert run_in_scenario(SCENARIO / "converge.yml", "--limit", NODE).changed[NODE] == 0


def test_two_of_three_servers_are_enough() -> None:
    docker("exec", "secure-server3", "systemctl", "kill", "--signal", "KILL", "nomad")
    docker("exec", "secure-server3", "systemctl", "stop", "nomad")
    try:
        run = run_in_scenario("playbooks/verify.yml", "--limit", "all:!secure-server3")
    finally:
        docker("exec", "secure-server3", "systemctl", "start", "nomad")
    assert run.code == 0, run.output
    assert run_in_scenario("playbooks/verify.yml").code == 0


def test_who_has_the_token_that_only_reads_verifies(tmp_path: Path) -> None:
    """And can do no more."""
    colleague = tmp_path / "secrets"
    colleague.mkdir(mode=0o700)
    (colleague / "nomad-verify-token.txt").write_bytes((SECRETS / "nomad-verify-token.txt").read_bytes())
    run = run_in_scenario("playbooks/verify.yml", "--extra-vars", f"@{given({'nomad_secrets_dir': str(colleague)})}")
    assert run.code == 0, run.output
    token = secrets()["nomad-verify"]
    own = node()["ID"]
    assert api(SERVER, f"/v1/node/{own}/eligibility", token, "POST", {"Eligibility": "ineligible"}) == 403
    assert api(SERVER, "/v1/acl/tokens", token) == 403


def test_a_machine_of_somebody_else_joins_with_what_the_owner_gives(tmp_path: Path) -> None:
    """As docs/wsl.md prints it, with the folder of an owner, and no CA where the machine is set up."""
    shutil.copytree(SECRETS, tmp_path / "my-lab-secrets")
    path = f"{build.nomad()}:{os.environ['PATH']}"
    make = printed.block(ROOT / "docs/wsl.md", "mkdir my-lab-secrets/gaming-pc")
    subprocess.run(["sh", "-euc", make], cwd=tmp_path, env={**os.environ, "PATH": path}, check=True)
    folder = tmp_path / "my-lab-secrets/gaming-pc"

    share = tmp_path / "home/.local/share/gpufarm"
    share.mkdir(parents=True)
    (share / "venv").symlink_to(Path(sys.executable).parents[1])
    shutil.copy(ROOT / "examples/wsl/setup.sh", tmp_path)
    shutil.copytree(folder, tmp_path / "gaming-pc")
    network = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
    address = docker("inspect", "--format", network, SERVER).strip()
    (join,) = [
        line for line in printed.commands(printed.block(ROOT / "docs/wsl.md", "cd && curl")) if "sh setup" in line
    ]

    def set_up(command: str) -> str:
        """Run it up to the playbook, which wants Windows."""
        given = {"HOME": str(tmp_path / "home"), "WSL_DISTRO_NAME": "Debian", "GPUFARM_COLLECTIONS": ""}
        command = command.replace("192.0.2.10", address)
        return subprocess.run(
            ["sh", "-c", command], cwd=tmp_path, env={**os.environ, **given}, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, check=False, start_new_session=True,
        ).stderr  # fmt: skip

    assert f"{address} wants a certificate" in set_up("sh setup.sh 192.0.2.10")
    said = set_up(join)
    written = tmp_path / "home/gpufarm/servers.yml"
    assert written.exists(), said
    variables = yaml.safe_load(written.read_text(encoding="utf-8"))["all"]["vars"]
    assert variables["nomad_client_servers"] == [address]

    # The playbook runs on the machine itself, so what is in the folder is at the same place on the node.
    secrets_of_pc = tmp_path / "home/gpufarm-secrets"
    for file in secrets_of_pc.iterdir():
        write = f"umask 077; mkdir -p {secrets_of_pc}; cat >{file}"
        on(NODE, "sh", "-c", write, given=file.read_text(encoding="ascii"))
    pc = {
        **variables,
        "nomad_secrets_dir": str(secrets_of_pc),
        "nomad_servers_group": "nobody",
        "gpu_node_health": False,
    }
    run = run_in_scenario(SCENARIO / "converge.yml", "--limit", NODE, "--extra-vars", f"@{given(pc)}")
    assert run.code == 0, run.output
    assert f'cert_file              = "{secrets_of_pc}/global-client-nomad.pem"' in on(
        NODE, "cat", "/etc/nomad.d/nomad.hcl"
    )
    assert (node()["Status"], len(api(SERVER, "/v1/nodes", secrets()["nomad-verify"]))) == ("ready", 2)
    run = run_in_scenario(SCENARIO / "converge.yml", "--limit", NODE)
    assert run.code == 0, run.output
    on(NODE, "rm", "-r", str(secrets_of_pc))


RIGHTS = 'namespace "research" { policy = "write" } node { policy = "read" }'
TEAMS = {
    "nomad_tenancy_namespaces": [{"name": "research", "gpus": 1}, {"name": "idle"}],
    "nomad_tenancy_node_pools": [{"name": "lent", "description": "For guests"}],
    "nomad_tenancy_policies": {"research": RIGHTS},
    "nomad_tenancy_tokens": {"research": ["research"]},
}


def test_a_team_has_its_namespace_and_is_told_of_when_it_uses_too_much(tmp_path: Path) -> None:
    def tenancy(teams: dict[str, Any], *options: str) -> Run:
        return run_in_scenario("playbooks/tenancy.yml", *options, "--extra-vars", f"@{given(teams)}")

    path = SECRETS / "team-research-token.txt"
    first = tenancy(TEAMS, "-vvv", "--diff")
    assert first.code == 0, first.output
    token = path.read_text(encoding="ascii")
    assert (path.stat().st_mode & 0o777, token in first.output, seen(first.output)) == (0o600, False, [])
    assert "nothing stops a team that goes beyond its budget" in words(first.output)
    again = tenancy(TEAMS)
    assert (again.code, set(again.changed.values())) == (0, {0}), again.output
    assert api(SERVER, "/v1/node/pool/lent", secrets()["nomad-management"])["Description"] == "For guests"

    jobs.load_image("secure", "t4")
    # Its allocation runs on the node that has the image.
    here = [{"LTarget": "${node.unique.name}", "RTarget": NODE, "Operand": "="}]
    task = {
        "Name": "train", "Driver": "docker", "Resources": {"Devices": [{"Name": "nvidia/gpu", "Count": 2}]},
        "Config": {"image": jobs.job_image(), "command": "sleep", "args": ["86400"]},
    }  # fmt: skip
    big: dict[str, Any] = {
        "ID": "big", "Type": "batch", "Namespace": "research", "Datacenters": ["*"], "Constraints": here,
        "TaskGroups": [{"Name": "all", "Tasks": [task]}],
    }  # fmt: skip
    assert api(SERVER, "/v1/jobs", token, "POST", {"Job": {**big, "Namespace": "default"}}) == 403
    assert "EvalID" in api(SERVER, "/v1/jobs?namespace=research", token, "POST", {"Job": big})
    wait_for("Nomad has placed the job", lambda: api(SERVER, "/v1/job/big/allocations?namespace=research", token))

    over = "region global: the namespace research uses 2 GPU(s): big 2. Expected: at most 1, its budget. Next step: "
    refused = tenancy({})
    assert (refused.code != 0, over in words(refused.output)) == (True, True), refused.output
    # The run would raise it.
    checked = tenancy({"nomad_tenancy_namespaces": [{"name": "research", "gpus": 2}, {"name": "idle"}]}, "--check")
    assert (checked.code, sum(checked.changed.values())) == (0, 1), checked.output
    told, report = tmp_path / "told.json", tmp_path / "report.html"
    verified = run_in_scenario("playbooks/verify.yml", "--extra-vars", f"verify_report={told}")
    assert (verified.code, over in words(verified.output)) == (0, True), verified.output
    use = {"region": "global", "namespace": "research", "gpus": 2, "budget": 1}
    assert use in json.loads(told.read_text(encoding="utf-8"))["namespaces"]
    assert run_in_scenario("playbooks/report.yml", "--extra-vars", f"report_path={report}").code == 0
    assert use in json.loads(report.with_suffix(".json").read_text(encoding="utf-8"))["users"]["namespaces"]

    gone = {"nomad_tenancy_namespaces": [{"name": name, "state": "absent"} for name in ("research", "idle")]}
    refused = tenancy(gone)
    assert refused.code != 0
    assert 'namespace "research" has non-terminal jobs in regions: [global]' in words(refused.output), refused.output
    api(SERVER, "/v1/job/big?purge=true&namespace=research", token, "DELETE")
    wait_for(
        "the job has ended",
        lambda: [
            each["ClientStatus"] for each in api(SERVER, "/v1/allocations?namespace=research", token)
        ] in ([], ["complete"]),
    )  # fmt: skip
    absent: dict[str, Any] = {"research": {"state": "absent"}}
    gone |= {"nomad_tenancy_policies": absent, "nomad_tenancy_tokens": absent}
    last = tenancy(gone, "-vvv", "--diff")
    assert (last.code, token in last.output, seen(last.output)) == (0, False, []), last.output
    assert (path.exists(), api(SERVER, "/v1/acl/token/self", token)) == (False, 403)
    assert api(SERVER, "/v1/acl/policy/research", secrets()["nomad-management"]) == 404
    names = {each["Name"] for each in api(SERVER, "/v1/namespaces", secrets()["nomad-management"])}
    assert names == {"default"}


def test_certificates_are_renewed_while_the_farm_works() -> None:
    """All that end in less than 400 days, which are those that there are; one server at a time."""
    before = {node: on(node, "cat", f"{TLS}/agent.pem") for node in NODES}
    sooner = given({"nomad_tls_renew_days": 400, "nomad_tls_days": 800})
    run = run_in_scenario(SCENARIO / "converge.yml", "--extra-vars", f"@{sooner}")
    assert run.code == 0, run.output
    after = {node: on(node, "cat", f"{TLS}/agent.pem") for node in NODES}
    assert not [node for node in NODES if before[node] == after[node]]
    assert len({on(node, "sha256sum", f"{TLS}/ca.pem") for node in NODES}) == 1
    run = run_in_scenario(SCENARIO / "converge.yml", "--limit", f"{SERVER},{NODE}")
    assert set(run.changed.values()) == {0}, run.output
