"""A node leaves the farm and becomes one again, after the other tests, which find it as it was converged."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.simulator.cache import ROOT
from tests.simulator.docker import docker, docker_binary
from tests.testinfra import playbooks
from tests.testinfra.helpers import wait_for
from tests.testinfra.playbooks import Run, changed_tasks, run_in_scenario, words
from tests.testinfra.snapshot import left

NODE = "device-t4"
REMOVE = ("playbooks/remove.yml", "--limit", NODE)
WITH_DATA = ("--extra-vars", "remove_also=data,host_volumes,other_files")
EVERYTHING = "data,host_volumes,other_files,shared_data,container_toolkit,docker,cuda,driver,tuning"
# What a removal leaves on purpose, beside what every node writes itself.
OTHERS_MAY_USE = ("ca-certificates", "gpgv", "iptables", "python3-apt")
STAYS = (
    # Docker's settings, images and volumes.
    r"(containerd|docker-cli|docker\.io|runc|tini)$",
    r"/(etc|var/lib)/(docker|containerd)(/|$)",
    r"/etc/(default|init\.d)/docker$",
    r"/etc/rc\d\.d/[KS]\d\ddocker$",
    r"group docker$|/etc/cni(/|$)",
    r"/etc/systemd/system/(multi-user|sockets)\.target\.wants(/(docker|containerd)\.(service|socket))?$",
    # Which of several programs a name means, of packages that stay.
    r"/etc/alternatives/|/usr/sbin/(arp|eb|ip|ip6)tables(-save|-restore)?$",
    # The double's: what a driver of that version has.
    r"/usr/lib/firmware(/|$)",
)
JOB = """
job "stays" {
  group "main" {
    task "main" {
      driver = "raw_exec"
      config {
        command = "/bin/sleep"
        args    = ["98765"]
      }
    }
  }
}
"""
# Units, programs and settings of the agent, the plugin and the gate are here; what Debian writes there in running, too.
PLACES = "/etc /usr/local /opt /var/lib /root /run -path /run/udev -prune -o -path /var/lib/docker -prune -o"


def purged() -> bool:
    stop = [docker_binary(), "exec", "device-server", "nomad", "job", "stop", "-detach", "-purge", "stays"]
    return subprocess.run(stop, check=False, capture_output=True).returncode == 0


def on_node(script: str) -> str:
    return docker("exec", NODE, "sh", "-c", script).strip()


def nodes() -> list[str]:
    """Return names and states of the nodes that the farm has."""
    said = docker("exec", "device-server", "nomad", "node", "status").splitlines()[1:]
    return [" ".join(line.split()[n] for n in (3, -1)) for line in said]


def ids() -> set[str]:
    """Return the IDs of the nodes that the farm has."""
    found = docker("exec", "device-server", "nomad", "node", "status", "-json")
    return {node["ID"] for node in json.loads(found or "[]") or []}


def ours() -> list[str]:
    """Return what is on the node of Nomad and of this collection, the simulator's own left out."""
    names = "\\( -iname '*nomad*' -o -iname '*gpufarm*' \\)"
    found = on_node(
        f"find {PLACES} {names} -print; systemctl list-unit-files --no-legend '*nomad*' 'gpufarm-health*' || true"
    )
    units = on_node("systemctl list-units --all --plain --no-legend '*nomad*' | grep -v not-found || true")
    mounts = on_node("grep /nomad /proc/self/mounts || true")
    kept = (
        # The driver's, which stays until its removal is asked for.
        "/etc/apt/apt.conf.d/52gpufarm-nvidia",
        "gpufarm-simulator",
        "gpufarm-test-ca",
        "gpufarm-gpu-",
        "gpufarm-kmsg",
        "gpufarm-boot-id",
        "mirror.gpufarm.test",
    )
    return [
        line for line in "\n".join((found, units, mounts)).splitlines() if line and not any(k in line for k in kept)
    ]


def cut_off(task: str) -> None:
    """Kill Ansible, and what it has started, when it begins a task."""
    inventory = str(Path(os.environ["MOLECULE_INVENTORY_FILE"]).parent)
    with subprocess.Popen(
        [str(Path(sys.executable).with_name("ansible-playbook")), "-i", inventory, *REMOVE],
        cwd=ROOT, env=playbooks.environment(os.environ["GPUFARM_FARM"]), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    ) as running:  # fmt: skip
        assert running.stdout
        said = []
        for line in running.stdout:
            said.append(line)
            if line.startswith("TASK [") and f"{task}]" in line:
                os.killpg(running.pid, signal.SIGKILL)
                return
    raise AssertionError(f"{task} never began:\n{''.join(said)}")


def start_a_job() -> None:
    subprocess.run(
        [docker_binary(), "exec", "-i", "device-server", "nomad", "job", "run", "-detach", "-"],
        input=JOB.encode(), check=True, capture_output=True,
    )  # fmt: skip
    wait_for("a job that runs", lambda: on_node("pgrep -xf '/bin/sleep 98765' || true") != "")


def test_a_running_job_stops_the_removal_before_it_begins() -> None:
    start_a_job()
    before = ours()
    run = run_in_scenario(*REMOVE)
    assert run.code != 0
    told = words(run.output)
    assert "device-t4: 1 running allocation, which its removal from the farm would end: stays.main[0] (" in told
    assert "Expected: a node on which none runs; they go on. Next step: wait for their end, or set policy" in told
    assert ours() == before
    assert nodes() == ["device-t4 ready"]
    assert changed_tasks(run.output) == []


def test_what_is_others_stops_the_removal_or_stays() -> None:
    docker("exec", "device-server", "nomad", "job", "stop", "-purge", "stays")
    volumes = [{"name": "a", "path": "/srv/a"}, {"name": "b", "path": "/srv/b", "read_only": True}]
    also = (*WITH_DATA, "--extra-vars", json.dumps({"nomad_client_host_volumes": volumes}))
    data, below = "/opt/nomad/data/mine", "/srv/a/below"
    on_node(
        f"mkdir -p {data} {below} /srv/b /root/mine && touch /root/mine/file && mount --bind /root/mine {below}"
        f" && echo 'none {data} tmpfs' >>/etc/fstab && mount {data}"
    )
    before = ours()
    run = run_in_scenario(*REMOVE, *also)
    assert run.code != 0
    assert f"device-t4: remove_also would delete what is mounted at {below}, {data}. Expected: " in words(run.output)
    assert changed_tasks(run.output) == []
    assert ours() == before
    on_node(f"umount {below} {data} && sed -i /tmpfs/d /etc/fstab")


def test_what_it_would_do_is_said_and_changes_nothing() -> None:
    before = ours()
    run = run_in_scenario(*REMOVE, "--check")
    assert run.code == 0, run.output
    assert "Stays: the agent's data in /opt/nomad/data, with the identity " in words(run.output).replace("''", "'")
    assert {"Have no agent running", "Delete this host's records", "Have nothing of the agent"} <= set(
        changed_tasks(run.output)
    )
    assert ours() == before
    assert nodes() == ["device-t4 ready"]


def test_nothing_is_left_wherever_it_was_cut_off_and_the_next_run_changes_nothing() -> None:
    for task in (
        "Have no agent running", "Delete this host's records", "Have nothing of the device plugin",
        "Have nothing of the agent",
    ):  # fmt: skip
        cut_off(task)
    assert run_in_scenario(*REMOVE).code == 0
    assert nodes() == []
    # The identity of the node is its data's, which nobody has asked for.
    assert {Path(path).parts[:3] for path in ours()} == {("/", "opt", "nomad")}, ours()
    on_node("test -s /opt/nomad/data/client/client-id")
    again = run_in_scenario(*REMOVE)
    assert (again.code, again.changed) == (0, {NODE: 0}), again.output


def test_data_goes_where_it_is_asked_for() -> None:
    volumes = [{"name": "a", "path": "/srv/a"}, {"name": "b", "path": "/srv/b", "read_only": True}]
    run = run_in_scenario(*REMOVE, *WITH_DATA, "--extra-vars", json.dumps({"nomad_client_host_volumes": volumes}))
    assert run.code == 0, run.output
    assert ours() == []
    assert on_node("ls /srv; ls /root/mine") == "b\nfile"
    on_node("rm -r /srv/b /root/mine")
    assert run_in_scenario(*REMOVE, *WITH_DATA).changed == {NODE: 0}


def test_a_farm_that_is_gone_is_told_and_left_with_consent() -> None:
    converge()
    start_a_job()
    docker("exec", "device-server", "systemctl", "stop", "nomad")
    run = run_in_scenario(*REMOVE)
    without = (*REMOVE, *WITH_DATA, "--extra-vars", "remove_without_farm=true")
    try:
        assert run.code != 0
        assert "Nothing was changed. Where the servers are gone for good, set remove_without_farm." in words(run.output)
        assert on_node("systemctl is-active nomad") == "active"
        # Work stops it only when the agent is stopped, which then goes on.
        run = run_in_scenario(*without)
        assert run.code != 0
        assert "which its removal from the farm would end" in words(run.output)
        assert on_node("systemctl is-active nomad; systemctl is-enabled nomad").split() == ["active", "enabled"]
        on_node("systemctl stop nomad; pkill -xf '/bin/sleep 98765'")
        run = run_in_scenario(*without)
        assert run.code == 0, run.output
        assert ours() == []
    finally:
        docker("exec", "device-server", "systemctl", "start", "nomad")
        wait_for("a job that is gone", purged)


def test_the_machine_becomes_a_node_again_and_leaves_servers_that_are_not_in_the_inventory() -> None:
    # The farm that was not told keeps the former node.
    former = ids()
    converge()
    wait_for("a node", lambda: len(ids() - former) == 1)
    elsewhere = json.dumps({"nomad_servers_group": "elsewhere"})
    run = run_in_scenario(*REMOVE, "--extra-vars", elsewhere)
    assert run.code != 0
    assert "device-t4: found Nomad here, and no server that could be told. Expected: " in words(run.output)
    assert changed_tasks(run.output) == []
    elsewhere = json.dumps({"nomad_servers_group": "elsewhere", "nomad_client_servers": ["device-server:4647"]})
    run = run_in_scenario(*REMOVE, "--extra-vars", elsewhere)
    assert run.code == 0, run.output
    assert ids() <= former


def test_with_all_that_may_go_a_node_is_as_it_was_when_it_was_fresh() -> None:
    listed = "dpkg-query --show --showformat '${db:Status-Status} ${Package}\\n'"
    packages = f"{listed} | grep -E '^installed .*(nvidia|cuda|docker)'"
    assert len(on_node(packages).splitlines()) > 10
    also = ("--extra-vars", f"remove_also={EVERYTHING}")
    run = run_in_scenario(*REMOVE, *also)
    assert run.code == 0, run.output
    assert left(NODE, OTHERS_MAY_USE, *STAYS) == {}
    assert on_node(f"{packages} || true") == ""
    # Others may use it.
    assert "iptables" in on_node("dpkg-query --show iptables")
    assert run_in_scenario(*REMOVE, *also).changed == {NODE: 0}


def converge() -> None:
    run: Run = run_in_scenario("molecule/nomad_device_nvidia/converge.yml")
    assert run.code == 0, run.output
