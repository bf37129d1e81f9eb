# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import copy
import inspect
import ipaddress
import json
import re
import socket
import ssl
import urllib.error
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from ansible_collections.gpufarm.core.plugins.module_utils import nomad
from ansible_collections.gpufarm.core.plugins.module_utils.nomad import client as nomad_client
from ansible_collections.gpufarm.core.plugins.module_utils.nomad import comparison, stream, waiting
from ansible_collections.gpufarm.core.plugins.module_utils.nomad import nodes as nomad_nodes
from ansible_collections.gpufarm.core.plugins.modules import nomad_gpu_verify
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils import nomad_helper as helper

UUIDS = (
    "GPU-4404041a-04cf-1ccf-9e70-f139a9b1e23c",
    "GPU-92b7cca4-1b2f-4d5e-8f3a-0e7a6b9e1c22",
    "GPU-b0e4ad6d-7fd2-4c11-9a64-31d1f0c8be33",
    "GPU-c1a5e9f0-2b6d-4e77-b1d8-7c90a2e4f544",
)


@pytest.fixture
def agent() -> Iterator[helper.Agent]:
    running = helper.Agent()
    yield running
    running.close()


def farm(nodes: int, gpus: int = 2) -> list[dict[str, Any]]:
    return [helper.make_node(number, gpus) for number in range(nodes)]


def judged(expected: list[nomad.Expected], nodes: list[dict[str, Any]], **options: bool) -> list[nomad.NodeVerdict]:
    return nomad.compare(expected, [nomad.describe_node(node) for node in nodes], **options)


def codes(verdicts: list[nomad.NodeVerdict]) -> list[str]:
    return [problem.code for verdict in verdicts for problem in verdict.problems]


def wish(number: int = 0, gpus: int = 2, **more: Any) -> nomad.Expected:
    uuids = tuple(helper.uuid_of(number, gpu) for gpu in range(gpus))
    return nomad.Expected(**{"node": f"node{number:05d}", "uuids": uuids, **more})


# --- one node --------------------------------------------------------------------------------


def test_gpus_of_a_recorded_node() -> None:
    """Nomad 1.11.3 with the ancestor of HashiCorp's plugin over an NVML double."""
    gpus = nomad.gpus_of_node(helper.recorded("nodes-1.11.3")[0])
    assert [gpu["uuid"] for gpu in gpus] == list(UUIDS)
    assert gpus[0] == {
        "uuid": UUIDS[0],
        "model": "NVIDIA H100 80GB HBM3",
        "vendor": "nvidia",
        "type": "gpu",
        "device_id": "nvidia/gpu/NVIDIA H100 80GB HBM3",
        "memory_mib": 81559,
        "driver_version": "580.159.04",
        "mig": False,
        "mig_profile": None,
        "healthy": True,
        "health_description": None,
        "pci_bus_id": "00000000:1A:00.0",
        "numa_node": None,
    }


@pytest.mark.parametrize(
    "node",
    [
        {},
        {"NodeResources": None},
        {"NodeResources": {"Devices": None}},
        {"NodeResources": {"Devices": []}},
        {"NodeResources": {"Devices": [None]}},
        {"NodeResources": {"Devices": [{"Type": "fpga", "Instances": [{"ID": "x"}]}]}},
        {"NodeResources": {"Devices": [{"Type": "gpu", "Instances": None, "Attributes": None}]}},
    ],
)
def test_a_node_without_gpus(node: dict[str, Any]) -> None:
    assert nomad.gpus_of_node(node) == []


def test_a_gpu_of_which_nothing_is_known() -> None:
    node = {"NodeResources": {"Devices": [{"Type": "gpu", "Instances": [{"ID": "GPU-1", "Locality": None}]}]}}
    gpu = nomad.gpus_of_node(node)[0]
    unknown = ("memory_mib", "driver_version", "health_description", "pci_bus_id", "numa_node", "mig_profile")
    assert [gpu[name] for name in unknown] == [None] * len(unknown)
    assert gpu["healthy"] is False


@pytest.mark.parametrize(
    ("attribute", "mebibytes"),
    [
        ({"Int": 81559, "Unit": "MiB"}, 81559),
        ({"Int": 80, "Unit": "GiB"}, 81920),
        ({"Float": 1.5, "Unit": "GiB"}, 1536),
        ({"Int": 17179869184, "Unit": "B"}, 16384),
        ({"Int": 16, "Unit": "GB"}, 15258),
        ({"Int": 16000, "Unit": "MB"}, 15258),
        ({"Int": 16000000, "Unit": "kB"}, 15258),
        ({"Int": 16000000, "Unit": "KB"}, 15258),
        ({"Int": 1, "Unit": "TB"}, 953674),
        ({"Int": 2097152, "Unit": "KiB"}, 2048),
        ({"Int": 2, "Unit": "TiB"}, 2097152),
        ({"Int": 15360, "Unit": ""}, 15360),
        ({"Int": 0, "Unit": "MiB"}, 0),
        ({"String": "81559 MiB"}, None),
        ({"Bool": True}, None),
        ({"Int": 5, "Unit": "MHz"}, None),
        ({"Int": None, "Unit": "MiB"}, None),
        (None, None),
    ],
)
def test_memory_in_every_unit(attribute: Any, mebibytes: int | None) -> None:
    assert nomad_nodes.mebibytes(attribute) == mebibytes


def test_numa_node_by_pci_address() -> None:
    node = helper.make_node(0, 2)
    node["NodeResources"]["Processors"]["Topology"]["BusAssociativity"] = {"0000:01:00.0": 0, "0000:02:00.0": 1}
    assert [gpu["numa_node"] for gpu in nomad.gpus_of_node(node)] == [0, 1]


def test_mig_devices() -> None:
    node = helper.make_node(0, 1)
    group = node["NodeResources"]["Devices"][0]
    group["Name"] = "NVIDIA A100-SXM4-80GB MIG 1g.10gb"
    group["Instances"][0]["ID"] = "MIG-11111111-2222-3333-4444-555555555555"
    gpu = nomad.gpus_of_node(node)[0]
    assert gpu["mig"] is True and gpu["mig_profile"] == "1g.10gb"


def test_which_allocation_holds_which_gpu() -> None:
    allocations = helper.recorded("allocations-1.11.3")
    held = nomad.devices_in_use(allocations)
    assert {uuid for _node, uuid in held} == {UUIDS[2], UUIDS[3]}
    key = (allocations[0]["NodeID"], UUIDS[2])
    assert held[key]["job_id"] == "training" and held[key]["task"] == "t" and held[key]["id"] == allocations[0]["ID"]
    ended = [{**allocations[0], "ClientStatus": "complete"}]
    assert nomad.devices_in_use(ended) == {}


# --- the list, element by element ------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 100, 1 << 20])
def test_items_of_a_list_in_pieces(size: int) -> None:
    items = [{"a": 'ü]}[{\\"', "n": number, "deep": {"l": [1, [2]]}} for number in range(20)]
    data = json.dumps(items, ensure_ascii=False, indent=1).encode()
    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    assert list(stream.json_items(pieces)) == items


def test_cores_are_skipped_and_nothing_else() -> None:
    node = helper.make_node(1, 2, cores=64)
    node["Name"] = 'a "Cores":[1] b'
    item = next(stream.json_items([json.dumps([node], separators=(",", ":")).encode()]))
    assert item["NodeResources"]["Processors"]["Topology"]["Cores"] is None
    item["NodeResources"]["Processors"]["Topology"]["Cores"] = node["NodeResources"]["Processors"]["Topology"]["Cores"]
    assert item == node


@pytest.mark.parametrize(
    "text",
    [
        '[{"Cores":[1,2]}]',
        '[{"Cores":[[{"a":1}]]}]',
        '[{"Cores":["]"]}]',
        '[{"a":"\\"Cores\\":[{}]"}]',
        '[{"Cores":[{"a":"x]"}]}]',
    ],
)
def test_other_lists_of_that_name_stay(text: str) -> None:
    assert list(stream.json_items([text.encode()])) == json.loads(text)


@pytest.mark.parametrize("text", ["[]", " [ ] \n", "null", "null\n"])
def test_an_empty_list(text: str) -> None:
    assert list(stream.json_items([text.encode()])) == []


@pytest.mark.parametrize(
    "text", ["", "[", '[{"a": 1}', '[{"a": 1},', '[{"a": 1} {"b": 2}]', "[1]", "{}", "<html>", '["a"]']
)
def test_what_is_no_complete_list(text: str) -> None:
    with pytest.raises(ValueError):
        list(stream.json_items([text.encode()]))


# --- comparing -------------------------------------------------------------------------------


def test_a_good_farm() -> None:
    wanted = [
        wish(n, model_counts={helper.MODEL: 2}, memory_mib_min=80000, driver_version=helper.DRIVER) for n in (0, 1)
    ]
    verdicts = judged(wanted, farm(2))
    assert [verdict.verdict for verdict in verdicts] == ["ok", "ok"]
    assert [(verdict.gpus_expected, verdict.gpus_found) for verdict in verdicts] == [(2, 2), (2, 2)]


def change(node: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {**node, **fields}


def without_last_gpu(node: dict[str, Any]) -> dict[str, Any]:
    changed = copy.deepcopy(node)
    changed["NodeResources"]["Devices"][0]["Instances"].pop()
    return changed


def sick(node: dict[str, Any]) -> dict[str, Any]:
    changed = copy.deepcopy(node)
    changed["NodeResources"]["Devices"][0]["Instances"][0].update(Healthy=False, HealthDescription="off the bus")
    return changed


NODE = helper.make_node(0, 2)
PLAIN = nomad.Expected(node="node00000")
PROBLEMS: list[tuple[str, nomad.Expected, list[dict[str, Any]], dict[str, bool], str]] = [
    ("node_missing", wish(3), [NODE], {}, "no such node"),
    ("node_duplicate", PLAIN, [NODE, change(helper.make_node(1, 2), Name="node00000")], {}, "2 of them ("),
    ("node_down", PLAIN, [change(NODE, Status="down")], {}, "status down"),
    ("node_down", PLAIN, [change(NODE, Status="disconnected")], {}, "status disconnected"),
    ("node_ineligible", PLAIN, [change(NODE, SchedulingEligibility="ineligible")], {"require_eligible": True}, "ineli"),
    ("node_ineligible", PLAIN, [change(NODE, Drain=True)], {"require_eligible": True}, "being drained"),
    ("node_unexpected", PLAIN, [NODE, helper.make_node(1, 3)], {"allow_extra_nodes": False}, "a node with 3 GPUs"),
    ("no_devices", PLAIN, [helper.make_node(0, 0)], {}, "no GPU device at all"),
    ("no_devices", wish(0), [helper.make_node(0, 0)], {}, "2 GPUs"),
    ("gpu_missing", wish(0), [without_last_gpu(NODE)], {}, helper.uuid_of(0, 1)),
    ("gpu_unexpected", wish(0, 1), [NODE], {}, helper.uuid_of(0, 1)),
    ("count_mismatch", nomad.Expected("node00000", count=4), [NODE], {}, "found 2 GPUs. Expected: 4 GPUs"),
    ("count_mismatch", nomad.Expected("node00000", count=0), [NODE], {}, "found 2 GPUs. Expected: 0 GPUs"),
    ("model_mismatch", nomad.Expected("node00000", models=("Tesla T4",)), [NODE], {}, "Tesla T4"),
    ("model_mismatch", nomad.Expected("node00000", model_counts={helper.MODEL: 3}), [NODE], {}, "2 x NVIDIA H100"),
    ("memory_too_small", nomad.Expected("node00000", memory_mib_min=81560), [helper.make_node(0, 1)], {}, "81559 MiB"),
    ("driver_version_stale", nomad.Expected("node00000", driver_version="590.1"), [NODE], {}, "driver 580.159.04 in"),
    ("mig_mismatch", nomad.Expected("node00000", mig=True), [NODE], {}, "only MIG devices"),
    ("mig_mismatch", nomad.Expected("node00000", mig_profiles={"1g.10gb": 7}), [NODE], {}, "7 x 1g.10gb"),
    ("gpu_unhealthy", PLAIN, [sick(NODE)], {}, "off the bus"),
]


@pytest.mark.parametrize(("code", "expected", "nodes", "options", "words"), PROBLEMS)
def test_each_problem(
    code: str, expected: nomad.Expected, nodes: list[dict[str, Any]], options: dict[str, bool], words: str
) -> None:
    verdicts = judged([expected], nodes, **options)
    assert codes(verdicts) == [code]
    problem = next(problem for verdict in verdicts for problem in verdict.problems)
    assert words in problem.message
    assert re.match(r"^Node node0000\d: found .+\. Expected: .+\. Next step: .+\.$", problem.message)
    assert problem.node in ("node00000", "node00001", "node00003")


def test_who_waits_for_its_former_self_is_no_duplicate_of_it() -> None:
    """Nomad has a node that is away as disconnected, as long as one of its allocations may wait for it."""
    former = change(NODE, ID="former", Status="disconnected", CreateIndex=9999)
    (verdict,) = judged([PLAIN], [former, NODE])
    assert verdict.problems == [] and verdict.id == NODE["ID"]


def test_every_code_is_tested_and_documented() -> None:
    source = inspect.getsource(comparison)
    there = set(re.findall(r'problem_of\(\s*[^,]+,\s*"(\w+)"', source))
    assert there == {row[0] for row in PROBLEMS} | {"duplicate_uuid"}
    notes = " ".join(yaml.safe_load(nomad_gpu_verify.DOCUMENTATION)["notes"])
    assert there <= set(re.findall(r"C\((\w+)\)", notes))


def test_a_gpu_whose_mig_devices_nobody_tells_hides_no_other() -> None:
    def gpu(number: int, mode: str, devices: list[dict[str, Any]] | None) -> dict[str, Any]:
        return {"uuid": helper.uuid_of(0, number), "name": helper.MODEL, "mig_mode": mode, "mig_devices": devices}

    facts = {"available": True, "driver_version": "1", "gpus": [gpu(0, "Enabled", None), gpu(1, "Disabled", [])]}
    told = nomad.expected_of_facts(facts, "node00000")
    assert (told["uuids"], told["mig_unknown"]) == ([helper.uuid_of(0, 1)], [helper.uuid_of(0, 0)])
    wanted = nomad.Expected("node00000", uuids=tuple(told["uuids"]), mig_unknown=tuple(told["mig_unknown"]))

    def found(*uuids: str) -> list[str]:
        node = copy.deepcopy(NODE)
        (group,) = node["NodeResources"]["Devices"]
        group["Instances"] = [{"ID": uuid, "Healthy": True} for uuid in uuids]
        return codes(judged([wanted], [node]))

    assert found(helper.uuid_of(0, 1), "MIG-1", "MIG-2") == found(helper.uuid_of(0, 1)) == []
    assert found(helper.uuid_of(0, 0), helper.uuid_of(0, 1)) == []
    assert found("MIG-1", "MIG-2") == ["gpu_missing"] and found() == ["no_devices"]
    assert found(helper.uuid_of(0, 1), "GPU-other") == ["gpu_unexpected"]
    layout = nomad.Expected("node00000", count=2, mig_profiles={"1g.10gb": 1}, mig_unknown=("",))
    (problem,) = [problem for each in judged([layout], [NODE]) for problem in each.problems]
    assert problem.code == "mig_mismatch" and problem.expected == "at least 1 x 1g.10gb"
    few = judged([nomad.Expected("node00000", count=3, mig_unknown=("",))], [NODE])
    assert [(each.code, each.expected) for each in few[0].problems] == [("count_mismatch", "at least 3 GPUs")]
    assert codes(judged([nomad.Expected("node00000", count=1, mig_unknown=("",))], [NODE])) == []


def test_the_newest_living_node_of_a_name_counts() -> None:
    def node(status: str, index: int) -> Any:
        return nomad.describe_node({"Status": status, "CreateIndex": index})

    ordered = [node("down", 7), node("down", 9), node("ready", 3), node("initializing", 5), node("ready", 8)]
    assert sorted(reversed(ordered), key=nomad.rank) == ordered


def test_one_uuid_on_two_nodes() -> None:
    clone = change(helper.make_node(0, 2), ID="other", Name="clone")
    verdicts = judged([wish(0)], [NODE, clone])
    assert codes(verdicts) == ["duplicate_uuid"] * 4
    assert [verdict.name for verdict in verdicts] == ["node00000", "clone"]
    assert "also on clone (other)" in verdicts[0].problems[0].message
    assert codes(judged([wish(0)], [NODE, change(clone, Status="down")])) == []


def test_a_former_self_that_is_down_does_not_count() -> None:
    former = change(helper.make_node(0, 2), ID="former", Status="down", CreateIndex=99)
    for nodes in ([NODE, former], [former, NODE]):
        verdicts = judged([wish(0)], nodes, allow_extra_nodes=False)
        assert codes(verdicts) == [] and verdicts[0].id == NODE["ID"]


def test_a_node_of_which_nothing_is_known() -> None:
    assert nomad.describe_node({}) == {
        "id": "",
        "name": "",
        "address": None,
        "status": "",
        "eligibility": "",
        "drain": False,
        "datacenter": "",
        "node_pool": None,
        "node_class": None,
        "version": None,
        "create_index": 0,
        "modify_index": 0,
        "gpus": [],
    }


def test_extra_nodes_are_named_and_allowed() -> None:
    nodes = [*farm(3), helper.make_node(7, 0), change(helper.make_node(8, 2), Status="down")]
    assert codes(judged([wish(0)], nodes)) == []
    actual = [nomad.describe_node(node) for node in nodes]
    assert nomad.extra_gpu_nodes([wish(0)], actual) == ["node00001", "node00002"]
    assert nomad.extra_gpu_nodes([wish(0), nomad.Expected(nodes[1]["ID"])], actual) == ["node00002"]


def test_a_node_by_its_id() -> None:
    assert codes(judged([nomad.Expected(NODE["ID"])], [NODE], allow_extra_nodes=False)) == []


def test_uuids_are_compared_without_case() -> None:
    assert codes(judged([wish(0, uuids=tuple(helper.uuid_of(0, gpu).upper() for gpu in (1, 0)))], [NODE])) == []


def test_the_table_shows_failed_nodes_first() -> None:
    verdicts = judged([wish(0), wish(1, 4), wish(5)], farm(2))
    assert nomad.table(verdicts).splitlines() == [
        "NODE       STATUS  EXPECTED  FOUND  VERDICT  PROBLEMS",
        "node00001  ready   4         2      failed   gpu_missing (2x)",
        "node00005  -       2         0      failed   node_missing",
        "node00000  ready   2         2      ok       -",
    ]
    assert nomad.table(verdicts, 1).splitlines()[-1] == "... and 2 more nodes"
    assert nomad.table(verdicts, 3) == nomad.table(verdicts)


# --- the client ------------------------------------------------------------------------------


def ask(agent: helper.Agent, **settings: Any) -> list[dict[str, Any]]:
    client = nomad.Client(nomad.Connection(**{"address": agent.url, **settings}))
    return list(client.items("/v1/nodes", {"resources": "true"}).items)


def test_what_is_sent(agent: helper.Agent) -> None:
    agent.nodes = farm(1)
    assert ask(agent, token="secret", namespace="n s", region="eu") == agent.nodes
    path, query, headers = agent.requests[0]
    assert path == "/v1/nodes"
    assert query == {"resources": "true", "namespace": "n s", "region": "eu"}
    assert headers["X-Nomad-Token"] == "secret"
    assert "X-Nomad-Token" not in (ask(agent) and agent.requests[1][2])


@pytest.mark.parametrize(("asked", "answered", "following"), [(0, 7, 7), (7, 9, 9), (7, 7, 7), (9, 3, 0), (5, 0, 0)])
def test_the_index_to_wait_from(asked: int, answered: int, following: int) -> None:
    assert nomad_client.next_index(asked, answered) == following


def test_a_blocking_query_waits_for_the_change(agent: helper.Agent) -> None:
    client = nomad.Client(nomad.Connection(address=agent.url))
    first = client.items("/v1/nodes", {})
    list(first.items)
    assert first.index == 10 and "index" not in agent.requests[0][1]
    again = client.items("/v1/nodes", {}, index=first.index, wait=0.2)
    list(again.items)
    assert agent.requests[1][1] == {"index": "10", "wait": "188ms"}
    assert again.index == 10


def refuse(status: int, body: bytes = b"", **headers: str) -> Any:
    def answer(request: Any) -> bool:
        request.reply(status, body, headers)
        return True

    return answer


@pytest.mark.parametrize(
    ("status", "body", "words", "transient"),
    [
        (403, b"Permission denied", "was refused (HTTP 403: Permission denied)", False),
        (500, b"No cluster leader", "answered HTTP 500: No cluster leader", True),
        (500, b"rpc error: leadership lost while committing log", "rpc error: leadership lost", True),
        (500, b"rpc error: failed to get conn: dial tcp 192.0.2.1:4647: connect: connection refused", "failed", True),
        (500, b"No path to region", "answered HTTP 500: No path to region", False),
        (502, b"", "answered HTTP 502.", True),
        (404, b"not here", "answered HTTP 404: not here", False),
        (307, b"", "redirects to http://evil.example/", False),
        (200, b"<html>login</html>", "did not answer with a complete list", True),
        (200, b'[{"ID": "1"', "did not answer with a complete list", True),
    ],
)
def test_what_nomad_refuses(agent: helper.Agent, status: int, body: bytes, words: str, transient: bool) -> None:
    agent.answer = refuse(status, body, Location="http://evil.example/")
    with pytest.raises(nomad.NomadError) as caught:
        ask(agent, token="very-secret")
    assert words in str(caught.value) and agent.url in str(caught.value)
    assert " Expected: " in str(caught.value) and " Next step: " in str(caught.value)
    assert caught.value.transient is transient
    assert len(agent.requests) == (nomad_client.ATTEMPTS if status in (500, 502) else 1)


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that were made, in no time."""
    made: list[float] = []
    monkeypatch.setattr(nomad_client.time, "sleep", made.append)
    return made


def first(agent: helper.Agent, *answers: Any) -> None:
    """Give these answers to the first requests; None ends the connection without one."""
    left = list(answers)

    def answer(request: Any) -> bool:
        if not left:
            return False
        status, headers = left.pop(0) or (None, {})
        if status is None:
            request.close_connection = True
        else:
            request.reply(status, b"Not ready to serve consistent reads", headers)
        return True

    agent.answer = answer


def client_of(agent: helper.Agent, **settings: Any) -> nomad.Client:
    return nomad.Client(nomad.Connection(**{"address": agent.url, **settings}))


READS = [
    lambda client: list(client.items("/v1/nodes", {}).items),
    lambda client: client.call("GET", "/v1/nodes"),
    lambda client: json.loads(client.text("/v1/nodes", {})),
]


@pytest.mark.parametrize("read", READS, ids=["items", "call", "text"])
@pytest.mark.parametrize("answer", [(429, {}), (500, {}), (502, {}), (503, {}), (504, {}), None], ids=str)
def test_a_read_survives_one_hiccup(agent: helper.Agent, pauses: list[float], read: Any, answer: Any) -> None:
    agent.nodes = farm(1)
    first(agent, answer)
    assert read(client_of(agent)) == agent.nodes
    assert len(agent.requests) == 2 and pauses == [0.5]


@pytest.mark.parametrize("answer", [(500, {}), None], ids=str)
def test_a_read_gives_up_in_the_end(agent: helper.Agent, pauses: list[float], answer: Any) -> None:
    first(agent, *[answer] * 9)
    with pytest.raises(nomad.NomadError) as caught:
        client_of(agent).call("GET", "/v1/nodes")
    assert caught.value.transient and len(agent.requests) == 3 and pauses == [0.5, 1.0]


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 501])
def test_what_will_not_pass_is_asked_once(agent: helper.Agent, pauses: list[float], status: int) -> None:
    first(agent, *[(status, {"Retry-After": "1"})] * 9)
    with pytest.raises(nomad.NomadError, match=f"HTTP {status}"):
        client_of(agent).call("GET", "/v1/nodes")
    assert len(agent.requests) == 1 and pauses == []


@pytest.mark.parametrize("answer", [(500, {}), (503, {"Retry-After": "1"}), None], ids=str)
def test_a_write_that_may_have_arrived_is_not_made_again(agent: helper.Agent, pauses: list[float], answer: Any) -> None:
    first(agent, answer)
    with pytest.raises(nomad.NomadError) as caught:
        client_of(agent).call("POST", "/v1/jobs", {"Job": {}})
    assert caught.value.transient and agent.writes == [("/v1/jobs", {"Job": {}})] and pauses == []


def test_a_write_that_was_turned_away_is_made_again(agent: helper.Agent, pauses: list[float]) -> None:
    first(agent, (429, {"Retry-After": "3"}))
    assert client_of(agent).call("POST", "/v1/jobs", {"Job": {}}) == {}
    assert len(agent.writes) == 2 and pauses == [3.0]


@pytest.mark.parametrize(
    ("asked", "timeout", "made"), [("7", 30, [7.0]), ("0", 30, [0.0]), ("29", 30, [29.0]), ("31", 60, []), ("5", 5, [])]
)
def test_retry_after_is_honoured_as_far_as_a_request_may_last(
    agent: helper.Agent, pauses: list[float], asked: str, timeout: float, made: list[float]
) -> None:
    first(agent, (429, {"Retry-After": asked}))
    client = client_of(agent, request_timeout=timeout)
    if made:
        assert client.call("GET", "/v1/nodes") == []
    else:
        with pytest.raises(nomad.NomadError, match="HTTP 429"):
            client.call("GET", "/v1/nodes")
    assert pauses == made


def test_nobody_listening_and_a_server_that_hangs_are_no_hiccups(pauses: list[float]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        address = f"http://127.0.0.1:{hanging.getsockname()[1]}"
        for ask_for in (*READS, lambda client: client.call("POST", "/v1/jobs", {})):
            client = nomad.Client(nomad.Connection(address=address, request_timeout=0.2))
            with pytest.raises(nomad.NomadError, match=r"cannot be reached \(timed out\)") as caught:
                ask_for(client)
            assert caught.value.transient
            hanging.accept()[0].close()
        hanging.setblocking(False)
        with pytest.raises(BlockingIOError):
            hanging.accept()
    with pytest.raises(nomad.NomadError, match="cannot be reached"):
        nomad.Client(nomad.Connection(address=address)).call("GET", "/v1/nodes")
    assert pauses == []


def test_all_attempts_together_take_no_longer_than_one_may(
    agent: helper.Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, given = [100.0], []
    monkeypatch.setattr(nomad_client.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(nomad_client.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    client = client_of(agent, request_timeout=10)

    def opened(_request: Any, timeout: float) -> None:
        given.append(timeout)
        now[0] += 4
        raise ConnectionResetError("reset")

    monkeypatch.setattr(client._opener, "open", opened)
    with pytest.raises(nomad.NomadError, match="reset"):
        client.call("GET", "/v1/nodes")
    assert given == [10.0, 5.5, 0.5]


def test_every_text_of_nomads_is_clean(agent: helper.Agent) -> None:
    """HashiCorp's plugin sends a C array, and whoever runs a job chooses its name."""
    node = helper.make_node(0, 1)
    node["NodeResources"]["Devices"][0]["Instances"][0]["Locality"]["PciBusID"] = "00000000:00:06.0" + "\0" * 16
    node["NodeResources"]["Processors"]["Topology"]["BusAssociativity"] = {"0000:00:06.0": 1}
    node["Name"], node["Attributes"] = "n\x9b2J", {"k\x1b": "v\u202e"}
    agent.nodes = [node]
    for answer in (ask(agent), client_of(agent).call("GET", "/v1/nodes")):
        (gpu,) = nomad.gpus_of_node(answer[0])
        assert (gpu["pci_bus_id"], gpu["numa_node"]) == ("00000000:00:06.0", 1)
        assert answer[0]["Name"] == "n 2J" and answer[0]["Attributes"] == {"k": "v"}
    agent.answer = refuse(404, b"no\x1b[2J\0")
    with pytest.raises(nomad.NomadError) as caught:
        ask(agent)
    assert str(caught.value).isprintable() and caught.value.found.endswith("answered HTTP 404: no [2J")


@pytest.mark.parametrize("escaped", ["raw", "escaped"])
def test_a_list_is_cleaned_however_its_characters_are_written(escaped: str) -> None:
    text = '[{"a":"b\\u0007"}]' if escaped == "escaped" else '[{"a":"b\x85"}]'
    assert list(stream.json_items([text.encode()])) == [{"a": "b"}]


def test_the_token_is_in_no_text(agent: helper.Agent) -> None:
    agent.answer = refuse(403, b"ACL token very-secret not found")
    connection = nomad.Connection(address=agent.url, token="very-secret")
    with pytest.raises(nomad.NomadError) as caught:
        nomad.Client(connection).items("/v1/nodes", {})
    assert "very-secret" not in str(caught.value) and "ACL token ********" in str(caught.value)
    assert "very-secret" not in repr(connection)


@pytest.mark.parametrize("token", ["very\nsecret", "verysecret\x00", "véry-sécret"])
def test_a_token_that_no_header_can_hold_is_refused_unseen(token: str) -> None:
    with pytest.raises(nomad.NomadError, match=r"holds characters.*Expected: .*Next step: ") as caught:
        nomad.Client(nomad.Connection(address="http://127.0.0.1:1", token=token))
    assert "ver" not in str(caught.value) and not caught.value.transient


def test_a_token_comes_with_the_newline_of_its_file(agent: helper.Agent) -> None:
    nomad.Client(nomad.Connection(address=agent.url, token="very-secret\n")).items("/v1/nodes", {})
    assert nomad.Client(nomad.Connection(address=agent.url, token="very-secret\n")).connection.token == "very-secret"


@pytest.mark.parametrize("error", [ssl.SSLError(1, "[SSL] tlsv13 alert certificate required"), None])
def test_an_alert_of_tls_is_no_matter_of_the_firewall(error: Exception | None) -> None:
    failure = error or urllib.error.URLError(ssl.SSLError(1, "[SSL] tlsv13 alert certificate required"))
    with pytest.raises(nomad.NomadError, match="check the scheme of the address, and client_cert") as caught:
        nomad_client._unreachable("https://nomad.example.com:4646", failure)
    assert not caught.value.transient


def test_an_error_whose_text_breaks_off_is_that_error(agent: helper.Agent) -> None:
    def answer(request: Any) -> bool:
        request.send_response(502)
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()
        request.wfile.write(b"64\r\nhalf")
        request.close_connection = True
        return True

    agent.answer = answer
    with pytest.raises(nomad.NomadError, match="answered HTTP 502") as caught:
        ask(agent)
    assert caught.value.transient


def test_nobody_listens() -> None:
    stopped = helper.Agent()
    stopped.close()
    with pytest.raises(nomad.NomadError, match="cannot be reached") as caught:
        ask(stopped)
    assert caught.value.transient


@pytest.mark.parametrize("address", ["", "127.0.0.1:4646", "unix:///run/nomad.sock", "https://"])
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(nomad.NomadError, match="the address of Nomad is"):
        nomad.Client(nomad.Connection(address=address))


def test_proxies_do_not_break_this_machine(agent: helper.Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert ask(agent) == []


@pytest.mark.parametrize(
    ("host", "own"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("localhost", True), ("::1", True), ("203.0.113.1", False),
     ("a.b", False), ("", False), (None, False),
     ("0.0.0.0", True)],
)  # fmt: skip
def test_what_is_this_machine(host: str | None, own: bool) -> None:
    assert nomad.is_own(host) is own


def test_the_other_addresses_of_this_machine_are_its_own_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loopback's stands in for that of a network card, which not every machine has."""
    monkeypatch.setattr(ipaddress.IPv4Address, "is_loopback", False)
    assert nomad.is_own("127.0.0.1") is True


def test_filter_of_names() -> None:
    assert nomad.name_filter(["a", "b-1"]) == 'Name == "a" or Name == "b-1"'
    for name in ('a" or true', "a\\", "a`", ""):
        with pytest.raises(nomad.NomadError, match="name of a node"):
            nomad.name_filter([name])


# --- waiting ---------------------------------------------------------------------------------


class Clock:
    """Time that only passes when somebody waits."""

    def __init__(self) -> None:
        self.now = 0.0
        self.asked: list[tuple[int, float]] = []

    def __call__(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        self.now += seconds


def test_waiting_ends_with_the_first_good_answer() -> None:
    clock = Clock()
    answers = iter([(5, "bad"), (6, "bad"), (9, "good"), (10, "never")])

    def fetch(index: int, wait: float) -> tuple[int, str]:
        clock.asked.append((index, wait))
        return next(answers)

    assert nomad.wait_until(fetch, "good".__eq__, 100, clock, clock.pause) == "good"
    assert [index for index, _wait in clock.asked] == [0, 5, 6]
    assert all(wait <= waiting.LONGEST_WAIT for _index, wait in clock.asked)


def test_waiting_ends_with_the_time_and_the_last_answer() -> None:
    clock = Clock()

    def fetch(index: int, wait: float) -> tuple[int, str]:
        clock.asked.append((index, wait))
        clock.now += wait
        return index + 1, f"bad {index}"

    assert nomad.wait_until(fetch, "good".__eq__, 130, clock, clock.pause) == "bad 2"
    assert 130 <= clock.now <= 131


def test_no_time_is_one_look() -> None:
    clock = Clock()
    calls: list[float] = []
    answer = nomad.wait_until(lambda _index, wait: (1, calls.append(wait)), bool, 0, clock, clock.pause)
    assert answer is None and calls == [0]


def test_a_server_without_leader_is_asked_again() -> None:
    clock = Clock()
    answers: Iterator[Any] = iter([nomad.NomadError("a", "b", "c", transient=True), "good"])

    def fetch(_index: int, _wait: float) -> tuple[int, str]:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return 1, answer

    assert nomad.wait_until(fetch, "good".__eq__, 10, clock, clock.pause) == "good"


def test_an_answer_is_not_lost_to_an_error_of_the_last_moment() -> None:
    clock = Clock()

    def fetch(_index: int, wait: float) -> tuple[int, str]:
        if clock.now > 3:
            clock.now += wait
            raise nomad.NomadError("no leader", "one", "wait", transient=True)
        clock.now += 2
        return 1, "bad"

    assert nomad.wait_until(fetch, "good".__eq__, 10, clock, clock.pause) == "bad"


@pytest.mark.parametrize(("transient", "timeout"), [(False, 10), (True, 0), (True, 3)])
def test_errors_that_end_the_waiting(transient: bool, timeout: int) -> None:
    clock = Clock()

    def fetch(_index: int, _wait: float) -> tuple[int, str]:
        raise nomad.NomadError("found", "expected", "next", transient)

    with pytest.raises(nomad.NomadError):
        nomad.wait_until(fetch, bool, timeout, clock, clock.pause)
    assert clock.now <= timeout + 0.5
