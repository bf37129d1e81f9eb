# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A real apt collects from signed repositories what packages need, and nothing else."""

from __future__ import annotations

import gzip
import hashlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpufarm.core.plugins.module_utils import apt_bundle
from ansible_collections.gpufarm.core.plugins.modules import bundle_collect
from ansible_collections.gpufarm.core.tests.unit.plugins.modules import release_helper as helper

from tests.simulator.mirror.serve import badly_signed

pytestmark = pytest.mark.skipif(
    not (helper.HAS_GPG and shutil.which("apt-get") and shutil.which("dpkg-deb")),
    reason="gpg, apt and dpkg-deb are needed to see what apt would install",
)

PIN = "Package: driver*\nPin: version 570.*\nPin-Priority: 1000\n"


gpg = helper.gpg


@pytest.fixture(scope="module")
def signer(gpg: helper.Gpg) -> str:
    return gpg.new_key("repository")


def deb(
    folder: Path, name: str, version: str, depends: str = "", *, recommends: str = "",
    files: dict[str, str] | None = None,
) -> Path:  # fmt: skip
    root = folder / f"{name}-{version}"
    (root / "DEBIAN").mkdir(parents=True)
    needs = f"Depends: {depends}\n" if depends else ""
    needs += f"Recommends: {recommends}\n" if recommends else ""
    control = f"Package: {name}\nVersion: {version}\nArchitecture: all\nMaintainer: x <x@x>\n{needs}Description: x\n"
    (root / "DEBIAN/control").write_text(control)
    for path, text in (files or {}).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    target = folder / f"{name}_{version.replace(':', '%3a')}_all.deb"
    subprocess.run(["dpkg-deb", "--root-owner-group", "--build", root, target], check=True, capture_output=True)
    return target


class Upstream:
    """A flat repository as a vendor has it, and a distribution's."""

    def __init__(self, folder: Path, server: helper.Server, gpg: helper.Gpg, signer: str) -> None:
        self.folder, self.server, self.gpg, self.signer = folder, server, gpg, signer
        pinning = {"etc/apt/preferences.d/pin": PIN}
        self.flat = [
            deb(folder, "pinning", "570", files=pinning),
            deb(folder, "driver", "570.1", "driver-lib (= 570.1), libbase"),
            deb(folder, "driver-lib", "570.1"), deb(folder, "driver", "580.1", "driver-lib (= 580.1)"),
            deb(folder, "driver-lib", "580.1"), deb(folder, "unwanted", "1"),
            deb(folder, "engine", "1", recommends="network"), deb(folder, "network", "1"),
        ]  # fmt: skip
        self.base = [deb(folder, "libbase", "1:2.0+b", "essential"), deb(folder, "essential", "1")]
        # Which has nothing that is wanted.
        self.publish("/other", "", "", [(deb(folder, "other", "1"), "other_1_all.deb")])
        self.publish("/cuda", "", "", [(path, path.name) for path in self.flat])
        self.publish(
            "/debian", "dists/trixie/", "main/binary-all/",
            [(path, f"pool/main/{path.name.replace('1%3a', '')}") for path in self.base],
        )  # fmt: skip

    def publish(self, place: str, suite: str, lists: str, packages: list[tuple[Path, str]]) -> None:
        stanzas = []
        for path, where in packages:
            body = path.read_bytes()
            self.server.files[f"{place}/{'' if suite else './'}{where.replace('+', '%2b')}"] = body
            control = subprocess.run(["dpkg-deb", "-f", path], check=True, capture_output=True, text=True).stdout
            digest = hashlib.sha256(body).hexdigest()
            name = where if suite else f"./{where}"
            stanzas.append(f"{control.strip()}\nFilename: {name}\nSize: {len(body)}\nSHA256: {digest}\n")
        text = "".join(f"{stanza}\n" for stanza in stanzas).encode()
        lines = ""
        for name, body in ((f"{lists}Packages", text), (f"{lists}Packages.gz", gzip.compress(text, mtime=0))):
            self.server.files[f"{place}/{suite}{name}"] = body
            lines += f" {hashlib.sha256(body).hexdigest()} {len(body)} {name}\n"
        more = "Suite: stable\nCodename: trixie\nArchitectures: all amd64 arm64\nComponents: main\n" if suite else ""
        release = f"{more}Date: Thu, 01 Jan 2026 00:00:00 UTC\nSHA256:\n{lines}"
        signed = self.gpg.run("--local-user", self.signer, "--clearsign", data=release.encode())
        self.server.files[f"{place}/{suite}InRelease"] = signed


class Collector:
    """The module on a host whose entries are those of the distribution."""

    def __init__(self, folder: Path, upstream: Upstream, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self._upstream, self._capsys = folder, upstream, capsys

    def collect(self, *packages: str, first: tuple[str, ...] = (), login: str = "", **more: Any) -> helper.Outcome:
        (self.folder / "keys").mkdir(parents=True, exist_ok=True)
        (self.folder / "keys/cuda.asc").write_bytes(self._upstream.gpg.export(self._upstream.signer))
        url = f"{self._upstream.server.url}/cuda".replace("://", f"://{login}@" if login else "://")
        given = {
            "bundle": "/b", "platform": "here", "folder": str(self.folder),
            "repositories": [{"name": "cuda", "url": url, "key": str(self.folder / "keys/cuda.asc")}],
            "wanted": [{"packages": packages, "first": first}], "origins": {"keys": "https://up.example"}, **more,
        }  # fmt: skip
        return helper.run_module(bundle_collect.main, self._capsys, given)


@pytest.fixture
def upstream(tmp_path: Path, gpg: helper.Gpg, signer: str) -> Iterator[Upstream]:
    server = helper.Server()
    (tmp_path / "debs").mkdir()
    yield Upstream(tmp_path / "debs", server, gpg, signer)
    server.close()


@pytest.fixture
def collector(
    tmp_path: Path, upstream: Upstream, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Collector:
    etc = tmp_path / "etc"
    (etc / "sources.list.d").mkdir(parents=True)
    (tmp_path / "debian.asc").write_bytes(upstream.gpg.export(upstream.signer))
    (etc / "sources.list").write_text(
        f"deb [signed-by={tmp_path}/debian.asc] {upstream.server.url}/debian trixie main\n"
        f"deb [signed-by={tmp_path}/debian.asc] {upstream.server.url}/other /\n"
    )
    monkeypatch.setattr(bundle_collect, "ETC", etc)
    monkeypatch.setattr(bundle_collect, "STATUS_OF_HOST", "/dev/null")
    # Root alone has them, and a folder of pytest's is open to nobody else.
    monkeypatch.setattr(bundle_collect, "SETTINGS", {
        **bundle_collect.SETTINGS, "APT::Sandbox::User": "", "Acquire::http::Proxy": "DIRECT", "Acquire::Retries": "0",
    })  # fmt: skip
    return Collector(tmp_path / "collect", upstream, capsys)


def names(answer: helper.Outcome) -> list[str]:
    return sorted(answer["collected"]["files"])


HOST = "apt/here/127.0.0.1_"


def test_packages_come_with_all_that_they_need_and_what_vouches_for_them(collector: Collector) -> None:
    answer = collector.collect("driver=570.*", first=("pinning",))
    assert not answer.get("failed"), answer
    found = answer["collected"]
    short = [name.replace(HOST, "H_") for name in names(answer)]
    port = next(name for name in short if name.startswith("H_")).split("_")[1]
    assert [name.replace(f"H_{port}", "apt/here/H") for name in short] == sorted([
        "apt/here/H_debian/dists/trixie/InRelease", "apt/here/H_debian/dists/trixie/main/binary-all/Packages",
        "apt/here/H_debian/pool/main/essential_1_all.deb", "apt/here/H_debian/pool/main/libbase_2.0+b_all.deb",
        "apt/here/cuda/InRelease", "apt/here/cuda/Packages", "apt/here/cuda/driver-lib_570.1_all.deb",
        "apt/here/cuda/driver_570.1_all.deb", "keys/here/cuda.asc",
    ])  # fmt: skip
    base = found["files"][f"{HOST}{port}_debian/pool/main/libbase_2.0+b_all.deb"]
    assert base["package"] == "libbase_1%3a2.0+b_all.deb"
    for file in found["files"].values():
        assert hashlib.sha256(Path(file["source"]).read_bytes()).hexdigest() == file["sha256"]
    for name in ("apt/here/cuda", f"{HOST}{port}_debian/dists/trixie"):
        signed = apt_bundle.parse_signed(Path(found["files"][f"{name}/InRelease"]["source"]).read_text())
        lists = {path[len(name) + 1 :]: file["sha256"] for path, file in found["files"].items()
                 if path.startswith(name) and "Packages" in path}  # fmt: skip
        assert lists and lists.items() <= signed.items()
    assert found["files"]["keys/here/cuda.asc"]["from"] == "https://up.example/cuda.asc"
    (wanted,) = found["wanted"]
    assert wanted["packages"] == ["driver=570.*"] and len(wanted["files"]) == 4
    distribution, vendor = sorted(found["repositories"], key=lambda each: bool(each["of_role"]))
    assert (distribution["suite"], distribution["components"]) == ("trixie", ["main"])
    assert distribution["signed_by"].endswith("debian.asc")
    assert vendor == {"name": "cuda", "suite": "/", "components": [], "signed_by": "", "of_role": True}


def test_another_branch_needs_its_preferences_first(collector: Collector) -> None:
    """Without them apt takes the newer library for the only one."""
    answer = collector.collect("driver=570.*")
    assert answer["failed"] and "driver-lib (= 570.1)" in answer["msg"], answer
    assert ". Expected: " in answer["msg"] and ". Next step: " in answer["msg"]
    shutil.rmtree(collector.folder)
    assert not collector.collect("driver=570.*", first=("pinning",)).get("failed")


def test_what_the_bundle_has_is_not_downloaded_again(collector: Collector, upstream: Upstream) -> None:
    have = {
        f"x/{path.name}": hashlib.sha256(path.read_bytes()).hexdigest() for path in [*upstream.flat, *upstream.base]
    }
    answer = collector.collect("driver", have=have)
    files = answer["collected"]["files"]
    debs = {name: file["source"] for name, file in files.items() if name.endswith(".deb")}
    assert len(debs) == 2 and set(debs.values()) == {""}
    assert not any(path.endswith(".deb") for path in upstream.server.requests)


@pytest.mark.parametrize(("more", "comes"), [({"recommended": True}, ["engine", "network"]), ({}, ["engine"])])
def test_what_is_installed_with_recommendations_comes_with_them(
    collector: Collector, more: dict[str, Any], comes: list[str]
) -> None:
    answer = collector.collect(wanted=[{"packages": ["engine"], **more}])
    packages = [f"apt/here/cuda/{name}_1_all.deb" for name in comes]
    assert answer.get("collected", answer).get("wanted") == [{"packages": ["engine"], "files": packages}], answer
    assert [name for name in names(answer) if name.endswith(".deb")] == packages


def test_what_may_be_left_out_is_told(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(bundle_collect.AnsibleModule, "warn", lambda _self, text: warnings.append(text))
    wanted = [
        {"packages": ["nothing-like-it"], "optional": True}, {"packages": ["unwanted"], "optional": True},
        {"packages": ["driver"]},
    ]  # fmt: skip
    answer = collector.collect(wanted=wanted)
    assert [each["packages"] for each in answer["collected"]["wanted"]] == [["unwanted"], ["driver"]], answer
    (told,) = warnings
    assert "the bundle is without nothing-like-it: " in told and "Unable to locate package nothing-like-it" in told


def test_what_may_be_left_out_is_not_where_its_download_fails(collector: Collector, upstream: Upstream) -> None:
    """Otherwise a server that is away for a moment would cost the bundle what it has."""
    path = "/cuda/./driver_580.1_all.deb"
    body = upstream.server.files.pop(path)
    answer = collector.collect(wanted=[{"packages": ["driver"], "optional": True}])
    assert answer.get("failed") and "apt could not collect what is wanted" in answer["msg"], answer
    upstream.server.files[path] = body[:-1] + bytes([body[-1] ^ 1])
    answer = collector.collect(wanted=[{"packages": ["driver"], "optional": True}])
    assert answer.get("failed"), answer


def test_what_no_repository_has_is_named(collector: Collector) -> None:
    answer = collector.collect("driver", "nothing-like-it")
    assert answer["failed"] and "Unable to locate package nothing-like-it" in answer["msg"]


@pytest.mark.parametrize("place", ["/cuda/InRelease", "/debian/dists/trixie/InRelease"])
def test_nothing_is_collected_that_is_not_signed(collector: Collector, upstream: Upstream, place: str) -> None:
    upstream.server.files[place] = badly_signed(upstream.server.files[place])
    answer = collector.collect("driver")
    assert answer["failed"] and "apt could not collect what is wanted" in answer["msg"], answer


def test_a_server_that_cannot_be_reached_is_told(collector: Collector) -> None:
    """To apt that is no more than a warning."""
    (bundle_collect.ETC / "sources.list.d/away.list").write_text("deb http://127.0.0.1:1/debian trixie main\n")
    answer = collector.collect("driver")
    assert answer["failed"] and "http://127.0.0.1:1/debian" in answer["msg"], answer


def test_a_server_that_has_nothing_signed_is_told(collector: Collector, upstream: Upstream) -> None:
    del upstream.server.files["/debian/dists/trixie/InRelease"]
    answer = collector.collect("driver")
    assert answer["failed"] and "/debian" in answer["msg"]


def test_a_package_that_is_another_than_the_signed_one_is_not_collected(
    collector: Collector, upstream: Upstream
) -> None:
    path = "/cuda/./driver_580.1_all.deb"
    body = upstream.server.files[path]
    upstream.server.files[path] = body[:-1] + bytes([body[-1] ^ 1])
    answer = collector.collect("driver")
    assert answer["failed"] and "Hash Sum mismatch" in answer["msg"], answer


def test_a_login_is_shown_nowhere(collector: Collector, upstream: Upstream) -> None:
    for path in upstream.server.files:
        if path.startswith("/cuda"):
            upstream.server.ask_for_login(path, "robot:s3/cret")
    origins = {"keys": "https://robot:s3%2Fcret@up.example", "keys/cuda.asc": "https://robot:s3%2Fcret@up.example/k"}
    answer = collector.collect("driver", login="robot:s3%2Fcret", origins=origins)
    assert answer["collected"]["files"]["keys/here/cuda.asc"]["from"] == "https://up.example/k"
    assert not answer.get("failed") and "cret" not in str(answer).replace("s3cret", ""), answer
    assert (collector.folder / "auth.conf.d/cuda.conf").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ["90ubuntu-advantage", "mine.conf"])
def test_the_logins_of_the_host_are_taken(collector: Collector, upstream: Upstream, name: str) -> None:
    for path in upstream.server.files:
        if path.startswith("/debian"):
            upstream.server.ask_for_login(path, "robot:secret")
    (bundle_collect.ETC / "auth.conf.d").mkdir()
    login = f"machine {upstream.server.url}/ login robot password secret\n"
    (bundle_collect.ETC / "auth.conf.d" / name).write_text(login)
    answer = collector.collect("libbase")
    assert not answer.get("failed") and len(answer["collected"]["wanted"][0]["files"]) == 2, answer


def test_a_login_of_the_hosts_own_entries_is_in_no_arguments(
    collector: Collector, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in upstream.server.files:
        if path.startswith("/debian"):
            upstream.server.ask_for_login(path, "robot:secret")
    entries = bundle_collect.ETC / "sources.list"
    entries.write_text(entries.read_text().replace("http://", "http://robot:secret@"))
    asked: list[str] = []
    run = bundle_collect.AnsibleModule.run_command
    monkeypatch.setattr(
        bundle_collect.AnsibleModule, "run_command",
        lambda self, words, **more: asked.append(" ".join(words)) or run(self, words, **more),
    )  # fmt: skip
    answer = collector.collect("libbase")
    assert not answer.get("failed") and len(answer["collected"]["wanted"][0]["files"]) == 2, answer
    assert any("download-file" in line for line in asked) and not any("secret" in line for line in asked)
    assert "secret" not in str(answer)


def test_entries_of_the_host_for_the_same_repository_are_left_aside(collector: Collector, upstream: Upstream) -> None:
    """Two entries with different Signed-By stop apt."""
    entry = f"deb [signed-by=/none.asc] {upstream.server.url}/cuda /\n"
    (bundle_collect.ETC / "sources.list.d/older.list").write_text(entry)
    assert collector.collect("driver")["failed"]
    shutil.rmtree(collector.folder)
    url = f"{upstream.server.url}/cuda"
    given = {"name": "cuda", "url": url, "key": f"{collector.folder}/keys/cuda.asc", "obsolete": ["older.list"]}
    assert not collector.collect("driver", repositories=[given]).get("failed")


def test_an_entry_that_has_its_key_in_itself_is_told(collector: Collector, upstream: Upstream) -> None:
    """A host of the bundle would have an entry without a key, and apt would take nothing from there."""
    (bundle_collect.ETC / "sources.list").unlink()
    lines = upstream.gpg.export(upstream.signer).decode().splitlines()
    key = "\n".join(f" {line or '.'}" for line in lines)
    entry = f"Types: deb\nURIs: {upstream.server.url}/debian\nSuites: trixie\nComponents: main\nSigned-By:\n{key}\n"
    path = bundle_collect.ETC / "sources.list.d/own.sources"
    path.write_text(entry)
    said = collector.collect("libbase")["msg"]
    assert f"{path} has the key of {upstream.server.url}/debian/ in itself. Expected: an entry that names a" in said
    assert "Next step: store the key as a file below /etc/apt/keyrings" in said and "BEGIN" not in said
