"""What the unit does for an agent that cannot start or ends, after test_client.py, which counts starts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from testinfra.host import Host

from tests.testinfra.helpers import wait_for

testinfra_hosts = ["client-node"]

LATE = "/etc/nomad.d/late.hcl"


def unit(host: Host, name: str) -> str:
    return str(host.check_output("systemctl show nomad --value --property=%s", name))


def answers(host: Host) -> bool:
    program = "import urllib.request; urllib.request.urlopen('http://127.0.0.1:4646/v1/agent/health')"
    return bool(host.run("python3 -c %s", program).rc == 0)


@pytest.fixture
def late_network(host: Host) -> Iterator[None]:
    """Have an agent whose address comes with an interface that is not there yet."""
    host.check_output("echo %s >%s", 'addresses { http = "192.0.2.9" }', LATE)
    yield
    host.run("rm -f %s; ip link delete late0; systemctl restart nomad", LATE)


def test_agent_is_told_from_one_that_still_starts(host: Host) -> None:
    assert unit(host, "Type") == "notify"
    assert unit(host, "OOMScoreAdjust") == "-1000"


@pytest.mark.usefixtures("late_network")
def test_agent_waits_for_a_network_that_comes_late(host: Host) -> None:
    host.check_output("systemctl restart --no-block nomad")
    wait_for("six failed starts", lambda: int(unit(host, "NRestarts")) >= 6)
    assert unit(host, "ActiveState") == "activating"
    host.check_output("ip link add late0 type bridge && ip address add 192.0.2.9/32 dev late0 && ip link set late0 up")
    wait_for("an agent that runs", lambda: unit(host, "ActiveState") == "active")


def test_agent_that_is_killed_comes_back(host: Host) -> None:
    wait_for("an agent that runs", lambda: unit(host, "ActiveState") == "active")
    before = unit(host, "MainPID")
    host.check_output("kill -9 %s", before)
    wait_for("another agent", lambda: unit(host, "MainPID") not in ("0", before) and answers(host))


def test_agent_does_not_inherit_what_keeps_it_from_starting(host: Host) -> None:
    host.check_output("systemctl set-environment AWS_CA_BUNDLE=/nowhere")
    try:
        host.check_output("systemctl restart nomad")
        assert answers(host)
        assert "AWS_CA_BUNDLE" not in host.check_output("tr '\\0' '\\n' </proc/%s/environ", unit(host, "MainPID"))
    finally:
        host.check_output("systemctl unset-environment AWS_CA_BUNDLE")
