from __future__ import annotations

from testinfra.host import Host

from tests.testinfra.helpers import nomad_api, restarts

testinfra_hosts = ["client-node"]


def test_server_has_the_client_ready(host: Host) -> None:
    node = next(item for item in nomad_api(host, "/v1/nodes") if item["Name"] == "client-node")
    assert node["Status"] == "ready"
    assert node["SchedulingEligibility"] == "eligible"
    assert node["NodeClass"] == "gpu"


def test_settings_reach_the_farm(host: Host) -> None:
    found = next(item for item in nomad_api(host, "/v1/nodes") if item["Name"] == "client-node")
    detail = nomad_api(host, f"/v1/node/{found['ID']}")
    assert detail["Meta"]["rack"] == "r1"
    assert detail["HostVolumes"]["results"]["Path"] == "/srv/results"


def test_commands_without_isolation_are_off(host: Host) -> None:
    found = next(item for item in nomad_api(host, "/v1/nodes") if item["Name"] == "client-node")
    assert found["Drivers"]["raw_exec"]["Detected"] is False


def test_converging_again_restarted_nothing(host: Host) -> None:
    assert restarts(host, "nomad") == 1
