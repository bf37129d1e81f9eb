"""Engines besides Docker: their settings stay, their containers stay and see their GPUs, and all of it goes again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.simulator.docker import docker
from tests.testinfra.helpers import UUID
from tests.testinfra.playbooks import Run, changed_tasks, enter, run_in_scenario, words

CONVERGE = "molecule/containerd/converge.yml"
FILES = Path(__file__).parents[1] / "files"
ALONE, BESIDE = "containerd-alone", "containerd-beside"
NODES = (ALONE, BESIDE)
IMAGE = "docker.io/library/gpufarm-test:1"
TOP = "/etc/containerd/config.toml"
DROP_IN = "/etc/containerd/conf.d/99-nvidia-gpufarm.toml"
# How each client is asked for one GPU; the runtime of NVIDIA's is what takes the variable.
CTR = f"ctr run --rm --runc-binary /usr/bin/nvidia-container-runtime --env NVIDIA_VISIBLE_DEVICES={{}} {IMAGE} one"
PODMAN = f"podman run --rm --network none --device nvidia.com/gpu={{}} {IMAGE}"
DOCKER = f"docker run --rm --network none --runtime nvidia -e NVIDIA_VISIBLE_DEVICES={{}} {IMAGE}"


def sh(node: str, script: str) -> str:
    return docker("exec", node, "sh", "-c", script)


def verify(limit: str = "all", **extra: object) -> Run:
    parts = ("nvidia_driver/verify", "container_toolkit/verify")
    return enter(*parts, limit=limit, nvidia_driver_managed=False, **extra)


def runtimes(node: str) -> set[str]:
    """Return the runtimes that the running containerd has logged when it started its CRI plugin."""
    log = sh(node, "journalctl -b -u containerd --output cat --grep 'Start cri plugin' | tail -n 1")
    return set(re.findall(r"(\w+):\{(?:Runtime)?Type:", log.partition("Runtimes:map[")[2]))


@pytest.fixture(scope="module", autouse=True)
def _images() -> None:
    sh(ALONE, "ctr images list --quiet | grep -q gpufarm-test")
    for engine in ("docker load --input", "podman load --quiet --input", "ctr images import"):
        sh(BESIDE, f"{engine} /root/image.tar")


def test_docker_comes_only_where_it_is_asked_for() -> None:
    look = "for program in dockerd podman containerd; do command -v $program || true; done"
    assert sh(ALONE, look).split() == ["/usr/bin/containerd"]
    assert sh(BESIDE, look).split() == ["/usr/sbin/dockerd", "/usr/bin/podman", "/usr/bin/containerd"]


@pytest.mark.parametrize("node", NODES)
def test_the_containerd_that_runs_has_the_runtime_and_its_own(node: str) -> None:
    assert {"nvidia", "runc"} <= runtimes(node)
    assert re.search(r"io.containerd.grpc.v1 +cri .* ok", sh(node, "ctr plugins list"))


def test_settings_of_the_owner_stay() -> None:
    before = (FILES / "config.toml").read_text(encoding="utf-8")
    wanted = before.replace('owner.toml",\n', 'owner.toml", "/etc/containerd/conf.d/99-nvidia*.toml",\n')
    assert sh(ALONE, f"cat {TOP}") == wanted != before
    read = sh(ALONE, "containerd config dump")
    assert 'sandbox_image = "registry.example/pause:9"' in read and 'address = "127.0.0.1:1338"' in read
    assert sh(ALONE, f"stat -c %a {TOP} {DROP_IN}").split() == ["640", "640"]
    assert sh(BESIDE, f"stat -c %a {TOP} {DROP_IN}").split() == ["644", "644"]


def test_a_container_from_before_goes_on() -> None:
    assert sh(ALONE, "ctr tasks list | grep before") == sh(ALONE, "cat /root/container-before")


@pytest.mark.parametrize("node", NODES)
def test_cdi_lists_every_gpu_by_index_and_uuid(node: str) -> None:
    uuids = UUID.findall(sh(node, "nvidia-smi -L"))
    assert len(uuids) == 4
    listed = set(re.findall(r"nvidia.com/gpu=(\S+)", sh(node, "nvidia-ctk cdi list")))
    assert listed == {*uuids, "0", "1", "2", "3", "all"}


@pytest.mark.parametrize(("node", "client"), [(ALONE, CTR), (BESIDE, CTR), (BESIDE, PODMAN), (BESIDE, DOCKER)])
def test_a_container_sees_its_gpu_alone(node: str, client: str) -> None:
    wanted = UUID.findall(sh(node, "nvidia-smi -L"))[2]
    assert UUID.findall(sh(node, f"{client.format(wanted)} nvidia-smi -L")) == [wanted]


def test_verification_runs_a_container_of_each_engine() -> None:
    run = verify()
    assert run.code == 0, run.output
    for node, title in ((ALONE, "containerd"), (BESIDE, "Docker"), (BESIDE, "Podman"), (BESIDE, "containerd")):
        heading = rf"TASK \[\S+ : Run nvidia-smi in a container of {title}\].*?(?=TASK|PLAY)"
        assert f"ok: [{node}]" in "".join(re.findall(heading, run.output, re.DOTALL)), run.output
    assert sh(ALONE, "ctr containers list --quiet").split() == ["before"]
    # One that nobody has, in a place that does not answer.
    run = verify(container_toolkit_verify_image="127.0.0.1:9/none:1", container_toolkit_engines=["containerd"])
    told = words(run.output)
    assert run.code != 0
    assert f"{ALONE}: a container of containerd from 127.0.0.1:9/none:1 did not run nvidia-smi (" in told, run.output
    assert "which the node has. Next step: see that the node has the image" in told, run.output


def test_verification_sees_that_a_container_has_not_all_gpus() -> None:
    """All is well but for what the engine does."""
    uuids = UUID.findall(sh(BESIDE, "nvidia-smi -L"))
    other = '#!/bin/bash\nexec /usr/bin/podman.real "${@/gpu=all/gpu=1}"\n'
    sh(BESIDE, "mv /usr/bin/podman /usr/bin/podman.real")
    sh(BESIDE, f"printf '%s' '{other}' >/usr/bin/podman && chmod +x /usr/bin/podman")
    run = verify(limit=BESIDE, container_toolkit_engines=["podman"])
    sh(BESIDE, "mv /usr/bin/podman.real /usr/bin/podman")
    assert run.code != 0
    saw = f"{BESIDE}: a container of Podman from {IMAGE} saw {uuids[1]}. Expected: {', '.join(uuids)}, which"
    assert saw in words(run.output), run.output


def test_a_specification_of_another_driver_is_seen_and_made_again() -> None:
    """All names are there."""
    specification = "/var/run/cdi/nvidia.yaml"
    sh(ALONE, f"cp {specification} /root/ && sed -i 's/[.]so[.]580[.]/.so.570./' {specification}")
    run = verify(limit=ALONE, container_toolkit_verify_image="")
    told = f"{ALONE}: the CDI specification is not what `nvidia-ctk cdi generate` says now. Expected: one of the driver"
    assert run.code != 0 and told in words(run.output), run.output
    run = run_in_scenario(CONVERGE, "--limit", ALONE)
    assert changed_tasks(run.output) == ["Refresh the CDI specification that does not hold the node's GPUs"], run.output
    sh(ALONE, f"cmp {specification} /root/nvidia.yaml")


def test_check_mode_has_nothing_to_tell() -> None:
    run = run_in_scenario(CONVERGE, "--check", "--diff")
    assert (run.code, run.changed) == (0, dict.fromkeys(NODES, 0)), run.output


def test_settings_that_nobody_can_read_are_refused_and_stay() -> None:
    sh(ALONE, f"cp -a {TOP} /root/ && echo 'broken = [' >>{TOP} && cp -a {TOP} /root/broken")
    run = run_in_scenario(CONVERGE, "--limit", ALONE)
    same = sh(ALONE, f"cmp {TOP} /root/broken && echo same")
    sh(ALONE, f"cp -a /root/config.toml {TOP}")
    assert run.code != 0 and same == "same\n"
    told = words(run.output)
    assert re.search(rf"{ALONE}: {TOP} is no TOML \(.*\)\. Expected: settings of containerd, to which", told), told
    assert "nothing was changed. Next step: mend the file, or move it away." in told, told
    # As Docker's makers have it in their package, by the name that it has in files of this version.
    sh(ALONE, f"sed -i '1i disabled_plugins = [\"io.containerd.grpc.v1.cri\"]' {TOP}")
    run = run_in_scenario(CONVERGE, "--limit", ALONE)
    sh(ALONE, f"cp -a /root/config.toml {TOP}")
    assert run.code != 0 and run.changed == {ALONE: 0}, run.output
    assert f"{ALONE}: containerd's settings have its CRI plugin in disabled_plugins. Expected: " in words(run.output)
    # What the file brings in is read by containerd alone.
    owner = "/etc/containerd/conf.d/10-owner.toml"
    sh(ALONE, f"cp {owner} /root/ && echo 'broken = [' >>{owner} && cp {owner} /root/broken")
    run = run_in_scenario(CONVERGE, "--limit", ALONE)
    same = sh(ALONE, f"cmp {owner} /root/broken && echo same")
    sh(ALONE, f"cp /root/10-owner.toml {owner}")
    assert run.code != 0 and same == "same\n"
    told = words(run.output)
    assert re.search(rf"{ALONE}: NVIDIA's runtime could not be added to {TOP} \(containerd: .*10-owner.toml", told), (
        told
    )
    assert "Expected: settings that it can read; the file is as it was. Next step: mend what it names" in told, told
    assert run_in_scenario(CONVERGE, "--limit", ALONE).changed == {ALONE: 0}


def test_what_a_restart_would_end_is_named_before_it() -> None:
    """A unit that takes its containers along is not restarted over them; what the owner has changed waits."""
    unit = "/run/systemd/system/containerd.service.d"
    sh(
        ALONE,
        f"mkdir -p {unit} && printf '[Service]\\nKillMode=mixed\\n' >{unit}/mixed.conf && systemctl daemon-reload",
    )
    sh(ALONE, f"sed -i s/pause:9/pause:10/ {TOP}")
    run = run_in_scenario(CONVERGE, "--limit", ALONE)
    told = words(run.output)
    alive = sh(ALONE, "ctr tasks list | grep before")
    sh(ALONE, f"rm -r {unit} && systemctl daemon-reload")
    assert run.code != 0
    assert re.search(
        rf"{ALONE}: containerd has to restart to read its settings, and with it would end process \d+ \(co", told
    ), told
    assert "Next step: stop them, or set node_maintenance_policy to drain." in told, told
    assert alive == sh(ALONE, "cat /root/container-before")
    # The drop-in follows what the owner has changed.
    assert "pause:10" in sh(ALONE, f"cat {DROP_IN}")
    sh(ALONE, f"sed -i s/pause:10/pause:9/ {TOP}")
    run = run_in_scenario(CONVERGE, "--limit", ALONE)
    assert run.code == 0 and "Restart containerd" in changed_tasks(run.output), run.output
    assert sh(ALONE, "ctr tasks list | grep before") == alive


def test_a_daemon_that_has_not_read_its_settings_is_seen() -> None:
    """Its files say the same all the time. Docker's containers live through restarts of containerd, too."""
    sh(BESIDE, f"docker run --detach --name through --network none {IMAGE} sleep infinity")
    sh(BESIDE, f"mv {DROP_IN} /root/ && systemctl restart containerd && mv /root/99-nvidia-gpufarm.toml {DROP_IN}")
    assert "runtimes.nvidia]" in sh(BESIDE, "containerd config dump")
    sh(ALONE, "systemctl stop containerd")
    run = verify(container_toolkit_verify_image="")
    sh(ALONE, "systemctl start containerd")
    told = words(run.output)
    assert run.code != 0
    assert f"{BESIDE}: containerd's runtimes are runc. Expected: one named nvidia, which gives containers" in told, told
    assert re.search(rf"{ALONE}: no containerd daemon answers \(/run/containerd/containerd.sock: .*\)\. Expected", told)
    sh(BESIDE, "rm /var/run/cdi/nvidia.yaml")
    run = run_in_scenario(CONVERGE, "--check", "--limit", BESIDE)
    asked = "Ask the engines which runtimes they have read, and for the node's CDI devices"
    made = "Refresh the CDI specification that does not hold the node's GPUs"
    assert run.code == 0 and changed_tasks(run.output) == [asked, "Restart containerd", made], run.output
    assert "nvidia" not in runtimes(BESIDE)
    run = run_in_scenario(CONVERGE, "--limit", BESIDE)
    assert run.code == 0 and changed_tasks(run.output) == [asked, "Restart containerd", made], run.output
    assert "nvidia" in runtimes(BESIDE)
    assert sh(BESIDE, "docker inspect --format '{{.State.Running}} {{.RestartCount}}' through") == "true 0\n"


def test_removal_leaves_what_was_there() -> None:
    run = enter("container_toolkit/absent")
    assert run.code == 0, run.output
    assert sh(ALONE, f"cat {TOP}") == (FILES / "config.toml").read_text(encoding="utf-8")
    assert sh(ALONE, "ls /etc/containerd/conf.d").split() == ["10-owner.toml"]
    assert sh(ALONE, "ctr tasks list | grep before") == sh(ALONE, "cat /root/container-before")
    # dpkg has the sum of what its package brings.
    assert "config.toml" not in sh(BESIDE, "dpkg --verify containerd")
    left = ["/etc/containerd:", "conf.d", "config.toml", "/etc/docker:"]
    assert sh(BESIDE, "ls /etc/containerd /etc/docker").split() == left
    assert sh(BESIDE, "ls /etc/containerd/conf.d") == ""
    for node in NODES:
        assert "nvidia" not in runtimes(node)
        assert "runc" in runtimes(node)
    run = enter("container_toolkit/absent")
    assert (run.code, run.changed) == (0, dict.fromkeys(NODES, 0)), run.output
