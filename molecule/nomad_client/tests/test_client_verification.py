"""What the verification says of a client, after the other tests, which find it as it was converged."""

from __future__ import annotations

import re

from tests.simulator.docker import docker
from tests.testinfra.playbooks import enter, words

NOMAD = "/usr/local/bin/nomad"


def on_client(script: str) -> str:
    return docker("exec", "client-node", "sh", "-c", script)


def test_verification_tells_what_is_wrong() -> None:
    on_client(f"chmod 0775 {NOMAD}")
    changed = enter("nomad_client/verify", limit="client-node")
    on_client(f"chmod 0755 {NOMAD}")
    route = "unreachable $(getent ahostsv4 client-server | sed 's/ .*//;q')"
    on_client(f"ip route add {route} && systemctl restart nomad")
    alone = enter("nomad_client/verify", limit="client-node", agent_timeout=0)
    on_client(f"ip route del {route} && systemctl restart nomad")
    for run, part in (
        (
            changed,
            rf"client-node: {NOMAD} is not as it was installed: its owner or mode differs\. Expected: release 1\.11\.3",
        ),
        (changed, r"Next step: run playbooks/site\.yml, or the role that installs it, for this host\."),
        (alone, r"client-node: no heartbeats in \d+ s, at last the client knows \S+, its heartbeat_ttl is 0s and its"),
        (
            alone,
            r"Expected: heartbeats to a server\. Next step: .* port 4647 of the servers is open to it; with TLS,",
        ),
    ):
        assert run.code != 0
        assert re.search(part, words(run.output)), run.output
    run = enter("nomad_client/verify", limit="client-node")
    assert run.code == 0, run.output


def test_configuration_that_nomad_refuses_stops_no_agent() -> None:
    """A file that somebody else has put there is read for the first time when the agent starts again."""
    agent = "systemctl show nomad --property=MainPID --value"
    before = on_client(agent)
    on_client("echo 'nonsense {' >/etc/nomad.d/zz.hcl && touch -d '+1 hour' /etc/nomad.d/nomad.hcl")
    run = enter("nomad_client/service", limit="client-node")
    on_client("rm /etc/nomad.d/zz.hcl")
    assert run.code != 0
    expected = rf"client-node: found that {NOMAD} refuses /etc/nomad\.d: \".*zz\.hcl.*\"\. Expected: a configuration"
    assert re.search(expected, words(run.output)), run.output
    assert on_client(agent) == before
    assert enter("nomad_client/service", limit="client-node").code == 0
    on_client("touch -d '1 hour ago' /etc/nomad.d/nomad.hcl")
    assert on_client(agent) != before
