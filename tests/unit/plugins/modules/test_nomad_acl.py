# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from typing import Any

import pytest
from ansible_collections.gpufarm.core.plugins.modules import nomad_acl
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils import nomad_helper as farm
from ansible_collections.gpufarm.core.tests.unit.plugins.modules import release_helper as helper

FIRST, OTHER = "11111111-2222-4333-8444-555555555555", "66666666-2222-4333-8444-555555555555"
READ, WRITE = (f'agent {{}}\nnode {{ policy = "{policy}" }}\n' for policy in ("read", "write"))


class Region(farm.Agent):
    """A region's ACLs, with the answers that Nomad 1.11.3 gave to these requests."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: list[dict[str, Any]] = []
        self.policies: dict[str, str] = {}
        self.roles: list[dict[str, Any]] = []
        # Of a token that it does not know. Until 1.10.0 it is (404, "ACL token not found").
        self.unknown = (403, "Permission denied")
        self.answer = self.as_nomad

    def has(
        self, name: str, secret: str, policies: list[str], kind: str = "client", *, everywhere: bool = True
    ) -> None:
        number = len(self.tokens)
        self.tokens.append(
            {"Name": name, "Type": kind, "Policies": policies or None, "SecretID": secret, "Global": everywhere,
             "AccessorID": f"accessor-{number}", "CreateIndex": 100 - number}
        )  # fmt: skip

    @property
    def written(self) -> list[str]:
        return [path for path, _body in self.writes]

    def as_nomad(self, request: Any) -> bool:
        known = {"GET": lambda: self.read(request), "DELETE": lambda: self.delete(request.path)}
        status, answer = known.get(request.command, self.write)()
        content = answer if isinstance(answer, str) else json.dumps(answer)
        request.reply(status, content.encode(), {})
        return True

    def read(self, request: Any) -> tuple[int, Any]:
        asked = request.path.removeprefix("/v1/acl/")
        own = [token for token in self.tokens if token["SecretID"] == request.headers["X-Nomad-Token"]]
        if not own:
            return self.unknown if asked == "token/self" else (403, "Permission denied")
        if asked == "token/self":
            return 200, own[0]
        if asked == "roles":
            return 200, self.roles
        if asked == "tokens":
            return 200, [{name: value for name, value in each.items() if name != "SecretID"} for each in self.tokens]
        kind, _slash, name = asked.partition("/")
        if kind == "token":
            return 200, next(token for token in self.tokens if token["AccessorID"] == name)
        rules = self.policies.get(name)
        return (404, "ACL policy not found") if rules is None else (200, {"Name": name, "Rules": rules})

    def delete(self, path: str) -> tuple[int, Any]:
        kind, _slash, name = path.removeprefix("/v1/acl/").partition("/")
        if kind == "policy":
            # Nomad asks nobody whether it is in use.
            del self.policies[name]
        else:
            self.tokens.remove(next(each for each in self.tokens if each["AccessorID"] == name))
        return 200, ""

    def write(self) -> tuple[int, Any]:
        path, body = self.writes[-1]
        asked = path.removeprefix("/v1/acl/")
        if asked == "bootstrap":
            if self.tokens:
                return 400, "ACL bootstrap already done (reset index: 8)"
            if len(body["BootstrapSecret"]) != 36:
                return 400, "invalid acl token"
            self.has("Bootstrap Token", body["BootstrapSecret"], [], "management")
            return 200, self.tokens[-1]
        if asked.startswith("policy/"):
            self.policies[body["Name"]] = body["Rules"]
            return 200, ""
        if asked == "token":
            everywhere = body.get("Global", False)
            self.has(body["Name"], f"secret-of-{body['Name']}", body["Policies"], everywhere=everywhere)
            return 200, self.tokens[-1]
        token = next(each for each in self.tokens if asked == f"token/{each['AccessorID']}")
        toggles = token["Global"] != body.get("Global", False)
        token.update({} if toggles else body)
        return (400, f"cannot toggle global mode of {token['AccessorID']}") if toggles else (200, token)


@pytest.fixture
def region(monkeypatch: pytest.MonkeyPatch) -> Iterator[Region]:
    for name in ("ADDR", "TOKEN"):
        monkeypatch.delenv(f"NOMAD_{name}", raising=False)
    running = Region()
    yield running
    running.close()


def run(region: Region, capsys: pytest.CaptureFixture[str], **arguments: Any) -> helper.Outcome:
    settings = {name: arguments.pop(name) for name in ("check_mode",) if name in arguments}
    given = {"address": region.url, "token": FIRST, **arguments}
    return helper.run_module(nomad_acl.main, capsys, given, **settings)


UNKNOWN = pytest.mark.parametrize("unknown", [(403, "Permission denied"), (404, "ACL token not found")])


@UNKNOWN
def test_a_new_region_is_bootstrapped_once(
    region: Region, capsys: pytest.CaptureFixture[str], unknown: tuple[int, str]
) -> None:
    region.unknown = unknown
    wanted: dict[str, Any] = {"policies": {"see": READ, "do": WRITE}, "tokens": {"both": ["do", "see"], "one": ["see"]}}
    found = run(region, capsys, **wanted)
    assert (found["changed"], found["secrets"]) == (True, {"both": "secret-of-both", "one": "secret-of-one"})
    assert region.policies == {"see": READ, "do": WRITE}
    assert [(token["Name"], token["Type"], token["Policies"]) for token in region.tokens] == [
        ("Bootstrap Token", "management", None), ("both", "client", ["do", "see"]), ("one", "client", ["see"]),
    ]  # fmt: skip
    assert region.tokens[0]["SecretID"] == FIRST
    region.writes.clear()
    again = run(region, capsys, **wanted)
    assert (again["changed"], again["secrets"], region.writes) == (False, found["secrets"], [])


def test_what_others_have_changed_is_put_right(region: Region, capsys: pytest.CaptureFixture[str]) -> None:
    region.has("Bootstrap Token", FIRST, [], "management")
    region.has("one", "newer", [])
    region.has("one", "older", ["see", "do"])
    region.has("another", "another", ["do"])
    # Of this region alone, which cannot be changed.
    region.has("one", "oldest", ["do"], everywhere=False)
    region.policies = {"see": WRITE, "do": WRITE}
    found = run(region, capsys, policies={"see": READ, "do": WRITE}, tokens={"one": ["see"]})
    # The oldest of a name, whose rights are changed and whose secret stays.
    assert (found["changed"], found["secrets"]) == (True, {"one": "older"})
    assert region.written == ["/v1/acl/policy/see", "/v1/acl/token/accessor-2"]
    assert [token["Policies"] for token in region.tokens] == [None, None, ["see"], ["do"], ["do"]]
    # Their order is Nomad's.
    region.tokens[2]["Policies"] = ["do", "see"]
    assert run(region, capsys, tokens={"one": ["see", "do"]})["changed"] is False


def test_check_mode_writes_nothing(region: Region, capsys: pytest.CaptureFixture[str]) -> None:
    wanted: dict[str, Any] = {"policies": {"see": READ}, "tokens": {"one": ["see"], "new": ["see"]}, "check_mode": True}
    found = run(region, capsys, **wanted)
    assert (found["changed"], found["secrets"]) == (True, {})
    region.has("Bootstrap Token", FIRST, [], "management")
    region.has("one", "secret", ["see"])
    region.policies = {"see": READ}
    found = run(region, capsys, **wanted)
    assert (found["changed"], found["secrets"]) == (True, {"one": "secret"})
    assert region.writes == []
    del wanted["tokens"]["new"]
    assert run(region, capsys, **wanted)["changed"] is False


def test_a_region_of_others_is_told(region: Region, capsys: pytest.CaptureFixture[str]) -> None:
    region.has("Bootstrap Token", OTHER, [], "management")
    found = run(region, capsys, policies={"see": READ})
    assert found["failed"] is True
    assert found["msg"] == (
        f"{platform.node()}: Nomad does not know the token, and takes it as its first one neither (ACL bootstrap "
        "already done (reset index: 8)). Expected: the management token that this region was bootstrapped with, or a "
        "region without any. Next step: bring that token, or see 'nomad acl bootstrap' on how a lost one is replaced."
    )
    assert region.policies == {}


def test_a_token_that_is_no_uuid_is_told(region: Region, capsys: pytest.CaptureFixture[str]) -> None:
    assert "(invalid acl token)" in run(region, capsys, token="short")["msg"]


def test_a_token_that_may_not_is_told(region: Region, capsys: pytest.CaptureFixture[str]) -> None:
    region.has("reader", FIRST, ["see"])
    found = run(region, capsys, policies={"see": READ})
    assert found["msg"] == (
        f"{platform.node()}: the token 'reader' is of type client. Expected: a management token, which alone may "
        "change policies and tokens. Next step: set 'token' to the one that the region was bootstrapped with."
    )
    assert region.writes == []


def test_a_server_without_a_leader_is_told(region: Region, capsys: pytest.CaptureFixture[str]) -> None:
    def no_leader(request: Any) -> bool:
        request.reply(500, b"No cluster leader", {"Retry-After": "0"})
        return True

    region.answer = no_leader
    assert "answered HTTP 500: No cluster leader" in run(region, capsys)["msg"]
    assert region.writes == []


def test_tokens_that_are_somebodys_own_stay(region: Region, capsys: pytest.CaptureFixture[str]) -> None:
    region.has("Bootstrap Token", FIRST, [], "management")
    region.has("research", "may-do-everything", [], "management")
    region.has("research", "ends", ["see"])
    region.tokens[-1]["ExpirationTime"] = "2026-12-01T00:00:00Z"
    found = run(region, capsys, tokens={"research": ["see"]})
    assert found["secrets"] == {"research": "secret-of-research"}
    assert region.written == ["/v1/acl/token"]


def test_roles_of_a_token_stay(region: Region, capsys: pytest.CaptureFixture[str]) -> None:
    region.has("Bootstrap Token", FIRST, [], "management")
    region.has("one", "secret", ["do"])
    region.tokens[-1]["Roles"] = [{"ID": "of-a-team"}]
    run(region, capsys, tokens={"one": ["see"]})
    assert (region.tokens[-1]["Policies"], region.tokens[-1]["Roles"]) == (["see"], [{"ID": "of-a-team"}])


@UNKNOWN
def test_a_team_that_is_gone_loses_its_policy_and_its_own_token(
    region: Region, capsys: pytest.CaptureFixture[str], unknown: tuple[int, str]
) -> None:
    region.unknown = unknown
    region.has("Bootstrap Token", FIRST, [], "management")
    region.has("research", OTHER, ["research"])
    region.has("research", "somebodys", ["see"])
    region.policies = {"research": WRITE, "see": READ}
    gone: dict[str, Any] = {"absent_policies": ["research", "never"], "absent_tokens": {"research": OTHER}}
    found = run(region, capsys, check_mode=True, **gone)
    assert (found["changed"], region.writes) == (True, [])
    found = run(region, capsys, **gone)
    assert (found["changed"], region.written) == (True, ["/v1/acl/token/accessor-1", "/v1/acl/policy/research"])
    assert (region.policies, [each["SecretID"] for each in region.tokens]) == ({"see": READ}, [FIRST, "somebodys"])
    region.writes.clear()
    # As after a run that was cut before the file went, when nobody else has one of that name.
    region.tokens.pop()
    assert (run(region, capsys, **gone)["changed"], region.writes) == (False, [])


def test_a_policy_that_somebody_has_stays(region: Region, capsys: pytest.CaptureFixture[str]) -> None:
    region.has("Bootstrap Token", FIRST, [], "management")
    region.has("research", OTHER, ["research"])
    region.has("another", "another", ["see", "research"])
    region.roles = [{"Name": "staff", "Policies": [{"Name": "research"}]}, {"Name": "guests", "Policies": None}]
    region.policies = {"research": WRITE}
    gone = {"absent_policies": ["research"], "absent_tokens": {"research": OTHER}}
    found = run(region, capsys, policies={"see": READ}, **gone)
    assert found["msg"] == (
        f"{platform.node()}: policies that are to go (research) are still those of the token another (accessor-2), "
        "the role staff. Expected: policies that nobody has any more. Next step: take away those tokens and roles as "
        "well, or give them other policies."
    )
    assert region.writes == []
    # One that gets others in the same call has it no more.
    region.roles = []
    assert run(region, capsys, policies={"see": READ}, tokens={"another": ["see"]}, **gone)["changed"] is True
    assert (region.policies, region.tokens[-1]["Policies"]) == ({"see": READ}, ["see"])


@pytest.mark.parametrize("check_mode", [True, False])
def test_a_token_counts_as_it_will_be_and_others_of_its_name_as_they_are(
    region: Region, capsys: pytest.CaptureFixture[str], check_mode: bool
) -> None:
    region.has("Bootstrap Token", FIRST, [], "management")
    region.has("alice", OTHER, ["old", "see"])
    region.has("alice", "somebodys", ["old"])
    region.policies = {"old": WRITE, "see": READ}
    wanted: dict[str, Any] = {"tokens": {"alice": ["see"]}, "absent_policies": ["old"], "check_mode": check_mode}
    for own in ({}, {"own_tokens": {"alice": OTHER}}):
        found = run(region, capsys, **wanted, **own)
        kept = "accessor-2" if own else "accessor-1"
        assert f"are still those of the token alice ({kept}). Expected" in found["msg"]
    region.tokens.pop()
    assert (run(region, capsys, **wanted, **own)["changed"], bool(region.writes)) == (True, not check_mode)


def test_a_token_of_somebody_elses_is_not_taken_over(region: Region, capsys: pytest.CaptureFixture[str]) -> None:
    """Who has made one for himself would find its rights changed, and its secret in the file of a team."""
    region.has("Bootstrap Token", FIRST, [], "management")
    region.has("research", "somebodys", ["see"])
    wanted: dict[str, Any] = {"policies": {"research": WRITE}, "tokens": {"research": ["research"]}}
    for secret, why in (
        ("", "whose Secret ID was not given"),
        (OTHER, "and does not know the Secret ID that was given"),
    ):
        found = run(region, capsys, **wanted, own_tokens={"research": secret})
        assert found["msg"] == (
            f"{platform.node()}: Nomad has a token of the name research (accessor-1), {why}. Expected: none of that "
            "name, or one whose Secret ID is given, which tells it from somebody's own. Next step: where it "
            "is the token that the role nomad_tenancy has made, copy nomad_secrets_dir/team-research-token.txt from "
            "the control machine that made it, or write its Secret ID (`nomad acl token info` with the ID that is "
            "named here) into that file, with mode 0600; where it is somebody's own choose another name, and only "
            "where nobody uses it run `nomad acl token delete` with that ID."
        )
        assert region.writes == []
    # One's own is not the oldest, and is kept all the same.
    region.has("research", OTHER, ["see"])
    region.tokens[-1]["CreateIndex"] = 1000
    found = run(region, capsys, **wanted, own_tokens={"research": OTHER})
    assert (found["changed"], found["secrets"]) == (True, {})
    assert region.written == ["/v1/acl/policy/research", "/v1/acl/token/accessor-2"]
    assert [each["Policies"] for each in region.tokens[1:]] == [["see"], ["research"]]
    assert run(region, capsys, **wanted, own_tokens={"research": OTHER})["changed"] is False
    # Where there is none it is made, whatever lies on the control machine.
    del region.tokens[1:]
    found = run(region, capsys, **wanted, own_tokens={"research": OTHER})
    assert (found["changed"], found["secrets"]) == (True, {"research": "secret-of-research"})


@pytest.mark.parametrize("given", ["absent_tokens", "own_tokens"])
@pytest.mark.parametrize(("name", "kind"), [("other", "client"), ("research", "management")])
def test_a_secret_of_somebody_else_changes_nothing(
    region: Region, capsys: pytest.CaptureFixture[str], name: str, kind: str, given: str
) -> None:
    region.has("Bootstrap Token", FIRST, [], "management")
    region.has(name, OTHER, ["see"], kind)
    found = run(region, capsys, **{given: {"research": OTHER}})
    what = "to delete as" if given == "absent_tokens" else "given for"
    assert f"the token {what} 'research' is '{name}', of type {kind}. Expected: a client token of that" in found["msg"]
    assert f"out of '{given}'" in found["msg"]
    assert (region.writes, OTHER in json.dumps(found)) == ([], False)


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    told: list[str] = []
    monkeypatch.setattr(nomad_acl.AnsibleModule, "warn", lambda _self, text: told.append(text))
    return told


def test_a_token_whose_secret_nobody_has_is_told_and_stays(
    region: Region, capsys: pytest.CaptureFixture[str], warnings: list[str]
) -> None:
    """Its file is elsewhere, or went in the run that deleted another: this one is somebody's own then."""
    region.has("Bootstrap Token", FIRST, [], "management")
    region.has("research", OTHER, ["see"])
    region.has("another", "another", ["free"])
    region.policies = {"research": WRITE, "free": READ}
    gone: dict[str, Any] = {"absent_policies": ["free"], "absent_tokens": {"another": "another", "research": ""}}
    told = (
        f"{platform.node()}: The token research (accessor-1) is left, because its Secret ID was not given, which tells "
        "it from somebody's own. If it is to be absent run `nomad acl token delete` with the ID that is named here."
    )
    assert run(region, capsys, check_mode=True, **gone)["changed"] is True
    assert (warnings, region.writes) == ([told], [])
    found = run(region, capsys, **gone)
    assert (found["changed"], region.written) == (True, ["/v1/acl/token/accessor-2", "/v1/acl/policy/free"])
    gone["absent_tokens"]["another"] = ""
    assert run(region, capsys, **gone)["changed"] is False
    assert (warnings, OTHER in json.dumps(warnings)) == ([told] * 3, False)
    # What cannot be one of ours is somebody's own, and nobody's concern.
    region.tokens.pop(1)
    region.has("research", "may-do-everything", [], "management")
    region.has("research", "of-a-region", ["see"], everywhere=False)
    region.has("research", "ends", ["see"])
    region.tokens[-1]["ExpirationTime"] = "2026-12-01T00:00:00Z"
    run(region, capsys, **gone)
    assert len(warnings) == 3


@UNKNOWN
def test_a_secret_that_is_another_tokens_than_that_of_the_name_is_told(
    region: Region, capsys: pytest.CaptureFixture[str], unknown: tuple[int, str]
) -> None:
    """The token was made anew elsewhere; a file that is deleted then would leave it with all its rights."""
    region.unknown = unknown
    region.has("Bootstrap Token", FIRST, [], "management")
    region.has("research", "made-anew", ["research"])
    region.policies = {"free": READ}
    gone: dict[str, Any] = {"absent_policies": ["free"], "absent_tokens": {"research": OTHER}}
    found = run(region, capsys, **gone)
    assert found["msg"] == (
        f"{platform.node()}: Nomad does not know the Secret ID that was given for research, and has a token of that "
        "name (accessor-1). Expected: the Secret ID of the token that is to be absent, which tells it from somebody's "
        "own. Next step: give that (the role nomad_tenancy reads it from nomad_secrets_dir/team-research-token.txt), "
        "or run `nomad acl token delete` with the ID that is named here; where that token is somebody's own, give none "
        "and delete that file."
    )
    assert run(region, capsys, check_mode=True, **gone)["msg"] == found["msg"]
    assert (region.writes, OTHER in json.dumps(found)) == ([], False)
