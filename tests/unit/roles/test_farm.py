# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the role farm works out of a node that is to be upgraded."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible_collections.gpufarm.core.tests.unit.playbooks.playbook_helper import LOCAL, run_playbook
from ansible_collections.gpufarm.core.tests.unit.roles import role_helper

NO_RUN_BEFORE = {"rc": 1, "stdout": ""}


def gpus(*uuids: str | None) -> dict[str, Any]:
    found = [{"uuid": uuid, "status": "ok" if uuid else "lost", "status_message": f"{uuid} is"} for uuid in uuids]
    return {"nvidia_smi": {"available": True, "gpus": found}}


def value(name: str, **given: Any) -> Any:
    known = {**role_helper.variables("farm"), "inventory_hostname": "gpu1", "__farm_upgrade_left": NO_RUN_BEFORE}
    return role_helper.value(name, {**known, **given})


def before(key: str, **given: Any) -> Any:
    """Return what is noted of a node before it is changed."""
    path = role_helper.ROLES / "farm/tasks/upgrade_before.yml"
    tasks = DataLoader().load_from_file(str(path), trusted_as_template=True)
    (noted,) = [
        task["ansible.builtin.set_fact"]["__farm_upgrade_node"]
        for task in tasks[-1]["block"]
        if "__farm_upgrade_node" in task.get("ansible.builtin.set_fact", {})
    ]
    return value("noted", noted=noted[key], **given)


@pytest.mark.parametrize(
    ("out", "pods", "closed"),
    [
        # Kubernetes was asked first, and refused, or would have done it before Nomad refused.
        (None, {"failed": True, "closed": False}, False),
        ({"failed": True, "closed": False}, {"maintenance": "acceptance"}, False),
        ({"failed": True, "closed": True}, {"maintenance": "acceptance"}, True),
        # Neither said so.
        ({"failed": True, "msg": "no module"}, None, True),
        ({"unreachable": True}, None, True),
        # Nomad has closed it, and then its pods did not go, or nobody asked.
        ({"maintenance": "acceptance"}, {"failed": True, "closed": False}, True),
        ({"maintenance": None}, {"failed": True, "closed": False}, False),
        ({"maintenance": None}, {"failed": True}, True),
        ({"maintenance": None}, {"unreachable": True}, True),
        ({"maintenance": None}, {"maintenance": "acceptance"}, True),
        ({"maintenance": None}, None, False),
    ],
)  # fmt: skip
def test_a_node_that_could_not_be_taken_out_may_be_closed(
    out: dict[str, Any] | None, pods: dict[str, Any] | None, closed: bool
) -> None:
    told = {"__node_maintenance_out": out, "__node_maintenance_pods": pods}
    given = {"ansible_check_mode": False, **{name: told for name, told in told.items() if told is not None}}
    assert value("__farm_accept_may_be_closed", **given) is closed
    assert value("__farm_accept_may_be_closed", **given | {"ansible_check_mode": True}) is False


def test_a_lost_gpu_without_a_uuid_is_not_missed_for_ever() -> None:
    assert value("__farm_upgrade_gpus_now", ansible_facts=gpus("GPU-1", None)) == ["GPU-1"]
    noted = {"__farm_upgrade_node": {"gpus": ["GPU-1", "GPU-2"]}}
    assert value("__farm_upgrade_gpus_missing", ansible_facts=gpus("GPU-1", "GPU-2"), **noted) == []
    assert value("__farm_upgrade_gpus_missing", ansible_facts=gpus("GPU-1", None), **noted) == ["GPU-2"]


@pytest.mark.parametrize(
    ("left", "noted"),
    [
        (NO_RUN_BEFORE, ["GPU-2", "GPU-3"]),
        # A GPU has come since that run, and one of those is away.
        ({"rc": 0, "stdout": json.dumps({"gpus": ["GPU-1", "GPU-2"]})}, ["GPU-1", "GPU-2", "GPU-3"]),
    ],
)
def test_what_is_noted_of_a_node(left: dict[str, Any], noted: list[str]) -> None:
    assert before("gpus", ansible_facts=gpus("GPU-3", "GPU-2"), __farm_upgrade_left=left) == noted


def test_nodes_that_no_inventory_has() -> None:
    """gpu2 was left out by --limit and gpu3 has another name in Nomad."""
    known: dict[str, Any] = {"hostvars": {"gpu1": {}, "gpu2": {}, "gpu3": {"nomad_node_name": "rack3"}}}
    known |= {"groups": {"gpu_nodes": ["gpu1", "gpu2", "gpu3"]}}
    found = value(
        "__farm_verify_strangers", __farm_verify_result={"extra_nodes": ["gpu2", "rack3", "visitor", "old"]}, **known
    )
    assert found == ["old", "visitor"]


def test_a_gpu_that_nobody_has_divided_can_run_nothing() -> None:
    *_others, task = role_helper.tasks_of("farm/tasks/verify_gpus.yml")
    found: list[dict[str, Any]] = [
        {"mig_mode": None, "mig_devices": []},
        {"mig_mode": "Enabled", "mig_devices": [], "uuid": "GPU-1"},
        # What nobody tells is no reason.
        {"mig_mode": "Enabled", "mig_devices": None},
        {"mig_mode": "Enabled", "mig_devices": [{"uuid": "MIG-1"}]},
    ]
    facts = {"ansible_facts": {"nvidia_smi": {"gpus": found}}}
    assert value("__farm_verify_empty", **facts) == [found[1]] and task["when"] == "__farm_verify_empty | length > 0"
    # One that is meant to be so: it is not handed out, or its node's health does not suffer from it.
    assert value("__farm_verify_empty", **facts, nomad_device_nvidia_ignored_gpu_ids=["GPU-1"]) == []
    assert value("__farm_verify_empty", **facts, nomad_device_nvidia_ignored_gpu_ids=["GPU-2"]) == [found[1]]
    for severity, left in (("ignore", []), ("warning", []), ("critical", [found[1]])):
        options = {"severities": {"mig_empty": severity}}
        assert value("__farm_verify_empty", **facts, gpu_health_options=options) == left
    assert value("__farm_verify_empty", **facts, gpu_health_options={"severities": {"temperature": "ignore"}})


# What names the GPUs that are none of Nomad's, by role.
IGNORED = {"farm": "__farm_ignored_gpus", "nomad": "__nomad_ignored_gpus", "wsl": "__wsl_ignored"}


@pytest.mark.parametrize(
    ("given", "uuids"),
    [
        (["GPU-1", "GPU-2"], ["GPU-1", "GPU-2"]),
        # As the command line and an INI file have them.
        ("GPU-1", ["GPU-1"]),
        ("GPU-1, GPU-2", ["GPU-1", "GPU-2"]),
        ("", []),
        (None, []),
    ],
)
def test_gpus_that_are_none_of_nomads_may_be_named_as_text(given: Any, uuids: list[str]) -> None:
    for role, name in IGNORED.items():
        known = {**role_helper.variables(role), "nomad_device_nvidia_ignored_gpu_ids": given}
        assert role_helper.value(name, known) == uuids, role


def test_all_that_goes_by_them_asks_that_variable() -> None:
    """Text where a list is expected would be as many UUIDs as it has letters."""
    raw = re.compile(r"\{[^}]*\bnomad_device_nvidia_ignored_gpu_ids\b")
    asking = {
        f"{path.parts[-3]}/{path.name}"
        for path in role_helper.ROLES.glob("*/*/*")
        if path.suffix in (".yml", ".j2") and raw.search(path.read_text(encoding="utf-8"))
    }
    # The variables themselves, and an option of a module, which takes text.
    assert asking == {*(f"{role}/main.yml" for role in IGNORED), "node_maintenance/put_back.yml"}


def test_a_node_that_is_a_server_too() -> None:
    assert before("server", groups={"nomad_servers": ["s1", "gpu1"]}) is True
    assert before("server", groups={"nomad_servers": ["s1"]}) is False
    assert before("server", groups={}) is False


@pytest.mark.parametrize(
    ("hosts", "partial"),
    [(["s1", "gpu1", "k1", "other"], False), (["s1", "k1"], True), (["s1", "gpu1"], True)],
)
def test_a_run_without_all_hosts_removes_nothing_of_theirs(hosts: list[str], partial: bool) -> None:
    farm = {"nomad_servers": ["s1"], "gpu_nodes": ["gpu1", "s1"], "kubernetes_nodes": ["k1", "s1"]}
    assert value("__farm_bundle_partial", groups=farm, ansible_play_hosts=hosts) is partial


@pytest.mark.parametrize("hosts", [["deb", "el"], ["el"]])
def test_a_host_that_no_bundle_is_for_is_told_and_keeps_nothing_in_it(tmp_path: Path, hosts: list[str]) -> None:
    tasks = [
        {"ansible.builtin.include_role": {
            "name": "gpufarm.core.farm", "tasks_from": "bundle_wanted.yml", "rolespec_validate": False, "public": True,
        }},
        {"ansible.builtin.debug": {"msg": "partial {{ __farm_bundle_partial }}"}},
    ]  # fmt: skip
    (tmp_path / "play.yml").write_text(yaml.safe_dump([{"hosts": "all", "gather_facts": False, "tasks": tasks}]))
    known = {
        "gpufarm_bundle": "/srv/bundle", "ansible_facts": {"distribution": "Rocky"},
        "_common_family": {"packages": "{{ 'apt' if inventory_hostname == 'deb' else 'dnf' }}"},
        "_common_bundle_platform": "p", "__farm_bundle_wanted": [], "__farm_bundle_repositories": [],
        "__farm_bundle_releases": [],
    }  # fmt: skip
    (tmp_path / "known.json").write_text(json.dumps(known))
    inventory = {"gpu_nodes": {"hosts": dict.fromkeys(hosts, LOCAL)}}
    run = run_playbook(tmp_path, inventory, str(tmp_path / "play.yml"), "-e", f"@{tmp_path}/known.json")
    said = " ".join(run.stdout.replace("''", "'").split())
    assert "el: the packages of Rocky are not apt's. Expected: a distribution of the family Debian" in said, said
    assert ("no host of this run can collect" in run.stdout) is (hosts == ["el"]), run.stdout
    assert run.stdout.count("partial False") == (2 if "deb" in hosts else 0), run.stdout
    assert run.returncode == (0 if "deb" in hosts else 2)


@functools.cache
def of_all_roles() -> dict[str, Any]:
    return role_helper.variables(*(path.name for path in role_helper.ROLES.iterdir()))


def bundled(name: str, *groups: str, **given: Any) -> Any:
    """What a host of these groups says in bundle.yml."""
    known = of_all_roles() | {
        "ansible_facts": role_helper.facts("Debian: Debian 13"), "_common_host": role_helper.host(),
        "common_scope": "bundle", "inventory_hostname": "host", "groups": {group: ["host"] for group in groups},
    }  # fmt: skip
    return role_helper.value(name, known | given)


def test_a_node_of_kubernetes_is_collected_for() -> None:
    """The driver and the toolkit; its engine is there, and it has nothing of Nomad."""
    given = {
        "gpu_node_cuda": True,
        "nomad_client_sized_volumes": True,
        "container_toolkit_engines": ["docker", "podman"],
    }
    found = [tuple(each["packages"]) for each in bundled("__farm_bundle_wanted", "kubernetes_nodes", **given)]
    of_server = [tuple(each["packages"]) for each in bundled("__farm_bundle_wanted", "nomad_servers", **given)]
    of_node = [tuple(each["packages"]) for each in bundled("__farm_bundle_wanted", "gpu_nodes", **given)]
    mine = [packages for packages in found if packages not in of_server]
    names = {package.partition("=")[0] for packages in mine for package in packages}
    assert set(mine) < set(of_node) and names == {
        "nvidia-container-toolkit", "nvidia-container-toolkit-base", "libnvidia-container-tools",
        "libnvidia-container1", "nvidia-driver-pinning-580", "nvidia-driver-cuda", "nvidia-kernel-open-dkms",
        "nvidia-kernel-dkms", "nvidia-fabricmanager", "nvlsm", "infiniband-diags", "linux-headers-6.12.0",
    }  # fmt: skip
    repositories = bundled("__farm_bundle_repositories", "kubernetes_nodes", **given)
    assert [each["name"] for each in repositories] == ["nvidia-container-toolkit", "nvidia-cuda"]
    assert bundled("__farm_bundle_releases", "kubernetes_nodes", **given) == []
    (product,) = [each["product"] for each in bundled("__farm_bundle_releases", "nomad_servers", **given)]
    assert product == "nomad"
    # Where others have installed it.
    kept = {"nvidia_driver_managed": False}
    names = {name for each in bundled("__farm_bundle_wanted", "kubernetes_nodes", **kept) for name in each["packages"]}
    assert not [name for name in names if name.startswith("nvidia-driver")]


# By what variable a file of _common's knows what is to be installed.
ASKED = {
    "packages.yml": "common_packages", "bundle.yml": "common_bundle_packages",
    "apt_repository.yml": "common_repository",
}  # fmt: skip


def asked() -> Iterator[tuple[str, str, Any, bool]]:
    """What roles have _common install: in which file, by what variable, what, and whether with recommendations."""
    for path in sorted(role_helper.ROLES.glob("*/tasks/*.yml")):
        name = path.relative_to(role_helper.ROLES).as_posix()
        # The first two hand on what they were given.
        if name in ("_common/tasks/packages.yml", "_common/tasks/apt_repository.yml") or "absent" in path.name:
            continue
        for task in role_helper.tasks_of(name, templates=True):
            given = task.get("vars", {})
            entered = str([told for key, told in task.items() if re.search("(include|import)_(role|tasks)$", key)])
            for file, variable in ASKED.items():
                if variable in given:
                    yield name, variable, given[variable], given.get("common_packages_recommended", False)
                elif "gpufarm.core._common" in entered or name.startswith("_common/"):
                    # The repository is that of whoever has entered this file.
                    assert f"'{file}'" not in entered or variable == "common_repository", name


@pytest.mark.parametrize("server", ["host", "other"])
def test_a_bundle_has_all_that_roles_install_and_as_they_do(server: str) -> None:
    """Who lacks a package is told to collect again, which helps only where it then is collected."""
    given = {
        "container_toolkit_engines": ["containerd", "crio", "podman"], "gpu_node_cuda": True, "gpu_node_tuning": True,
        "node_tuning_acs_off": True, "nomad_client_bridge": True, "nomad_client_sized_volumes": True,
        "shared_data_cache": True, "shared_data_server": server,
        "__nomad_client_cni": {"stdout": "missing bridge\nmissing iptables"},
    }  # fmt: skip
    host = role_helper.host(programs={"dockerd": "", "containerd": "", "crio": "", "podman": ""})
    wanted = bundled("__farm_bundle_wanted", "gpu_nodes", **given)
    found = set()
    for name, variable, value_of_it, recommended in asked():
        what = bundled("what", "gpu_nodes", **given, common_scope="site", _common_host=host, what=value_of_it)
        packages = what["packages"] + what.get("also", []) if "repository" in variable else what
        for package in packages:
            those = [each for each in wanted if package in each["packages"]]
            assert recommended in [each.get("recommended", False) for each in those], (name, package)
            found.add(package.partition("=")[0])
    assert found >= {"acl", "podman", "python3-venv", "cuda-toolkit-13-0", "nvidia-driver-cuda", "linux-headers-6.12.0"}


REPOSITORY = {"name": "cuda", "key_url": "http://robot:s3cret@127.0.0.1:1/key", "fingerprints": ["00" * 20]}
RELEASE = {
    "product": "nomad", "version": "1.11.3", "base_url": "http://robot:s3cret@127.0.0.1:1",
    "key_url": "http://robot:s3cret@127.0.0.1:1/key", "key_fingerprints": ["00" * 20],
}  # fmt: skip


def collected(folder: Path, *options: str, rc: int = 2, **given: Any) -> str:
    """What a host says that has collected, which it could not, or was not to."""
    play = {"hosts": "all", "gather_facts": False, "tasks": [{"ansible.builtin.include_role": {
        "name": "gpufarm.core.farm", "tasks_from": "bundle.yml", "rolespec_validate": False,
    }}]}  # fmt: skip
    (folder / "play.yml").write_text(yaml.safe_dump([play]))
    known = {
        "gpufarm_bundle": str(folder / "bundle"), "__farm_bundle": {"platform": "p"}, "_common_architecture": "amd64",
        "__farm_bundle_of_all": {"repositories": [], "releases": [], "wanted": []},
        "__farm_bundle_known": {"repositories": [], "origins": {}}, "__farm_bundle_partial": False,
        "_common_bundle_collect": str(folder / "collect"),
        "_common_download_environment": {},
    } | given  # fmt: skip
    # Of another run, which goes on.
    (folder / "collect/other").mkdir(parents=True)
    (folder / "known.json").write_text(json.dumps(known))
    run = run_playbook(
        folder, {"all": {"hosts": {"host": LOCAL}}}, str(folder / "play.yml"), "-e", f"@{folder}/known.json", *options
    )
    assert run.returncode == rc and [path.name for path in (folder / "collect").iterdir()] == ["other"], run.stdout
    return run.stdout + run.stderr


@pytest.mark.parametrize("part", [{"repositories": [REPOSITORY]}, {"releases": [RELEASE]}])
def test_what_could_not_be_collected_is_told_without_a_login(tmp_path: Path, part: dict[str, Any]) -> None:
    said = collected(tmp_path, __farm_bundle_of_all={"repositories": [], "releases": [], "wanted": [], **part})
    assert "s3cret" not in said and "127.0.0.1:1" in said and "Next step: " in said, said


def test_check_mode_collects_nothing_and_says_so(tmp_path: Path) -> None:
    of_all = {"repositories": [REPOSITORY], "releases": [RELEASE], "wanted": []}
    # It has paths in the folder of the run, which there is none of.
    unknown = "{{ __farm_bundle_folder }}"
    said = collected(tmp_path, "--check", rc=0, __farm_bundle_of_all=of_all, __farm_bundle_known=unknown)
    assert f"host: would collect for p into {tmp_path}/bundle; what that is, is known when" in " ".join(said.split())
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize(("url", "closed"), [("http://up.example", False), ("http://robot:s3cret@up.example", True)])
def test_the_task_whose_arguments_have_a_login_is_not_shown(url: str, closed: bool) -> None:
    path = role_helper.ROLES / "farm/tasks/bundle.yml"
    (task,) = DataLoader().load_from_file(str(path), trusted_as_template=True)[-1]["block"][-1:]
    for known in (
        {"repositories": [{"url": url}], "origins": {}}, {"repositories": [], "origins": {"releases": url}}
    ):  # fmt: skip
        assert value("closed", closed=task["no_log"], __farm_bundle_known=known) is closed
