"""What the verification says of servers, after the other tests, which find them running."""

from __future__ import annotations

import re

from testinfra.host import Host

from tests.simulator.docker import docker
from tests.testinfra.helpers import wait_for
from tests.testinfra.playbooks import enter, words

testinfra_hosts = ["nomad-server-3"]

NOMAD = "/usr/local/bin/nomad"
LEADER = "import urllib.request; urllib.request.urlopen('http://127.0.0.1:4646/v1/status/leader', timeout=3)"


def test_verification_tells_what_is_wrong(host: Host) -> None:
    changed = f"systemctl stop nomad && cp -p {NOMAD} /root/ && echo >>{NOMAD}"
    docker("exec", "nomad-server-1", "sh", "-c", changed)
    docker("exec", "nomad-server-2", "systemctl", "stop", "nomad")
    # One of three is no majority.
    wait_for("a server without a leader", lambda: host.run("python3 -c %s", LEADER).rc != 0)
    run = enter("nomad_server/verify", agent_timeout=0)
    docker("exec", "nomad-server-1", "sh", "-c", f"mv /root/nomad {NOMAD} && systemctl start nomad")
    docker("exec", "nomad-server-2", "systemctl", "start", "nomad")
    assert run.code != 0
    told = words(run.output)
    no_leader = r"Expected: an elected leader\. Next step: read `journalctl -u nomad` on every server and check"
    for part in (
        rf"nomad-server-1: {NOMAD} is not as it was installed: the program is not the one that was installed\. "
        r"Expected: release 1\.11\.3 .* Next step: run playbooks/site\.yml",
        rf"nomad-server-2: no leader in \d+ s, at last \S+ cannot be reached \(.*Connection refused\)\. {no_leader}",
        rf"nomad-server-3: no leader in \d+ s, at last .*\. {no_leader}",
    ):
        assert re.search(part, told), told
    run = enter("nomad_server/verify")
    assert run.code == 0, run.output
