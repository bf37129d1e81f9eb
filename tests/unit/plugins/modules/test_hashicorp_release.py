# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gpufarm.core.plugins.module_utils import release
from ansible_collections.gpufarm.core.plugins.modules import hashicorp_release
from ansible_collections.gpufarm.core.tests.unit.plugins.modules import release_helper as helper

pytestmark = pytest.mark.skipif(not helper.HAS_GPG, reason=helper.GPG_MISSING)

HOST = platform.node()


gpg = helper.gpg


@pytest.fixture(scope="module")
def signer(gpg: helper.Gpg) -> str:
    return gpg.new_key("signer", subkey=True)


@pytest.fixture(scope="module")
def stranger(gpg: helper.Gpg) -> str:
    return gpg.new_key("stranger")


@pytest.fixture
def server() -> Iterator[helper.Server]:
    running = helper.Server()
    yield running
    running.close()


@pytest.fixture
def releases(server: helper.Server, gpg: helper.Gpg, signer: str) -> helper.Releases:
    return helper.Releases(server, gpg, signer)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "Network", functools.partial(release.Network, pause=lambda _seconds: None))


class Node:
    """The module on a node of its own."""

    def __init__(self, folder: Path, server: helper.Server, signer: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.dest = folder / "bin"
        self.receipts = folder / "receipts"
        self.remote_tmp = folder / "remote_tmp"
        self.remote_tmp.mkdir()
        self.binary = self.dest / "nomad"
        self.receipt = hashicorp_release.receipt_path(self.receipts, "nomad", str(self.binary))
        self._capsys = capsys
        self.arguments: dict[str, Any] = {
            "product": "nomad",
            "version": "1.2.3",
            "base_url": server.url,
            "key_url": f"{server.url}/key.txt",
            "key_fingerprints": [signer],
            "dest": str(self.dest),
            "receipt_dir": str(self.receipts),
            "architecture": "amd64",
        }

    def run(self, check: bool = False, diff: bool = False, **arguments: Any) -> helper.Outcome:
        settings = {"check_mode": check, "diff": diff, "remote_tmp": str(self.remote_tmp)}
        return helper.run_module(hashicorp_release.main, self._capsys, {**self.arguments, **arguments}, **settings)

    def files(self) -> dict[str, bytes]:
        """Every file of the node, but for what a module leaves in Ansible's own folder until its process ends."""
        roots = [self.dest, self.receipts, self.remote_tmp]
        return {str(path): path.read_bytes() for root in roots for path in root.rglob("*") if path.is_file()}


@pytest.fixture
def node(tmp_path: Path, server: helper.Server, signer: str, capsys: pytest.CaptureFixture[str]) -> Node:
    return Node(tmp_path, server, signer, capsys)


def assert_error(result: helper.Outcome, *parts: str) -> None:
    assert result.get("failed"), result
    for part in (f"{HOST}: ", "Expected: ", "Next step: ", *parts):
        assert part in result["msg"]


def assert_says(result: helper.Outcome, text: str) -> None:
    assert result.get("failed") and result["msg"] == f"{HOST}: {text}"


PUBLIC = "check key_url; a login page or an error page of a proxy is a common cause"


def test_installs_what_was_verified(node: Node, releases: helper.Releases, signer: str) -> None:
    path = releases.publish("nomad", "1.2.3", b"program ", ("amd64", "arm64"))
    result = node.run(diff=True)
    assert result["changed"] and result["binary_changed"]
    assert node.binary.read_bytes() == b"program amd64"
    assert stat.S_IMODE(node.binary.stat().st_mode) == 0o755
    assert result["version"] == "1.2.3" and result["previous_version"] is None
    assert result["signature"] == signer
    assert result["path"] == str(node.binary)
    assert result["binary_sha256"] == hashlib.sha256(b"program amd64").hexdigest()
    assert result["diff"]["before"] == "" and result["diff"]["after"].startswith("nomad 1.2.3\n")
    receipt = json.loads(node.receipt.read_text())
    assert receipt["source"] == releases.server.url + path
    assert receipt["zip_sha256"] == hashlib.sha256(releases.server.files[path]).hexdigest()
    assert receipt["signed_by"] == signer
    assert set(node.files()) == {str(node.binary), str(node.receipt)}


def test_a_program_that_is_refused_replaces_none(
    node: Node, releases: helper.Releases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in ("1.2.3", "1.3.0"):
        releases.publish("nomad", version, f"#!/bin/sh\necho of {version}; exit 7 # ".encode())
    # It runs as it will be, so nobody may have it open for writing, in the folder in which it will be.
    log = tmp_path / "log"
    judge = tmp_path / "judge"
    says = f'echo "$code $#" "$@" >>{log}; echo "cannot\\033[31m start" >&2'
    judge.write_text(f'#!/bin/sh\n"$1"; code=$?; {says}; exit $2\n')
    judge.chmod(0o755)
    # Nothing is expanded, and a script stays as it is.
    monkeypatch.setenv("WORDS", "1")
    assert node.run(validate=f"{judge} %s 0 '$WORDS' a//b ~")["changed"]
    code, count, path, *rest = log.read_text().split()
    assert (code, count, Path(path).parent, rest) == ("7", "5", node.dest, ["0", "$WORDS", "a//b", "~"])
    before = node.files()
    result = node.run(version="1.3.0", validate=f"{judge} %s 1")
    assert_says(
        result,
        "the command in 'validate' refuses nomad 1.3.0 (of 1.3.0 cannot [31m start). Expected: a program that it "
        "accepts; what was there before stays. Next step: correct what it names, or set another version.",
    )
    assert node.files() == before
    assert len(log.read_text().splitlines()) == 2
    monkeypatch.setattr(hashicorp_release, "VALIDATE_S", 0.2)
    for command, told in (
        ("sh -c 'echo waits; exec sleep 600' %s", "it did not end within 0.2 s"),
        ("/nowhere %s", "No such file or directory"),
    ):
        result = node.run(version="1.3.0", validate=command)
        assert f"the command in 'validate' refuses nomad 1.3.0 ({told}). Expected: a program" in result["msg"]
    assert node.files() == before
    # Nothing is asked where the program stays, and in check mode.
    assert not node.run(validate="/nowhere %s")["changed"]
    node.receipt.unlink()
    assert node.run(validate="/nowhere %s")["changed"]
    assert node.run(check=True, version="1.3.0", validate="/nowhere %s")["changed"]


def test_what_killed_installations_have_left_goes(node: Node, releases: helper.Releases) -> None:
    releases.publish("nomad", "1.2.3", b"program ")
    node.dest.mkdir()
    # One that another process writes at this moment, and what others have.
    ages = {".gpufarm-abcd1234": 4000, ".gpufarm-new_0000": 3000, ".gpufarm-of-theirs": 4000, "gpufarm-abcd1234": 4000}
    for name, age in ages.items():
        (node.dest / name).write_bytes(b"half a program")
        os.utime(node.dest / name, (time.time() - age, time.time() - age))
    assert node.run()["changed"]
    assert {path.name for path in node.dest.iterdir()} == {"nomad", *ages} - {".gpufarm-abcd1234"}


def test_second_run_uses_no_network(node: Node, releases: helper.Releases) -> None:
    releases.publish("nomad", "1.2.3", b"program ")
    node.run()
    asked = len(releases.server.requests)
    result = node.run()
    assert not result["changed"] and not result["binary_changed"] and result["reasons"] == []
    assert result["previous_version"] == "1.2.3"
    assert len(releases.server.requests) == asked


def test_check_mode_tells_and_touches_nothing(node: Node, releases: helper.Releases) -> None:
    releases.publish("nomad", "1.2.3", b"program ")
    result = node.run(check=True)
    assert result["changed"] and result["binary_sha256"] is None
    assert node.files() == {} and not node.dest.exists() and not node.receipts.exists()
    assert releases.server.requests == []
    node.run()
    assert not node.run(check=True)["changed"]


def test_verified_is_what_was_installed_and_nothing_else(node: Node, releases: helper.Releases) -> None:
    releases.publish("nomad", "1.2.3", b"program ")
    assert_says(
        node.run(state="verified"),
        f"{node.binary} is not as it was installed: the program is not there. Expected: release 1.2.3 as it was "
        "verified when it was installed. Next step: run playbooks/site.yml, or the role that installs it, for this "
        "host.",
    )
    assert node.files() == {} and releases.server.requests == []
    node.run()
    asked = len(releases.server.requests)
    result = node.run(state="verified")
    assert not result["changed"] and result["version"] == "1.2.3"
    assert_error(node.run(state="verified", version="1.2.4"), "version is 1.2.3, not 1.2.4")
    node.binary.chmod(0o777)
    assert_error(node.run(state="verified"), "its owner or mode differs")
    assert node.binary.stat().st_mode & 0o7777 == 0o777
    node.binary.write_bytes(b"another")
    assert_error(node.run(state="verified"), "the program is not the one that was installed")
    assert node.binary.read_bytes() == b"another" and len(releases.server.requests) == asked


def test_upgrade_and_downgrade(node: Node, releases: helper.Releases) -> None:
    releases.publish("nomad", "1.2.3", b"old ")
    releases.publish("nomad", "1.3.0", b"new ")
    node.run()
    result = node.run(version="1.3.0", diff=True)
    assert result["changed"] and result["previous_version"] == "1.2.3"
    assert result["reasons"] == ["version is 1.2.3, not 1.3.0"]
    assert node.binary.read_bytes() == b"new amd64"
    old, new = (hashlib.sha256(program).hexdigest() for program in (b"old amd64", b"new amd64"))
    assert result["diff"] == {
        "before": f"nomad 1.2.3\nsha256 {old}\n",
        "after": f"nomad 1.3.0\nsha256 {new}\n",
        "before_header": str(node.binary),
        "after_header": str(node.binary),
    }
    assert node.run()["previous_version"] == "1.3.0"
    assert node.binary.read_bytes() == b"old amd64"


@pytest.mark.parametrize("damage", ["none", "delete", "modify"])
@pytest.mark.parametrize("check", [False, True])
def test_a_server_does_not_go_back(node: Node, releases: helper.Releases, damage: str, check: bool) -> None:
    for version in ("1.9.0", "1.10.0", "1.10.1", "1.10.1-beta.1"):
        releases.publish("nomad", version, version.encode())
    node.run(version="1.9.0")
    assert not node.run(version="1.10.0", downgrade=False).get("failed")
    if damage == "delete":
        node.binary.unlink()
    elif damage == "modify":
        node.binary.write_bytes(b"another")
    before = node.files()
    result = node.run(version="1.9.0", downgrade=False, check=check)
    assert_says(
        result,
        f"{node.binary} was nomad 1.10.0. Expected: a version that is not newer than 1.9.0, because an older server "
        "may not read what a newer one has written. Next step: set the version to 1.10.0 or a newer one; to go back, "
        "restore a snapshot on new servers.",
    )
    assert node.files() == before
    assert not node.run(version="1.10.0", downgrade=False).get("failed")
    # A beta is near enough to go either way.
    for version in ("1.10.1", "1.10.1-beta.1", "1.10.1"):
        assert not node.run(version=version, downgrade=False).get("failed")
    assert not node.run(version="1.9.0").get("failed")


def test_a_server_does_not_go_back_in_another_folder(node: Node, releases: helper.Releases, tmp_path: Path) -> None:
    """Its data is where it was."""
    for product, version in (("nomad", "1.9.0"), ("nomad", "1.10.0"), ("nomad-device-nvidia", "9.0.0")):
        releases.publish(product, version, b"program ")
    node.run(version="1.10.0")
    assert not node.run(product="nomad-device-nvidia", version="9.0.0").get("failed")
    (node.receipts / "nomad-0.json").write_bytes(b"\xff")
    before = node.files()
    result = node.run(version="1.9.0", downgrade=False, dest=str(tmp_path / "other"))
    assert_error(result, f"{node.binary} was nomad 1.10.0. Expected: a version that is not newer than 1.9.0,")
    assert node.files() == before and not (tmp_path / "other").exists()
    assert not node.run(version="1.10.0", downgrade=False, dest=str(tmp_path / "other")).get("failed")


@pytest.mark.parametrize("damage", ["delete", "modify"])
def test_a_program_that_is_not_the_installed_one_is_replaced(
    node: Node, releases: helper.Releases, damage: str
) -> None:
    releases.publish("nomad", "1.2.3", b"program ")
    node.run()
    if damage == "delete":
        node.binary.unlink()
    else:
        node.binary.write_bytes(b"something else")
    result = node.run()
    assert result["changed"] and result["binary_changed"] and result["previous_version"] is None
    assert node.binary.read_bytes() == b"program amd64"


def test_lost_receipt_is_renewed_without_touching_the_program(node: Node, releases: helper.Releases) -> None:
    releases.publish("nomad", "1.2.3", b"program ")
    node.run()
    inode = node.binary.stat().st_ino
    node.receipt.write_text("{")
    result = node.run()
    assert result["changed"] and not result["binary_changed"]
    assert node.binary.stat().st_ino == inode
    assert not node.run()["changed"]


def test_corrupted_zip(node: Node, releases: helper.Releases) -> None:
    releases.publish("nomad", "1.2.3", b"old ")
    path = releases.publish("nomad", "1.3.0", b"new ")
    node.run()
    before = node.files()
    good = hashlib.sha256(releases.server.files[path]).hexdigest()
    releases.server.files[path] = helper.make_zip({"nomad": b"evil"})
    bad = hashlib.sha256(releases.server.files[path]).hexdigest()
    result = node.run(version="1.3.0")
    assert_says(
        result,
        f"{releases.server.url}{path} has sha256 {bad}. Expected: sha256 {good}, as signed. "
        "Next step: download again; if it stays so, the file on this server is damaged or was replaced.",
    )
    assert node.files() == before


def test_changed_sums(node: Node, releases: helper.Releases) -> None:
    releases.publish("nomad", "1.2.3", b"program ")
    path = "/nomad/1.2.3/nomad_1.2.3_SHA256SUMS"
    releases.server.files[path] += b"# changed\n"
    result = node.run()
    assert_error(result, f"{releases.server.url}{path}.sig holds a BAD signature", "a good signature by")
    assert node.files() == {}


def test_signature_by_another_key_of_the_key_file(
    node: Node, releases: helper.Releases, gpg: helper.Gpg, signer: str, stranger: str
) -> None:
    releases.publish("nomad", "1.2.3", b"program ")
    releases.list_sums("nomad", "1.2.3", releases.server.files["/nomad/1.2.3/nomad_1.2.3_SHA256SUMS"], stranger)
    releases.server.files["/key.txt"] = gpg.export(signer, stranger)
    result = node.run()
    assert_error(result, f"was signed by key {stranger}", "which the key file does not hold", signer)
    assert node.files() == {}


def test_key_file_without_the_pinned_key(
    node: Node, releases: helper.Releases, gpg: helper.Gpg, signer: str, stranger: str
) -> None:
    releases.publish("nomad", "1.2.3", b"program ")
    releases.server.files["/key.txt"] = gpg.export(stranger)
    result = node.run()
    assert_says(
        result,
        f"{releases.server.url}/key.txt holds the key {stranger} (stranger <stranger@example.com>). "
        f"Expected: the public key {signer}. "
        "Next step: compare with the fingerprint that the signer publishes, and pin it only if it is theirs.",
    )
    assert releases.server.requests == ["/key.txt"]
    releases.server.files["/key.txt"] = b"<html>"
    assert_says(
        node.run(key_fingerprints=[signer, "F" * 40]),
        f"{releases.server.url}/key.txt is not an OpenPGP public key: the file holds no OpenPGP key block, it starts "
        f"with '<html>'. Expected: the public key {signer} or {'F' * 40}. Next step: {PUBLIC}.",
    )


def test_missing_architecture_lists_those_there_are(node: Node, releases: helper.Releases) -> None:
    releases.publish("nomad", "1.2.3", b"program ", ("amd64", "s390x"))
    result = node.run(architecture="arm64")
    assert_error(result, "lists no nomad_1.2.3_linux_arm64.zip", "amd64, s390x", "a checksum for linux_arm64")


def test_not_found_is_final(node: Node, releases: helper.Releases) -> None:
    releases.publish("nomad", "1.2.3", b"program ")
    result = node.run(version="9.9.9")
    url = f"{releases.server.url}/nomad/9.9.9/nomad_9.9.9_SHA256SUMS"
    assert_error(result, f"{url} does not exist (HTTP 404)", "check product/version, or base_url of your mirror")
    assert len(releases.server.requests) == 2


def interrupt(server: helper.Server, path: str, times: int) -> None:
    def cut_off(request: Any, content: bytes) -> None:
        whole = server.requests.count(path) > times
        request.send_response(200)
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        request.wfile.write(content if whole else content[:50])
        request.close_connection = True

    server.hooks[path] = cut_off


def test_interrupted_download_is_tried_again(node: Node, releases: helper.Releases) -> None:
    path = releases.publish("nomad", "1.2.3", b"program ")
    interrupt(releases.server, path, 2)
    assert node.run(retries=2)["changed"]
    assert releases.server.requests.count(path) == 3


def test_interrupted_download_leaves_everything_as_it_was(node: Node, releases: helper.Releases) -> None:
    releases.publish("nomad", "1.2.3", b"old ")
    path = releases.publish("nomad", "1.3.0", b"new ")
    node.run()
    before = node.files()
    interrupt(releases.server, path, 99)
    result = node.run(version="1.3.0", retries=1)
    assert_error(result, f"{releases.server.url}{path} could not be downloaded", "50 of", "tried 2 times")
    assert node.files() == before


def test_damaged_zip_that_is_signed_leaves_everything_as_it_was(node: Node, releases: helper.Releases) -> None:
    releases.publish("nomad", "1.2.3", b"old ")
    path = releases.publish("nomad", "1.3.0", b"new ")
    node.run()
    before = node.files()
    broken = helper.make_zip({"consul": b"another program"})
    releases.server.files[path] = broken
    sums = f"{hashlib.sha256(broken).hexdigest()}  nomad_1.3.0_linux_amd64.zip\n"
    releases.list_sums("nomad", "1.3.0", sums.encode())
    assert_error(node.run(version="1.3.0"), "does not hold 'nomad', it holds: consul", "the option 'binary'")
    assert node.files() == before


def test_unknown_owner_leaves_everything_as_it_was(node: Node, releases: helper.Releases) -> None:
    releases.publish("nomad", "1.2.3", b"old ")
    releases.publish("nomad", "1.3.0", b"new ")
    node.run()
    before = node.files()
    assert node.run(version="1.3.0", owner="no-such-user-here").get("failed")
    assert node.files() == before


def test_signature_without_the_right_key_in_the_pins(node: Node, releases: helper.Releases, stranger: str) -> None:
    releases.publish("nomad", "1.2.3", b"program ")
    releases.list_sums("nomad", "1.2.3", releases.server.files["/nomad/1.2.3/nomad_1.2.3_SHA256SUMS"], stranger)
    assert_error(node.run(), f"signed by key {stranger}", "key_url and key_fingerprints")


def test_signature_that_is_none(node: Node, releases: helper.Releases) -> None:
    releases.publish("nomad", "1.2.3", b"program ")
    releases.server.files["/nomad/1.2.3/nomad_1.2.3_SHA256SUMS.sig"] = b"<html>"
    assert_error(node.run(), "SHA256SUMS.sig holds no signature that gpgv can read")


def test_a_key_that_is_no_longer_pinned_means_verifying_again(
    node: Node, releases: helper.Releases, gpg: helper.Gpg, signer: str, stranger: str
) -> None:
    releases.publish("nomad", "1.2.3", b"program ")
    node.run()
    releases.list_sums("nomad", "1.2.3", releases.server.files["/nomad/1.2.3/nomad_1.2.3_SHA256SUMS"], stranger)
    releases.server.files["/key.txt"] = gpg.export(stranger)
    result = node.run(key_fingerprints=[stranger])
    assert result["changed"] and not result["binary_changed"] and result["signature"] == stranger
    assert not node.run(key_fingerprints=[signer, stranger])["changed"]


def test_missing_gpgv(node: Node, releases: helper.Releases, monkeypatch: pytest.MonkeyPatch) -> None:
    releases.publish("nomad", "1.2.3", b"program ")
    monkeypatch.setattr(hashicorp_release.AnsibleModule, "get_bin_path", lambda *_a, **_k: None)
    assert_says(
        node.run(),
        "the program gpgv is not installed. Expected: gpgv, which verifies the signature of the release. "
        "Next step: install the package gpgv (Debian, Ubuntu) or gnupg2 (RHEL).",
    )
    assert releases.server.requests == []


def test_pinned_checksum(node: Node, releases: helper.Releases) -> None:
    path = releases.publish("nomad", "1.2.3", b"program ")
    good = hashlib.sha256(releases.server.files[path]).hexdigest()
    assert_says(
        node.run(checksum="0" * 64),
        f"{releases.server.url}/nomad/1.2.3/nomad_1.2.3_SHA256SUMS states sha256 {good} for "
        f"nomad_1.2.3_linux_amd64.zip. Expected: the pinned checksum {'0' * 64}. "
        "Next step: check whether the option 'checksum' is that of this version and architecture.",
    )
    releases.server.requests.clear()
    assert_says(
        node.run(checksum="0" * 64, verify_signature=False),
        f"{releases.server.url}{path} has sha256 {good}. Expected: sha256 {'0' * 64}, as listed or pinned. "
        "Next step: download again; if it stays so, the file on this server is damaged or was replaced.",
    )
    assert releases.server.requests == [path]
    assert_error(node.run(checksum="short"), "the option 'checksum' is 'short'")
    assert node.run(checksum=f"sha256:{good}")["changed"]
    assert not node.run(checksum=good)["changed"]
    assert_error(node.run(checksum="0" * 64), "the pinned checksum 000")


def test_pinned_checksum_alone_needs_nothing_but_the_zip(node: Node, releases: helper.Releases) -> None:
    path = releases.publish("nomad", "1.2.3", b"program ")
    good = hashlib.sha256(releases.server.files[path]).hexdigest()
    result = node.run(checksum=good, verify_signature=False)
    assert result["changed"] and result["signature"] is None
    assert releases.server.requests == [path]
    # Later verification is a reason to do it all again.
    assert node.run()["changed"] and node.run()["changed"] is False


def test_no_signature_and_no_checksum_is_a_warning(
    node: Node, releases: helper.Releases, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(hashicorp_release.AnsibleModule, "warn", lambda _self, text: warnings.append(text))
    releases.publish("nomad", "1.2.3", b"program ")
    assert node.run(verify_signature=False)["changed"]
    assert warnings == [
        f"{releases.server.url}/nomad/1.2.3/nomad_1.2.3_linux_amd64.zip is compared with a list of checksums that "
        "nothing vouches for; set verify_signature=true or pin a checksum."
    ]


def test_other_names(node: Node, releases: helper.Releases) -> None:
    releases.publish("nomad", "1.2.3", b"program ")
    result = node.run(binary="LICENSE.txt", dest_name="nomad-licence", mode="0640")
    target = node.dest / "nomad-licence"
    assert result["path"] == str(target) and target.read_bytes() == b"licence"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    target.chmod(0o600)
    again = node.run(binary="LICENSE.txt", dest_name="nomad-licence", mode="0640")
    assert again["changed"] and not again["binary_changed"] and again["reasons"] == []


PRODUCT = "a product name such as nomad or nomad-device-nvidia"
VERSION = "a version such as 1.11.3, without a leading v"
NAME = "a file name without a folder"


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("version", "v1.2.3", VERSION),
        ("version", "../1", VERSION),
        ("version", "1/2", VERSION),
        ("product", "no/mad", PRODUCT),
        ("product", "-nomad", PRODUCT),
        ("product", "Nomad", PRODUCT),
        ("binary", "../nomad", NAME),
        ("binary", ".", NAME),
        ("dest_name", "..", NAME),
        ("dest_name", "a/b", NAME),
        ("architecture", "../x", "an architecture such as amd64 or arm64"),
    ],
)
def test_options_that_cannot_be(node: Node, server: helper.Server, option: str, value: Any, expected: str) -> None:
    assert_says(
        node.run(**{option: value}),
        f"the option '{option}' is '{value}'. Expected: {expected}. Next step: correct the option '{option}'.",
    )
    assert server.requests == []


@pytest.mark.parametrize("value", [["34365D9472D7468F"], []])
def test_fingerprints_that_pin_nothing(node: Node, server: helper.Server, value: list[str]) -> None:
    assert_error(node.run(key_fingerprints=value), "the option 'key_fingerprints'")
    assert server.requests == []


def test_names_that_are_unusual(tmp_path: Path) -> None:
    given = {
        "product": "n",
        "version": "1.2.3+ent~rc1-2",
        "binary": "...",
        "dest_name": None,
        "architecture": "s390x_1",
    }
    given |= {"verify_signature": False, "key_fingerprints": ["nonsense"], "checksum": None, "base_url": "http://h/"}
    plan = hashicorp_release.make_plan({**given, "dest": f"{tmp_path}/", "receipt_dir": "/receipts"})
    assert plan.wanted == release.Wanted("n", "1.2.3+ent~rc1-2", "s390x_1", f"{tmp_path}/...", None, ())
    assert plan.files.archive_url == "http://h/n/1.2.3+ent~rc1-2/n_1.2.3+ent~rc1-2_linux_s390x_1.zip"
    name = hashlib.sha256(f"{tmp_path}/...".encode()).hexdigest()[:16]
    assert str(plan.receipt_path) == f"/receipts/n-{name}.json"


def test_a_folder_in_the_place_of_the_program(node: Node) -> None:
    node.binary.mkdir(parents=True)
    assert_says(
        node.run(),
        f"{node.binary} is a folder. Expected: the program, or nothing, at this path. "
        "Next step: remove the folder, or choose another 'dest' or 'dest_name'.",
    )
    assert_error(node.run(check=True), f"{node.binary} is a folder")


def test_architecture_of_this_machine(node: Node, releases: helper.Releases, monkeypatch: pytest.MonkeyPatch) -> None:
    releases.publish("nomad", "1.2.3", b"program ", ("amd64", "arm64"))
    monkeypatch.setattr(hashicorp_release.platform, "machine", lambda: "aarch64")
    assert node.run(architecture=None)["architecture"] == "arm64"
    assert node.binary.read_bytes() == b"program arm64"
    monkeypatch.setattr(hashicorp_release.platform, "machine", lambda: "riscv64")
    assert_error(node.run(architecture=None), "'riscv64'", "the option 'architecture'")


def test_expired_signing_key_is_a_warning(
    node: Node, releases: helper.Releases, gpg: helper.Gpg, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(hashicorp_release.AnsibleModule, "warn", lambda _self, text: warnings.append(text))
    releases.publish("nomad", "1.2.3", b"program ")
    old = gpg.new_key("oldsigner", expire="20200301T000000", faked_time="20200101T000000!")
    sums = "/nomad/1.2.3/nomad_1.2.3_SHA256SUMS"
    releases.server.files[f"{sums}.sig"] = gpg.sign(releases.server.files[sums], old, faked_time="20200201T000000!")
    releases.server.files["/key.txt"] = gpg.export(old)
    assert node.run(key_fingerprints=[old])["signature"] == old
    assert f"The key {old} that signed {releases.server.url}{sums} has expired; its signature is good." in warnings


def test_returned_keys_are_the_documented_ones(node: Node, releases: helper.Releases) -> None:
    releases.publish("nomad", "1.2.3", b"program ")
    documented = set(yaml.safe_load(hashicorp_release.RETURN))
    # Ansible itself describes the file that a result names.
    common = {"changed", "invocation", "mode", "owner", "group", "state", "uid", "gid", "size", "secontext"}
    for check in (True, False, False):
        assert set(node.run(check=check)) - common == documented


# --- who can read what ---------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_modes_hold_under_every_umask(node: Node, releases: helper.Releases, tmp_path: Path, mask: int) -> None:
    releases.publish("nomad", "1.2.3", b"program ")
    node.receipts = tmp_path / "var" / "lib" / "receipts"
    before = os.umask(mask)
    try:
        assert node.run(dest=str(tmp_path / "opt" / "bin"), receipt_dir=str(node.receipts))["changed"]
    finally:
        os.umask(before)
    modes = {
        str(path.relative_to(tmp_path)): stat.S_IMODE(path.stat().st_mode)
        for top in ("opt", "var")
        for path in [tmp_path / top, *(tmp_path / top).rglob("*")]
    }
    receipt = next(node.receipts.iterdir()).name
    assert modes == {
        "opt": 0o755,
        "opt/bin": 0o755,
        "opt/bin/nomad": 0o755,
        "var": 0o755,
        "var/lib": 0o755,
        "var/lib/receipts": 0o755,
        f"var/lib/receipts/{receipt}": 0o644,
    }


def test_folders_that_are_there_keep_their_modes(node: Node, releases: helper.Releases) -> None:
    releases.publish("nomad", "1.2.3", b"program ")
    node.dest.mkdir(mode=0o700)
    node.run()
    assert stat.S_IMODE(node.dest.stat().st_mode) == 0o700


def test_two_places_of_a_product_do_not_fight(node: Node, releases: helper.Releases, tmp_path: Path) -> None:
    releases.publish("nomad", "1.2.3", b"old ")
    releases.publish("nomad", "1.3.0", b"new ")
    other = {"dest": str(tmp_path / "other"), "version": "1.3.0"}
    assert node.run()["changed"] and node.run(**other)["changed"]
    asked = len(releases.server.requests)
    assert not node.run()["changed"] and not node.run(**other)["changed"]
    assert not node.run(check=True)["changed"] and len(releases.server.requests) == asked
    assert len(list(node.receipts.iterdir())) == 2


LOGIN = "robot:s3cret%21"


def test_a_password_is_nowhere(node: Node, releases: helper.Releases, capsys: pytest.CaptureFixture[str]) -> None:
    server = releases.server
    releases.publish("nomad", "1.2.3", b"program ")
    for path in server.files:
        server.ask_for_login(path, "robot:s3cret!")
    url = server.url.replace("://", f"://{LOGIN}@")
    given = {"base_url": url, "key_url": f"{url}/key.txt"}
    results = [node.run(check=True, diff=True, **given), node.run(diff=True, **given), node.run(**given)]
    assert [result["changed"] for result in results] == [True, True, False]
    assert results[1]["source"].startswith(f"{server.url}/nomad/")
    assert results[1]["invocation"]["module_args"]["base_url"] == server.url
    assert results[1]["invocation"]["module_args"]["key_url"] == f"{server.url}/key.txt"
    # What fails says its address too: a key that is another one, a version that is not there, a login that is wrong.
    results.append(node.run(**given, key_fingerprints=["A" * 40]))
    results.append(node.run(**given, version="9.9.9"))
    results.append(node.run(base_url=url.replace("s3cret", "s3cret0"), version="1.3.0"))
    results.append(node.run(base_url=f"{url}/s3cret@".replace("robot:", "robot:/"), version="1.3.0"))
    assert [result.get("failed", False) for result in results[3:]] == [True] * 4
    text = json.dumps(results) + capsys.readouterr().err + "".join(str(data) for data in node.files().values())
    assert "s3cret" not in text and "robot" not in text


@pytest.mark.controller
def test_nothing_of_it_is_shown_by_ansible(node: Node, releases: helper.Releases, tmp_path: Path) -> None:
    """What a person or a log sees of a run with everything switched on."""
    server = releases.server
    releases.publish("nomad", "1.2.3", b"program ")
    for path in server.files:
        server.ask_for_login(path, "robot:s3cret!")
    url = server.url.replace("://", f"://{LOGIN}@")
    tasks = [
        {"gpufarm.core.hashicorp_release": {**node.arguments, "base_url": url, "key_url": f"{url}/key.txt"}},
        {
            "gpufarm.core.openpgp_key": {
                "url": f"{url}/key.txt",
                "fingerprints": node.arguments["key_fingerprints"],
                "dest": str(tmp_path / "key.asc"),
            }
        },
        {"gpufarm.core.openpgp_key": {"url": f"{url}/no", "fingerprints": ["A" * 40], "dest": str(tmp_path / "no")}},
    ]
    play = tmp_path / "play.yml"
    play.write_text(json.dumps([{"hosts": "localhost", "gather_facts": False, "tasks": tasks}]))
    done = subprocess.run(
        [sys.executable, "-m", "ansible", "playbook", "-vvv", "--diff", "-i", "localhost,", "-c", "local", str(play)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={
            **os.environ,
            "ANSIBLE_COLLECTIONS_PATH": str(Path(__file__).resolve().parents[4] / ".collections"),
            "ANSIBLE_PYTHON_INTERPRETER": sys.executable,
            "ANSIBLE_HOME": str(tmp_path / "home"),
            "ANSIBLE_INJECT_INVOCATION": "true",
        },
    )
    shown = done.stdout + done.stderr
    assert "changed=2" in shown and "failed=1" in shown, shown
    assert "HTTP 404" in shown and "module_args" in shown
    assert "s3cret" not in shown and "robot" not in shown


def test_what_an_attacker_sent_first_is_not_unpacked(node: Node, releases: helper.Releases) -> None:
    """Zips are read from their end: a longer one under the true one would be what is unpacked."""
    path = releases.publish("nomad", "1.2.3", b"program ")
    good = releases.server.files[path]
    evil = helper.make_zip({"nomad": b"evil" + os.urandom(5000)})
    assert len(evil) > len(good)

    def hook(request: Any, _content: bytes) -> None:
        if releases.server.requests.count(path) == 1:
            helper.send(request, good + evil[len(good) :], length=len(evil) + 1)
            request.close_connection = True
        else:
            helper.send(request, good)

    releases.server.hooks[path] = hook
    assert node.run()["changed"]
    assert node.binary.read_bytes() == b"program amd64"
    assert releases.server.requests.count(path) == 2


def test_a_certificate_that_is_not_trusted(node: Node, gpg: helper.Gpg, signer: str, tmp_path: Path) -> None:
    secure = helper.Server(certificate := helper.new_certificate(tmp_path))
    try:
        helper.Releases(secure, gpg, signer).publish("nomad", "1.2.3", b"program ")
        given = {"base_url": secure.url, "key_url": f"{secure.url}/key.txt"}
        assert_error(node.run(**given), "/key.txt is not trusted", "the option 'ca_path'")
        assert node.files() == {} and secure.requests == []
        assert node.run(**given, ca_path=str(certificate.path))["changed"]
    finally:
        secure.close()


def test_a_place_that_cannot_be_written_to(node: Node, releases: helper.Releases, tmp_path: Path) -> None:
    releases.publish("nomad", "1.2.3", b"program ")
    (tmp_path / "file").write_text("")
    dest = str(tmp_path / "file" / "bin")
    result = node.run(dest=dest)
    assert_error(result, f"nomad could not be installed in {dest} (")
    assert result["msg"].endswith(
        "Expected: folders that this task may write to, with room for the program. "
        "Next step: check 'dest', 'receipt_dir' and the free space, and use 'become'."
    )


def test_what_check_mode_knows(node: Node, releases: helper.Releases) -> None:
    path = releases.publish("nomad", "1.2.3", b"old ")
    releases.publish("nomad", "1.3.0", b"new ")
    result = node.run(check=True, diff=True, checksum="A" * 64)
    assert (result["zip_sha256"], result["signature"], result["binary_changed"]) == ("a" * 64, None, True)
    assert result["source"] == f"{releases.server.url}{path}"
    assert result["diff"]["after"] == "nomad 1.2.3\n" and result["diff"]["before"] == ""
    node.run()
    result = node.run(check=True, version="1.3.0")
    assert result["changed"] and result["binary_changed"] and result["previous_version"] == "1.2.3"
    assert (result["zip_sha256"], result["signature"], result["version"]) == (None, None, "1.3.0")
    assert node.binary.read_bytes() == b"old amd64"
    node.binary.chmod(0o700)
    result = node.run(check=True)
    assert result["changed"] and not result["binary_changed"] and result["reasons"] == []
    assert stat.S_IMODE(node.binary.stat().st_mode) == 0o700


def test_a_receipt_of_another_program_says_nothing_of_before(node: Node, releases: helper.Releases) -> None:
    releases.publish("nomad", "1.2.3", b"program ")
    node.run()
    for change in ({"path": "/elsewhere"}, {"binary_sha256": "0" * 64}):
        node.receipt.write_text(json.dumps({**json.loads(node.receipt.read_text()), **change}))
        result = node.run()
        assert result["changed"] and result["previous_version"] is None
    node.receipt.write_bytes(b"\xff\xfe")
    assert node.run()["reasons"] == ["there is no receipt of a verified installation"]


def test_the_time_and_the_tries_that_were_asked_for(
    node: Node, releases: helper.Releases, monkeypatch: pytest.MonkeyPatch
) -> None:
    releases.publish("nomad", "1.2.3", b"program ")
    seen: list[dict[str, Any]] = []
    network = release.Network

    def note(**given: Any) -> release.Network:
        seen.append(given)
        return network(**given)

    monkeypatch.setattr(release, "Network", note)
    assert node.run(timeout=7, retries=5)["changed"]
    assert seen[0].pop("folder").startswith(str(node.remote_tmp))
    assert seen == [{"timeout": 7, "retries": 5, "ca_path": None}]


def test_the_program_is_on_the_disk_before_it_takes_the_place_of_the_old_one(
    node: Node, releases: helper.Releases, monkeypatch: pytest.MonkeyPatch
) -> None:
    releases.publish("nomad", "1.2.3", b"program ")
    steps: list[str] = []
    move = hashicorp_release.AnsibleModule.atomic_move

    def note(self: Any, source: str, target: str, **options: Any) -> None:
        content = Path(source).read_bytes()
        steps.append(f"{Path(target).name.partition('-')[0]} {len(content)}")
        move(self, source, target, **options)

    monkeypatch.setattr(hashicorp_release.os, "fsync", lambda _number: steps.append("written"))
    monkeypatch.setattr(hashicorp_release.AnsibleModule, "atomic_move", note)
    assert node.run()["changed"]
    assert steps[:2] == ["written", f"nomad {len(b'program amd64')}"] and len(steps) == 3
