"""A run that is killed anywhere and begun again ends as one that nobody disturbs.

Its name is the last one: the node that it takes away is built again.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.simulator.cache import ROOT
from tests.simulator.docker import docker
from tests.testinfra.playbooks import changed_tasks, environment, run_in_scenario
from tests.testinfra.snapshot import files

NODE = "secure-h200"
MOMENTS = 10
ALSO = "data,container_toolkit,docker,driver"
# All that a node is given, but what Nomad and systemd write themselves.
PLACES = (
    "/etc/nomad.d /etc/gpufarm /etc/docker /etc/cdi /etc/nvidia-container-runtime /etc/systemd/system /etc/modprobe.d "
    "/etc/modules-load.d /etc/apt /usr/share/keyrings /usr/local /opt/nomad/plugins /var/lib/gpufarm/releases"
)
# A certificate and its key are others each time.
OTHER_EACH_TIME = re.compile(r"/etc/nomad\.d/tls/agent(-key)?\.pem$")
UNITS = "nomad.service 'gpufarm-*' 'nvidia-*' docker.service"


def run_until(moment: str, later: float) -> None:
    """Kill a run so many seconds after a task has begun, as if the control machine lost its power.

    A run that does not have the task comes to its end.
    """
    inventory = str(Path(os.environ["MOLECULE_INVENTORY_FILE"]).parent)
    command = [
        str(Path(sys.executable).with_name("ansible-playbook")),
        "-i",
        inventory,
        "playbooks/site.yml",
        "--limit",
        NODE,
    ]
    with subprocess.Popen(
        command, cwd=ROOT, env={**environment(os.environ["GPUFARM_FARM"]), "PYTHONUNBUFFERED": "1"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
    ) as run:  # fmt: skip
        assert run.stdout
        for line in run.stdout:
            heading = re.match(r"(?:TASK|RUNNING HANDLER) \[(?:\S+ : )?(.*)\]", line)
            if heading and heading[1] == moment:
                time.sleep(later)
                os.killpg(run.pid, signal.SIGKILL)
                break
        else:
            return
        run.wait()


def tasks_of_the_first_run() -> list[str]:
    """Return what has changed the node when nobody disturbed it, in order."""
    log = (Path(os.environ["MOLECULE_EPHEMERAL_DIRECTORY"]) / "ansible.log").read_text(encoding="utf-8")
    lines = [line.partition("| ")[2] for line in log.splitlines()]
    told = [line for line in lines if not line.startswith("changed: [") or line.startswith(f"changed: [{NODE}]")]
    names = list(dict.fromkeys(changed_tasks("\n".join(told))))
    assert "docker.io" in " ".join(names) and len(names) > 2 * MOMENTS, names
    return names


def test_a_run_that_is_killed_at_any_moment_is_brought_to_its_end_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANSIBLE_VERBOSITY", "0")
    before = files(NODE, PLACES, UNITS, OTHER_EACH_TIME)
    assert "content of /usr/local/bin/nomad" in before
    run = run_in_scenario("playbooks/remove.yml", "--limit", NODE, "--extra-vars", f"remove_also={ALSO}")
    assert run.code == 0, run.output
    assert docker("exec", NODE, "sh", "-c", "ls -d /usr/local/bin/nomad /etc/nomad.d /etc/docker; true").strip() == ""

    names = tasks_of_the_first_run()
    seed = int.from_bytes(os.urandom(3))
    chance = random.Random(seed)  # noqa: S311 # which second a machine dies in is no secret
    moments = sorted(chance.sample(names, MOMENTS), key=names.index)
    for moment in moments:
        run_until(moment, chance.random())
    # As the killed ones: what a run of the whole farm finds is seen elsewhere, and costs as much as several moments.
    last = run_in_scenario("playbooks/site.yml", "--limit", NODE)
    assert last.code == 0, f"seed {seed}, {moments}\n{last.output}"
    assert files(NODE, PLACES, UNITS, OTHER_EACH_TIME) == before, f"seed {seed}, {moments}"
