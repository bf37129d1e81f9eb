from __future__ import annotations

import json
from pathlib import Path

import pytest
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
    assert detail["HostVolumes"]["results"]["Path"] == "/srv/results"
    assert detail["ReservedResources"]["Cpu"]["CpuShares"] == 100
    assert detail["ReservedResources"]["Memory"]["MemoryMB"] == 64


def test_texts_arrive_as_they_were_given(host: Host) -> None:
    """Quotes, control characters, what looks like an interpolation: nothing of it is changed on the way through HCL."""
    found = next(item for item in nomad_api(host, "/v1/nodes") if item["Name"] == "client-node")
    given = json.loads((Path(__file__).parents[1] / "meta.json").read_text(encoding="utf-8"))
    meta = nomad_api(host, f"/v1/node/{found['ID']}")["Meta"]
    assert {name: meta.get(name) for name in given} == given


def test_what_has_no_variable_of_its_own(host: Host) -> None:
    config = nomad_api(host, "/v1/agent/self")["config"]
    assert config["HTTPAPIResponseHeaders"] == {"X-Farm": "lab"}
    assert config["Telemetry"]["PrometheusMetrics"] is True
    assert config["Client"]["MaxKillTimeout"] == "10m"
    plugins = {plugin["Name"]: plugin["Config"] for plugin in config["Plugins"]}
    # Over ours, which stays beside it.
    assert plugins["raw_exec"] == {"enabled": False, "denied_host_uids": "0"}
    assert plugins["docker"]["allow_runtimes"] == ["runc", "nvidia"]
    assert "log_level" not in host.file("/etc/nomad.d/nomad.hcl").content_string


def test_groups_can_have_a_network_of_their_own(host: Host) -> None:
    found = next(item for item in nomad_api(host, "/v1/nodes") if item["Name"] == "client-node")
    attributes = nomad_api(host, f"/v1/node/{found['ID']}")["Attributes"]
    assert {"bridge", "firewall", "host-local", "loopback", "portmap"} <= {
        name.rpartition(".")[2] for name in attributes if name.startswith("plugins.cni.version.")
    }


def test_the_agent_knows_who_makes_volumes_of_a_size(host: Host) -> None:
    found = next(item for item in nomad_api(host, "/v1/nodes") if item["Name"] == "client-node")
    attributes = nomad_api(host, f"/v1/node/{found['ID']}")["Attributes"]
    assert {"plugins.host_volume.ext4-image.version", "plugins.host_volume.mkdir.version"} <= set(attributes)


@pytest.mark.parametrize(
    ("path", "owner", "mode"),
    [
        ("/srv/results", "root", 0o755),
        ("/srv/closed", "root", 0o700),
        ("/scratch", "nobody", 0o1777),
        ("/other", "nobody", 0o750),
    ],
)
def test_folders_of_host_volumes_that_were_there_stay_as_they_were(
    host: Host, path: str, owner: str, mode: int
) -> None:
    found = host.file(path)
    assert (found.user, oct(found.mode)) == (owner, oct(mode))


@pytest.mark.parametrize(
    ("path", "mode"),
    [
        ("/etc/nomad.d", 0o750),
        ("/etc/nomad.d/nomad.hcl", 0o640),
        ("/etc/nomad.d/client.hcl", 0o640),
        ("/opt/nomad/data", 0o700),
    ],
)
def test_configuration_and_state_are_roots_alone(host: Host, path: str, mode: int) -> None:
    found = host.file(path)
    assert (found.user, found.group, oct(found.mode)) == ("root", "root", oct(mode))


def test_commands_without_isolation_are_off(host: Host) -> None:
    found = next(item for item in nomad_api(host, "/v1/nodes") if item["Name"] == "client-node")
    assert found["Drivers"]["raw_exec"]["Detected"] is False


def test_converging_again_restarted_nothing(host: Host) -> None:
    assert restarts(host, "nomad") == 1
