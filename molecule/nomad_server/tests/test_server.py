from __future__ import annotations

import pytest
from testinfra.host import Host

from tests.testinfra.helpers import nomad_api, restarts

KEYRING = "/opt/nomad/data/server/serf.keyring"


def test_three_servers_elect_one_leader(host: Host) -> None:
    leader = nomad_api(host, "/v1/status/leader")
    peers = nomad_api(host, "/v1/status/peers")
    assert len(peers) == 3
    assert leader in peers


def test_release_is_the_one_that_was_asked_for(host: Host) -> None:
    assert host.check_output("nomad version").startswith("Nomad v1.11.3")
    receipt = host.check_output("cat /var/lib/gpufarm/releases/nomad-*.json")
    assert host.check_output("sha256sum /usr/local/bin/nomad").split()[0] in receipt


@pytest.mark.parametrize(
    ("path", "mode"),
    [
        ("/etc/nomad.d", 0o750),
        ("/etc/nomad.d/nomad.hcl", 0o640),
        ("/etc/nomad.d/server.hcl", 0o640),
        ("/etc/nomad.d/gossip.hcl", 0o640),
        ("/opt/nomad/data", 0o700),
        (KEYRING, 0o600),
    ],
)
def test_secrets_and_state_are_roots_alone(host: Host, path: str, mode: int) -> None:
    found = host.file(path)
    assert (found.user, found.group, oct(found.mode)) == ("root", "root", oct(mode))


def test_gossip_is_encrypted(host: Host) -> None:
    assert nomad_api(host, "/v1/agent/self")["stats"]["serf"]["encrypted"] == "true"


def test_converging_again_restarted_nothing(host: Host) -> None:
    assert restarts(host, "nomad") == 1


def test_agent_starts_with_the_machine(host: Host) -> None:
    assert host.service("nomad").is_enabled
    assert host.service("nomad").is_running


def test_systemd_finds_nothing_wrong_with_the_unit(host: Host) -> None:
    verified = host.run("systemd-analyze verify --man=no /etc/systemd/system/nomad.service")
    assert (verified.rc, verified.stdout + verified.stderr) == (0, "")
