"""What a job writes on the server is read by jobs on the nodes, whatever becomes of the server meanwhile."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.simulator.docker import PATIENCE, docker
from tests.testinfra.helpers import wait_for
from tests.testinfra.playbooks import Run, run_in_scenario, words

MACHINE, SERVER, NODE = "data-machine", "data-server", "data-node"
ADDRESSES = {SERVER: "10.99.0.11", NODE: "10.99.0.12"}
SCENARIO = Path(os.environ["MOLECULE_SCENARIO_DIRECTORY"])
EPHEMERAL = Path(os.environ["MOLECULE_EPHEMERAL_DIRECTORY"])
# What jobs on the server have written, when both have.
SAID = "written by a job\nand read by none before\n"
# No cgroup of CPUs is in a guest's kernel, so no driver there isolates: the volume says where a task may run, and the
# task looks at the folder itself. What a container would do with it is in a test of its own.
JOB = """
job "%(name)s" {
  type = "batch"
  constraint {
    attribute = "${node.unique.name}"
    value     = "%(node)s"
  }
  group "one" {
    restart { attempts = 0 }
    reschedule { attempts = 0 }
    volume "data" {
      type      = "host"
      source    = "data"
      read_only = %(read_only)s
    }
    task "one" {
      driver = "raw_exec"
      config {
        command = "sh"
        args    = ["-ec", "%(script)s"]
      }
      resources {
        cpu    = 50
        memory = 64
      }
    }
  }
}
"""


def run_on(guest: str, script: str) -> subprocess.CompletedProcess[str]:
    proxy = f"docker exec -i {MACHINE} socat - TCP:{ADDRESSES[guest]}:22"
    options = ["StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR", f"ProxyCommand={proxy}"]
    return subprocess.run(
        ["ssh", "-i", str(EPHEMERAL / "guest-key"), *[word for each in options for word in ("-o", each)],
         f"root@{guest}", script],
        capture_output=True, text=True, check=False, timeout=PATIENCE, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def on(guest: str, script: str) -> str:
    done = run_on(guest, script)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def power(guest: str, action: str) -> None:
    docker("exec", MACHINE, "systemctl", action, f"gpufarm-guest@{guest}")


def booted(guest: str) -> None:
    wait_for(f"{guest} has booted", lambda: run_on(guest, "systemctl is-system-running --wait").stdout == "running\n")


def run_job(name: str, node: str, script: str, read_only: bool) -> dict[str, Any]:
    """Run a job to its end and return its allocation."""
    text = JOB % {"name": name, "node": node, "script": script, "read_only": str(read_only).lower()}
    docker("exec", "-i", MACHINE, "nomad", "job", "run", "-detach", "-", stdin=text.encode())

    def allocations() -> list[dict[str, Any]]:
        found = json.loads(docker("exec", MACHINE, "nomad", "operator", "api", f"/v1/job/{name}/allocations"))
        return [each for each in found if each["ClientStatus"] in ("complete", "failed", "lost")]

    wait_for(f"{name} has ended", lambda: bool(allocations()))
    (allocation,) = allocations()
    assert allocation["ClientStatus"] == "complete", json.dumps(allocation)
    return allocation


def said_by(allocation: dict[str, Any]) -> str:
    return docker("exec", MACHINE, "nomad", "alloc", "logs", allocation["ID"])


def read_by_a_job(name: str) -> str:
    """Return what a job on the node reads of what jobs on the server have written."""
    return said_by(run_job(name, NODE, "cat /srv/data/said /srv/data/later; sleep 2", read_only=True))


def converge(*options: str, **variables: object) -> Run:
    return run_in_scenario(SCENARIO / "converge.yml", *options, "--extra-vars", json.dumps(variables))


def test_data_are_mounted_as_they_were_asked_for() -> None:
    mounts = [line.split() for line in on(NODE, "cat /proc/mounts").splitlines()]
    (options,) = [each[3].split(",") for each in mounts if each[:3] == ["10.99.0.11:/srv/data", "/srv/data", "nfs4"]]
    assert {"ro", "hard", "noatime", "vers=4.2", "nconnect=4", "fsc"} <= set(options)
    assert on(NODE, "systemctl is-enabled srv-data.automount") == "enabled\n"
    assert [each for each in mounts if each[1:3] == ["/srv/data", "autofs"]]


def test_what_a_job_writes_on_the_server_is_read_by_a_job_on_a_node() -> None:
    run_job("writer", SERVER, "echo written by a job >/srv/data/said", read_only=False)
    allocation = run_job(
        "reader", NODE, "cat /srv/data/said; echo no >/srv/data/other || echo refused; sleep 2", read_only=True
    )
    assert said_by(allocation) == "written by a job\nrefused\n"
    assert allocation["NodeName"] == NODE
    assert on(SERVER, "ls /srv/data") == "said\n"


def test_what_is_read_again_comes_from_the_disk() -> None:
    on(SERVER, "head -c 8000000 /dev/urandom >/srv/data/big && sync")
    sums = [on(NODE, "echo 3 >/proc/sys/vm/drop_caches; sha256sum </srv/data/big") for _ in range(2)]
    assert sums[0] == sums[1] == on(SERVER, "sha256sum </srv/data/big")
    assert int(on(NODE, "du -sk /var/cache/fscache").split()[0]) > 7000


def test_a_server_that_goes_away_is_waited_for_and_nothing_is_lost() -> None:
    """It loses its power while a program reads, which the cache cannot help, and between two jobs."""
    run_job("later", SERVER, "echo and read by none before >/srv/data/later; sync", read_only=False)
    on(SERVER, "head -c 8000000 /dev/urandom >/srv/data/new && sync")
    expected = on(SERVER, "sha256sum </srv/data/new")
    reads = (
        "exec 3</srv/data/new; head -c 1000 <&3; while [ ! -e /run/go ]; do sleep 0.2; done; cat <&3; echo >/run/done"
    )
    on(NODE, f"rm -f /run/go /run/done; nohup sh -c '{reads}' >/run/got 2>/run/errors </dev/null &")
    wait_for("the program has begun", lambda: on(NODE, "wc -c </run/got") == "1000\n")
    power(SERVER, "stop")
    on(NODE, "echo 1 >/proc/sys/vm/drop_caches; touch /run/go")
    run = converge("--limit", NODE)
    assert run.code != 0 and run.changed == {NODE: 0}, run.output
    told = words(run.output)
    assert f"{NODE}: 10.99.0.11 does not answer on port 2049. Expected: the NFS server that" in told, run.output
    assert run_on(NODE, "cat /run/done").returncode != 0
    power(SERVER, "start")
    wait_for("the program has read all of it", lambda: run_on(NODE, "cat /run/done").returncode == 0)
    assert (on(NODE, "sha256sum </run/got"), on(NODE, "cat /run/errors")) == (expected, "")
    assert read_by_a_job("after-the-server") == SAID


def test_a_node_boots_without_its_server_and_shows_no_empty_folder() -> None:
    power(SERVER, "stop")
    power(NODE, "restart")
    booted(NODE)
    looked = run_on(NODE, "ls /srv/data")
    assert looked.returncode != 0 and looked.stdout == "", looked
    # As containers have it.
    bind = "unshare --mount sh -c 'mount --rbind /srv/data /mnt && cat /mnt/said'"
    assert run_on(NODE, bind).returncode != 0
    power(SERVER, "start")
    booted(SERVER)
    wait_for("a container has the data", lambda: run_on(NODE, bind).stdout == "written by a job\n")
    assert read_by_a_job("after-both") == SAID


def test_what_is_refused_before_anything_changes() -> None:
    run = run_in_scenario(SCENARIO / "refusals.yml")
    assert run.code == 0, run.output
    node, server = [json.loads((EPHEMERAL / f"{guest}.json").read_text(encoding="utf-8")) for guest in (NODE, SERVER)]
    told = {case: " ".join(text.split()) for case, text in {**node["refusals"], **server["refusals"]}.items()}
    expected = {
        "files beneath": "data-node: there are files in /srv/full (mine), which the mount would hide.",
        "another mount": "data-node: mine (tmpfs) is mounted at /srv/taken, and not by this role.",
        "a unit of somebody else": "data-node: /etc/systemd/system/srv-theirs.mount is there, and not of this role.",
        "a line in fstab": "data-node: /etc/fstab mounts 192.0.2.9:/x at /srv/line. Expected: nobody else who does.",
        "a server that does not answer": "data-node: 10.99.0.1 does not answer on port 2049. Expected: the NFS server",
        "what is not exported": "data-node: 10.99.0.11:/srv/secret could not be mounted (",
        "nobody who may read": "data-server: shared_data_clients is empty. Expected: who may read the data",
        "what cannot be exported": "data-server: /proc/fs cannot be exported (",
    }
    for case, text in expected.items():
        assert text in told[case], told[case]
        assert "Next step: " in told[case]
    # What is exported stays so, and nothing else is.
    assert [line.split()[0] for line in server["after"]] == ["/srv/data"]
    # What could not be mounted is there to be mounted once the server lets it, and is asked for when somebody looks.
    assert node["after"] == ["/etc/systemd/system/srv-new.automount", "/etc/systemd/system/srv-new.mount", "/srv/new"]


def test_what_is_in_use_stays_and_then_nothing_is_left_but_the_data() -> None:
    on(NODE, "cd /srv/data; nohup sleep 7777 >/dev/null 2>&1 </dev/null &")
    run = run_in_scenario(SCENARIO / "gone.yml")
    told = words(run.output)
    assert run.code != 0 and run.changed == {NODE: 0, SERVER: 0}, run.output
    pid = on(NODE, "pidof sleep").strip()
    assert f"{NODE}: /srv/data is in use by {pid} (sleep). Expected: nobody, because it is to go." in told, run.output
    assert f"{SERVER}: 10.99.0.12 has something of this server mounted, which exports nothing else." in told, run.output
    on(NODE, "kill $(pidof sleep)")
    run = run_in_scenario(SCENARIO / "gone.yml")
    assert run.code == 0, run.output
    for guest in (NODE, SERVER):
        assert on(guest, "find /etc -name '*srv-data*' -o -name 'gpufarm-*data*'") == ""
    assert on(NODE, "ls -A /srv/data; grep srv/data /proc/mounts || true; pidof cachefilesd || true") == ""
    assert on(SERVER, "cat /srv/data/said; systemctl is-active nfs-server || true") == "written by a job\ninactive\n"
