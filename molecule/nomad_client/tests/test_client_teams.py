"""A farm without ACLs has teams as well: namespaces with budgets, and no tokens."""

from __future__ import annotations

import json

from tests.simulator.docker import docker
from tests.testinfra.playbooks import Run, run_in_scenario, words


def tenancy(*options: str, **variables: object) -> Run:
    return run_in_scenario("playbooks/tenancy.yml", *options, "--extra-vars", json.dumps(variables))


def names() -> list[str]:
    listed = docker("exec", "client-server", "nomad", "operator", "api", "/v1/namespaces")
    return [each["Name"] for each in json.loads(listed)]


def test_an_open_farm_has_namespaces_and_budgets() -> None:
    research = {"name": "research", "gpus": 2}
    checked = tenancy("--check", nomad_tenancy_namespaces=[research])
    assert (checked.code, checked.changed["client-server"], names()) == (0, 1, ["default"]), checked.output
    for changes in (1, 0):
        run = tenancy(nomad_tenancy_namespaces=[research])
        assert (run.code, run.changed["client-server"]) == (0, changes), run.output
    refused = tenancy(nomad_tenancy_tokens={"research": ["research"]})
    assert refused.code != 0
    assert "nomad_acl_enabled is false. Expected: a farm with ACLs." in words(refused.output), refused.output
    run = tenancy(nomad_tenancy_namespaces=[{**research, "state": "absent"}])
    assert (run.code, names()) == (0, ["default"]), run.output
