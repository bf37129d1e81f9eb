"""Two regions: one gossip, one CA and one set of ACLs, and each is verified by itself."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.simulator.cache import ROOT
from tests.simulator.docker import docker, docker_binary
from tests.simulator.farm import jobs
from tests.testinfra.helpers import wait_for
from tests.testinfra.playbooks import run_in_scenario, words

SERVERS = {"east": "regions-east", "west": "regions-west"}
NODES = {"east": "regions-t4", "west": "regions-h200"}
SCENARIO = Path(os.environ["MOLECULE_SCENARIO_DIRECTORY"])
SECRETS = Path(os.environ["MOLECULE_EPHEMERAL_DIRECTORY"]) / "inventory-secrets"
TLS = "/etc/nomad.d/tls"


def nomad(host: str, *arguments: str, token: str = "management") -> str:
    """Return what the CLI says on a host, by its own certificate and one of the farm's tokens."""
    secret = (SECRETS / f"nomad-{token}-token.txt").read_text(encoding="ascii") if token else ""
    given = {
        "NOMAD_ADDR": "https://127.0.0.1:4646", "NOMAD_CACERT": f"{TLS}/ca.pem",
        "NOMAD_CLIENT_CERT": f"{TLS}/agent.pem", "NOMAD_CLIENT_KEY": f"{TLS}/agent-key.pem", "NOMAD_TOKEN": secret,
    }  # fmt: skip
    environment = [part for name in given for part in ("--env", name)]
    command = [docker_binary(), "exec", *environment, "--workdir", "/srv", host, "nomad", *arguments]
    done = subprocess.run(command, env={**os.environ, **given}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(arguments)}: {done.stdout}{done.stderr}"
    return done.stdout


def api(host: str, path: str, token: str = "verify") -> Any:
    return json.loads(nomad(host, "operator", "api", path, token=token))


def nodes_of(host: str, region: str) -> dict[str, str]:
    return {node["Name"]: node["Status"] for node in api(host, f"/v1/nodes?region={region}")}


@pytest.mark.parametrize("asked", SERVERS)
@pytest.mark.parametrize("region", SERVERS)
def test_each_region_has_its_own_nodes_and_is_asked_from_both(asked: str, region: str) -> None:
    """By a token that is made in one region, which the other asks through the first one's certificates."""
    assert nodes_of(SERVERS[asked], region) == {NODES[region]: "ready"}


def test_every_server_knows_the_others_and_its_own_leader() -> None:
    for server in SERVERS.values():
        members = {(each["Name"], each["Status"]) for each in api(server, "/v1/agent/members")["Members"]}
        assert members == {("regions-east.east", "alive"), ("regions-west.west", "alive")}
        assert api(server, "/v1/agent/self")["stats"]["nomad"]["leader"] == "true"


def test_acls_are_those_of_the_authoritative_region() -> None:
    tokens = {
        region: {(token["AccessorID"], token["Name"]) for token in api(host, "/v1/acl/tokens", "management")}
        for region, host in SERVERS.items()
    }
    assert tokens["west"] == tokens["east"]
    assert {name for _, name in tokens["west"]} >= {"gpufarm-farm", "gpufarm-verify", "gpufarm-jobs", "gpufarm-gate"}
    assert [policy["Name"] for policy in api(SERVERS["west"], "/v1/acl/policies", "management")] == [
        policy["Name"] for policy in api(SERVERS["east"], "/v1/acl/policies", "management")
    ]
    assert "Permission denied" in nomad(SERVERS["west"], "operator", "api", "/v1/nodes", token="")
    # The token that fetches them is on the servers that need it, for root alone; Nomad has it in its data.
    secret = (SECRETS / "nomad-management-token.txt").read_text(encoding="ascii")
    found = {
        host: docker("exec", host, "sh", "-c", f"grep -rlF {secret} /etc /var /tmp /run 2>/dev/null; true").split()
        for host in (*SERVERS.values(), *NODES.values())
    }
    assert found == {
        "regions-east": [], "regions-west": ["/etc/nomad.d/server.hcl"], "regions-t4": [], "regions-h200": []
    }  # fmt: skip
    assert docker("exec", "regions-west", "stat", "-c", "%a %U", "/etc/nomad.d/server.hcl").split() == ["640", "root"]


def test_a_second_run_changes_nothing() -> None:
    run = run_in_scenario(SCENARIO / "converge.yml")
    assert run.code == 0, run.output
    assert set(run.changed.values()) == {0}, run.output


def verified(told: Path) -> dict[str, tuple[str, str, int]]:
    """Return the region of each node that was compared, its verdict, and how many GPUs Nomad has."""
    report = json.loads(told.read_text(encoding="utf-8"))
    regions = {entry["node"]: entry["region"] for entry in report["expected"]}
    return {node["name"]: (regions[node["name"]], node["verdict"], node["gpus_found"]) for node in report["nodes"]}


def test_both_regions_are_verified_and_every_gpu_is_proven_by_a_job(tmp_path: Path) -> None:
    for node in NODES.values():
        jobs.load_image("regions", node.removeprefix("regions-"))
    told = tmp_path / "told.json"
    options = {"verify_jobs": True, "verify_jobs_image": jobs.job_image(), "verify_report": str(told)}
    run = run_in_scenario("playbooks/verify.yml", "--extra-vars", json.dumps(options))
    assert run.code == 0, run.output
    assert verified(told) == {"regions-t4": ("east", "ok", 4), "regions-h200": ("west", "ok", 2)}
    proven = json.loads(told.read_text(encoding="utf-8"))["jobs"]
    assert sorted(gpu["node"] for gpu in proven["gpus"]) == sorted(["regions-h200"] * 2 + ["regions-t4"] * 4)
    assert (proven["counts"]["ok"], proven["problems"]) == (6, [])


def test_the_printed_job_goes_to_both_regions() -> None:
    text = (ROOT / "examples/jobs/README.md").read_text(encoding="utf-8")
    (printed,) = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    commands = re.findall(r"nomad (job run .*)", printed)
    assert len(commands) == len(SERVERS)
    docker("cp", str(ROOT / "examples"), "regions-east:/srv/")
    for command in commands:
        *arguments, job = command.split()
        nomad("regions-east", *arguments, "-detach", "-var", f"image={jobs.job_image()}", job)
    for region, node in NODES.items():
        path = f"/v1/job/gpu-docker/allocations?region={region}"

        def states(path: str = path) -> list[tuple[str, str]]:
            return [(each["NodeName"], each["ClientStatus"]) for each in api("regions-west", path)]

        wait_for(f"the job of {region} has ended", lambda: {state for _, state in states()} & {"complete", "failed"})
        assert states() == [(node, "complete")]
        nomad("regions-east", "job", "stop", "-purge", f"-region={region}", "gpu-docker")


def test_teams_are_those_of_the_authoritative_region() -> None:
    """What is made there comes to the other one, node pools as well, which its own clients cannot make."""
    teams = {
        "nomad_tenancy_namespaces": [{"name": "guests", "gpus": 1}],
        "nomad_tenancy_node_pools": [{"name": "lent"}],
    }
    run = run_in_scenario("playbooks/tenancy.yml", "--extra-vars", json.dumps(teams))
    assert run.code == 0, run.output
    assert run.changed == {"regions-east": 1, "regions-west": 0}, run.output
    for path, name in (("/v1/namespaces", "guests"), ("/v1/node/pools", "lent")):
        wait_for(
            f"{name} is in the other region",
            lambda path=path, name=name: name
            in [each["Name"] for each in api("regions-west", path, "management")],
        )  # fmt: skip


@pytest.mark.parametrize("region", NODES)
def test_one_region_is_verified_alone(region: str, tmp_path: Path) -> None:
    told = tmp_path / "told.json"
    run = run_in_scenario("playbooks/verify.yml", "--limit", NODES[region], "--extra-vars", f"verify_report={told}")
    assert run.code == 0, run.output
    assert [node["name"] for node in json.loads(told.read_text(encoding="utf-8"))["nodes"]] == [NODES[region]]


def test_report_says_which_region_is_which(tmp_path: Path) -> None:
    run = run_in_scenario("playbooks/report.yml", "--extra-vars", f"report_path={tmp_path}/report.html")
    assert run.code == 0, run.output
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert [(each["region"], each["server"]) for each in report["nomad"]["regions"]] == list(SERVERS.items())
    assert {node["region"]: node["name"] for node in report["nodes"]} == NODES
    assert {gpu["in_nomad"] for node in report["nodes"] for gpu in node["gpus"]} == {True}


def test_a_region_without_its_server_does_not_stop_the_other(tmp_path: Path) -> None:
    told = tmp_path / "told.json"
    docker("exec", "regions-west", "systemctl", "stop", "nomad")
    try:
        verification = run_in_scenario("playbooks/verify.yml", "--extra-vars", f"verify_report={told}")
        health = run_in_scenario("playbooks/health.yml")
        report = run_in_scenario("playbooks/report.yml", "--extra-vars", f"report_path={tmp_path}/report.html")
    finally:
        docker("exec", "regions-west", "systemctl", "start", "nomad")
    assert verification.code != 0
    assert verified(told) == {"regions-t4": ("east", "ok", 4)}
    for said in (
        "regions-west: no leader in 60 s, at last",
        "regions-h200: no heartbeats in 60 s, at last the client knows",
    ):
        assert said in words(verification.output), verification.output
    failed = dict(re.findall(r"^(\S+) +: ok=.*unreachable=0 +failed=(\d+)", verification.output, re.MULTILINE))
    assert failed == {"regions-east": "0", "regions-t4": "0", "regions-west": "1", "regions-h200": "1"}

    assert health.code != 0
    assert re.search(r"t4 +ready +yes +none +healthy and open", health.output), health.output
    assert report.code == 0, report.output
    assert "Nomad in west without an answer" in report.output
    nodes = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["nodes"]
    assert {node["name"]: node["gpus"][0]["in_nomad"] for node in nodes} == {"regions-t4": True, "regions-h200": None}
    # Its server asks the other region for ACLs again, and refuses until it has them.
    asked = ("operator", "api", "/v1/nodes?region=west")
    wait_for("the region is there again", lambda: '"Status":"ready"' in nomad("regions-east", *asked, token="verify"))


def test_servers_whose_acls_are_nobodys_are_refused() -> None:
    before = docker("exec", "regions-west", "sh", "-c", "cat /etc/nomad.d/*.hcl")
    run = run_in_scenario("playbooks/site.yml", "--extra-vars", "nomad_server_authoritative_region=north")
    assert run.code != 0
    assert "nomad_server_authoritative_region is north, which is no region of the servers here (east, west)" in words(
        run.output
    )
    assert set(run.changed.values()) == {0}
    assert docker("exec", "regions-west", "sh", "-c", "cat /etc/nomad.d/*.hcl") == before


def test_a_region_joins_a_farm_that_another_inventory_has(tmp_path: Path) -> None:
    """The second region alone, with addresses and a token of the first one's; what it has is what it had."""
    folder = tmp_path / "secrets"
    shutil.copytree(SECRETS, folder)
    address = docker(
        "inspect", "--format", "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}", "regions-east"
    ).strip()
    given = {
        "nomad_servers_group": "west_servers", "nomad_secrets_dir": str(folder),
        "nomad_server_federation_servers": [address],
    }  # fmt: skip
    inventory = tmp_path / "west.yml"
    inventory.write_text("west_servers: {hosts: {regions-west: {}}}\n", encoding="utf-8")
    run = run_in_scenario(
        SCENARIO / "converge.yml", "-i", str(inventory), "--limit", "regions-west,regions-h200", "--extra-vars",
        json.dumps(given),
    )  # fmt: skip
    assert run.code == 0, run.output
    text = docker("exec", "regions-west", "cat", "/etc/nomad.d/server.hcl")
    assert f'retry_join     = ["{address}"]' in text and 'authoritative_region = "east"' in text
    assert nodes_of("regions-west", "east") == {"regions-t4": "ready"}
