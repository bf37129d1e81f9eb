"""What the demo says of a farm, and how nodes are started."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.simulator import demo, docker, farm
from tests.simulator.farm import __main__ as program
from tests.simulator.farm import ansible

OUTPUT = """\
TASK [gpufarm.core.nomad : Have the verified Nomad release] ********************
[ERROR]: Task failed: Module failed: t4: the checksum is another one.
Origin: /x/roles/nomad/tasks/install.yml:22:3

fatal: [t4]: FAILED! =>
    changed: false
    msg: 't4: the checksum is another one.'

PLAY RECAP *********************************************************************
server                     : ok=36   changed=1    unreachable=0    failed=0    skipped=2    rescued=0    ignored=0
t4                         : ok=14   changed=0    unreachable=0    failed=1    skipped=0    rescued=0    ignored=0
""".splitlines()


def test_recap_holds_every_hosts_counts() -> None:
    recap = ansible.recap(OUTPUT)
    assert recap["server"]["changed"] == 1
    assert recap["t4"] == {
        "ok": 14, "changed": 0, "unreachable": 0, "failed": 1, "skipped": 0, "rescued": 0, "ignored": 0,
    }  # fmt: skip


def test_reason_is_what_failed_and_nothing_else() -> None:
    reason = ansible.reason(OUTPUT)
    assert "t4: the checksum is another one." in reason
    assert "fatal: [t4]" in reason
    assert "PLAY RECAP" not in reason
    assert "TASK" not in reason


def test_reason_of_an_unknown_failure_is_the_end_of_the_output() -> None:
    assert ansible.reason(["one", "two"]) == "one\ntwo"


def test_table_sets_nomads_gpus_beside_those_of_nvidia_smi() -> None:
    entry = {"platform": "linux", "driver_version": "570.1", "models": ["Tesla T4"], "gpus": 4}
    report = {
        "expected": [{"node": "t4", **entry}, {"node": "gone", **entry}],
        "nodes": [{"name": "t4", "gpus_found": 3, "verdict": "failed"}],
    }
    header, first, second = demo.table(report).splitlines()
    assert header.split() == ["NODE", "PLATFORM", "DRIVER", "MODEL", "NVIDIA-SMI", "NOMAD", "VERDICT"]
    assert first.split() == ["t4", "linux", "570.1", "Tesla", "T4", "4", "3", "failed"]
    assert second.split()[-2:] == ["0", "failed"]
    assert first.index("failed") == header.index("VERDICT")


def test_inventory_names_nodes_with_profiles_that_exist() -> None:
    nodes = farm.nodes()
    assert nodes["server"]["profile"] is None
    assert farm.gpu_nodes() == ["t4", "h100", "wsl"]
    for name in farm.gpu_nodes():
        assert (farm.ROOT / f"tests/simulator/gpu/profiles/{nodes[name]['profile']}.yml").is_file()


def test_distributions_are_those_of_a_windows_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUFARM_CACHE", str(tmp_path))
    farm.start_windows("x", [node for node in farm.inventory_nodes("x", {}) if not node.is_wsl])
    assert not farm.windows("x").folder.exists()
    farm.start_windows("x", farm.inventory_nodes("x", {}))
    (distribution,) = farm.windows("x").machine.distributions
    assert (distribution.name, distribution.container, distribution.default) == ("wsl", "x-wsl", True)


@pytest.mark.parametrize("version", ["1", "2"])
def test_flags_fit_the_cgroup_version(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker, "cgroup_version", lambda: version)
    flags = docker.node_flags()
    assert "--privileged" not in flags
    assert f"--cgroupns={'host' if version == '1' else 'private'}" in flags
    assert ("--volume=/sys/fs/cgroup:/sys/fs/cgroup:rw" in flags) is (version == "1")
    assert "--volume=/var/lib/docker" in flags


def test_molecules_platforms_are_nodes() -> None:
    first, second = farm.platform_nodes(
        [
            {"name": "a", "image": "gpufarm-node:trixie", "groups": ["gpu_nodes"], "env": {"GPUFARM_GPU_PROFILE": "x"}},
            {"name": "b", "image": "gpufarm-node:bookworm", "hostname": "twin"},
        ],
        ["trixie", "bookworm"],
    )
    assert first == farm.Node("a", "a", "trixie", {"GPUFARM_GPU_PROFILE": "x"})
    assert second == farm.Node("b", "twin", "bookworm")


@pytest.mark.parametrize(
    ("platform", "found"),
    [
        ({"image": "debian:12"}, "image debian:12"),
        ({}, "image None"),
        ({"image": "gpufarm-node:trixie", "privileged": True}, "keys ['privileged']"),
    ],
)
def test_a_platform_that_no_node_can_be_is_refused(platform: dict[str, object], found: str) -> None:
    with pytest.raises(docker.DockerError) as refusal:
        farm.platform_nodes([{"name": "odd", **platform}], ["trixie"])
    assert "platform odd" in str(refusal.value)
    assert found in str(refusal.value)
    assert "Next step: edit molecule.yml" in str(refusal.value)


def test_only_a_node_with_its_own_driver_has_its_messages_in_the_kernel_log() -> None:
    profiles = {"t4-x4": True, "rtx4090-wsl": False, "": False}
    for profile, expected in profiles.items():
        assert farm.Node("n", "n", "trixie", {"GPUFARM_GPU_PROFILE": profile}).own_kernel_log is expected
    assert farm.Node("n", "n", "trixie").own_kernel_log is False
    assert farm.Node("n", "n", "kubernetes", {"GPUFARM_GPU_PROFILE": "t4-x4"}).own_kernel_log is False


@pytest.mark.parametrize("suite", ["trixie", "kubernetes"])
def test_only_a_node_with_kubernetes_may_hand_on_nvidias_devices(suite: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[str, ...]] = []
    monkeypatch.setattr(farm, "docker", lambda *arguments: called.append(arguments) or "")
    monkeypatch.setattr(farm, "exists", lambda *_: False)
    monkeypatch.setattr(farm, "node_flags", lambda: ["--flag"])
    farm.start_node("x", farm.Node("n", "n", suite), "image")
    (run,) = called
    rules = [argument for argument in run if argument.startswith("--device-cgroup-rule=")]
    assert len(rules) == (3 if suite == "kubernetes" else 0)
    assert all(re.fullmatch(r"--device-cgroup-rule=c (195|510|511):\* rwm", rule) for rule in rules)


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"GPUFARM_FARM": "mine", "MOLECULE_PROJECT_DIRECTORY": "/a/role", "MOLECULE_SCENARIO_NAME": "x"}, "mine"),
        ({"MOLECULE_PROJECT_DIRECTORY": "/a/role", "MOLECULE_SCENARIO_NAME": "x"}, "role-x"),
        ({"MOLECULE_PROJECT_DIRECTORY": "/a/role"}, "role-default"),
    ],
)
def test_a_scenarios_farm_is_its_own(environment: dict[str, str], name: str) -> None:
    assert program.of_scenario(environment) == name


# A container that something else removes already, and one that nothing can remove.
DOCKER = """#!/bin/sh
cd "${0%/*}"
case "$*" in
ps*) [ -e gone ] || echo farm-t4 ;;
rm*) echo "$*" >>removed; echo "Error response from daemon: $(cat why)" >&2; [ ! -e soon ] || touch gone; exit 1 ;;
esac
"""


def test_a_farm_that_is_removed_already_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docker").write_text(DOCKER, encoding="utf-8")
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setattr(farm, "docker", docker.docker)
    monkeypatch.setattr(docker, "docker_binary", lambda: str(tmp_path / "docker"))
    monkeypatch.setattr(farm, "cache_dir", lambda: tmp_path)
    (tmp_path / "why").write_text("device or resource busy", encoding="utf-8")
    with pytest.raises(docker.DockerError, match="busy"):
        farm.remove("farm")
    (tmp_path / "why").write_text("removal of container farm-t4 is already in progress", encoding="utf-8")
    (tmp_path / "soon").touch()
    assert farm.remove("farm") == ["farm-t4"]
    assert (tmp_path / "removed").read_text(encoding="utf-8") == "rm --force --volumes farm-t4\n" * 2


@pytest.mark.parametrize(("before", "after"), [("128", "1024"), ("1023", "1024"), ("1024", "1024"), ("8192", "8192")])
def test_a_machine_has_room_for_the_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str
) -> None:
    setting = tmp_path / "max_user_instances"
    setting.write_text(before, encoding="ascii")
    monkeypatch.setattr(docker, "INOTIFY", setting)
    docker.make_room()
    assert setting.read_text(encoding="ascii") == after


def test_a_machine_whose_settings_are_not_ours_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker, "INOTIFY", tmp_path / "nowhere")
    docker.make_room()
    assert not (tmp_path / "nowhere").exists()
