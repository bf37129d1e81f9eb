# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Iterator
from typing import Any

import pytest
from ansible_collections.gpufarm.core.plugins.modules import nomad_owned_jobs
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils import nomad_helper as farm
from ansible_collections.gpufarm.core.tests.unit.plugins.modules import release_helper as helper

OWNER = "a test"
SECRET = "5ecret-of-a-job"


class Farm(farm.Agent):
    """Jobs, variables and policies; the answers are of the form that Nomad 1.11.3 gave."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs: dict[tuple[str, str], dict[str, Any]] = {}
        self.variables: dict[tuple[str, str], dict[str, Any]] = {}
        self.policies: dict[str, dict[str, Any]] = {}
        self.acls = True
        self.token: tuple[int, Any] = 200, {"Name": "own", "Type": "management"}
        self.answer = self.as_nomad

    def as_nomad(self, request: Any) -> bool:
        parts = urllib.parse.urlsplit(request.path)
        query = dict(urllib.parse.parse_qsl(parts.query))
        body = self.writes[-1][1] if request.command != "GET" else None
        status, answer = self.answer_of(request.command, parts.path.removeprefix("/v1/"), query, body)
        request.reply(status, (answer if isinstance(answer, str) else json.dumps(answer)).encode(), {})
        return True

    def answer_of(self, method: str, path: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        self.index += 1
        space = query.get("namespace", "default")
        kind, _slash, rest = path.partition("/")
        if path == "jobs" and method == "GET" and "prefix" in query:
            return 200, [
                job for (of, name), job in self.jobs.items() if of == space and name.startswith(query["prefix"])
            ]
        if path == "jobs" and method == "GET":
            assert (space, query["meta"]) == ("*", "true")
            return 200, list(self.jobs.values())
        if path == "jobs":
            return self.register(body)
        if kind == "job":
            rest = urllib.parse.unquote(rest)
            assert method == "GET" or rest.endswith("/plan") or "/dispatch-" in rest or query["purge"] == "true"
            return self.job(method, (space, rest.removesuffix("/plan")), body)
        if kind == "var":
            return self.variable(method, (space, rest), body)
        return self.acl(method, path, body)

    def register(self, body: Any) -> tuple[int, Any]:
        job = body["Job"]
        key = (job.get("Namespace", "default"), job["ID"])
        if body["EnforceIndex"] and self.jobs.get(key, {}).get("JobModifyIndex", 0) != body["JobModifyIndex"]:
            return 500, "Enforcing job modify index: job exists with conflicting index"
        self.jobs[key] = {"Namespace": "default", "Stop": False, **job, "JobModifyIndex": self.index}
        return 200, {}

    def job(self, method: str, key: tuple[str, str], planned: Any) -> tuple[int, Any]:
        there = self.jobs.get(key)
        if method == "DELETE":
            del self.jobs[key]
        if planned and planned["Job"].get("NodePool") == "nosuch":
            return 500, 'job "agent" is in nonexistent node pool "nosuch"'
        if planned:
            same = there and {name: there.get(name) for name in planned["Job"]} == planned["Job"]
            return 200, {"Diff": {"Type": "None" if same else "Edited" if there else "Added"}}
        return (200, there) if there else (404, "job not found")

    def variable(self, method: str, key: tuple[str, str], body: Any) -> tuple[int, Any]:
        if method == "PUT":
            self.variables[key] = {**body, "ModifyIndex": self.index}
        if method == "DELETE":
            self.variables.pop(key, None)
            return 200, ""
        return (200, self.variables[key]) if key in self.variables else (404, "variable not found")

    def acl(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        if path == "acl/token/self":
            return self.token if self.acls else (400, "ACL support disabled")
        kind, _slash, name = path.rpartition("/")
        assert kind == "acl/policy" and self.acls
        if method == "POST":
            self.policies[name] = {**body, "CreateIndex": 1}
            return 200, ""
        if method == "DELETE":
            del self.policies[name]
            return 200, ""
        return (200, self.policies[name]) if name in self.policies else (404, "ACL policy not found")


@pytest.fixture
def nomad(monkeypatch: pytest.MonkeyPatch) -> Iterator[Farm]:
    for name in ("NOMAD_TOKEN", "NOMAD_NAMESPACE", "NOMAD_REGION"):
        monkeypatch.delenv(name, raising=False)
    running = Farm()
    yield running
    running.close()


def run(nomad: Farm, capsys: pytest.CaptureFixture[str], *jobs: dict[str, Any], check: bool = False) -> helper.Outcome:
    given = {"address": nomad.url, "owner": OWNER, "jobs": list(jobs)}
    nomad.writes.clear()
    return helper.run_module(nomad_owned_jobs.main, capsys, given, check_mode=check)


def job(name: str, **more: Any) -> dict[str, Any]:
    return {"spec": {"ID": name, "Type": "batch", "Meta": {"own": "1"}, **more}}


AGENT = {**job("agent"), "variables": {"KEY": SECRET}, "rights": 'namespace "default" { policy = "read" }'}


def test_a_job_comes_with_its_rights_and_secrets_and_is_the_same_the_next_time(
    nomad: Farm, capsys: pytest.CaptureFixture[str]
) -> None:
    checked = run(nomad, capsys, AGENT, check=True)
    assert (checked["changed"], checked["registered"], nomad.jobs, nomad.variables) == (True, ["agent"], {}, {})
    found = run(nomad, capsys, AGENT)
    assert (found["changed"], found["registered"], found["removed"]) == (True, ["agent"], [])
    assert nomad.variables["default", "nomad/jobs/agent"]["Items"] == {"KEY": SECRET}
    policy = nomad.policies["gpufarm-job-default-agent"]
    assert (policy["Rules"], policy["JobACL"]) == (AGENT["rights"], {"Namespace": "default", "JobID": "agent"})
    meta = nomad.jobs["default", "agent"]["Meta"]
    assert (meta["own"], meta["gpufarm_owner"]) == ("1", OWNER)
    assert SECRET not in json.dumps(list(nomad.jobs.values()))
    again = run(nomad, capsys, AGENT)
    assert (again["changed"], again["registered"]) == (False, [])
    assert [path for path, _body in nomad.writes if not path.split("?")[0].endswith("/plan")] == []


def test_another_secret_starts_the_job_anew(nomad: Farm, capsys: pytest.CaptureFixture[str]) -> None:
    run(nomad, capsys, AGENT)
    other = {**AGENT, "variables": {"KEY": "another"}}
    checked = run(nomad, capsys, other, check=True)
    assert (checked["changed"], checked["registered"]) == (True, ["agent"])
    before = nomad.jobs["default", "agent"]["Meta"]
    assert run(nomad, capsys, other)["registered"] == ["agent"]
    assert nomad.jobs["default", "agent"]["Meta"] != before
    assert nomad.variables["default", "nomad/jobs/agent"]["Items"] == {"KEY": "another"}


def test_other_rights_are_written(nomad: Farm, capsys: pytest.CaptureFixture[str]) -> None:
    run(nomad, capsys, AGENT)
    other = {**AGENT, "rights": 'namespace "default" { policy = "write" }'}
    found = run(nomad, capsys, other)
    assert (found["changed"], found["registered"]) == (True, [])
    assert nomad.policies["gpufarm-job-default-agent"]["Rules"] == other["rights"]


def test_what_is_not_named_goes_whatever_its_name_and_namespace(
    nomad: Farm, capsys: pytest.CaptureFixture[str]
) -> None:
    run(nomad, capsys, AGENT, {**job("runs", Namespace="research"), "variables": {"KEY": SECRET}})
    meta = {"gpufarm_owner": OWNER}
    child = {"ID": "runs/dispatch-1", "Namespace": "research", "Meta": meta, "ParentID": "runs", "Stop": False,
             "Status": "running"}  # fmt: skip
    waits = {**child, "ID": "runs/dispatch-2", "Status": "pending"}
    others = {"ID": "theirs", "Namespace": "default", "Meta": None, "ParentID": "", "Stop": False}
    nomad.jobs |= {
        ("research", "runs/dispatch-1"): child,
        ("research", "runs/dispatch-2"): waits,
        ("default", "theirs"): others,
    }
    checked = run(nomad, capsys, job("other"), check=True)
    assert (checked["removed"], len(nomad.jobs)) == (["agent", "runs"], 5)
    found = run(nomad, capsys, job("other"))
    assert (found["registered"], found["removed"]) == (["other"], ["agent", "runs"])
    # It would have waited on its node for the variable.
    assert found["stopped"] == ["runs/dispatch-2"]
    assert sorted(name for _space, name in nomad.jobs) == ["other", "runs/dispatch-1", "theirs"]
    assert (nomad.variables, nomad.policies) == ({}, {})


def test_a_job_of_somebody_else_is_refused_before_anything_changes(
    nomad: Farm, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = {"ID": "agent", "Namespace": "default", "Meta": {"gpufarm_owner": "b"}, "Stop": False, "JobModifyIndex": 3}
    nomad.jobs["default", "agent"] = theirs
    found = run(nomad, capsys, job("first"), AGENT)
    assert found["failed"]
    assert (
        "the job 'agent' in namespace 'default' belongs to b. Expected: none, or one of a test. Next step"
        in found["msg"]
    )
    assert (list(nomad.jobs), nomad.writes) == ([("default", "agent")], [])


def test_what_nomad_refuses_leaves_no_secret_behind(nomad: Farm, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(nomad, capsys, job("first"), {**AGENT, "spec": {**AGENT["spec"], "NodePool": "nosuch"}})
    assert 'nonexistent node pool "nosuch"' in found["msg"]
    assert "Expected: a job that Nomad takes. Next step: correct what it names" in found["msg"]
    assert (nomad.jobs, nomad.variables, nomad.policies) == ({}, {}, {})


def test_a_job_is_forgotten_last(nomad: Farm, capsys: pytest.CaptureFixture[str]) -> None:
    run(nomad, capsys, AGENT)
    run(nomad, capsys)
    assert nomad.writes[-1][0].startswith("/v1/job/agent?")


def test_where_nomad_has_no_acls_there_are_no_rights(nomad: Farm, capsys: pytest.CaptureFixture[str]) -> None:
    nomad.acls = False
    assert run(nomad, capsys, AGENT)["registered"] == ["agent"]
    assert run(nomad, capsys)["removed"] == ["agent"]
    assert (nomad.jobs, nomad.variables) == ({}, {})


@pytest.mark.parametrize(
    ("token", "told"),
    [
        ((200, {"Name": "read-job", "Type": "client"}), "the token 'read-job' is of type client"),
        ((403, "Permission denied"), "/v1/acl/token/self was refused (HTTP 403: Permission denied)"),
        ((404, "ACL token not found"), "/v1/acl/token/self answered HTTP 404: ACL token not found"),
    ],
)
@pytest.mark.parametrize("check", [True, False])
def test_a_token_that_may_not_see_every_job_takes_none_for_gone(
    nomad: Farm, capsys: pytest.CaptureFixture[str], token: tuple[int, Any], told: str, check: bool
) -> None:
    """To one that may read some, Nomad lists those, and to one that may read none an empty list."""
    run(nomad, capsys, AGENT)
    nomad.token = token
    found = run(nomad, capsys, check=check)
    assert found["failed"]
    assert (
        f"{told}. Expected: a management token. Next step: set 'token' or NOMAD_TOKEN to one, or nomad_token of the "
        "roles."
    ) in found["msg"]
    assert (list(nomad.jobs), nomad.writes) == ([("default", "agent")], [])


@pytest.mark.parametrize("jobs", [[job("a/b")], [job("")], [job("a"), job("a")], [{"spec": {}}]])
def test_names_that_nomad_takes_for_something_else_are_refused(
    nomad: Farm, capsys: pytest.CaptureFixture[str], jobs: list[dict[str, Any]]
) -> None:
    found = run(nomad, capsys, *jobs)
    assert "is given as the ID of a job. Expected: letters, digits and dashes" in found["msg"]
    assert nomad.writes == []
