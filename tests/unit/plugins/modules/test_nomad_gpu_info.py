# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import platform
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gpufarm.core.plugins.modules import nomad_gpu_info, nomad_gpu_verify
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils import nomad_helper as farm
from ansible_collections.gpufarm.core.tests.unit.plugins.modules import release_helper as helper


@pytest.fixture
def agent() -> Iterator[farm.Agent]:
    running = farm.Agent()
    running.nodes = farm.recorded("nodes-1.11.3")
    running.allocations = farm.recorded("allocations-1.11.3")
    yield running
    running.close()


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ADDR", "TOKEN", "NAMESPACE", "REGION", "CACERT", "CAPATH", "SKIP_VERIFY", "TLS_SERVER_NAME"):
        monkeypatch.delenv(f"NOMAD_{name}", raising=False)


def run(capsys: pytest.CaptureFixture[str], **arguments: Any) -> helper.Outcome:
    return helper.run_module(nomad_gpu_info.main, capsys, arguments)


def test_one_request_reads_the_farm(agent: farm.Agent, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(capsys, address=agent.url)
    assert result["changed"] is False and result["gpu_count"] == 4 and result["index"] == 10
    node = result["nodes"][0]
    assert {name: node[name] for name in ("name", "status", "eligibility", "drain", "datacenter", "node_pool")} == {
        "name": "gpu01",
        "status": "ready",
        "eligibility": "eligible",
        "drain": False,
        "datacenter": "dc1",
        "node_pool": "default",
    }
    assert node["node_class"] == "gpu" and node["version"] == "1.11.3" and len(node["id"]) == 36
    assert [gpu["allocation_id"] for gpu in node["gpus"]] == [None] * 4
    assert [(path, query) for path, query, _headers in agent.requests] == [("/v1/nodes", {"resources": "true"})]


def test_without_gpus_the_answer_is_small(agent: farm.Agent, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(capsys, address=agent.url, gather_gpus=False)
    assert [(path, query) for path, query, _headers in agent.requests] == [("/v1/nodes", {})]
    assert result["nodes"][0]["modify_index"] == agent.nodes[0]["ModifyIndex"]


@pytest.mark.parametrize("option", ["only_gpu_nodes", "gather_reasons", "gather_allocations"])
def test_without_gpus_nothing_can_be_asked_of_them(
    agent: farm.Agent, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    result = run(capsys, address=agent.url, gather_gpus=False, **{option: True})
    assert result["msg"] == (
        f"{platform.node()}: gather_gpus is false and {option} is true. Expected: nodes with their GPUs, of which that "
        f"is asked. Next step: leave out gather_gpus or {option}."
    )
    assert agent.requests == []


def test_of_several_nodes_with_one_name_the_last_counts(agent: farm.Agent, capsys: pytest.CaptureFixture[str]) -> None:
    def node(name: str, **values: Any) -> dict[str, Any]:
        return {**agent.nodes[0], "Name": name, **values}

    agent.nodes = [
        node("b", ID="b"),
        node("a", ID="new", CreateIndex=7),
        node("a", ID="former", CreateIndex=9, Status="down"),
        node("a", ID="old", CreateIndex=3),
    ]
    assert [node["id"] for node in run(capsys, address=agent.url)["nodes"]] == ["former", "old", "new", "b"]


def test_why_nodes_are_closed(agent: farm.Agent, capsys: pytest.CaptureFixture[str]) -> None:
    """The maintenance comes before the gate, which waits for its end. Who is open, or has no GPU, is not asked."""
    metas = {
        "gated": {"gpufarm_gate_reason": "gpu_lost"},
        "both": {"gpufarm_gate_reason": "gpu_lost", "gpufarm_maintenance": "driver branch 580"},
        "maintained": {"gpufarm_maintenance": "firmware"},
        "other": {"rack": "1"},
        "bare": None,
        "broken": {},
    }

    def answer(request: Any) -> bool:
        name = request.path.removeprefix("/v1/node/")
        if name in metas:
            request.reply(500 if name == "broken" else 200, json.dumps({"ID": name, "Meta": metas[name]}).encode(), {})
        return name in metas

    agent.answer = answer
    closed = {**agent.nodes[0], "SchedulingEligibility": "ineligible"}
    agent.nodes = [{**closed, "ID": name, "Name": name} for name in metas]
    agent.nodes += [{**closed, "ID": "open", "Name": "open", "SchedulingEligibility": "eligible"}]
    agent.nodes += [{**closed, "ID": "cpu", "Name": "cpu", "NodeResources": {}}]
    found = {node["name"]: node["closed_for"] for node in run(capsys, address=agent.url, gather_reasons=True)["nodes"]}
    assert found == {
        "gated": "gpu_lost", "both": "maintenance: driver branch 580", "maintained": "maintenance: firmware",
        "other": None, "bare": None, "broken": None, "open": None, "cpu": None,
    }  # fmt: skip
    # A node that does not tell is asked once.
    assert sorted(path for path, _query, _headers in agent.requests) == sorted(
        ["/v1/nodes", *(f"/v1/node/{name}" for name in metas)]
    )
    agent.requests.clear()
    agent.nodes = [{**closed, "ID": "gated"}] * (nomad_gpu_info.READ_REASONS + 1)
    run(capsys, address=agent.url, gather_reasons=True)
    assert len(agent.requests) == 1 + nomad_gpu_info.READ_REASONS


def test_what_an_older_nomad_does_not_tell_is_unknown(agent: farm.Agent, capsys: pytest.CaptureFixture[str]) -> None:
    for field in ("NodePool", "NodeClass", "Version", "Address"):
        agent.nodes[0][field] = ""
    node = run(capsys, address=agent.url)["nodes"][0]
    assert [node[name] for name in ("node_pool", "node_class", "version", "address")] == [None] * 4


def test_allocations_are_a_second_request(agent: farm.Agent, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(capsys, address=agent.url, gather_allocations=True)
    holders = [gpu["allocation"] and gpu["allocation"]["job_id"] for gpu in result["nodes"][0]["gpus"]]
    assert holders == [None, None, "training", "training"]
    ids = [gpu["allocation_id"] for gpu in result["nodes"][0]["gpus"]]
    assert ids == [gpu["allocation"] and gpu["allocation"]["id"] for gpu in result["nodes"][0]["gpus"]] and all(ids[2:])
    path, query, _headers = agent.requests[1]
    assert path == "/v1/allocations"
    assert query == {
        "resources": "true",
        "task_states": "false",
        "filter": 'ClientStatus == "running" or ClientStatus == "pending" or ClientStatus == "unknown"',
        "namespace": "*",
    }
    run(capsys, address=agent.url, gather_allocations=True, namespace="ml")
    assert agent.requests[3][1]["namespace"] == "ml"


def test_use_is_told_by_namespace_job_and_node_pool(agent: farm.Agent, capsys: pytest.CaptureFixture[str]) -> None:
    agent.namespaces = [
        {"Name": "default", "Meta": {"gpufarm_gpus": "1"}},
        {"Name": "idle", "Meta": None},
        {"Name": "odd", "Meta": {"gpufarm_gpus": "many"}},
    ]
    agent.nodes.append({**farm.make_node(7, 0), "NodePool": "cpu"})
    result = run(capsys, address=agent.url, gather_usage=True)
    pools = [
        {"node_pool": "cpu", "nodes": 1, "gpus": 0, "gpus_used": 0},
        {"node_pool": "default", "nodes": 1, "gpus": 4, "gpus_used": 2},
    ]
    assert result["usage"] == {
        "namespaces": [
            {"namespace": "default", "gpus": 2, "budget": 1},
            {"namespace": "idle", "gpus": 0, "budget": None},
            {"namespace": "odd", "gpus": 0, "budget": None},
        ],
        "jobs": [{"namespace": "default", "job_id": "training", "gpus": 2}],
        "node_pools": pools,
    }
    assert [path for path, _query, _headers in agent.requests] == ["/v1/nodes", "/v1/allocations", "/v1/namespaces"]
    # Who holds which was not asked for.
    assert {gpu["allocation_id"] for node in result["nodes"] for gpu in node["gpus"]} == {None}
    # What each node has is not needed for it.
    small = run(capsys, address=agent.url, gather_usage=True, gather_gpus=False)["usage"]
    assert small == {**result["usage"], "node_pools": [{**pool, "gpus": None} for pool in pools]}
    only = run(capsys, address=agent.url, gather_usage=True, namespace="idle")["usage"]
    assert [each["namespace"] for each in only["namespaces"]] == ["default", "idle"]


def test_use_is_that_of_the_nodes_that_are_chosen(agent: farm.Agent, capsys: pytest.CaptureFixture[str]) -> None:
    agent.nodes = [farm.make_node(7, 2)]
    usage = run(capsys, address=agent.url, gather_usage=True)["usage"]
    assert (usage["namespaces"], usage["jobs"]) == ([], [])
    assert run(capsys, address=agent.url)["usage"] is None


def test_what_is_no_gpu_is_no_use(agent: farm.Agent, capsys: pytest.CaptureFixture[str]) -> None:
    for task in agent.allocations[0]["AllocatedResources"]["Tasks"].values():
        for device in task["Devices"]:
            device["Type"] = "fpga"
    assert run(capsys, address=agent.url, gather_usage=True)["usage"]["jobs"] == []


def test_filters_are_nomads_own(agent: farm.Agent, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, address=agent.url, filter='Status == "ready" or Drain == true', node_name=["gpu01", "gpu02"])
    assert agent.requests[0][1]["filter"] == (
        '(Status == "ready" or Drain == true) and (Name == "gpu01" or Name == "gpu02")'
    )


def test_many_names_are_picked_from_the_answer(agent: farm.Agent, capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"node{number:05d}" for number in range(60)]
    agent.nodes = [*farm.recorded("nodes-1.11.3"), farm.make_node(3, 1), farm.make_node(2, 0)]
    result = run(capsys, address=agent.url, node_name=names)
    assert [node["name"] for node in result["nodes"]] == ["node00002", "node00003"]
    assert "filter" not in agent.requests[0][1]
    result = run(capsys, address=agent.url, node_name=names, only_gpu_nodes=True)
    assert [node["name"] for node in result["nodes"]] == ["node00003"]


def test_environment_of_nomads_cli(
    agent: farm.Agent, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOMAD_ADDR", agent.url)
    monkeypatch.setenv("NOMAD_TOKEN", "from-environment")
    monkeypatch.setenv("NOMAD_REGION", "eu")
    run(capsys)
    _path, query, headers = agent.requests[0]
    assert headers["X-Nomad-Token"] == "from-environment" and query["region"] == "eu"
    run(capsys, token="from-task", region="us")
    _path, query, headers = agent.requests[1]
    assert headers["X-Nomad-Token"] == "from-task" and query["region"] == "us"


def test_error_names_host_and_address_and_no_token(agent: farm.Agent, capsys: pytest.CaptureFixture[str]) -> None:
    agent.close()
    result = run(capsys, address=agent.url, token="very-secret")
    assert result["failed"] and result["msg"].startswith(f"{platform.node()}: {agent.url}/v1/nodes")
    assert "Expected: " in result["msg"] and "Next step: " in result["msg"]
    assert "very-secret" not in str(result)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CA, a server certificate for server.global.nomad only, and a client certificate."""
    if not shutil.which("openssl"):
        pytest.skip("openssl is needed to make certificates")
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=CA", "-days", "2",
            "-addext", "keyUsage=critical,keyCertSign,cRLSign")  # fmt: skip
    # Python 3.13 checks strictly: RFC 5280 wants the key identifiers.
    extensions = ("subjectAltName=DNS:server.global.nomad", "authorityKeyIdentifier=keyid", "subjectKeyIdentifier=hash")
    (folder / "names").write_text("\n".join(extensions) + "\n")
    for name in ("server", "client"):
        openssl("req", *new_key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signing = ("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial")
        openssl(*signing, "-days", "2", "-extfile", "names", "-out", f"{name}.pem")
    return folder


@pytest.fixture
def tls_agent(certificates: Path) -> Iterator[farm.Agent]:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    tls.load_verify_locations(certificates / "ca.pem")
    tls.verify_mode = ssl.CERT_REQUIRED
    running = farm.Agent(tls)
    running.nodes = farm.recorded("nodes-1.11.3")
    yield running
    running.close()


def test_mutual_tls(tls_agent: farm.Agent, certificates: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {"ca_cert": certificates / "ca.pem", "client_cert": certificates / "client.pem"}
    files["client_key"] = certificates / "client.key"
    good: dict[str, Any] = {name: str(path) for name, path in files.items()}
    good.update(address=tls_agent.url, tls_server_name="server.global.nomad")
    assert run(capsys, **good)["gpu_count"] == 4

    result = run(capsys, **{**good, "tls_server_name": "other.global.nomad"})
    assert "is not accepted" in result["msg"] and "tls_server_name" in result["msg"]
    result = run(capsys, **{**good, "ca_cert": None})
    assert "is not accepted" in result["msg"] and "set ca_cert" in result["msg"]
    assert run(capsys, **{**good, "ca_cert": None, "tls_server_name": None, "validate_certs": False})["gpu_count"] == 4
    result = run(capsys, **{**good, "ca_cert": str(certificates / "missing.pem")})
    assert "cannot be used" in result["msg"] and "missing.pem" in result["msg"]
    assert "failed" in run(capsys, **{**good, "client_key": None})


def test_skip_verify_of_the_environment(
    tls_agent: farm.Agent, certificates: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"client_cert": str(certificates / "client.pem"), "client_key": str(certificates / "client.key")}
    for value, works in (("true", True), ("0", False), ("", False)):
        monkeypatch.setenv("NOMAD_SKIP_VERIFY", value)
        assert ("nodes" in run(capsys, address=tls_agent.url, **files)) is works
    monkeypatch.setenv("NOMAD_SKIP_VERIFY", "1")
    assert "failed" in run(capsys, address=tls_agent.url, validate_certs=True, **files)


def test_check_mode_asks_all_the_same(agent: farm.Agent, capsys: pytest.CaptureFixture[str]) -> None:
    asked = {"address": agent.url}
    assert helper.run_module(nomad_gpu_info.main, capsys, asked, check_mode=True)["gpu_count"] == 4
    asked["expected"] = [{"node": "gpu01", "count": 4}]
    checked = helper.run_module(nomad_gpu_verify.main, capsys, asked, check_mode=True)
    assert [node["verdict"] for node in checked["nodes"]] == ["ok"]


@pytest.mark.parametrize("module", [nomad_gpu_info, nomad_gpu_verify])
def test_documentation_is_valid_yaml(module: Any) -> None:
    documentation = yaml.safe_load(module.DOCUMENTATION)
    assert documentation["module"] == module.__name__.rsplit(".", 1)[-1]
    assert yaml.safe_load(module.EXAMPLES) and yaml.safe_load(module.RETURN)


def test_returned_keys_are_the_documented_ones(agent: farm.Agent, capsys: pytest.CaptureFixture[str]) -> None:
    def compare(documented: dict[str, Any], found: dict[str, Any]) -> None:
        assert set(documented) == set(found)
        for name, value in found.items():
            inner = documented[name].get("contains")
            if inner and value:
                compare(inner, value[0] if isinstance(value, list) else value)

    result = run(capsys, address=agent.url, gather_allocations=True)
    result["nodes"][0]["gpus"].reverse()
    shown = {name: result[name] for name in result if name not in ("changed", "invocation")}
    compare(yaml.safe_load(nomad_gpu_info.RETURN), shown)
