# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import os
import platform
import stat
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gpufarm.core.plugins.module_utils import openpgp, release
from ansible_collections.gpufarm.core.plugins.modules import openpgp_key
from ansible_collections.gpufarm.core.tests.unit.plugins.modules import release_helper as helper

pytestmark = pytest.mark.skipif(not helper.HAS_GPG, reason=helper.GPG_MISSING)


gpg = helper.gpg


@pytest.fixture(scope="module")
def first(gpg: helper.Gpg) -> str:
    return gpg.new_key("first", subkey=True)


@pytest.fixture(scope="module")
def second(gpg: helper.Gpg) -> str:
    return gpg.new_key("second")


@pytest.fixture
def server(gpg: helper.Gpg, first: str) -> Iterator[helper.Server]:
    running = helper.Server()
    running.files["/key"] = gpg.export(first)
    yield running
    running.close()


class Node:
    def __init__(self, folder: Path, server: helper.Server, first: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.dest = folder / "keyrings" / "key.gpg"
        self.armored = folder / "keyrings" / "key.asc"
        self._tmp = folder / "tmp"
        self._tmp.mkdir()
        self._capsys = capsys
        self._arguments = {"url": f"{server.url}/key", "fingerprints": [first], "dest": str(self.dest), "retries": 0}

    def run(self, check: bool = False, diff: bool = False, **arguments: Any) -> helper.Outcome:
        given = {name: value for name, value in {**self._arguments, **arguments}.items() if value is not None}
        settings = {"check_mode": check, "diff": diff, "remote_tmp": str(self._tmp)}
        return helper.run_module(openpgp_key.main, self._capsys, given, **settings)


@pytest.fixture
def node(tmp_path: Path, server: helper.Server, first: str, capsys: pytest.CaptureFixture[str]) -> Node:
    return Node(tmp_path, server, first, capsys)


def assert_error(result: helper.Outcome, *parts: str) -> None:
    assert result.get("failed"), result
    for part in (f"{platform.node()}: ", "Expected: ", "Next step: ", *parts):
        assert part in result["msg"]


def assert_says(result: helper.Outcome, text: str) -> None:
    assert result.get("failed") and result["msg"] == f"{platform.node()}: {text}"


def test_writes_a_binary_keyring(node: Node, gpg: helper.Gpg, first: str) -> None:
    result = node.run(diff=True)
    assert result["changed"] and result["downloaded"] and result["fingerprints"] == [first]
    assert node.dest.read_bytes() == gpg.export(first, armored=False)
    assert stat.S_IMODE(node.dest.stat().st_mode) == 0o644
    assert result["diff"] == {"before": "", "after": f"{node.dest}\n{first}\n"}
    assert result["public_keys"] == [{"fingerprint": first, "user_ids": ["first <first@example.com>"]}]


def test_writes_an_armored_keyring_that_gpg_reads(node: Node, gpg: helper.Gpg, first: str) -> None:
    node.run(dest=str(node.armored))
    assert node.armored.read_bytes().startswith(b"-----BEGIN PGP PUBLIC KEY BLOCK-----\n\n")
    assert first in gpg.run("--show-keys", str(node.armored)).decode()
    assert not node.run(dest=str(node.armored))["changed"]


def test_second_run_uses_no_network(node: Node, server: helper.Server) -> None:
    node.run()
    result = node.run()
    assert not result["changed"] and not result["downloaded"]
    assert len(server.requests) == 1
    assert node.run(force=True)["downloaded"] and not node.run(force=True)["changed"]
    assert len(server.requests) == 3


def test_wrong_form_and_wrong_mode_are_put_right_without_network(
    node: Node, server: helper.Server, gpg: helper.Gpg, first: str
) -> None:
    node.run()
    node.dest.write_bytes(gpg.export(first))
    assert node.run()["changed"]
    assert node.dest.read_bytes() == gpg.export(first, armored=False)
    node.dest.chmod(0o600)
    assert node.run(check=True)["changed"] and node.run()["changed"] and not node.run()["changed"]
    assert len(server.requests) == 1


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x99\x01"])
def test_a_damaged_keyring_is_replaced(node: Node, gpg: helper.Gpg, first: str, content: bytes) -> None:
    node.run()
    node.dest.write_bytes(content)
    assert node.run()["changed"]
    assert node.dest.read_bytes() == gpg.export(first, armored=False)


def test_another_key_is_refused(node: Node, server: helper.Server, gpg: helper.Gpg, first: str, second: str) -> None:
    node.run()
    before = node.dest.read_bytes()
    server.files["/key"] = gpg.export(second)
    result = node.run(force=True)
    assert_says(
        result,
        f"{server.url}/key holds the key {second} (second <second@example.com>). Expected: only {first}. "
        "Next step: compare with the fingerprint that the publisher states, and pin it only if it is theirs.",
    )
    assert node.dest.read_bytes() == before


def test_one_strange_key_among_the_pinned_is_refused(
    node: Node, server: helper.Server, gpg: helper.Gpg, first: str, second: str
) -> None:
    server.files["/key"] = gpg.export(first, second)
    assert_error(node.run(), f"/key holds the key {second} (second <second@example.com>). Expected: only {first}.")
    assert_error(node.run(fingerprints=[first, "F" * 40]), f"Expected: only {', '.join(sorted([first, 'F' * 40]))}.")
    assert not node.dest.exists() and not node.dest.parent.exists()
    assert node.run(fingerprints=[first, second])["fingerprints"] == sorted([first, second])


def test_rotation_fetches_the_new_key(
    node: Node, server: helper.Server, gpg: helper.Gpg, first: str, second: str
) -> None:
    node.run()
    server.files["/key"] = gpg.export(first, second)
    both = [first, second]
    assert node.run(check=True, fingerprints=both)["changed"]
    result = node.run(fingerprints=both, diff=True)
    assert result["changed"] and len(result["fingerprints"]) == 2
    assert result["diff"]["before"] == f"{node.dest}\n{first}\n"
    # The old key is no longer pinned: what is there must not stay.
    server.files["/key"] = gpg.export(second)
    assert node.run(fingerprints=[second])["fingerprints"] == [second]


def test_check_mode_uses_no_network_where_it_need_not(node: Node, server: helper.Server, first: str) -> None:
    result = node.run(check=True, diff=True)
    assert result["changed"] and result["fingerprints"] == [first] and result["public_keys"] == []
    assert server.requests == [] and not node.dest.parent.exists()


def test_a_file_of_the_node(node: Node, gpg: helper.Gpg, server: helper.Server, first: str, tmp_path: Path) -> None:
    source = tmp_path / "key.asc"
    assert_says(
        node.run(url=None, src=str(source)),
        f"{source} cannot be read (No such file or directory). Expected: a file with the public key. "
        "Next step: copy the key to the node first, or use the option 'url'.",
    )
    source.write_bytes(gpg.export(first))
    result = node.run(url=None, src=str(source))
    assert result["changed"] and not result["downloaded"] and server.requests == []


def test_fingerprint_as_the_publisher_prints_it(node: Node, first: str) -> None:
    spaced = " ".join(first[start : start + 4] for start in range(0, 40, 4)).lower()
    assert node.run(fingerprints=[spaced])["fingerprints"] == [first]


def test_errors_name_what_to_do(node: Node, server: helper.Server, first: str) -> None:
    assert_error(node.run(fingerprints=[first[-16:]]), "not a full OpenPGP fingerprint", "short key ID")
    assert_error(node.run(fingerprints=[]), "'fingerprints' is empty")
    server.files["/key"] = b"<html>Please log in</html>"
    assert_says(
        node.run(fingerprints=[first, "F" * 40]),
        f"{server.url}/key is not an OpenPGP public key: the file holds no OpenPGP key block, it starts with "
        f"'<html>Please log in</html>'. Expected: the public key {', '.join(sorted([first, 'F' * 40]))}. "
        "Next step: check the address; a login page or an error page of a proxy is a common cause.",
    )
    del server.files["/key"]
    assert_error(node.run(), f"{server.url}/key does not exist (HTTP 404)")
    node.dest.mkdir(parents=True)
    assert_says(
        node.run(),
        f"{node.dest} cannot be read (Is a directory). Expected: a keyring file, or nothing, at this path. "
        "Next step: remove what is there, or choose another 'dest'.",
    )
    node.dest.rmdir()
    node.dest.parent.rmdir()
    node.dest.parent.write_text("")
    other = str(node.dest.parent / "deeper" / "key.gpg")
    assert_error(node.run(dest=other), f"{other} cannot be read (Not a directory)")


def test_a_downloaded_keyring_serves_gpgv(node: Node, gpg: helper.Gpg, first: str, tmp_path: Path) -> None:
    node.run()
    signature = gpg.sign(b"data", first)
    path = helper.shutil.which("gpgv")
    assert path
    verdict, _said = release.run_gpgv(path, node.dest.read_bytes(), signature, b"data", str(tmp_path))
    assert verdict.primary_fingerprints == (openpgp.normalize_fingerprint(first),)


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_apt_can_read_the_keyring_whatever_the_umask(node: Node, tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        assert node.run(dest=str(tmp_path / "etc" / "apt" / "keyrings" / "key.asc"))["changed"]
    finally:
        os.umask(before)
    paths = [tmp_path / "etc", *(tmp_path / "etc").rglob("*")]
    assert [stat.S_IMODE(path.stat().st_mode) for path in paths] == [0o755, 0o755, 0o755, 0o644]


def test_a_password_is_nowhere(node: Node, server: helper.Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.ask_for_login("/key", "robot:s3cret")
    url = f"{server.url}/key".replace("://", "://robot:s3cret@")
    results = [node.run(url=url, diff=True), node.run(url=url), node.run(url=url, fingerprints=["A" * 40])]
    results.append(node.run(url=url.replace("/key", "/none"), force=True))
    assert [result.get("failed", False) for result in results] == [False, False, True, True]
    assert results[0]["invocation"]["module_args"]["url"] == f"{server.url}/key"
    assert "s3cret" not in json.dumps(results) + capsys.readouterr().err


def test_what_is_returned(node: Node, first: str) -> None:
    common = {"changed", "invocation", "mode", "owner", "group", "state", "uid", "gid", "size", "secontext"}
    documented = set(yaml.safe_load(openpgp_key.RETURN))
    for check in (True, False, False):
        result = node.run(check=check, diff=True)
        assert set(result) - common - {"diff"} == documented
        assert (result["dest"], result["downloaded"]) == (str(node.dest), result["changed"] and not check)
    assert result["diff"] == {"before": f"{node.dest}\n{first}\n", "after": f"{node.dest}\n{first}\n"}


def test_check_mode_and_force(node: Node, server: helper.Server, gpg: helper.Gpg, first: str, second: str) -> None:
    """The key is fetched in check mode where only that tells whether something would change."""
    assert node.run(check=True, force=True)["downloaded"] and not node.dest.parent.exists()
    node.run()
    server.files["/key"] = gpg.export(second)
    server.requests.clear()
    result = node.run(check=True, fingerprints=[second])
    assert result["changed"] and not result["downloaded"] and server.requests == []
    assert_error(node.run(check=True, force=True), f"holds the key {second}")
    assert node.dest.read_bytes() == gpg.export(first, armored=False)


def test_what_is_there_but_is_no_folder(node: Node, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    node.dest.parent.mkdir()
    result = node.run(dest=str(node.dest.parent / ("x" * 300)))
    assert result["failed"] and "cannot be read (File name too long)" in result["msg"]


def test_a_folder_that_cannot_be_written_to(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(release, "make_folder", full)
    assert_says(
        node.run(),
        f"{node.dest} could not be written ([Errno 28] No space left on device). "
        "Expected: a folder that this task may write to. Next step: check 'dest' and use 'become'.",
    )


def test_the_time_and_the_tries_that_were_asked_for(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []
    network = release.Network

    def note(**given: Any) -> release.Network:
        seen.append(given)
        return network(**given)

    monkeypatch.setattr(release, "Network", note)
    assert node.run(timeout=7, retries=5)["changed"]
    assert seen[0].pop("folder").startswith(str(tmp_path / "tmp"))
    assert seen == [{"timeout": 7, "retries": 5, "ca_path": None}]


def test_nothing_of_a_run_is_left_behind(node: Node, tmp_path: Path) -> None:
    node.run()
    node.run(fingerprints=["F" * 40])
    assert [path for path in (tmp_path / "tmp").rglob("*") if path.is_file()] == []
    assert [path.name for path in node.dest.parent.iterdir()] == ["key.gpg"]


def test_a_key_is_had_by_the_proxy_of_the_environment(
    node: Node, server: helper.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Ansible leaves what it has opened with to all that follows in this process.
    monkeypatch.setattr(urllib.request, "_opener", None)
    server.files["http://upstream.invalid/key"] = server.files["/key"]
    assert node.run(url="http://upstream.invalid/key").get("failed")
    monkeypatch.setenv("http_proxy", server.url)
    assert node.run(url="http://upstream.invalid/key")["changed"]
