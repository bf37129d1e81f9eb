"""A farm without internet is made of a bundle alone, and what is wrong with the bundle is said by name."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.simulator.cache import ROOT
from tests.simulator.docker import docker
from tests.testinfra import printed
from tests.testinfra.playbooks import enter, run_in_scenario, words
from tests.testinfra.user import user_shell

BUNDLE = Path(os.environ["MOLECULE_EPHEMERAL_DIRECTORY"]) / "bundle"
PLATFORM = "debian-trixie-amd64"
SERVER, GPU = "bundle-server", "bundle-gpu"
CUDA = {SERVER: (), GPU: ("cuda-toolkit-13-0",)}
MIRROR = f"{os.environ['GPUFARM_FARM']}-mirror"
HERE = "/var/lib/gpufarm/bundle"


def manifest() -> Any:
    return json.loads((BUNDLE / "manifest.json").read_text("utf-8"))


@contextmanager
def damaged(path: Path) -> Iterator[None]:
    """Have one bit of a file changed, as a disk or somebody else does it."""
    body = path.read_bytes()
    middle = len(body) // 2
    path.write_bytes(body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :])
    yield
    path.write_bytes(body)


@contextmanager
def internet() -> Iterator[None]:
    """Have the mirror and the nodes' way out again."""
    template = "{{range .NetworkSettings.Networks}}{{.Gateway}}{{end}}"
    docker("start", MIRROR)
    for node in (SERVER, GPU):
        gateway = docker("inspect", "--format", template, node).strip()
        shell(node, f"ip route replace default via {gateway} dev eth0")
    yield
    docker("stop", MIRROR)
    for node in (SERVER, GPU):
        shell(node, "ip route replace default via 192.0.2.1 dev eth0 onlink")


def shell(node: str, script: str) -> str:
    return docker("exec", node, "sh", "-euc", script)


def test_as_printed(tmp_path: Path) -> None:
    """Collecting once more downloads nothing anew, and the farm is as it was; idempotence of both is tested here."""
    before = {path: path.stat().st_mtime_ns for path in BUNDLE.rglob("*") if path.is_file()}
    collect, install = printed.commands(printed.block(ROOT / "README.md", "# where there is internet"))
    inventory = Path(os.environ["MOLECULE_INVENTORY_FILE"]).parent
    with user_shell(tmp_path / "home", inventory) as shell_of_user:
        shell_of_user(printed.commands(printed.block(ROOT / "README.md", "ansible-galaxy"))[0])
        with internet():
            shell_of_user(collect.replace("/srv/bundle", str(BUNDLE)))
        said = shell_of_user(install.replace("/srv/bundle", str(BUNDLE)))
    after = {path: path.stat().st_mtime_ns for path in BUNDLE.rglob("*") if path.is_file()}
    assert {path: after.get(path) for path in before if path.suffix in {".deb", ".zip"}} == {
        path: time for path, time in before.items() if path.suffix in {".deb", ".zip"}
    }
    counts = re.findall(r"^(\S+) +: ok=\d+ +changed=(\d+) ", said, re.MULTILINE)
    assert dict(counts) == {SERVER: "0", GPU: "0"}, said


def test_all_came_from_the_bundle() -> None:
    """Of packages that no node has had before, and of what the farm is run by."""
    for node in (SERVER, GPU):
        for package in ("docker.io", "nvidia-container-toolkit", "nvidia-driver-cuda", *CUDA[node]):
            policy = shell(node, f"APT_CONFIG={HERE}/apt.conf apt-cache policy {package}")
            installed = policy.split("Installed: ")[1].split()[0]
            assert installed != "(none)" and f"*** {installed}" in policy and f"file:{HERE}/apt/" in policy
    assert {file["from"].split("/")[2] for file in manifest()["files"].values()} >= {"mirror.gpufarm.test"}


def test_apt_of_the_nodes_is_as_it_was() -> None:
    for node in (SERVER, GPU):
        assert shell(node, "ls /etc/apt/sources.list.d") == ""
        assert "gpufarm" not in shell(node, "apt-config dump; cat /etc/apt/sources.list; ls /var/lib/apt/lists")


def test_who_has_collected_has_nothing_left_of_it() -> None:
    assert "collect" not in shell(SERVER, "ls /var/lib/gpufarm")


def test_nodes_have_only_what_they_lacked() -> None:
    """The bundle has what those need that have nothing yet, as the C library."""
    packages = {Path(name).name for name, file in manifest()["files"].items() if "package" in file}
    there = set(shell(GPU, f"find {HERE}/apt -name '*.deb' -printf '%f\\n'").split())
    assert there < packages and not any(name.startswith("libc6_") for name in there)
    assert any(name.startswith("libc6_") for name in packages)


def lacking_toolkit() -> None:
    shell(GPU, f"dpkg --purge --force-depends nvidia-container-toolkit && rm -r {HERE}/apt/nvidia-container-toolkit")


def test_a_damaged_package_is_refused_by_name() -> None:
    before = shell(GPU, f"ls {HERE}/apt").split()
    lacking_toolkit()
    (package,) = (BUNDLE / f"apt/{PLATFORM}/nvidia-container-toolkit").glob("nvidia-container-toolkit_*.deb")
    with damaged(package):
        run = enter("container_toolkit/main", limit=GPU)
    said = words(run.output)
    assert run.code != 0 and f"{GPU}: {package} has the SHA-256 " in said, run.output
    assert "Expected: " in said and "run playbooks/bundle.yml again with this inventory" in said
    # Beside NVIDIA's there are only the repositories of the distribution, whose names are those of its servers.
    distribution = {each["name"] for each in manifest()["platforms"][PLATFORM]["repositories"] if not each["of_role"]}
    assert set(before) == {*distribution, "nvidia-container-toolkit", "nvidia-cuda"}
    assert shell(GPU, f"ls {HERE}/apt").split() == [name for name in before if name != "nvidia-container-toolkit"]
    assert enter("container_toolkit/main", limit=GPU).code == 0


def test_apt_itself_refuses_what_upstream_has_not_signed() -> None:
    """Whoever can write the manifest as well gets no package onto a node."""
    lacking_toolkit()
    (package,) = (BUNDLE / f"apt/{PLATFORM}/nvidia-container-toolkit").glob("nvidia-container-toolkit_*.deb")
    text, told = (BUNDLE / "manifest.json").read_text("utf-8"), manifest()
    with damaged(package):
        told["files"][package.relative_to(BUNDLE).as_posix()]["sha256"] = hashlib.sha256(
            package.read_bytes()
        ).hexdigest()
        (BUNDLE / "manifest.json").write_text(json.dumps(told), "utf-8")
        run = enter("container_toolkit/main", limit=GPU)
        (BUNDLE / "manifest.json").write_text(text, "utf-8")
    assert run.code != 0 and "could not be installed" in words(run.output) and "Hash Sum mismatch" in run.output
    assert docker(
        "exec", GPU, "sh", "-c", "dpkg-query -W -f '${db:Status-Status}' nvidia-container-toolkit || true"
    ) in ("", "not-installed")
    assert enter("container_toolkit/main", limit=GPU).code == 0


def test_files_of_others_are_named_before_anything_changes() -> None:
    strange = BUNDLE / f"apt/{PLATFORM}/strange.deb"
    strange.write_text("strange")
    run = run_in_scenario("playbooks/site.yml")
    strange.unlink()
    assert run.code != 0 and sum(run.changed.values()) == 0, run.output
    for node in (SERVER, GPU):
        assert (
            f"{node}: the bundle {BUNDLE} is not as its manifest has it: apt/{PLATFORM}/strange.deb is not in the "
            "manifest. Expected: what was collected, and nothing of others."
        ) in words(run.output), run.output


def test_what_was_not_collected_is_named() -> None:
    run = enter("cuda/main", limit=GPU, cuda_version="12.8")
    assert run.code != 0 and (
        f"{GPU}: the bundle has not cuda-toolkit-12-8 for {PLATFORM}. Expected: all that the roles of this host "
        "install. Next step: run playbooks/bundle.yml again with this inventory, where there is internet."
    ) in words(run.output), run.output


@pytest.mark.parametrize("part", ["zip", "SHA256SUMS"])
def test_a_damaged_release_is_refused_by_name(part: str) -> None:
    (path,) = (BUNDLE / "releases/nomad-device-nvidia").glob(f"*/*{part}")
    shell(GPU, "mv /opt/nomad/plugins/nomad-device-nvidia /root/")
    with damaged(path):
        run = enter("nomad_device_nvidia/main", limit=GPU)
    shell(GPU, "mv /root/nomad-device-nvidia /opt/nomad/plugins/")
    assert run.code != 0 and f"{GPU}: {BUNDLE}/releases has not, or not whole, nomad-device-nvidia/" in words(
        run.output
    )


def test_a_machine_that_leaves_has_nothing_of_it() -> None:
    run = run_in_scenario("playbooks/remove.yml", "--limit", GPU)
    assert run.code == 0, run.output
    # CUDA was not to go, and neither does the note of whose it is.
    assert shell(GPU, "ls -A /var/lib/gpufarm 2>/dev/null || true").split() == ["cuda"]
