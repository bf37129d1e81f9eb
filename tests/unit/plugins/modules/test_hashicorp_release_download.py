# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import concurrent.futures
import functools
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpufarm.core.plugins.module_utils import release
from ansible_collections.gpufarm.core.plugins.modules import hashicorp_release, hashicorp_release_download
from ansible_collections.gpufarm.core.tests.unit.plugins.modules import release_helper as helper

pytestmark = pytest.mark.skipif(not helper.HAS_GPG, reason=helper.GPG_MISSING)

FOLDER = "nomad/1.2.3/nomad_1.2.3_"
ZIP, SUMS, SIGNATURE = f"{FOLDER}linux_amd64.zip", f"{FOLDER}SHA256SUMS", f"{FOLDER}SHA256SUMS.sig"
KEY = "pgp-key.txt"


gpg = helper.gpg


@pytest.fixture(scope="module")
def signer(gpg: helper.Gpg) -> str:
    return gpg.new_key("signer")


@pytest.fixture
def releases(gpg: helper.Gpg, signer: str) -> Iterator[helper.Releases]:
    server = helper.Server()
    published = helper.Releases(server, gpg, signer)
    published.publish("nomad", "1.2.3", b"program ", ("amd64", "arm64"))
    yield published
    server.close()


class Control:
    """The module on a control machine, with a folder of its own."""

    def __init__(self, folder: Path, releases: helper.Releases, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capsys, self._releases = folder, capsys, releases
        self.arguments: dict[str, Any] = {
            "product": "nomad",
            "version": "1.2.3",
            "base_url": releases.server.url,
            "key_url": f"{releases.server.url}/key.txt",
            "key_fingerprints": [releases.signer],
            "dest": str(folder),
        }

    def run(self, check: bool = False, **arguments: Any) -> helper.Outcome:
        main = hashicorp_release_download.main
        return helper.run_module(main, self._capsys, {**self.arguments, **arguments}, check_mode=check)

    def asked(self) -> list[str]:
        """What the server was asked for since the last time."""
        found = [path.lstrip("/").replace("key.txt", KEY) for path in self._releases.server.requests]
        self._releases.server.requests.clear()
        return sorted(found)

    def names(self) -> set[str]:
        return {str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file()}


@pytest.fixture
def control(tmp_path: Path, releases: helper.Releases, capsys: pytest.CaptureFixture[str]) -> Control:
    return Control(tmp_path / "releases", releases, capsys)


def test_a_release_is_downloaded_once(control: Control) -> None:
    everything = [ZIP, SUMS, SIGNATURE, KEY]
    announced = control.run(check=True)
    assert announced["changed"] and sorted(announced["downloaded"]) == sorted(everything)
    assert control.asked() == [] and not control.folder.exists()
    first = control.run()
    assert first["changed"] and first["files"] == everything and sorted(first["downloaded"]) == sorted(everything)
    assert control.asked() == sorted(everything)
    second = control.run()
    assert not second["changed"] and second["downloaded"] == [] and control.asked() == []
    # Nor is a folder that has everything written to, which may be somebody else's.
    lock = control.folder / ".lock"
    lock.unlink()
    assert not control.run()["changed"] and not lock.exists()
    other = control.run(architecture="arm64")
    assert other["downloaded"] == [ZIP.replace("amd64", "arm64")] == control.asked()


def test_a_node_installs_from_the_folder_without_network(
    control: Control, tmp_path: Path, capsys: pytest.CaptureFixture[str], releases: helper.Releases
) -> None:
    control.run()
    control.asked()
    arguments = {
        **{name: control.arguments[name] for name in ("product", "version", "key_fingerprints")},
        "base_url": str(control.folder),
        "key_url": str(control.folder / KEY),
        "dest": str(tmp_path / "bin"),
        "receipt_dir": str(tmp_path / "receipts"),
        "architecture": "amd64",
    }
    node = functools.partial(helper.run_module, hashicorp_release.main, capsys)
    done = node(arguments)
    assert done["changed"] and (tmp_path / "bin/nomad").read_bytes() == b"program amd64"
    assert done["source"] == str(control.folder / ZIP) and done["signature"] == releases.signer
    assert control.asked() == []
    # What was brought is not believed either.
    (control.folder / SUMS).write_bytes((control.folder / SUMS).read_bytes() + b"\n")
    assert "BAD" in node({**arguments, "dest": str(tmp_path / "other")})["msg"]
    (control.folder / SUMS).unlink()
    missing = node({**arguments, "dest": str(tmp_path / "other")})
    assert missing["msg"] == (
        f"{platform.node()}: {control.folder / SUMS} cannot be read (No such file or directory). Expected: a file of a "
        "release, in a folder laid out like releases.hashicorp.com. Next step: bring the file there, or name the "
        "address of a server that has it."
    )


def test_a_file_that_is_too_large_is_none_of_a_release(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b"12345")
    with pytest.raises(release.ReleaseError, match="is larger than 4 bytes"):
        release.download(str(tmp_path / "large"), release.Network(), limit=4)
    with release.download(str(tmp_path / "large"), release.Network(), limit=5) as file:
        assert file.read() == b"12345"


@pytest.mark.parametrize(
    ("name", "content", "asked"),
    [
        (ZIP, b"half a zip", [ZIP]),
        (ZIP, None, [ZIP]),
        (SUMS, b"<html>please log in</html>", [SUMS, SIGNATURE]),
        (SUMS, None, [SUMS, SIGNATURE]),
        (SIGNATURE, None, [SUMS, SIGNATURE]),
        (SIGNATURE, b"<html>please log in</html>", [SUMS, SIGNATURE]),
        (SIGNATURE, b"", [SUMS, SIGNATURE]),
        (KEY, b"<html>please log in</html>", [SUMS, SIGNATURE, KEY]),
        (KEY, None, [SUMS, SIGNATURE, KEY]),
    ],
)
def test_what_is_damaged_or_gone_is_downloaded_again(
    control: Control, name: str, content: bytes | None, asked: list[str]
) -> None:
    control.run()
    whole = (control.folder / name).read_bytes()
    control.asked()
    if content is None:
        (control.folder / name).unlink()
    else:
        (control.folder / name).write_bytes(content)
    again = control.run()
    assert again["changed"] and sorted(again["downloaded"]) == sorted(asked)
    assert control.asked() == sorted(asked) and (control.folder / name).read_bytes() == whole
    assert (control.folder / name).stat().st_mode & 0o777 == 0o644


def test_a_signature_in_armor_is_one(control: Control, releases: helper.Releases, gpg: helper.Gpg) -> None:
    sums = releases.server.files[f"/{SUMS}"]
    armored = gpg.run("--local-user", releases.signer, "--armor", "--detach-sign", data=sums)
    releases.server.files[f"/{SIGNATURE}"] = armored
    control.run()
    assert (control.folder / SIGNATURE).read_bytes() == armored and not control.run()["changed"]


def test_what_is_served_for_a_signature_and_is_none_does_not_stay(control: Control, releases: helper.Releases) -> None:
    releases.server.files[f"/{SIGNATURE}"] = b"<html>please log in</html>"
    assert control.run()["msg"] == (
        f"{platform.node()}: {releases.server.url}/{SIGNATURE} is no OpenPGP signature. Expected: that of the list of "
        "checksums. Next step: check the address; a login page or an error page of a proxy is a common cause."
    )
    assert not (control.folder / SIGNATURE).exists()


def test_what_is_there_stays_where_something_else_is_served_for_it(
    control: Control, releases: helper.Releases, gpg: helper.Gpg
) -> None:
    """A mistake in the pin, or a proxy that asks for a login, costs none of what a carried folder has."""
    releases.publish("nomad-device-nvidia", "1.1.0", b"plugin ")
    control.run()
    control.run(product="nomad-device-nvidia", version="1.1.0")
    before = {name: (control.folder / name).read_bytes() for name in control.names()}
    other = gpg.new_key("of somebody else's")
    assert control.run(key_fingerprints=[other])["msg"] == (
        f"{platform.node()}: {releases.server.url}/key.txt holds {releases.signer}. Expected: a key with the "
        f"fingerprint {other}. Next step: check key_url and key_fingerprints; a login page or an error page of a proxy "
        "is a common cause."
    )
    assert {name: (control.folder / name).read_bytes() for name in control.names()} == before
    (control.folder / KEY).write_bytes(b"damaged")
    releases.server.files[f"/{SIGNATURE}"] = b"<html>please log in</html>"
    assert "is no OpenPGP signature" in control.run()["msg"]
    assert {name: (control.folder / name).read_bytes() for name in control.names()} == before


def test_another_key_has_signed_all_that_is_there_anew(
    control: Control, releases: helper.Releases, gpg: helper.Gpg
) -> None:
    releases.publish("nomad-device-nvidia", "1.1.0", b"plugin ")
    plugin = {"product": "nomad-device-nvidia", "version": "1.1.0"}
    control.run()
    control.run(**plugin)
    releases.signer = gpg.new_key("another")
    releases.server.files["/key.txt"] = gpg.export(releases.signer)
    for product, version in (("nomad", "1.2.3"), plugin.values()):
        sums = releases.server.files[f"/{product}/{version}/{product}_{version}_SHA256SUMS"]
        releases.list_sums(product, version, sums)
    control.asked()
    again = {"key_fingerprints": [releases.signer]}
    assert sorted(control.run(**again)["downloaded"]) == sorted([SUMS, SIGNATURE, KEY])
    assert len(control.run(**again, **plugin)["downloaded"]) == 2
    for name in (SIGNATURE, "nomad-device-nvidia/1.1.0/nomad-device-nvidia_1.1.0_SHA256SUMS.sig"):
        assert (control.folder / name).read_bytes() == releases.server.files[f"/{name}"]
    control.asked()
    assert not control.run(**again)["changed"] and not control.run(**again, **plugin)["changed"]
    assert control.asked() == []


def ended(*_given: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("name", [KEY, SIGNATURE, SUMS])
def test_a_run_that_ends_when_another_key_came_is_made_good_by_the_next(
    control: Control, releases: helper.Releases, gpg: helper.Gpg, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    control.run()
    releases.signer = gpg.new_key("another after that")
    releases.server.files["/key.txt"] = gpg.export(releases.signer)
    releases.list_sums("nomad", "1.2.3", releases.server.files[f"/{SUMS}"] + b"\n")
    again = {"key_fingerprints": [releases.signer]}
    if name == KEY:
        # Between the key and what the former one has signed.
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(Path, "glob", ended)
            control.run(**again)
    else:
        there = releases.server.files.pop(f"/{name}")
        assert f"{name} does not exist" in control.run(**again)["msg"]
        releases.server.files[f"/{name}"] = there
    assert control.run(**again)["changed"]
    for each in (SIGNATURE, SUMS, KEY):
        wanted = releases.server.files["/key.txt" if each == KEY else f"/{each}"]
        assert (control.folder / each).read_bytes() == wanted, each


@pytest.mark.parametrize(("name", "times"), [(None, 1), (SUMS, 1), (SIGNATURE, 1), (KEY, 1), (ZIP, 2)])
def test_a_zip_is_read_once(control: Control, monkeypatch: pytest.MonkeyPatch, name: str | None, times: int) -> None:
    """And the one that comes for another."""
    control.run()
    if name == ZIP:
        (control.folder / ZIP).write_bytes(b"half a zip")
    elif name:
        (control.folder / name).unlink()
    # As a process that has read nothing yet.
    hashicorp_release_download.sum_of.cache_clear()
    read: list[str] = []
    sha256 = release.sha256
    monkeypatch.setattr(release, "sha256", lambda file: read.append(file.name) or sha256(file))
    control.run()
    assert read == [str(control.folder / ZIP)] * times


def test_a_zip_that_the_list_does_not_vouch_for_does_not_stay(control: Control, releases: helper.Releases) -> None:
    releases.server.files[f"/{ZIP}"] = b"another zip"
    failed, listed = control.run(), (control.folder / SUMS).read_text().split()
    assert failed["msg"] == (
        f"{platform.node()}: {releases.server.url}/{ZIP} has not the sha256 {listed[listed.index(Path(ZIP).name) - 1]} "
        f"that {releases.server.url}/{SUMS} lists. Expected: the zip of this release. Next step: download again; if it "
        "stays so, the file on this server is damaged or was replaced."
    )
    assert control.names() == {SUMS, SIGNATURE, KEY, ".lock"}


def test_an_architecture_that_is_not_released(control: Control) -> None:
    failed = control.run(architecture="riscv64")
    assert "lists no nomad_1.2.3_linux_riscv64.zip; it has these Linux architectures: amd64, arm64" in failed["msg"]


@pytest.mark.parametrize(
    ("option", "value"), [("version", "../1.2.3"), ("product", "../nomad"), ("architecture", "a/b")]
)
def test_no_option_leads_out_of_the_folder(control: Control, option: str, value: str) -> None:
    assert f"the option '{option}' is '{value}'. Expected: " in control.run(**{option: value})["msg"]
    assert not control.folder.exists()


def test_a_folder_that_cannot_be_made(control: Control) -> None:
    control.folder.write_text("a file")
    assert re.fullmatch(
        rf"{platform.node()}: the release cannot be kept in {control.folder} \(.*\)\. Expected: a folder that this "
        r"task may write to, with room for the zip\. Next step: check 'dest' and the free space\.",
        control.run()["msg"],
    )


def test_of_many_processes_one_downloads(control: Control) -> None:
    """A run over many nodes has a process for each, on one control machine."""
    program = f"""
from ansible.module_utils.testing import patch_module_args
from {hashicorp_release_download.__name__} import main
with patch_module_args({control.arguments!r}):
    main()
"""

    def one(_number: int) -> dict[str, Any]:
        command = [sys.executable, "-c", program]
        given = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        answer = subprocess.run(command, env=given, capture_output=True, text=True, check=False, timeout=600)
        assert answer.stdout, answer.stderr
        found: dict[str, Any] = json.loads(answer.stdout)
        return found

    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        outcomes = list(pool.map(one, range(5)))
    assert [each["changed"] for each in outcomes].count(True) == 1, outcomes
    assert control.asked() == sorted([ZIP, SUMS, SIGNATURE, KEY])


def test_a_folder_that_another_process_makes_meanwhile_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = tmp_path / "nomad/1.11.3"
    there.mkdir(parents=True)
    monkeypatch.setattr(Path, "exists", lambda path: path == tmp_path)
    release.make_folder(there)
    assert there.is_dir()


def test_a_fingerprint_that_is_none_is_told_by_its_option(control: Control) -> None:
    assert "the option 'key_fingerprints'" in control.run(key_fingerprints=["1234"])["msg"]


def test_a_password_is_nowhere(control: Control, releases: helper.Releases) -> None:
    url = releases.server.url.replace("http://", "http://farm:secret@")
    told = json.dumps([control.run(base_url=url, key_url=f"{url}/key.txt"), control.run(base_url=url, version="9")])
    assert "secret" not in told and "does not exist (HTTP 404)" in told
