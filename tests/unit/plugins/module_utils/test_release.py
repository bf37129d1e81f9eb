# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpufarm.core.plugins.module_utils import release
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
    assert release.without_login("https://mirror.example.com/a@b") == "https://mirror.example.com/a@b"


def test_architectures() -> None:
    assert release.architecture_of("x86_64") == "amd64"
    assert release.architecture_of("aarch64") == "arm64"
    with pytest.raises(release.ReleaseError, match=r"'riscv64'\. Expected: x86_64"):
        release.architecture_of("riscv64")


def test_names_are_laid_out_as_upstream_does() -> None:
    files = release.release_files("https://releases.hashicorp.com/", "nomad", "1.11.3", "arm64")
    folder = "https://releases.hashicorp.com/nomad/1.11.3"
    assert files.archive_url == f"{folder}/nomad_1.11.3_linux_arm64.zip"
    assert files.sums_url == f"{folder}/nomad_1.11.3_SHA256SUMS"
    assert files.signature_url == f"{folder}/nomad_1.11.3_SHA256SUMS.sig"


def test_checksum_list() -> None:
    a, b = "a" * 64, "B" * 64
    sums = release.parse_sums(f"{a}  one.zip\n{b} *two.zip\r\n# remark\nshort  three.zip\n{a}\n")
    assert sums == {"one.zip": a, "two.zip": b.lower()}


def test_listed_sum_of_the_right_file_only() -> None:
    sums = {"nomad_1.0_linux_amd64.zip": "x", "nomad_1.0_darwin_arm64.zip": "y", "nomad_1.0_linux_s390x.zip": "z"}
    assert release.listed_sum(sums, "nomad", "1.0", "amd64", "u") == "x"
    with pytest.raises(release.ReleaseError, match="these Linux architectures: amd64, s390x"):
        release.listed_sum(sums, "nomad", "1.0", "arm64", "u")
    with pytest.raises(release.ReleaseError, match="architectures: none"):
        release.listed_sum({}, "nomad", "1.0", "arm64", "u")


def test_pinned_checksum() -> None:
    assert release.normalize_checksum(f" sha256:{'A' * 64}") == "a" * 64
    for text in ("", "abc", "md5:" + "a" * 32, "a" * 63 + "g"):
        with pytest.raises(release.ReleaseError, match="the option 'checksum' is"):
            release.normalize_checksum(text)


# --- gpgv ------------------------------------------------------------------------------------

VALID = f"[GNUPG:] VALIDSIG {SUBKEY} 2026-01-01 1767225600 0 4 0 1 8 00 {PINNED}"


def judge(*lines: str, pinned: tuple[str, ...] = (PINNED,)) -> str:
    return release.judge_signature(release.parse_gpgv_status("\n".join(lines)), list(pinned), "http://x/SUMS.sig")


def test_a_subkey_of_the_pinned_key_may_sign() -> None:
    assert judge("[GNUPG:] NEWSIG", f"[GNUPG:] GOODSIG {SUBKEY[-16:]} HashiCorp", VALID) == PINNED


def test_one_of_two_signatures_by_the_pinned_key_is_enough() -> None:
    assert judge(VALID.replace(PINNED, OTHER), VALID) == PINNED
    assert judge("[GNUPG:] ERRSIG 1234567890ABCDEF 1 8 00 1767225600 9", VALID) == PINNED


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([f"[GNUPG:] BADSIG {SUBKEY[-16:]} HashiCorp"], "holds a BAD signature"),
        ([VALID, f"[GNUPG:] BADSIG {SUBKEY[-16:]} HashiCorp"], "holds a BAD signature"),
        ([f"[GNUPG:] REVKEYSIG {SUBKEY[-16:]} HashiCorp", VALID], "signed with a revoked key"),
        ([f"[GNUPG:] EXPSIG {SUBKEY[-16:]} HashiCorp", VALID], "has expired"),
        ([VALID.replace(PINNED, OTHER)], f"was signed by {OTHER}"),
        # The pinned fingerprint must be that of the primary key, in the place of the primary key.
        ([VALID.replace(PINNED, OTHER).replace(SUBKEY, PINNED)], f"was signed by {OTHER}"),
        ([f"[GNUPG:] ERRSIG 1234567890ABCDEF 1 8 00 1767225600 9 {OTHER}"], f"signed by key {OTHER}"),
        (["[GNUPG:] ERRSIG 1234567890ABCDEF 1 8 00 1767225600 9 -"], "signed by key 1234567890ABCDEF"),
        (["[GNUPG:] NODATA 4"], "holds no signature"),
        ([f"GOODSIG {VALID}"], "holds no signature"),
        ([], "holds no signature"),
    ],
)
def test_signatures_that_do_not_count(lines: list[str], words: str) -> None:
    with pytest.raises(release.ReleaseError, match=words) as caught:
        judge(*lines)
    assert PINNED in caught.value.expected


def test_gpgv_that_does_not_run(tmp_path: Path) -> None:
    with pytest.raises(release.ReleaseError, match="did not run"):
        release.run_gpgv(str(tmp_path / "gpgv"), b"", b"", b"", str(tmp_path))
    assert list(tmp_path.iterdir()) == []


# --- network ---------------------------------------------------------------------------------


def test_download(server: helper.Server) -> None:
    server.files["/a"] = b"content" * 1000
    sink = io.BytesIO()
    assert release.download(f"{server.url}/a", sink, network()[0]) == hashlib.sha256(server.files["/a"]).hexdigest()
    assert sink.getvalue() == server.files["/a"]


def fail_first(server: helper.Server, path: str, times: int, how: Any) -> None:
    def hook(request: Any, content: bytes) -> None:
        if server.requests.count(path) <= times:
            how(request, content)
        else:
            request.send_response(200)
            request.send_header("Content-Length", str(len(content)))
            request.end_headers()
            request.wfile.write(content)

    server.hooks[path] = hook


def cut_off(request: Any, content: bytes) -> None:
    request.send_response(200)
    request.send_header("Content-Length", str(len(content)))
    request.end_headers()
    request.wfile.write(content[: len(content) // 2])
    request.close_connection = True


def server_error(request: Any, _content: bytes) -> None:
    request.send_error(503)


def hang_up(request: Any, _content: bytes) -> None:
    request.close_connection = True


@pytest.mark.parametrize("how", [cut_off, server_error, hang_up])
def test_trouble_that_passes_is_tried_again(server: helper.Server, how: Any) -> None:
    server.files["/a"] = b"x" * 3_000_000
    fail_first(server, "/a", 2, how)
    settings, pauses = network(retries=3)
    sink = io.BytesIO()
    release.download(f"{server.url}/a", sink, settings)
    assert sink.getvalue() == server.files["/a"]
    assert len(server.requests) == 3 and pauses == [1.0, 2.0]


@pytest.mark.parametrize(
    ("how", "words"),
    [(cut_off, "ended after 50 of 100 bytes"), (server_error, "HTTP 503 Service Unavailable"), (hang_up, "could not")],
)
def test_trouble_that_stays(server: helper.Server, how: Any, words: str) -> None:
    server.files["/a"] = b"x" * 100
    fail_first(server, "/a", 99, how)
    settings, pauses = network(retries=2)
    with pytest.raises(release.ReleaseError, match=words) as caught:
        release.download(f"{server.url}/a", io.BytesIO(), settings)
    assert "tried 3 times" in caught.value.found and server.url in caught.value.found
    assert len(server.requests) == 3 and pauses == [1.0, 2.0]


@pytest.mark.parametrize(("status", "words"), [(404, "does not exist"), (403, "answered HTTP 403"), (410, "HTTP 410")])
def test_answers_that_are_final(server: helper.Server, status: int, words: str) -> None:
    server.hooks["/a"] = lambda request, _content: request.send_error(status)
    settings, pauses = network()
    with pytest.raises(release.ReleaseError, match=words):
        release.download(f"{server.url}/a", io.BytesIO(), settings)
    assert len(server.requests) == 1 and pauses == []


def test_size_limit(server: helper.Server) -> None:
    server.files["/a"] = b"x" * 101
    with pytest.raises(release.ReleaseError, match="larger than 100 bytes"):
        release.download_small(f"{server.url}/a", network()[0], limit=100)
    assert release.download_small(f"{server.url}/a", network()[0], limit=101) == server.files["/a"]


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://host/a", "/a", ""])
def test_other_schemes_are_refused(url: str) -> None:
    with pytest.raises(release.ReleaseError, match="the address is"):
        release.download(url, io.BytesIO(), network()[0])


def test_a_full_disk_is_not_tried_again(server: helper.Server) -> None:
    class Full(io.BytesIO):
        def write(self, _data: Any) -> int:
            raise OSError(28, "No space left on device")

    server.files["/a"] = b"x"
    with pytest.raises(release.ReleaseError, match="could not be written \\(No space left on device\\)"):
        release.download(f"{server.url}/a", Full(), network()[0])
    assert len(server.requests) == 1


# --- archives --------------------------------------------------------------------------------


def unpack(path: Path, data: bytes, member: str = "nomad", limit: int = 1000) -> bytes:
    archive = path / "a.zip"
    archive.write_bytes(data)
    target = io.BytesIO()
    digest = release.unpack_member(str(archive), member, target, "http://x/a.zip", limit)
    assert digest == hashlib.sha256(target.getvalue()).hexdigest()
    return target.getvalue()


def test_one_member_is_unpacked(tmp_path: Path) -> None:
    data = helper.make_zip({"../../evil": b"evil", "/abs": b"evil", "nomad": b"good"})
    assert unpack(tmp_path, data) == b"good"
    assert [path.name for path in tmp_path.iterdir()] == ["a.zip"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            helper.make_zip({"consul": b"x", "L.txt": b"x"}),
            "does not hold 'nomad', it holds: L.txt, consul",
        ),
        (helper.make_zip({}), "it holds: nothing"),
        (helper.make_zip({"nomad": b"x" * 1001}), "larger than 1000 bytes"),
        (b"<html>", "could not be unpacked"),
        (helper.make_zip({"nomad": b"x" * 500})[:-30], "could not be unpacked"),
    ],
    ids=["other member", "empty", "too large", "no archive", "cut off"],
)
def test_archives_that_do_not_do(tmp_path: Path, data: bytes, words: str) -> None:
    with pytest.raises(release.ReleaseError, match=words):
        unpack(tmp_path, data)


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
