from __future__ import annotations

from testinfra.host import Host

from tests.testinfra.helpers import nomad_api, restarts


def test_three_servers_elect_one_leader(host: Host) -> None:
    leader = nomad_api(host, "/v1/status/leader")
    peers = nomad_api(host, "/v1/status/peers")
    assert len(peers) == 3
    assert leader in peers


def test_release_is_the_one_that_was_asked_for(host: Host) -> None:
    assert host.check_output("nomad version").startswith("Nomad v1.11.3")
    receipt = host.check_output("cat /var/lib/gpufarm/releases/nomad-*.json")
    assert host.check_output("sha256sum /usr/local/bin/nomad").split()[0] in receipt


def test_secrets_and_state_are_roots_alone(host: Host) -> None:
    configuration = host.file("/etc/nomad.d/server.hcl")
    assert "encrypt" in configuration.content_string
    assert configuration.mode == 0o640
    assert configuration.user == "root"
    assert host.file("/opt/nomad/data").mode == 0o700
    assert host.file("/etc/nomad.d").mode == 0o750


def test_gossip_is_encrypted(host: Host) -> None:
    assert nomad_api(host, "/v1/agent/self")["stats"]["serf"]["encrypted"] == "true"


def test_converging_again_restarted_nothing(host: Host) -> None:
    assert restarts(host, "nomad") == 1


def test_agent_starts_with_the_machine(host: Host) -> None:
    assert host.service("nomad").is_enabled
    assert host.service("nomad").is_running
