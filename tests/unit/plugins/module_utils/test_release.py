# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import random
import re
import shutil
import signal
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpufarm.core.plugins.module_utils import release
from ansible_collections.gpufarm.core.plugins.module_utils.release import downloading, signature
from ansible_collections.gpufarm.core.tests.unit.plugins.modules import release_helper as helper

PINNED = "C874011F0AB405110D02105534365D9472D7468F"
SUBKEY = "374EC75B485913604A831CC7C820C6D5CD27AB87"
OTHER = "4D64FEC119C2029067D6E791F8D2585B8783D481"


def network(**settings: Any) -> tuple[release.Network, list[float]]:
    pauses: list[float] = []
    return release.Network(**{"timeout": 5, "pause": pauses.append, **settings}), pauses


@pytest.fixture
def server() -> Iterator[helper.Server]:
    running = helper.Server()
    yield running
    running.close()


# --- names and lists -------------------------------------------------------------------------


def test_a_login_of_a_mirror_is_in_no_text() -> None:
    url = "https://robot:s3cret@mirror.example.com/nomad"
    assert (
        release.without_login(f"{url} and {url}")
        == "https://mirror.example.com/nomad and https://mirror.example.com/nomad"
    )
    assert "s3cret" not in str(release.ReleaseError(f"{url} answered HTTP 404", "a file", "look there"))
    for text in ("https://mirror.example.com/a@b", "http://h?a@b", "http://h#a@b", "mail@example.com"):
        assert release.without_login(text) == text
    assert release.without_login("http://a:p@ss@h/x,http://b@h") == "http://h/x,http://h"


def test_addresses_are_shown_without_what_may_be_a_password() -> None:
    assert release.shown("http://a:b@h/x") == "http://h/x"
    # All but the first would be a host with its port or behind a login.
    port, login = ("http://a:1/c@h/x", "http://a:1#c@h/x"), ("https://a:b@c/1@h/x", "https://a@b.example:1/2@h/x")
    for url in ("http://a:b/c@h/x", *port, *login):
        assert release.shown(url) == f"{url.partition(':')[0]}:..."
        with pytest.raises(release.ReleaseError, match=r"the address is 'https?:\.\.\.'\. Expected: https://host/path"):
            release.check_address(url)
    assert release.shown("nonsense") == "nonsense"


def test_the_options_that_ansible_shows_lose_their_logins() -> None:
    params = {"url": "http://a:b@h/x", "key_url": None, "other": "http://a:b@h/x"}
    before = dict(params)
    assert release.take_addresses(params, "url", "key_url") == before
    assert params == {"url": "http://h/x", "key_url": None, "other": "http://a:b@h/x"}


def test_architectures() -> None:
    assert release.architecture_of("x86_64") == "amd64"
    assert release.architecture_of("aarch64") == "arm64"
    assert [release.architecture_of(name) for name in ("AMD64", "arm64")] == ["amd64", "arm64"]
    with pytest.raises(release.ReleaseError) as caught:
        release.architecture_of("riscv64")
    assert str(caught.value) == (
        "this machine's architecture is 'riscv64'. Expected: x86_64 (amd64) or aarch64 (arm64). "
        "Next step: set the option 'architecture' if the releases server has files for this machine."
    )


def test_names_are_laid_out_as_upstream_does() -> None:
    files = release.release_files("https://releases.hashicorp.com/", "nomad", "1.11.3", "arm64")
    folder = "https://releases.hashicorp.com/nomad/1.11.3"
    assert files.archive == "nomad_1.11.3_linux_arm64.zip"
    assert files.archive_url == f"{folder}/nomad_1.11.3_linux_arm64.zip"
    assert files.sums_url == f"{folder}/nomad_1.11.3_SHA256SUMS"
    assert files.signature_url == f"{folder}/nomad_1.11.3_SHA256SUMS.sig"


def test_checksum_list() -> None:
    a, b = "a" * 64, "B" * 64
    sums = release.parse_sums(
        f"{a}  one.zip\n{b} *two.zip\r\n# remark\nshort  three.zip\n{a}\n{a}x  four.zip\n {a}\tb\n"
    )
    assert sums == {"one.zip": a, "two.zip": b.lower(), "b": a}
    assert release.parse_sums(f"{a}  one two.zip\n{a[1:]}  five.zip\nx{a}  six.zip") == {}


def test_listed_sum_of_the_right_file_only() -> None:
    sums = {"nomad_1.0_linux_amd64.zip": "x", "nomad_1.0_darwin_arm64.zip": "y", "nomad_1.0_linux_s390x.zip": "z"}
    assert release.listed_sum(sums, "nomad", "1.0", "amd64", "u") == "x"
    with pytest.raises(release.ReleaseError) as caught:
        release.listed_sum(sums, "nomad", "1.0", "arm64", "http://h/SUMS")
    assert str(caught.value) == (
        "http://h/SUMS lists no nomad_1.0_linux_arm64.zip; it has these Linux architectures: amd64, s390x. "
        "Expected: a checksum for linux_arm64. "
        "Next step: choose a version of nomad that is released for arm64, or another architecture."
    )
    others = {"nomad_1.0_linux_amd64.txt": "x", "nomad_2.0_linux_amd64.zip": "y"}
    with pytest.raises(release.ReleaseError, match=r"architectures: none\. Expected"):
        release.listed_sum(others, "nomad", "1.0", "arm64", "u")


def test_pinned_checksum() -> None:
    assert release.normalize_checksum(f" sha256:{'A' * 64}") == "a" * 64
    for text in ("", "abc", "md5:" + "a" * 32, "a" * 63 + "g", "a" * 65, "b" + "sha256:" + "a" * 64):
        with pytest.raises(release.ReleaseError) as caught:
            release.normalize_checksum(text)
        assert str(caught.value) == (
            f"the option 'checksum' is '{text}'. Expected: 64 hexadecimal digits, plain or after 'sha256:'. "
            "Next step: copy the line of this architecture from the SHA256SUMS file of the release."
        )


def test_pinned_fingerprints_are_whole_ones() -> None:
    assert release.pinned_fingerprints("pins", [OTHER.lower(), PINNED, OTHER]) == sorted([PINNED, OTHER])
    with pytest.raises(release.ReleaseError) as caught:
        release.pinned_fingerprints("pins", [PINNED, "72D7468F"])
    assert str(caught.value) == (
        "in the option 'pins', '72D7468F' is not a full OpenPGP fingerprint (40 or 64 hexadecimal digits). "
        "Expected: full fingerprints as 'gpg --show-keys' prints them. "
        "Next step: copy the whole fingerprint, a short key ID does not identify a key."
    )
    with pytest.raises(release.ReleaseError) as caught:
        release.pinned_fingerprints("pins", [])
    assert str(caught.value) == (
        "the option 'pins' is empty. Expected: at least one full fingerprint. "
        "Next step: pin the one that the signer publishes; the roles' variables for it end in key_fingerprints."
    )


# --- gpgv ------------------------------------------------------------------------------------

VALID = f"[GNUPG:] VALIDSIG {SUBKEY} 2026-01-01 1767225600 0 4 0 1 8 00 {PINNED}"


def judge(*lines: str, pinned: tuple[str, ...] = (PINNED,)) -> str:
    return release.judge_signature(release.parse_gpgv_status("\n".join(lines)), list(pinned), "http://x/SUMS.sig")


def test_a_subkey_of_the_pinned_key_may_sign() -> None:
    assert judge("[GNUPG:] NEWSIG", f"[GNUPG:] GOODSIG {SUBKEY[-16:]} HashiCorp", VALID) == PINNED


def test_one_of_two_signatures_by_the_pinned_key_is_enough() -> None:
    assert judge(VALID.replace(PINNED, OTHER), VALID) == PINNED
    assert judge("[GNUPG:] ERRSIG 1234567890ABCDEF 1 8 00 1767225600 9", VALID) == PINNED


BAD = (
    "holds a BAD signature, the checksum list is not what was signed",
    "do not use this mirror before you know who changed the file; compare with another source",
)
STRANGER = (
    f"was signed by {OTHER}",
    "check the option 'key_fingerprints' against the fingerprint that the signer publishes",
)
MISSING = "check key_url and key_fingerprints, or whether the mirror signs with another key"
NOTHING = ("holds no signature that gpgv can read", "check what the server delivers at this address")


@pytest.mark.parametrize(
    ("lines", "found", "step"),
    [
        ([f"[GNUPG:] BADSIG {SUBKEY[-16:]} HashiCorp"], *BAD),
        ([VALID, f"[GNUPG:] BADSIG {SUBKEY[-16:]} HashiCorp"], *BAD),
        (
            [f"[GNUPG:] REVKEYSIG {SUBKEY[-16:]} HashiCorp", VALID],
            "was signed with a revoked key",
            "look for the signer's notice on the revocation and for newly signed files",
        ),
        ([VALID.replace(PINNED, OTHER)], *STRANGER),
        # The pinned fingerprint must be that of the primary key, in the place of the primary key.
        ([VALID.replace(PINNED, OTHER).replace(SUBKEY, PINNED)], *STRANGER),
        (
            [f"[GNUPG:] ERRSIG 1234567890ABCDEF 1 8 00 1767225600 9 {OTHER}"],
            f"was signed by key {OTHER}, which the key file does not hold",
            MISSING,
        ),
        (
            ["[GNUPG:] ERRSIG 1234567890ABCDEF 1 8 00 1767225600 9 -", "[GNUPG:] ERRSIG 2234567890abcdef"],
            "was signed by key 1234567890ABCDEF, 2234567890ABCDEF, which the key file does not hold",
            MISSING,
        ),
        (["[GNUPG:] NODATA 4"], *NOTHING),
        ([f"GOODSIG {VALID}"], *NOTHING),
        (["", "[GNUPG:]", "[GNUPG:] ERRSIG", " ".join(VALID.split()[:11])], *NOTHING),
        (["[GNUPG:]"], *NOTHING),
        ([], *NOTHING),
    ],
)
def test_signatures_that_do_not_count(lines: list[str], found: str, step: str) -> None:
    with pytest.raises(release.ReleaseError) as caught:
        judge(*lines, pinned=(PINNED, "A" * 40))
    assert str(caught.value) == (
        f"http://x/SUMS.sig {found}. Expected: a good signature by {PINNED} or {'A' * 40}. Next step: {step}."
    )


def test_a_signature_that_has_expired() -> None:
    with pytest.raises(release.ReleaseError) as caught:
        judge(f"[GNUPG:] EXPSIG {SUBKEY[-16:]} HashiCorp", VALID)
    assert str(caught.value) == (
        f"the signature in http://x/SUMS.sig has expired. Expected: a good signature by {PINNED}. "
        "Next step: fetch the signature that the signer has renewed."
    )


def test_what_gpgv_said_is_told() -> None:
    with pytest.raises(release.ReleaseError, match=r"that gpgv can read \(no valid data\)\. Expected"):
        release.judge_signature(release.parse_gpgv_status(""), [PINNED], "u", "no valid data")


def test_gpgv_that_does_not_run(tmp_path: Path) -> None:
    with pytest.raises(release.ReleaseError, match=r"/gpgv did not run \(.*No such file.*within 60 seconds\. Next"):
        release.run_gpgv(str(tmp_path / "gpgv"), b"", b"", b"", str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_how_gpgv_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpgv = tmp_path / "gpgv"
    gpgv.write_text(
        '#!/bin/sh\nprintf "[GNUPG:] ERRSIG %s\\n" "$(echo "$LC_ALL $@" | sed "s,$2,HOME,g; s, ,_,g")"\n'
        'cat "$6" "$7" "$8" >&2\necho last words >&2\n'
    )
    gpgv.chmod(0o755)
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    verdict, said = release.run_gpgv(str(gpgv), b"1\n", b"2\n", b"3\n", str(tmp_path))
    assert said == "last words"
    called = "C_--homedir_HOME_--status-fd_1_--keyring_HOME/keyring.gpg_HOME/data.sig_HOME/data"
    assert verdict.missing_keys == (called.upper(),)
    gpgv.write_text("#!/bin/sh\ncat $6 $7 $8 >&2\n")
    assert release.run_gpgv(str(gpgv), b"1 ", b"2 ", b"3 ", str(tmp_path))[1] == "1 2 3"
    gpgv.write_text("#!/bin/sh\n")
    assert release.run_gpgv(str(gpgv), b"", b"", b"", str(tmp_path))[1] == ""


def test_gpgv_that_does_not_end(tmp_path: Path) -> None:
    gpgv = tmp_path / "gpgv"
    gpgv.write_text("#!/bin/sh\nexec sleep 1000\n")
    gpgv.chmod(0o755)
    with pytest.raises(release.ReleaseError) as caught:
        release.run_gpgv(str(gpgv), b"", b"", b"", str(tmp_path), seconds=1)
    assert str(caught.value).startswith(f"{gpgv} did not run (")
    assert str(caught.value).endswith(
        "Expected: a gpgv that checks a signature within 1 seconds. "
        "Next step: reinstall the package gpgv (Debian, Ubuntu) or gnupg2 (RHEL)."
    )
    assert list(tmp_path.iterdir()) == [gpgv]


# --- network ---------------------------------------------------------------------------------


def content_of(url: str, settings: release.Network, **limits: Any) -> bytes:
    with release.download(url, settings, **limits) as file:
        return file.read()


def test_download(server: helper.Server, tmp_path: Path) -> None:
    server.files["/a"] = b"content" * 1_000_000
    with release.download(f"{server.url}/a", network(folder=str(tmp_path))[0]) as file:
        assert file.read() == server.files["/a"]
        assert release.sha256(file) == hashlib.sha256(server.files["/a"]).hexdigest()
        # It has no name that anybody could put another file under.
        assert list(tmp_path.iterdir()) == []
    assert server.headers[0]["User-Agent"] == "gpufarm.core"


def test_defaults_of_the_network() -> None:
    settings = release.Network()
    assert (settings.timeout, settings.retries, settings.ca_path, settings.folder) == (60, 3, None, None)
    assert settings.pause is time.sleep
    assert (downloading.SMALL_FILE_SECONDS, downloading.ARCHIVE_SECONDS, signature.GPGV_SECONDS) == (300, 3600, 60)
    assert (downloading.SMALL_FILE_LIMIT, downloading.ARCHIVE_LIMIT) == (4 << 20, 2 << 30)


def fail_first(server: helper.Server, path: str, times: int, how: Any) -> None:
    def hook(request: Any, content: bytes) -> None:
        if server.requests.count(path) <= times:
            how(request, content)
        else:
            helper.send(request, content)

    server.hooks[path] = hook


def cut_off(request: Any, content: bytes) -> None:
    helper.send(request, content[: len(content) // 2], length=len(content))
    request.close_connection = True


def answer(status: int, **headers: str) -> Any:
    def how(request: Any, _content: bytes) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name.replace("_", "-"), value)
        request.end_headers()

    return how


def hang_up(request: Any, _content: bytes) -> None:
    request.close_connection = True


@pytest.mark.parametrize(
    "how", [cut_off, hang_up, *(answer(status) for status in (429, 500, 502, 503, 504))], ids=lambda _how: ""
)
def test_trouble_that_passes_is_tried_again(server: helper.Server, how: Any) -> None:
    server.files["/a"] = b"x" * 3_000_000
    fail_first(server, "/a", 2, how)
    settings, pauses = network(retries=2)
    assert content_of(f"{server.url}/a", settings) == server.files["/a"]
    assert len(server.requests) == 3 and pauses == [1.0, 2.0]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (cut_off, "the connection ended after 50 of 100 bytes"),
        (answer(503), "HTTP 503 Service Unavailable"),
        (hang_up, "Remote end closed connection without response"),
    ],
)
def test_trouble_that_stays(server: helper.Server, how: Any, words: str) -> None:
    server.files["/a"] = b"x" * 100
    fail_first(server, "/a", 99, how)
    settings, pauses = network(retries=2)
    with pytest.raises(release.ReleaseError) as caught:
        release.download(f"{server.url}/a", settings)
    assert str(caught.value) == (
        f"{server.url}/a could not be downloaded ({words}; tried 3 times). Expected: a complete answer of the server. "
        "Next step: check name resolution, proxy and firewall of this node, or set the address of a mirror."
    )
    assert len(server.requests) == 3 and pauses == [1.0, 2.0]


@pytest.mark.parametrize("retries", [0, -1])
def test_no_second_try_where_none_is_wanted(server: helper.Server, retries: int) -> None:
    server.hooks["/a"] = answer(500)
    settings, pauses = network(retries=retries)
    with pytest.raises(release.ReleaseError, match="HTTP 500 Internal Server Error; tried once"):
        release.download(f"{server.url}/a", settings)
    assert len(server.requests) == 1 and pauses == []


def test_the_pause_that_the_server_asks_for(server: helper.Server) -> None:
    server.files["/a"] = b"x"
    fail_first(server, "/a", 1, answer(429, Retry_After="7"))
    settings, pauses = network()
    assert content_of(f"{server.url}/a", settings) == b"x"
    assert pauses == [7.0]


def test_a_server_that_asks_for_too_long_a_pause_is_left_alone(server: helper.Server) -> None:
    server.hooks["/a"] = answer(429, Retry_After="3600")
    settings, pauses = network()
    with pytest.raises(release.ReleaseError, match="HTTP 429 Too Many Requests, Retry-After: 3600; tried once"):
        release.download(f"{server.url}/a", settings)
    assert len(server.requests) == 1 and pauses == []


def test_pauses_count_as_time(server: helper.Server) -> None:
    server.hooks["/a"] = answer(503)
    settings, pauses = network(retries=9)
    with pytest.raises(release.ReleaseError, match="tried 3 times"):
        release.download(f"{server.url}/a", settings, seconds=3.9)
    assert pauses == [1.0, 2.0]


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (403, "answered HTTP 403 Forbidden"),
        (410, "answered HTTP 410 Gone"),
        (408, "answered HTTP 408 Request Timeout"),
        (304, "answered HTTP 304 Not Modified"),
        (302, "answered HTTP 302 Found"),
    ],
)
def test_answers_that_are_final(server: helper.Server, status: int, words: str) -> None:
    server.hooks["/a"] = answer(status)
    settings, pauses = network()
    with pytest.raises(release.ReleaseError) as caught:
        release.download(f"{server.url}/a", settings)
    assert str(caught.value) == (
        f"{server.url}/a {words}. Expected: HTTP 200. "
        "Next step: check the address and this node's access to the server (proxy, login, mirror)."
    )
    assert len(server.requests) == 1 and pauses == []


def test_a_file_that_is_not_there(server: helper.Server) -> None:
    with pytest.raises(release.ReleaseError) as caught:
        release.download(f"{server.url}/a", network()[0])
    assert str(caught.value) == (
        f"{server.url}/a does not exist (HTTP 404). Expected: the file of this release. "
        "Next step: check product/version, or base_url of your mirror."
    )
    assert len(server.requests) == 1


def test_what_a_server_says_steers_no_terminal(server: helper.Server) -> None:
    server.hooks["/a"] = lambda request, _content: request.wfile.write(b"HTTP/1.0 500 \x1b[2J\x07bad\r\n\r\n")
    with pytest.raises(release.ReleaseError, match=re.escape("(HTTP 500 [2J bad; tried once)")):
        release.download(f"{server.url}/a", network(retries=0)[0])


def test_size_limit(server: helper.Server) -> None:
    server.files["/a"] = b"x" * 101
    with pytest.raises(release.ReleaseError) as caught:
        release.download_small(f"{server.url}/a", network()[0], limit=100)
    assert str(caught.value) == (
        f"{server.url}/a is larger than 100 bytes. Expected: a file of a release. "
        "Next step: check what the server delivers at this address."
    )
    assert len(server.requests) == 1
    assert release.download_small(f"{server.url}/a", network()[0], limit=101) == server.files["/a"]


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "ftp://host/a",
        "a",
        "",
        "http://",
        "http:///a",
        "http://a b/c",
        "http://host:port/",
        "http://host/a b",
        "https://host\n/",
        "x http://host/",
        "http://[::1/a",
    ],
)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(release.ReleaseError) as caught:
        release.download(url, network()[0])
    assert str(caught.value) == (
        f"the address is '{url}'. Expected: https://host/path or http://host/path, in a password every special "
        "character as %XX, and with a login or a port every @ in the path as %40. "
        "Next step: correct the option that holds the address."
    )


@pytest.mark.parametrize(
    "url",
    ["http://h", "https://[2001:db8::1]:8443/a?b#c", "http://n:p@h_1.example:80/%40", "http://h?a", "http://h/a@b"],
)
def test_what_is_an_address(url: str) -> None:
    release.check_address(url)


def test_a_full_disk_is_not_tried_again(server: helper.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.BytesIO):
        def write(self, _data: Any) -> int:
            raise OSError(28, "No space left on device")

    server.files["/a"] = b"x"
    monkeypatch.setattr(downloading.tempfile, "TemporaryFile", lambda **_options: Full())
    with pytest.raises(release.ReleaseError) as caught:
        release.download(f"{server.url}/a", network()[0])
    assert str(caught.value) == (
        f"what came from {server.url}/a could not be written (No space left on device). "
        "Expected: room for the archive and the unpacked program. "
        "Next step: free disk space, or point Ansible's remote_tmp to a larger file system."
    )
    assert len(server.requests) == 1


# --- network: servers that mean harm -----------------------------------------------------------


@pytest.mark.parametrize("lengths", [(9000, 50), (50, 9000)], ids=["long then short", "short then long"])
def test_a_try_leaves_nothing_behind_for_the_next(server: helper.Server, lengths: tuple[int, int]) -> None:
    """What an attacker sent before breaking off must not stay behind the true file that comes next."""
    evil, server.files["/a"] = b"e" * lengths[0], b"t" * lengths[1]

    def break_off(request: Any, _content: bytes) -> None:
        helper.send(request, evil, length=10 * len(evil))
        request.close_connection = True

    fail_first(server, "/a", 1, break_off)
    with release.download(f"{server.url}/a", network()[0]) as file:
        assert file.read() == server.files["/a"]
        assert release.sha256(file) == hashlib.sha256(server.files["/a"]).hexdigest()
    assert len(server.requests) == 2


def test_every_try_has_a_file_of_its_own(server: helper.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    files: list[Any] = []
    fresh = tempfile.TemporaryFile

    def keep(**options: Any) -> Any:
        files.append(fresh(**options))
        return files[-1]

    monkeypatch.setattr(downloading.tempfile, "TemporaryFile", keep)
    server.files["/a"] = b"x" * 100
    fail_first(server, "/a", 2, cut_off)
    with release.download(f"{server.url}/a", network()[0]) as file:
        assert file is files[2]
        assert [each.closed for each in files] == [True, True, False]


@pytest.mark.parametrize(("stated", "received"), [(50, 50), (100, 100)])
def test_a_body_that_is_longer_than_stated_is_cut_there(server: helper.Server, stated: int, received: int) -> None:
    server.files["/a"] = b"x" * 100
    server.hooks["/a"] = lambda request, content: helper.send(request, content, length=stated)
    assert content_of(f"{server.url}/a", network()[0]) == b"x" * received


@pytest.mark.parametrize("stated", ["much", "-1", "²"])
def test_a_length_that_is_none_says_nothing(server: helper.Server, stated: str) -> None:
    def hook(request: Any, content: bytes) -> None:
        request.wfile.write(f"HTTP/1.0 200 OK\r\nContent-Length: {stated}\r\n\r\n".encode("latin-1") + content)

    server.files["/a"] = b"x" * 100
    server.hooks["/a"] = hook
    assert content_of(f"{server.url}/a", network(retries=0)[0]) == b"x" * 100


def hang_before_headers(request: Any, _content: bytes) -> None:
    request.ended.wait()


def hang_in_the_body(request: Any, content: bytes) -> None:
    helper.send(request, content[:10], length=len(content))
    request.wfile.flush()
    request.ended.wait()


@pytest.mark.parametrize("how", [hang_before_headers, hang_in_the_body])
def test_a_server_that_hangs(server: helper.Server, how: Any) -> None:
    server.files["/a"] = b"x" * 100
    server.hooks["/a"] = how
    with pytest.raises(release.ReleaseError, match=r"\((The read operation )?timed out; tried 2 times\)"):
        release.download(f"{server.url}/a", network(timeout=1, retries=1)[0])
    assert len(server.requests) == 2


def test_a_trouble_without_words_has_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def reset(*_arguments: Any, **_options: Any) -> None:
        raise ConnectionResetError

    monkeypatch.setattr(downloading, "open_url", reset)
    with pytest.raises(release.ReleaseError, match=r"\(ConnectionResetError"):
        release.download("http://mirror.example/a", network(retries=0)[0])


def trickle_headers(request: Any, _content: bytes) -> None:
    request.wfile.write(b"HTTP/1.0 200 OK\r\nX: ")
    while not request.ended.wait(0.05):
        request.wfile.write(b"x")


def trickle_body(request: Any, _content: bytes) -> None:
    request.send_response(200)
    request.end_headers()
    while not request.ended.wait(0.05):
        request.wfile.write(b"x")


@pytest.mark.parametrize("how", [trickle_headers, trickle_body])
def test_a_server_that_sends_a_byte_at_a_time_for_ever(server: helper.Server, how: Any) -> None:
    def hook(request: Any, content: bytes) -> None:
        with contextlib.suppress(OSError):
            how(request, content)

    server.hooks["/a"] = hook
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(release.ReleaseError, match=r"\(not complete after 1 seconds; tried once\)"):
        release.download(f"{server.url}/a", network(timeout=30)[0], seconds=1)
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    assert signal.getsignal(signal.SIGALRM) is before


def test_a_small_file_has_less_time_than_an_archive(server: helper.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.hooks["/a"] = trickle_body
    monkeypatch.setattr(downloading, "SMALL_FILE_SECONDS", 1)
    with pytest.raises(release.ReleaseError, match="not complete after 1 seconds"):
        release.download_small(f"{server.url}/a", network()[0])


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirections_are_followed(server: helper.Server, status: int) -> None:
    server.files["/b/c"] = b"x"
    server.redirect("/a", "b/c", status)
    assert content_of(f"{server.url}/a", network()[0]) == b"x"
    assert server.requests == ["/a", "/b/c"]


@pytest.mark.parametrize("status", [300, 403])
def test_an_address_in_another_answer_leads_nowhere(server: helper.Server, status: int) -> None:
    server.files["/b"] = b"x"
    server.redirect("/a", "/b", status)
    with pytest.raises(release.ReleaseError, match=f"answered HTTP {status} "):
        release.download(f"{server.url}/a", network(retries=0)[0])
    assert server.requests == ["/a"]


def test_redirections_end(server: helper.Server) -> None:
    server.redirect("/a", "/a")
    with pytest.raises(release.ReleaseError) as caught:
        release.download(f"{server.url}/a", network()[0])
    assert str(caught.value) == (
        f"{server.url}/a leads from one address to the next, more than 5 times. Expected: the file, or an address that "
        "has it. Next step: check what the server delivers at this address."
    )
    assert len(server.requests) == 6


@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://host/a", "http://host:port/", "http:///x y"])
def test_redirections_to_what_is_no_server(server: helper.Server, target: str) -> None:
    server.redirect("/a", target)
    with pytest.raises(release.ReleaseError, match=re.escape(f"{server.url}/a leads to '")):
        release.download(f"{server.url}/a", network()[0])
    assert len(server.requests) == 1


LOGIN = "robot:s3cret"


def with_login(url: str) -> str:
    return url.replace("://", f"://{LOGIN}@")


@pytest.mark.parametrize("absolute", [True, False])
def test_a_login_goes_to_its_own_server(server: helper.Server, absolute: bool) -> None:
    server.files["/b"] = b"x"
    server.ask_for_login("/b", LOGIN)
    server.redirect("/a", f"{server.url}/b" if absolute else "/b")
    assert content_of(f"{with_login(server.url)}/a", network()[0]) == b"x"
    with pytest.raises(release.ReleaseError, match="/a answered HTTP 401 Unauthorized"):
        release.download(f"{server.url}/a", network()[0])


def test_a_login_goes_to_no_other_server(server: helper.Server) -> None:
    other = helper.Server()
    try:
        other.ask_for_login("/b", LOGIN)
        server.redirect("/a", f"{other.url}/b")
        with pytest.raises(release.ReleaseError, match="HTTP 401") as caught:
            release.download(f"{with_login(server.url)}/a", network()[0])
        assert other.requests and not [headers for headers in other.headers if "Authorization" in headers]
        assert "s3cret" not in str(caught.value)
    finally:
        other.close()


def test_a_netrc_is_not_read(server: helper.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".netrc").write_text("default login robot password s3cret\n")
    (tmp_path / ".netrc").chmod(0o600)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    server.ask_for_login("/a", LOGIN)
    with pytest.raises(release.ReleaseError, match="HTTP 401"):
        release.download(f"{server.url}/a", network()[0])
    assert server.requests == ["/a"] and "Authorization" not in server.headers[0]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> helper.Certificate:
    if not shutil.which("openssl"):
        pytest.skip("openssl is needed to make a certificate")
    return helper.new_certificate(tmp_path_factory.mktemp("certificate"))


@pytest.fixture
def secure(certificate: helper.Certificate) -> Iterator[helper.Server]:
    running = helper.Server(certificate)
    yield running
    running.close()


def test_a_certificate_that_nobody_vouches_for(secure: helper.Server, certificate: helper.Certificate) -> None:
    secure.files["/a"] = b"x"
    settings, pauses = network()
    with pytest.raises(release.ReleaseError) as caught:
        release.download(f"{secure.url}/a", settings)
    assert str(caught.value).startswith(f"the certificate of {secure.url}/a is not trusted (")
    assert str(caught.value).endswith(
        "Expected: a certificate that this node trusts. "
        "Next step: install the CA of the mirror on the node, or name it in the option 'ca_path'."
    )
    assert secure.requests == [] and pauses == []
    assert content_of(f"{secure.url}/a", network(ca_path=str(certificate.path))[0]) == b"x"


def test_nothing_leads_from_https_to_http(
    secure: helper.Server, server: helper.Server, certificate: helper.Certificate
) -> None:
    server.files["/b"] = b"x"
    secure.redirect("/a", f"{server.url}/b")
    settings = network(ca_path=str(certificate.path))[0]
    with pytest.raises(release.ReleaseError) as caught:
        release.download(f"{secure.url}/a", settings)
    assert str(caught.value) == (
        f"{secure.url}/a leads to '{server.url}/b'. Expected: an address that starts with https://. "
        "Next step: name the address of a mirror that delivers the file itself."
    )
    assert server.requests == []
    # The other way round it is for the better.
    secure.files["/c"] = b"y"
    server.redirect("/a", f"{secure.url}/c")
    assert content_of(f"{server.url}/a", settings) == b"y"


# --- archives --------------------------------------------------------------------------------


def unpack(path: Path, data: bytes, member: str = "nomad", limit: int = 1000) -> bytes:
    archive = path / "a.zip"
    archive.write_bytes(data)
    target = io.BytesIO()
    with archive.open("rb") as file:
        release.unpack_member(file, member, target, "http://x/a.zip", limit)
    return target.getvalue()


def test_one_member_is_unpacked(tmp_path: Path) -> None:
    data = helper.make_zip({"../../evil": b"evil", "/abs": b"evil", "nomad": b"good"})
    assert unpack(tmp_path, data) == b"good"
    assert [path.name for path in tmp_path.iterdir()] == ["a.zip"]


def zip_with_mode(mode: int, content: bytes = b"/etc/shadow") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as container:
        info = zipfile.ZipInfo("nomad")
        info.external_attr = mode << 16
        container.writestr(info, content)
    return buffer.getvalue()


def test_zips_that_say_what_kind_a_file_is_and_those_that_do_not(tmp_path: Path) -> None:
    assert unpack(tmp_path, zip_with_mode(0o100755, b"x")) == b"x"
    assert unpack(tmp_path, zip_with_mode(0o755, b"x")) == b"x"
    assert unpack(tmp_path, helper.make_zip({"nomad": b"x" * 1000})) == b"x" * 1000


IRREGULAR = "'nomad' in http://x/a.zip is no regular file or larger than 1000 bytes"
OTHERS = {f"{letter}.txt": b"" for letter in "lkjihgfedcb"}


@pytest.mark.parametrize(
    ("data", "found", "step"),
    [
        (
            helper.make_zip({"consul": b"x", **OTHERS}),
            "http://x/a.zip does not hold 'nomad', it holds: b.txt, c.txt, consul, d.txt, e.txt, f.txt, g.txt, h.txt, "
            "i.txt, j.txt",
            "set the option 'binary' to the name of the program in the zip",
        ),
        (
            helper.make_zip({"\x1b[2J": b"", "nomad/": b"", "Nomad": b""}),
            "http://x/a.zip does not hold 'nomad', it holds: [2J, Nomad, nomad/",
            "set the option 'binary' to the name of the program in the zip",
        ),
        (
            helper.make_zip({}),
            "http://x/a.zip does not hold 'nomad', it holds: nothing",
            "set the option 'binary' to the name of the program in the zip",
        ),
        (helper.make_zip({"nomad": b"x" * 1001}), IRREGULAR, "check what the server delivers at this address"),
        (zip_with_mode(0o120777), IRREGULAR, "check what the server delivers at this address"),
        (zip_with_mode(0o040755), IRREGULAR, "check what the server delivers at this address"),
        (zip_with_mode(0o020666), IRREGULAR, "check what the server delivers at this address"),
        (
            b"<html>",
            "http://x/a.zip could not be unpacked (File is not a zip file)",
            "compare the file with the one that the publisher offers",
        ),
        (
            helper.make_zip({"nomad": b"x" * 500})[:-30],
            "http://x/a.zip could not be unpacked (File is not a zip file)",
            "compare the file with the one that the publisher offers",
        ),
    ],
    ids=["other member", "names", "empty", "too large", "link", "folder", "device", "no archive", "cut off"],
)
def test_archives_that_do_not_do(tmp_path: Path, data: bytes, found: str, step: str) -> None:
    with pytest.raises(release.ReleaseError) as caught:
        unpack(tmp_path, data)
    assert str(caught.value) == f"{found}. Expected: a zip that holds the file 'nomad'. Next step: {step}."


@pytest.mark.parametrize("where", [8, 10])
def test_archives_that_zipfile_cannot_read(tmp_path: Path, where: int) -> None:
    """A member that is encrypted, and one that is compressed in a way that nobody knows."""
    data = bytearray(helper.make_zip({"nomad": b"x" * 500}))
    entry = data.index(b"PK\x01\x02")
    for place in (entry + where, where - 2):
        data[place] = 1 if where == 8 else 77
    with pytest.raises(release.ReleaseError, match="could not be unpacked"):
        unpack(tmp_path, bytes(data))


def test_damaged_archives_give_one_exception(tmp_path: Path) -> None:
    chance = random.Random(20261121)  # noqa: S311
    whole = helper.make_zip({"nomad": bytes(range(256)) * 3, "LICENSE.txt": b"x"})
    words = set()
    for _round in range(400):
        damaged = bytearray(whole[: chance.choice([len(whole), len(whole), chance.randrange(len(whole))])])
        for _change in range(chance.randint(0, 4)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        if chance.random() < 0.3:
            del damaged[chance.randrange(len(damaged)) : chance.randrange(len(damaged))]
        try:
            unpack(tmp_path, bytes(damaged))
        except release.ReleaseError as error:
            words.add(str(error).partition(" (")[0])
    assert "http://x/a.zip could not be unpacked" in words


def test_an_archive_whose_list_points_before_its_beginning(tmp_path: Path) -> None:
    data = helper.make_zip({"nomad": os.urandom(900)})
    with pytest.raises(release.ReleaseError, match="could not be unpacked"):
        unpack(tmp_path, data[:100] + data[data.index(b"PK\x01\x02") :])


def test_a_stream_that_is_none(tmp_path: Path) -> None:
    data = bytearray(helper.make_zip({"nomad": b"x" * 500}))
    data[35] = 0xFF
    with pytest.raises(release.ReleaseError, match="could not be unpacked"):
        unpack(tmp_path, bytes(data))


def test_a_member_that_lies_about_its_size(tmp_path: Path) -> None:
    data = bytearray(helper.make_zip({"nomad": b"x" * 5000}))
    entry = data.index(b"PK\x01\x02")
    data[entry + 24 : entry + 28] = (10).to_bytes(4, "little")
    with pytest.raises(release.ReleaseError, match="could not be unpacked"):
        unpack(tmp_path, bytes(data))


# --- receipts --------------------------------------------------------------------------------

RECEIPT = release.Receipt("nomad", "1.0", "amd64", "/bin/nomad", "a" * 64, "b" * 64, "http://x", PINNED)
WANTED = release.Wanted("nomad", "1.0", "amd64", "/bin/nomad", None, (PINNED,))


def test_a_receipt_survives_the_disk() -> None:
    assert release.read_receipt(RECEIPT.to_json()) == RECEIPT
    unverified = dataclasses.replace(RECEIPT, signed_by=None)
    assert release.read_receipt(unverified.to_json()) == unverified


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        json.dumps({**json.loads(RECEIPT.to_json()), "format": 2}),
        json.dumps({**json.loads(RECEIPT.to_json()), "more": 1}),
        json.dumps({**json.loads(RECEIPT.to_json()), "version": None}),
    ],
)
def test_what_is_no_receipt(text: str) -> None:
    assert release.read_receipt(text) is None


def test_nothing_to_do() -> None:
    assert release.reasons_to_install(WANTED, RECEIPT, "b" * 64) == []
    assert release.reasons_to_install(dataclasses.replace(WANTED, checksum="a" * 64), RECEIPT, "b" * 64) == []
    unverified = dataclasses.replace(RECEIPT, signed_by=None)
    assert release.reasons_to_install(dataclasses.replace(WANTED, signers=()), unverified, "b" * 64) == []


@pytest.mark.parametrize(
    ("wanted", "receipt", "binary", "reason"),
    [
        ({}, {}, None, "the program is not there"),
        ({}, None, "b" * 64, "there is no receipt"),
        ({}, {}, "c" * 64, "not the one that was installed"),
        ({"version": "1.1"}, {}, "b" * 64, "version is 1.0, not 1.1"),
        ({"architecture": "arm64"}, {}, "b" * 64, "architecture is amd64"),
        ({"path": "/opt/nomad"}, {}, "b" * 64, "path is /bin/nomad"),
        ({"product": "consul"}, {}, "b" * 64, "product is nomad"),
        ({"checksum": "c" * 64}, {}, "b" * 64, "pinned checksum"),
        ({"signers": (OTHER,)}, {}, "b" * 64, "signature was not verified"),
        ({}, {"signed_by": None}, "b" * 64, "signature was not verified"),
    ],
)
def test_reasons_to_install(wanted: dict[str, Any], receipt: dict[str, Any] | None, binary: str, reason: str) -> None:
    found = None if receipt is None else dataclasses.replace(RECEIPT, **receipt)
    reasons = release.reasons_to_install(dataclasses.replace(WANTED, **wanted), found, binary)
    assert len(reasons) == 1 and reason in reasons[0]


def test_what_receipts_and_wishes_are_compared_for() -> None:
    every = dataclasses.replace(
        WANTED, product="a", version="b", architecture="c", path="d", checksum="e", signers=("f",)
    )
    assert release.reasons_to_install(every, RECEIPT, "c" * 64) == [
        "product is nomad, not a",
        "version is 1.0, not b",
        "architecture is amd64, not c",
        "path is /bin/nomad, not d",
        "the program is not the one that was installed",
        "the pinned checksum is not the one of the installed archive",
        "its signature was not verified with a key that is pinned now",
    ]
    assert release.reasons_to_install(every, None, None) == ["the program is not there"]
    assert release.reasons_to_install(every, None, "c") == ["there is no receipt of a verified installation"]


def test_a_receipt_as_it_lies_on_the_disk() -> None:
    assert dataclasses.replace(RECEIPT, signed_by=None).to_json() == (
        '{\n  "architecture": "amd64",\n  "binary_sha256": "' + "b" * 64 + '",\n  "format": 1,\n'
        '  "path": "/bin/nomad",\n  "product": "nomad",\n  "signed_by": null,\n  "source": "http://x",\n'
        '  "version": "1.0",\n  "zip_sha256": "' + "a" * 64 + '"\n}\n'
    )


def test_folders_are_made_for_everybody_to_read(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        (tmp_path / "there").mkdir()
        release.make_folder(tmp_path / "there" / "a" / "b")
        release.make_folder(tmp_path / "there" / "a" / "b")
    finally:
        os.umask(before)
    paths = [tmp_path / "there", tmp_path / "there" / "a", tmp_path / "there" / "a" / "b"]
    assert [path.stat().st_mode & 0o777 for path in paths] == [0o700, 0o755, 0o755]
