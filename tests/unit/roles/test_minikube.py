# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The role minikube, run whole against a double of minikube and a cluster that answers kubectl, and what it refuses.

The container toolkit and packages are left out of the collection that is run; /etc, /run, /home, where
root is at home too, and /usr/local/bin are folders of the test's own.
"""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpufarm.core.tests.unit.playbooks import playbook_helper
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils import kubernetes_helper as farm
from ansible_collections.gpufarm.core.tests.unit.roles import role_helper

from tests.simulator.cache import ROOT
from tests.testinfra.playbooks import changed_tasks, words

DOUBLE = ROOT / "tests/simulator/minikube/minikube"
RECORDED = json.loads((ROOT / "tests/unit/simulator/minikube/recorded.json").read_text(encoding="utf-8"))
# The name of a node of the cluster that answers.
PROFILE = "node00000"
MADE = {
    "Driver": "docker",
    "GPUs": "all",
    "KubernetesConfig": {"KubernetesVersion": "v1.35.1", "ContainerRuntime": "docker"},
}
APART = (
    "unshare", "--mount", "sh", "-c",
    'for each in etc run home usr/local/bin; do mount --bind "$1/$each" "/$each" || exit; done; shift\n'
    # One of the machine's own would be used.
    '[ ! -e /usr/bin/kubectl ] || mount --bind /dev/null /usr/bin/kubectl; exec "$@"',
    "sh",
)  # fmt: skip
ROOTS_OWN = pytest.mark.skipif(os.geteuid() != 0, reason="only root has folders of its own in place of the machine's")


class Host:
    """A host with a driver for two GPUs, and upstream's release of minikube."""

    def __init__(self, folder: Path, cluster: farm.Cluster) -> None:
        self.folder = folder
        self.cluster = cluster
        for name in ("run/systemd/system", "home/ada", "home/root", "usr/local/bin/minikube-upstream"):
            (folder / name).mkdir(parents=True)
        shutil.copytree("/etc", folder / "etc", symlinks=True)
        lines = {"passwd": "ada:x:4711:4711::/home/ada:/bin/sh", "shadow": "ada:*:20000:0:99999:7:::",
                 "group": "ada:x:4711:", "gshadow": "ada:!::"}  # fmt: skip
        if "docker:" not in (folder / "etc/group").read_text(encoding="ascii"):
            lines["group"] += "\ndocker:x:4712:"
        for name, line in lines.items():
            with (folder / "etc" / name).open("a", encoding="ascii") as file:
                file.write(f"{line}\n")
        passwd = folder / "etc/passwd"
        passwd.write_text(re.sub(r"(?m)^(root:.*):/root:", r"\1:/home/root:", passwd.read_text(encoding="utf-8")))
        os.chown(folder / "home/ada", 4711, 4711)
        self.bin = folder / "usr/local/bin"
        shutil.copy(farm.FIXTURES / "kubectl", self.bin / "minikube-upstream/kubectl")
        server = json.loads(cluster.kubeconfig.read_text(encoding="utf-8"))["contexts"]["farm"]
        (self.bin / "minikube-upstream/server").write_text(server, encoding="ascii")
        (self.bin / "docker").write_text("#!/bin/sh\necho '{\"nvidia\":{}}'\n", encoding="ascii")
        (self.bin / "docker").chmod(0o755)
        release = folder / "release/v1.38.1/minikube-linux-amd64"
        release.parent.mkdir(parents=True)
        shutil.copy(DOUBLE, release)
        self.program = release
        self.collections = folder / "collections"
        core = self.collections / "ansible_collections/gpufarm/core"
        shutil.copytree(ROOT / "roles", core / "roles")
        for name in ("plugins", "meta", "galaxy.yml"):
            (core / name).symlink_to(ROOT / name)
        (core / "roles/container_toolkit/tasks/main.yml").write_text(json.dumps([
            {"name": "Toolkit", "ansible.builtin.debug": {"msg": "toolkit for {{ container_toolkit_engines }}"}}
        ]))  # fmt: skip
        (core / "roles/_common/tasks/packages.yml").write_text(json.dumps([
            {"name": "Packages", "ansible.builtin.debug": {"msg": "packages {{ common_packages }}"}}
        ]))  # fmt: skip
        self.uuids = [farm.uuid_of(0, 0), farm.uuid_of(0, 1)]

    def run(self, *options: str, **given: Any) -> tuple[int, list[str], str]:
        """Run the role; the exit code, what changed, and what was said."""
        gpus = [{"uuid": uuid, "name": farm.MODEL, "mig_mode": None, "mig_devices": None} for uuid in self.uuids]
        facts = {"available": True, "reason": "ok", "message": "", "driver_version": farm.DRIVER, "gpus": gpus}
        play = [{
            "name": "Machine", "hosts": "all", "gather_facts": False,
            "tasks": [
                {"ansible.builtin.set_fact": {"nvidia_smi": facts, "cacheable": True}},
                {"ansible.builtin.include_role": {"name": "gpufarm.core.minikube"}},
            ],
        }]  # fmt: skip
        (self.folder / "play.yml").write_text(json.dumps(play), encoding="utf-8")
        known = {
            **playbook_helper.LOCAL,
            # What a user can run who may not look into root's home.
            "ansible_python_interpreter": "/usr/bin/python3",
            "ansible_become_method": "ansible.builtin.su",
            "minikube_profile": PROFILE,
            "minikube_release_url": (self.folder / "release").as_uri(),
            "minikube_checksum": hashlib.sha256(DOUBLE.read_bytes()).hexdigest(),
            "__nvidia_driver_checked": {"msg": "Machine"},
        }
        ran = playbook_helper.run_playbook(
            self.folder, {"all": {"hosts": {"desk": {**known, **given}}}}, str(self.folder / "play.yml"), *options,
            before=self.collections, under=(*APART, str(self.folder)),
        )  # fmt: skip
        return ran.returncode, changed_tasks(ran.stdout), words(ran.stdout + ran.stderr)

    def calls(self, home: str, command: str) -> list[str]:
        """The arguments with which minikube was called, as it writes them down."""
        log = self.folder / home / ".minikube/logs/audit.json"
        data = [json.loads(line)["data"] for line in log.read_text().splitlines()] if log.exists() else []
        return [each["args"] for each in data if each["command"] == command]

    def machine(self, home: str) -> Path:
        return self.folder / home / ".minikube/machines" / PROFILE / "config.json"

    def programs(self) -> list[str]:
        return sorted(path.name for path in self.bin.iterdir() if path.name in ("minikube", "kubectl"))


@pytest.fixture
def host() -> Iterator[Host]:
    # Not below what pytest keeps for itself: another user has to read it.
    with tempfile.TemporaryDirectory(prefix="gpufarm-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        cluster = farm.Cluster(folder)
        cluster.nodes = [farm.make_node(0, 2)]
        yield Host(folder, cluster)
        cluster.close()


@ROOTS_OWN
def test_a_machine_gets_a_cluster_whose_pods_see_its_gpus_and_loses_it_again(host: Host) -> None:
    everything = ["Download minikube", "Have kubectl", "Have the cluster"]
    code, changed, told = host.run("--check")
    assert (code, changed) == (0, everything), told
    assert host.programs() == [] and not (host.folder / "home/root/.minikube").exists()

    code, changed, told = host.run()
    assert (code, changed) == (0, everything), told
    assert "toolkit for ['docker']" in told
    assert host.programs() == ["kubectl", "minikube"] and (host.bin / "kubectl").readlink() == Path("minikube")
    options = "--driver docker --container-runtime docker --gpus all --interactive=false --force"
    assert host.calls("home/root", "start") == [f"--profile {PROFILE} {options}"]
    # Each of the two GPUs was seen by a pod, and none is left.
    assert len(host.cluster.created) == 2 and sorted(host.cluster.created) == sorted(host.cluster.removed)

    code, changed, told = host.run()
    assert (code, changed) == (0, []), told
    assert len(host.cluster.created) == 4 and len(host.calls("home/root", "start")) == 1

    # As after a reboot.
    host.machine("home/root").write_text('{"State": "Stopped"}')
    code, changed, told = host.run("--check")
    assert (code, changed) == (0, ["Have the cluster"]), told
    assert json.loads(host.machine("home/root").read_text()) == {"State": "Stopped"}
    code, changed, told = host.run(minikube_kubernetes_version="1.36.0")
    assert (code, changed) == (0, ["Have the cluster"]), told
    assert host.calls("home/root", "start")[1] == f"--profile {PROFILE} {options} --kubernetes-version v1.36.0"

    gone = ["Have no cluster", "Have no minikube"]
    code, changed, told = host.run("--check", minikube_state="absent")
    assert (code, changed[:2]) == (0, gone), told
    assert host.programs() == ["kubectl", "minikube"] and host.machine("home/root").exists()
    code, changed, told = host.run(minikube_state="absent")
    assert (code, changed[:2]) == (0, gone), told
    assert host.programs() == [] and not (host.folder / "home/root/.minikube").exists()
    assert json.loads((host.folder / "home/root/.kube/config").read_text())["contexts"] == {}
    code, changed, told = host.run(minikube_state="absent")
    assert (code, changed) == (0, []), told


@ROOTS_OWN
def test_a_user_of_the_machine_has_it_from_a_file_and_keeps_the_kubectl_that_is_there(host: Host) -> None:
    """No pod sees a GPU that the driver has not."""
    kubectl = host.bin / "kubectl"
    shutil.copy(farm.FIXTURES / "kubectl", kubectl)
    given = {
        "minikube_user": "ada",
        "minikube_path": str(host.program),
        "minikube_start_options": ["--memory=no-limit"],
    }
    code, changed, told = host.run("--check", **given)
    assert (code, changed) == (0, ["Copy minikube", "Have the user in the group docker", "Have the cluster"]), told
    host.uuids[1] = "GPU-0000ffff-0000-4000-8000-000000000001"
    code, changed, told = host.run(**given)
    assert (code, changed) == (2, ["Copy minikube", "Have the user in the group docker", "Have the cluster"]), told
    assert "packages ['acl']" in told
    assert f"found GPU {farm.uuid_of(0, 1)} in a pod. Expected: one of the 2 that nvidia-smi lists" in told
    options = "--driver docker --container-runtime docker --gpus all --interactive=false --memory=no-limit"
    assert host.calls("home/ada", "start") == [f"--profile {PROFILE} {options}"]
    assert host.machine("home/ada").stat().st_uid == 4711
    assert kubectl.read_bytes() == (farm.FIXTURES / "kubectl").read_bytes()
    assert not (host.folder / "home/root/.minikube").exists()


@ROOTS_OWN
def test_what_is_not_the_release_is_not_put_in_its_place_and_a_start_that_fails_is_told(host: Host) -> None:
    for given in ({}, {"minikube_path": str(host.program)}):
        code, changed, told = host.run(minikube_checksum="0" * 64, **given)
        assert code == 2 and changed == [] and host.programs() == [], told
        assert f"{'0' * 64}. Next step: correct minikube_" in told
    (host.bin / "docker").write_text("#!/bin/sh\necho '{\"runc\":{}}'\n", encoding="ascii")
    code, changed, told = host.run()
    assert (code, changed) == (2, ["Download minikube", "Have kubectl"]), told
    assert "desk: minikube did not start the cluster (GUEST_PROVISION: error provisioning guest:" in told
    assert f"minikube logs --profile {PROFILE}`" in told


def case(*told: str, **given: Any) -> dict[str, Any]:
    """Return what the role knows of a host of which look.sh told this."""
    return {
        "inventory_hostname": "desk",
        "ansible_check_mode": False,
        "ansible_facts": {
            **role_helper.facts("Debian: Debian 13.1"),
            "nvidia_smi": {
                "available": True,
                "reason": "ok",
                "message": "",
                "gpus": [{"uuid": "GPU-1", "mig_mode": None}],
            },
        },
        "__minikube_said": {"stdout_lines": ["home /root", "groups root", *told]},
        **given,
    }


def config(**more: Any) -> str:
    return f"config {json.dumps({**MADE, **more})}"


class Mirror(http.server.ThreadingHTTPServer):
    """Upstream's release on a server that is busy first; it notes who asks."""

    def __init__(self, busy: int) -> None:
        self.busy = busy
        self.asked: list[tuple[str, str | None]] = []
        super().__init__(("127.0.0.1", 0), MirrorHandler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class MirrorHandler(http.server.BaseHTTPRequestHandler):
    server: Mirror

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers.get("Authorization")))
        code = 503 if len(self.server.asked) <= self.server.busy else 200
        self.send_response(code)
        self.end_headers()
        self.wfile.write(DOUBLE.read_bytes() if code == 200 else b"busy")

    def log_message(self, *_given: Any) -> None:
        pass


def install(folder: Path, url: str) -> subprocess.CompletedProcess[str]:
    """Have only the program, from this address."""
    given = {
        **playbook_helper.LOCAL,
        "_common_architecture": "amd64",
        "_common_download_environment": {},
        "minikube_release_url": url,
        "minikube_bin_dir": str(folder),
        "minikube_checksum": hashlib.sha256(DOUBLE.read_bytes()).hexdigest(),
        "__minikube_said": {"stdout_lines": ["kubectl /usr/bin/kubectl"]},
    }
    task = {"ansible.builtin.include_role": {"name": "gpufarm.core.minikube", "tasks_from": "install.yml"}}
    play = [{"name": "Machine", "hosts": "all", "gather_facts": False, "tasks": [task]}]
    (folder / "play.yml").write_text(json.dumps(play), encoding="utf-8")
    return playbook_helper.run_playbook(
        folder, {"all": {"hosts": {"desk": given}}}, str(folder / "play.yml"), "-vvv", "--diff"
    )


@ROOTS_OWN
@pytest.mark.parametrize("login", ["", "ro+bot:s3cr%40+et@"])
def test_a_mirror_that_is_busy_is_asked_again_and_told_no_more_than_its_login(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, login: str
) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login other password others\n", encoding="ascii")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    mirror = Mirror(busy=1)
    ran = install(tmp_path, f"http://{login}127.0.0.1:{mirror.server_port}/m")
    mirror.shutdown()
    said = ran.stdout + ran.stderr
    assert ran.returncode == 0, said
    sent = f"Basic {base64.b64encode(b'ro+bot:s3cr@+et').decode()}" if login else None
    assert mirror.asked == [("/m/v1.38.1/minikube-linux-amd64", sent)] * 2
    assert (tmp_path / "minikube").read_bytes() == DOUBLE.read_bytes()
    assert not re.search("ro.bot|s3cr", said)


@ROOTS_OWN
def test_a_mirror_that_stays_busy_is_told_without_its_login(tmp_path: Path) -> None:
    mirror = Mirror(busy=9)
    ran = install(tmp_path, f"http://robot:s3cret@127.0.0.1:{mirror.server_port}")
    mirror.shutdown()
    said = words(ran.stdout + ran.stderr)
    assert ran.returncode == 2 and len(mirror.asked) == 4
    url = f"http://127.0.0.1:{mirror.server_port}/v1.38.1/minikube-linux-amd64"
    assert f"(Request failed: HTTP Error 503: Service Unavailable). Expected: {url} with the SHA-256" in said, said[
        -1500:
    ]
    assert not re.search("robot|s3cret", said)


def test_what_cannot_be_done_is_refused_with_what_to_do() -> None:
    older = {"minikube_kubernetes_version": "1.34.0"}
    other = {"KubernetesConfig": {"KubernetesVersion": "v1.35.1", "ContainerRuntime": "containerd"}}
    no_driver = {
        **case()["ansible_facts"],
        "nvidia_smi": {"available": False, "reason": "none", "message": "no driver", "gpus": []},
    }
    divided = {**case()["ansible_facts"]["nvidia_smi"], "gpus": [{"uuid": "GPU-1", "mig_mode": "Enabled"}]}
    divided = {**case()["ansible_facts"], "nvidia_smi": divided}
    made = 'the cluster minikube of root was made with driver "docker"'
    away = {"minikube_state": "absent"}
    cases = [
        (case(), ""),
        (case("harden 0", config(), "program x", **{"minikube_kubernetes_version": "v1.35.1"}), ""),
        (case(config(GPUs="nvidia.com")), ""),
        (case(__minikube_said={"stdout_lines": ["harden 0"]}), "there is no user root. Expected: the one whose"),
        (case(minikube_version="1.31.2"), "minikube_version is 1.31.2. Expected: 1.32.0 or newer"),
        (case(minikube_version="1.40.0"), "the checksum of minikube 1.40.0 is not known here. Expected: a SHA-256"),
        (case(minikube_version="1.40.0", minikube_checksum="sha256:" + "A" * 64), ""),
        (case(minikube_release_url="http://robot:1/s3cret@h/m"), "minikube_release_url is no address. Expected: one"),
        (case(minikube_release_url="http://robot:s3/cret@h/m"), "minikube_release_url is no address. Expected: one"),
        (case(minikube_release_url="http://robot:s3cret@[::1]:80/m"), ""),
        (case(minikube_release_url="http://mirror/m\n"), "minikube_release_url is no address. Expected: one"),
        (case(minikube_release_url="http://mirror\n/m"), "minikube_release_url is no address. Expected: one"),
        (case(minikube_checksum="abc"), 'the checksum of minikube 1.38.1 is "abc". Expected'),
        (case(_common_bundle="/srv/bundle"), "gpufarm_bundle is set, and minikube_path is empty. Expected"),
        (case(_common_bundle="/srv/bundle", minikube_path="/srv/minikube"), ""),
        (case(minikube_profile="a b"), "minikube_profile is a b. Expected: two or more letters"),
        (case(minikube_profile="ab\n"), "minikube_profile is ab\n. Expected: two or more letters"),
        (case(minikube_kubernetes_version="1.35.1\n"), "minikube_kubernetes_version is 1.35.1\n. Expected: three"),
        (case(minikube_checksum=f"{'a' * 64}\n"), "the checksum of minikube 1.38.1 is"),
        (case(minikube_kubernetes_version="latest"), "minikube_kubernetes_version is latest. Expected: three"),
        (case(minikube_start_options=["--memory=4g", "-g=all", "--ha"]), "minikube_start_options has -g=all, --ha. E"),
        (case(ansible_facts=no_driver), 'nvidia-smi says "no driver" (none). Expected: a driver'),
        (case(ansible_facts=no_driver, ansible_check_mode=True), ""),
        (case(ansible_facts=divided), "MIG is on for GPU-1. Expected: GPUs that are whole"),
        (case("harden 2"), "net.core.bpf_jit_harden is 2. Expected: 0, as minikube asks for"),
        (case(config(GPUs="")), f'{made}, container runtime "docker" and GPUs "". Expected: "docker", "docker" and "a'),
        (case(config(**other)), f'{made}, container runtime "containerd"'),
        (case(config(), **older), "the cluster minikube has Kubernetes 1.35.1. Expected: no newer one than"),
        (case("profile minikube", config(), "program x", **away), ""),
        (case(**away), ""),
        (case("profile minikube", "profile other", "program x", **away), "root has other clusters of minikube (other)"),
        (case("profile minikube", **away), "/usr/local/bin/minikube is not there, and the cluster minikube of root is"),
    ]  # fmt: skip
    found = role_helper.values("__minikube_refusal", ["_common", "minikube"], [given for given, _told in cases])
    for said, (given, told) in zip(found, cases, strict=True):
        assert said.startswith(told) and bool(said) == bool(told), (given, said)
        assert not said or "Next step: " in said


def test_every_option_of_start_is_one_of_minikubes() -> None:
    cases = [case(), case(minikube_user="ada", minikube_kubernetes_version="v1.35.1")]
    root, ada = role_helper.values("__minikube_start", ["_common", "minikube"], cases)
    assert root[2:] == [
        "--profile", "minikube", "--driver", "docker", "--container-runtime", "docker", "--gpus", "all",
        "--interactive=false", "--force",
    ]  # fmt: skip
    assert ada[-2:] == ["--kubernetes-version", "v1.35.1"] and "--force" not in ada
    known = {**RECORDED["options"]["start"], **RECORDED["options"]["all"]}
    assert {word.partition("=")[0][2:] for word in [*root, *ada] if word.startswith("--")} <= set(known)


def test_the_checksums_are_sha_256_of_both_architectures_newest_first() -> None:
    checksums = role_helper.variables("minikube")["__minikube_checksums"]
    versions = [tuple(map(int, version.split("."))) for version in checksums]
    assert versions == sorted(versions, reverse=True)
    assert ".".join(map(str, versions[0])) == role_helper.variables("minikube")["minikube_version"]
    found = [each for of in checksums.values() for each in of.values()]
    assert all(sorted(of) == ["amd64", "arm64"] for of in checksums.values())
    assert len({*found}) == len(found) and all(len(each) == 64 and int(each, 16) for each in found)
