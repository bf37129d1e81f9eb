"""The gossip key of running servers, after test_server.py, which finds them as they were converged."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path

from tests.simulator.docker import docker
from tests.testinfra.playbooks import Run, run_in_scenario

SERVERS = ["nomad-server-1", "nomad-server-2", "nomad-server-3"]
KEYRING = "/opt/nomad/data/server/serf.keyring"


def key_of(text: str) -> str:
    return base64.b64encode((text * 32)[:32].encode()).decode()


FIRST, SECOND = key_of("for this scenario only "), key_of("for a rotation only ")


def rotate(folder: Path, key: str, *options: str) -> Run:
    """Run the role with another key, which comes from a file as from a vault, and look for keys in what it says."""
    variables = folder / "key.json"
    variables.write_text(json.dumps({"scenario_gossip_key": key}), encoding="utf-8")
    playbook = Path(os.environ["MOLECULE_SCENARIO_DIRECTORY"]) / "converge.yml"
    run = run_in_scenario(playbook, "--extra-vars", f"@{variables}", "-vvv", "--diff", *options)
    assert run.code == 0, run.output
    for secret in (FIRST, SECOND):
        assert secret not in run.output
    return run


def keyrings() -> list[list[str]]:
    return [json.loads(docker("exec", server, "cat", KEYRING)) for server in SERVERS]


def starts() -> list[str]:
    return [docker("exec", server, "systemctl", "show", "nomad", "--property=MainPID") for server in SERVERS]


def encrypted() -> list[str]:
    program = (
        "import json, urllib.request; "
        "print(json.load(urllib.request.urlopen('http://127.0.0.1:4646/v1/agent/self'))['stats']['serf']['encrypted'])"
    )
    return [docker("exec", server, "python3", "-c", program).strip() for server in SERVERS]


def peers(server: str) -> int:
    program = (
        "import json, urllib.request; "
        "members = json.load(urllib.request.urlopen('http://127.0.0.1:4646/v1/agent/members'))['Members']; "
        "print(sum(member['Status'] == 'alive' for member in members))"
    )
    return int(docker("exec", server, "python3", "-c", program))


def test_another_gossip_key_is_rotated_in_without_a_restart(tmp_path: Path) -> None:
    before = starts()
    told = rotate(tmp_path, SECOND, "--check")
    assert all(told.changed[server] == 2 for server in SERVERS), told.output
    assert keyrings() == [[FIRST]] * 3

    done = rotate(tmp_path, SECOND)
    assert keyrings() == [[SECOND]] * 3
    assert starts() == before
    assert done.changed[SERVERS[0]] == 2, "its file, and the keys of all"
    for server in SERVERS:
        assert SECOND in docker("exec", server, "cat", "/etc/nomad.d/gossip.hcl")
        assert peers(server) == 3


def test_a_key_that_is_taken_back_is_gone_and_a_first_one_comes(tmp_path: Path) -> None:
    rotate(tmp_path, "")
    assert encrypted() == ["false"] * 3
    assert all("encrypt" not in docker("exec", server, "cat", "/etc/nomad.d/gossip.hcl") for server in SERVERS)
    before = starts()

    told = rotate(tmp_path, FIRST, "--check")
    assert told.output.count("RUNNING HANDLER") >= 1, "the restart that is due is told"
    assert starts() == before
    rotate(tmp_path, FIRST)
    assert encrypted() == ["true"] * 3
    assert keyrings() == [[FIRST]] * 3
    assert all(peers(server) == 3 for server in SERVERS)
