"""A run that is killed anywhere and begun again ends as one that nobody disturbs.

Its name is the last one: the node and the server that it takes away are built again.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from tests.simulator.cache import ROOT
from tests.simulator.docker import docker
from tests.testinfra import helpers
from tests.testinfra.playbooks import changed_tasks, environment, run_in_scenario
from tests.testinfra.secure import SERVER, SERVERS, api, first_run, secrets, seen
from tests.testinfra.snapshot import files

NODE, OTHER_SERVER = "secure-h200", "secure-server3"
# All that a host is given, but what Nomad and systemd write themselves.
PLACES = (
    "/etc/nomad.d /etc/gpufarm /etc/docker /etc/cdi /etc/nvidia-container-runtime /etc/systemd/system /etc/modprobe.d "
    "/etc/modules-load.d /etc/apt /usr/share/keyrings /usr/local /opt/nomad/plugins /var/lib/gpufarm/releases"
)
# A certificate and its key are others each time.
OTHER_EACH_TIME = re.compile(r"/etc/nomad\.d/tls/agent(-key)?\.pem$")
MARK = "GPUFARM_KILLED"
UNITS = "nomad.service 'gpufarm-*' 'nvidia-*' docker.service"


def whole(host: str) -> dict[str, str]:
    """Return what each file and folder of the collection's is, with packages and units.

    What Python has compiled has its source's time, and is there when it has been run.
    """
    found = files(host, f"$(ls -d {PLACES} 2>/dev/null)", UNITS, OTHER_EACH_TIME)
    assert "content of /usr/local/bin/nomad" in found
    return {name: told for name, told in found.items() if "/__pycache__" not in name}


def farm() -> dict[str, object]:
    """Return what Nomad has: the GPUs of each node that is ready, and the servers that are alive and vote."""
    token = secrets()["nomad-management"]
    nodes = api(SERVER, "/v1/nodes?resources=true", token)
    servers = api(SERVER, "/v1/operator/raft/configuration", token)["Servers"]
    voters = [each["Node"].split(".")[0] for each in servers if each["Voter"]]
    return {
        "servers": sorted(voters),
        **{
            each["Name"]: sorted(
                instance["ID"]
                for device in each["NodeResources"]["Devices"] or []
                for instance in device["Instances"]
                if instance["Healthy"]
            )
            for each in nodes
            if each["Status"] == "ready" and each["SchedulingEligibility"] == "eligible"
        },
    }


def killed(host: str, moments: list[str], later: float) -> bool:
    """Kill a run so many seconds after one of the tasks has begun, as if the control machine lost its power.

    Ansible's workers are in sessions of their own and would come to the end of their tasks, so they are killed as well.

    Return whether that was: a run that has none of them comes to its end.
    """
    inventory = str(Path(os.environ["MOLECULE_INVENTORY_FILE"]).parent)
    command = [
        str(Path(sys.executable).with_name("ansible-playbook")),
        "-i",
        inventory,
        "playbooks/site.yml",
        "--limit",
        host,
    ]
    mark = str(uuid.uuid4())
    own = {**environment(os.environ["GPUFARM_FARM"]), "PYTHONUNBUFFERED": "1", MARK: mark}
    with subprocess.Popen(
        command, cwd=ROOT, env=own, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
    ) as run:  # fmt: skip
        assert run.stdout
        for line in run.stdout:
            heading = re.match(r"(?:TASK|RUNNING HANDLER) \[(?:\S+ : )?(.*)\]", line)
            if heading and heading[1] in moments:
                time.sleep(later)
                os.kill(run.pid, signal.SIGKILL)
                while left := processes(mark):
                    for pid in left:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                return run.wait() == -signal.SIGKILL
    return False


def processes(mark: str) -> list[int]:
    """Return the living processes that were begun with the mark in their environment, and forks of theirs."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # Empty for one that has ended and waits for its parent to ask how.
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def tasks_of_the_first_run(mark: str) -> list[str]:
    """Return what has changed something when nobody disturbed it, in order, where the line of a change has a mark."""
    lines = [line.partition("| ")[2] for line in first_run().splitlines()]
    told = [line for line in lines if not line.startswith("changed: [") or line.startswith(f"changed: [{mark}")]
    return list(dict.fromkeys(changed_tasks("\n".join(told))))


@pytest.mark.parametrize(
    ("node", "count", "least", "also"),
    [
        (OTHER_SERVER, 2, 1, "data"),
        (NODE, 4, 3, "data,container_toolkit,docker,driver"),
    ],
)
def test_a_run_that_is_killed_at_any_moment_is_brought_to_its_end_by_the_next(
    node: str, count: int, least: int, also: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANSIBLE_VERBOSITY", "0")
    order = tasks_of_the_first_run(node)
    # Such as to sign its certificate.
    on_the_control_machine = tasks_of_the_first_run(f"{node} ->")
    assert "Have Nomad's systemd unit" in order and on_the_control_machine and len(order) > 2 * count, order
    before, known = whole(node), farm()
    assert known["servers"] == SERVERS and len(known) == 3, known
    # With what was there before it, which it may not say.
    secrets.cache_clear()
    secrets()
    run = run_in_scenario("playbooks/remove.yml", "-vvv", "--diff", "--limit", node, "-e", f"remove_also={also}")
    assert (run.code, seen(run.output)) == (0, []), run.output
    assert docker("exec", node, "sh", "-c", "ls -d /usr/local/bin/nomad /etc/nomad.d /etc/docker; true").strip() == ""

    seed = int.from_bytes(os.urandom(3))
    chance = random.Random(seed)  # noqa: S311 # which second a machine dies in is no secret
    here = chance.sample(on_the_control_machine, count // 4 or 1)
    moments = here + chance.sample([name for name in order if name not in here], count - len(here))
    moments.sort(key=order.index)
    # The run before may have done what the next was to be killed at; that is killed at what comes after it.
    deaths = [killed(node, order[order.index(moment) :], chance.random()) for moment in moments]
    told = f"seed {seed}, {sum(deaths)} of {count} runs were killed, at {moments}"
    assert sum(deaths) >= least, f"{told}: {deaths}"
    # As the killed ones: what a run of the whole farm finds is seen elsewhere, and costs as much as several moments.
    last = run_in_scenario("playbooks/site.yml", "--limit", node)
    assert last.code == 0, f"{told}\n{last.output}"
    assert whole(node) == before, told
    helpers.wait_for(f"{told}: {known}, as before", lambda: farm() == known)
