# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from typing import Any

import pytest
from ansible_collections.gpufarm.core.plugins.modules import nomad_tenancy
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils import nomad_helper as farm
from ansible_collections.gpufarm.core.tests.unit.plugins.modules import release_helper as helper

TOKEN = "11111111-2222-4333-8444-555555555555"
MANAGEMENT = (
    "Expected: a management token, which alone may change namespaces and node pools. Next step: set 'token' or "
    "NOMAD_TOKEN to one."
)
NONE = {"EnabledTaskDrivers": None, "DisabledTaskDrivers": None, "EnabledNetworkModes": None,
        "DisabledNetworkModes": None}  # fmt: skip


class Region(farm.Agent):
    """Namespaces and node pools, with the answers that Nomad 1.11.3 gave to these requests.

    The answers about quotas are those of HashiCorp's documentation; nobody here has Nomad Enterprise.
    """

    def __init__(self, *, enterprise: bool = False, version: str = "1.11.3", acls: bool = True) -> None:
        super().__init__()
        self.spaces = {"default": {"Name": "default", "Description": "Default shared namespace"}}
        self.pools = {name: {"Name": name, "NodeIdentityTTL": 86400000000000} for name in ("all", "default")}
        self.quotas: dict[str, Any] | None = {} if enterprise else None
        self.kept: dict[str, str] = {}
        self.version, self.acls, self.kind = version, acls, "management"
        self.answer = self.as_nomad

    @property
    def written(self) -> list[str]:
        return [path for path, _body in self.writes]

    def as_nomad(self, request: Any) -> bool:
        status, answer = self.answer_of(request)
        request.reply(status, (answer if isinstance(answer, str) else json.dumps(answer)).encode(), {})
        return True

    def answer_of(self, request: Any) -> tuple[int, Any]:
        path = request.path.removeprefix("/v1/").split("?")[0]
        if request.headers["X-Nomad-Token"] != TOKEN:
            return 403, "Permission denied"
        if "quota" in path and self.quotas is None:
            return 501, "Nomad Enterprise only endpoint"
        kind, _slash, name = path.rpartition("/")
        if path == "acl/token/self":
            return (200, {"Name": "own", "Type": self.kind}) if self.acls else (400, "ACL support disabled")
        if request.command == "GET":
            return 200, self.listed(path)
        return self.delete(kind, name) if request.command == "DELETE" else self.write(kind, self.writes[-1][1])

    def listed(self, path: str) -> Any:
        lists: Any = {"namespaces": self.spaces, "node/pools": self.pools, "quotas": self.quotas}
        lists |= {"regions": {"east": "east", "west": "west"}}
        build = {"member": {"Tags": {"build": f"{self.version}+ent"}}}
        return build if path == "agent/self" else list(lists[path].values())

    def stored(self, kind: str) -> dict[str, Any]:
        stored: Any = {"namespace": self.spaces, "node/pool": self.pools, "quota": self.quotas, "": self.quotas}
        found: dict[str, Any] = stored[kind]
        return found

    def delete(self, kind: str, name: str) -> tuple[int, Any]:
        used = kind == "quota" and name in [each.get("Quota") for each in self.spaces.values()]
        if used or name in self.kept:
            return 500, self.kept.get(name, f'quota "{name}" is used')
        del self.stored(kind)[name]
        return 200, ""

    def write(self, kind: str, body: dict[str, Any]) -> tuple[int, Any]:
        name, quota = body["Name"], body.get("Quota")
        if quota and quota not in (self.quotas or {}):
            return 500, f'namespace "{name}" using non-existent quota "{quota}"'
        self.stored(kind)[name] = {"CreateIndex": 8, **self.stored(kind).get(name, {}), **body}
        return 200, ""


@pytest.fixture
def region(monkeypatch: pytest.MonkeyPatch) -> Iterator[Region]:
    monkeypatch.delenv("NOMAD_TOKEN", raising=False)
    running = Region()
    yield running
    running.close()


@pytest.fixture
def enterprise(monkeypatch: pytest.MonkeyPatch) -> Iterator[Region]:
    monkeypatch.delenv("NOMAD_TOKEN", raising=False)
    running = Region(enterprise=True)
    yield running
    running.close()


def run(region: Region, capsys: pytest.CaptureFixture[str], **arguments: Any) -> helper.Outcome:
    region.writes.clear()
    settings = {name: arguments.pop(name) for name in ("check_mode",) if name in arguments}
    given = {"address": region.url, "token": TOKEN, **arguments}
    return helper.run_module(nomad_tenancy.main, capsys, given, **settings)


WANTED: dict[str, Any] = {
    "namespaces": [
        {"name": "research", "gpus": 8, "enabled_task_drivers": ["docker"], "meta": {"cost_centre": 4711}},
        {"name": "default", "gpus": 0},
    ],
    "node_pools": [{"name": "h200", "description": "By the window"}],
}


def test_teams_are_made_once(region: Region, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(region, capsys, **WANTED)
    assert (found["changed"], found["enforced"]) == (True, False)
    assert region.written == ["/v1/node/pool/h200", "/v1/namespace/research", "/v1/namespace/default"]
    assert region.spaces["research"] == {
        "CreateIndex": 8, "Name": "research", "Meta": {"cost_centre": "4711", "gpufarm_gpus": "8"},
        "Capabilities": {"EnabledTaskDrivers": ["docker"]},
    }  # fmt: skip
    # Of what is Nomad's own only what was asked for is other than it was.
    assert region.spaces["default"]["Description"] == "Default shared namespace"
    assert region.spaces["default"]["Meta"] == {"gpufarm_gpus": "0"}
    assert region.pools["h200"]["Description"] == "By the window"
    assert found["diff"]["before"]["namespace research"] is None
    assert found["diff"]["after"]["namespace research"]["Meta"]["gpufarm_gpus"] == "8"
    again = run(region, capsys, **WANTED)
    assert (again["changed"], again["enforced"], region.writes, again["diff"]["after"]) == (False, False, [], {})


def test_what_is_not_named_stays_and_what_is_named_changes(region: Region, capsys: pytest.CaptureFixture[str]) -> None:
    vault = {"Default": "team"}
    region.spaces["research"] = {
        "Name": "research", "Description": "Ada's", "VaultConfiguration": vault,
        "Meta": {"own": "1", "gpufarm_gpus": "4"},
        "Capabilities": {**NONE, "EnabledTaskDrivers": ["docker"], "DisabledNetworkModes": ["host"], "Later": ["x"]},
    }  # fmt: skip
    region.pools["h200"] = {"Name": "h200", "NodeIdentityTTL": 1, "Description": "Old", "Meta": {"own": "1"}}
    run(
        region, capsys, namespaces=[{"name": "research", "gpus": 6, "enabled_task_drivers": []}],
        node_pools=[{"name": "h200", "meta": {"more": "2"}}],
    )  # fmt: skip
    changed = region.spaces["research"]
    assert (changed["Description"], changed["VaultConfiguration"]) == ("Ada's", vault)
    assert changed["Meta"] == {"own": "1", "gpufarm_gpus": "6"}
    assert changed["Capabilities"] == {
        **NONE,
        "EnabledTaskDrivers": [],
        "DisabledNetworkModes": ["host"],
        "Later": ["x"],
    }
    assert region.pools["h200"]["Meta"] == {"own": "1", "more": "2"}
    assert (region.pools["h200"]["Description"], region.pools["h200"]["NodeIdentityTTL"]) == ("Old", 1)
    # A budget is what the list says, so that taking it out there takes it away.
    found = run(region, capsys, namespaces=[{"name": "research", "disabled_network_modes": []}])
    assert region.spaces["research"]["Meta"] == {"own": "1"}
    assert region.spaces["research"]["Capabilities"]["Later"] == ["x"]
    assert found["enforced"] is None


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("description", "d", {"Description": "d"}),
        ("meta", {"site": "a"}, {"Meta": {"site": "a"}}),
        ("gpus", 8, {"Meta": {"gpufarm_gpus": "8"}}),
        ("enabled_task_drivers", ["docker"], {"Capabilities": {"EnabledTaskDrivers": ["docker"]}}),
        ("disabled_task_drivers", ["exec"], {"Capabilities": {"DisabledTaskDrivers": ["exec"]}}),
        ("enabled_network_modes", ["bridge"], {"Capabilities": {"EnabledNetworkModes": ["bridge"]}}),
        ("disabled_network_modes", ["host"], {"Capabilities": {"DisabledNetworkModes": ["host"]}}),
    ],
)
def test_one_thing_alone_changes(
    region: Region, capsys: pytest.CaptureFixture[str], option: str, value: Any, told: dict[str, Any]
) -> None:
    region.spaces["research"] = {"Name": "research"}
    found = run(region, capsys, namespaces=[{"name": "research", option: value}])
    assert found["diff"] == {"before": {"namespace research": {}}, "after": {"namespace research": told}}
    assert (found["changed"], region.written) == (True, ["/v1/namespace/research"])
    assert run(region, capsys, namespaces=[{"name": "research", option: value}])["changed"] is False


def test_check_mode_writes_nothing(region: Region, capsys: pytest.CaptureFixture[str]) -> None:
    gone = {"namespaces": [{"name": "old", "state": "absent"}], "node_pools": [{"name": "p", "state": "absent"}]}
    region.spaces["old"], region.pools["p"] = {"Name": "old"}, {"Name": "p", "NodeIdentityTTL": 1}
    for wanted in (WANTED, gone):
        found = run(region, capsys, **wanted, check_mode=True)
        assert (found["changed"], region.writes) == (True, [])
    assert found["diff"] == {
        "before": {"namespace old": {}, "node pool p": {}}, "after": {"namespace old": None, "node pool p": None}
    }  # fmt: skip
    assert set(region.spaces) == {"default", "old"}


def test_what_goes_is_deleted_once(region: Region, capsys: pytest.CaptureFixture[str]) -> None:
    region.spaces["old"], region.pools["p"] = {"Name": "old"}, {"Name": "p", "NodeIdentityTTL": 1}
    gone = {"namespaces": [{"name": "old", "state": "absent"}], "node_pools": [{"name": "p", "state": "absent"}]}
    assert run(region, capsys, **gone)["changed"] is True
    assert (set(region.spaces), set(region.pools)) == ({"default"}, {"all", "default"})
    assert run(region, capsys, **gone)["changed"] is False


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            '1 error occurred:\n\t* namespace "old" has variables associated with it in regions: [global]\n\n',
            'namespace "old" has variables associated with it in regions: [global]',
        ),
        (
            "rpc error: 2 errors occurred:\n\t* namespace has non-terminal jobs\n\t* and allocations\n\n",
            "namespace has non-terminal jobs; and allocations",
        ),
    ],
)
def test_what_is_in_use_is_told(region: Region, capsys: pytest.CaptureFixture[str], said: str, told: str) -> None:
    region.spaces["old"] = {"Name": "old"}
    region.kept["old"] = said
    found = run(region, capsys, namespaces=[{"name": "old", "state": "absent"}])
    assert found["failed"] is True
    assert found["msg"] == (
        f"{platform.node()}: Nomad keeps the namespace 'old': {told}. Expected: a namespace that nothing uses any "
        "more. Next step: stop its jobs, or bring its nodes elsewhere, and run this again; the garbage collection of "
        "Nomad, `nomad system gc`, forgets jobs that have ended."
    )


BAD = {
    "'a b' is given as the name of a namespace. Expected: letters, digits and dashes, at most 128. Next step: correct "
    "it in namespaces.": {"namespaces": [{"name": "a b"}]},
    "'a_b' is given as the name of a namespace. Expected: letters, digits and dashes, at most 128. Next step: correct "
    "it in namespaces.": {"namespaces": [{"name": "a_b"}]},
    "'a b' is given as the name of a node pool. Expected: letters, digits, dashes and underscores, at most 128. "
    "Next step: correct it in node_pools.": {"node_pools": [{"name": "a b"}]},
    "the namespace 'a' is given twice. Expected: each once. Next step: take one of them out of namespaces.": {
        "namespaces": [{"name": "a"}, {"name": "a", "state": "absent"}]
    },
    "the node pool 'a_b' is given twice. Expected: each once. Next step: take one of them out of node_pools.": {
        "node_pools": [{"name": "a_b"}, {"name": "a_b"}]
    },
    "the namespace 'default' is to be absent. Expected: a namespace that is not Nomad's own. Next step: take it out of "
    "namespaces.": {"namespaces": [{"name": "default", "state": "absent"}]},
    "the node pool 'all' is to be present. Expected: a node pool that is not Nomad's own. Next step: take it out of "
    "node_pools.": {"node_pools": [{"name": "all"}]},
    "the node pool 'default' is to be absent. Expected: a node pool that is not Nomad's own. Next step: take it out of "
    "node_pools.": {"node_pools": [{"name": "default", "state": "absent"}]},
    "the namespace 'a' may use -1 GPUs. Expected: a number from 0 on, or none where it has no budget. Next step: "
    "correct 'gpus' in namespaces.": {"namespaces": [{"name": "a", "gpus": -1}]},
}


@pytest.mark.parametrize("told", BAD)
def test_what_nomad_would_refuse_is_told_before_anything_changes(
    told: str, region: Region, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = {**BAD[told], "check_mode": False}
    kind = next(iter(BAD[told]))
    wanted[kind] = [{"name": "first"}, *wanted[kind]]
    assert run(region, capsys, **wanted)["msg"] == f"{platform.node()}: {told}"
    assert region.writes == []


def test_a_token_that_may_not_is_told(region: Region, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(region, capsys, token="another", **WANTED)
    assert found["msg"] == (
        f"{platform.node()}: {region.url}/v1/acl/token/self was refused (HTTP 403: Permission denied). {MANAGEMENT}"
    )
    assert region.spaces.keys() == {"default"}


def test_enterprise_keeps_the_budgets(enterprise: Region, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(enterprise, capsys, **WANTED)
    assert (found["changed"], found["enforced"]) == (True, True)
    # A namespace names a quota that is there.
    assert enterprise.written == [
        "/v1/node/pool/h200", "/v1/quota", "/v1/quota", "/v1/namespace/research", "/v1/namespace/default"
    ]  # fmt: skip
    quotas = enterprise.quotas or {}
    limits = [
        {"Region": region, "RegionLimit": {"Devices": [{"Name": "nvidia/gpu", "Count": 8}]}}
        for region in ("east", "west")
    ]
    assert enterprise.writes[1][1] == {
        "Name": "gpufarm-research", "Description": "A GPU budget of gpufarm.core", "Limits": limits
    }  # fmt: skip
    assert enterprise.spaces["research"]["Quota"] == "gpufarm-research"
    assert run(enterprise, capsys, **WANTED)["changed"] is False
    enterprise.spaces["research"]["Quota"] = ""
    assert run(enterprise, capsys, **WANTED)["diff"]["after"]["namespace research"]["Quota"] == "gpufarm-research"
    assert enterprise.written == ["/v1/namespace/research"]
    # What others have set in our quota stays.
    limit = quotas["gpufarm-research"]["Limits"][1]["RegionLimit"]
    limit.update(CPU=2500, Devices=[{"Name": "fpga", "Count": 1}, {"Name": "nvidia/gpu", "Count": 9}])
    assert run(enterprise, capsys, **WANTED)["changed"] is True
    assert enterprise.written == ["/v1/quota"]
    assert quotas["gpufarm-research"]["Limits"][1]["RegionLimit"] == {
        "CPU": 2500, "Devices": [{"Name": "fpga", "Count": 1}, {"Name": "nvidia/gpu", "Count": 8}]
    }  # fmt: skip


def test_enterprise_forgets_budgets(enterprise: Region, capsys: pytest.CaptureFixture[str]) -> None:
    run(enterprise, capsys, **WANTED)
    found = run(enterprise, capsys, namespaces=[{"name": "research", "state": "absent"}, {"name": "default"}])
    assert (found["changed"], found["enforced"]) == (True, None)
    assert (enterprise.quotas, set(enterprise.spaces)) == ({}, {"default"})
    assert enterprise.spaces["default"]["Quota"] == ""


def test_a_quota_of_somebody_else_is_not_replaced(enterprise: Region, capsys: pytest.CaptureFixture[str]) -> None:
    enterprise.quotas = {"theirs": {"Name": "theirs"}}
    enterprise.spaces["research"] = {"Name": "research", "Quota": "theirs"}
    found = run(enterprise, capsys, **WANTED)
    assert found["msg"] == (
        f"{platform.node()}: the namespace 'research' has the quota 'theirs'. Expected: none, or 'gpufarm-research', "
        "which has the limit that 'gpus' says. Next step: leave out 'gpus' and give that quota a limit on devices, or "
        "take it from the namespace."
    )
    assert enterprise.writes == []
    # Without a budget it is theirs.
    assert run(enterprise, capsys, namespaces=[{"name": "research", "description": "d"}])["changed"] is True
    assert enterprise.spaces["research"]["Quota"] == "theirs"


def test_a_server_without_a_leader_is_told(region: Region, capsys: pytest.CaptureFixture[str]) -> None:
    def no_leader(request: Any) -> bool:
        request.reply(500, b"No cluster leader", {"Retry-After": "0"})
        return True

    region.answer = no_leader
    assert "/v1/acl/token/self answered HTTP 500: No cluster leader. Expected: " in run(region, capsys, **WANTED)["msg"]


def test_a_token_that_sees_a_part_is_refused(region: Region, capsys: pytest.CaptureFixture[str]) -> None:
    """Of what it does not see Nomad would say that it is gone."""
    region.kind = "client"
    for check_mode in (True, False):
        found = run(region, capsys, namespaces=[{"name": "unseen", "state": "absent"}], check_mode=check_mode)
        assert found["msg"] == f"{platform.node()}: the token 'own' is of type client. {MANAGEMENT}"


def test_a_region_without_acls_needs_no_token(capsys: pytest.CaptureFixture[str]) -> None:
    region = Region(acls=False)
    assert run(region, capsys, **WANTED)["changed"] is True
    region.close()


def test_an_enterprise_whose_quotas_know_no_devices_keeps_no_budgets(capsys: pytest.CaptureFixture[str]) -> None:
    region = Region(enterprise=True, version="1.8.4")
    found = run(region, capsys, **WANTED)
    assert (found["enforced"], region.quotas) == (False, {})
    region.close()
    newer = Region(enterprise=True, version="1.10.0")
    assert run(newer, capsys, **WANTED)["enforced"] is True
    newer.close()


def test_a_quota_that_a_run_has_left_behind_goes(enterprise: Region, capsys: pytest.CaptureFixture[str]) -> None:
    enterprise.quotas = {"gpufarm-old": {"Name": "gpufarm-old"}, "gpufarm-other": {"Name": "gpufarm-other"}}
    assert run(enterprise, capsys, namespaces=[{"name": "old", "state": "absent"}])["changed"] is True
    assert set(enterprise.quotas) == {"gpufarm-other"}


def test_text_that_nomad_would_not_answer_with_is_written_once(
    region: Region, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = [{"name": "research", "description": "Ada\n", "meta": {"site": "a\tb"}}]
    assert run(region, capsys, namespaces=wanted)["changed"] is True
    assert run(region, capsys, namespaces=wanted)["changed"] is False


def test_what_an_older_nomad_does_not_know_of_capabilities_is_no_change(
    region: Region, capsys: pytest.CaptureFixture[str]
) -> None:
    both = {"EnabledTaskDrivers": ["docker"], "DisabledTaskDrivers": None}
    region.spaces["research"] = {"Name": "research", "Capabilities": both}
    wanted = [{"name": "research", "enabled_task_drivers": ["docker"], "disabled_network_modes": []}]
    assert run(region, capsys, namespaces=wanted)["changed"] is False
