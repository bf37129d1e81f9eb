"""The server: honest by default, and lying exactly as told."""

from __future__ import annotations

import http.client
import io
import json
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.simulator.docker import PATIENCE
from tests.simulator.mirror import serve
from tests.simulator.mirror.layout import dearmored
from tests.simulator.mirror.pki import Pki, Signer
from tests.simulator.mirror.serve import Faults, Server, badly_signed, corrupted, wanted_range

from .conftest import needs

BODY = bytes(range(256)) * 40


@dataclass
class Mirror:
    port: int
    root: Path
    faults: Path
    log: io.StringIO
    context: ssl.SSLContext

    def connection(self) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection("localhost", self.port, context=self.context, timeout=PATIENCE)

    def get(self, path: str, method: str = "GET", **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
        connection = self.connection()
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        body = response.read()
        connection.close()
        return response, body

    def lie(self, **faults: str) -> None:
        self.faults.write_text(json.dumps({f"/{path}": fault for path, fault in faults.items()}), encoding="ascii")


@pytest.fixture
def mirror(tmp_path: Path, keys: Pki) -> Iterator[Mirror]:
    root = tmp_path / "www"
    (root / "folder").mkdir(parents=True)
    (root / "blob").write_bytes(BODY)
    (root / "text").write_text("text\n", encoding="ascii")
    (root / "a.zip").write_bytes(BODY)
    (tmp_path / "secret").write_text("secret", encoding="ascii")
    faults, log = tmp_path / "faults.json", io.StringIO()
    server = Server(("127.0.0.1", 0), root, cert=keys.server_cert, key=keys.server_key, faults=Faults(faults), log=log)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    context = ssl.create_default_context(cafile=str(keys.ca_cert))
    yield Mirror(server.server_address[1], root, faults, log, context)
    server.shutdown()
    server.server_close()


# --- honest -----------------------------------------------------------------------------------------------------------


def test_files_come_whole_with_type_length_and_date(mirror: Mirror) -> None:
    response, body = mirror.get("/a.zip")
    assert (response.status, body) == (200, BODY)
    assert response.headers["Content-Type"] == "application/zip"
    assert response.headers["Content-Length"] == str(len(BODY))
    assert response.headers["Last-Modified"].endswith("GMT")
    assert mirror.get("/text")[0].headers["Content-Type"] == "text/plain"
    assert mirror.get("/blob")[0].headers["Content-Type"] == "application/octet-stream"


def test_head_has_the_length_and_no_body(mirror: Mirror) -> None:
    response, body = mirror.get("/blob", method="HEAD")
    assert (response.headers["Content-Length"], body) == (str(len(BODY)), b"")


def test_one_connection_carries_many_requests(mirror: Mirror) -> None:
    connection = mirror.connection()
    seen = set()
    for path in ("/blob", "/nothing", "/text", "/"):
        connection.request("GET", path)
        connection.getresponse().read()
        assert connection.sock is not None
        seen.add(connection.sock.getsockname())
    assert len(seen) == 1


@pytest.mark.parametrize("path", ["/nothing", "/../secret", "/%2e%2e/secret", "/folder/../../secret", "/a%00b"])
def test_what_is_not_there_and_what_is_outside_is_404(mirror: Mirror, path: str) -> None:
    assert mirror.get(path)[0].status == 404


def test_a_link_out_of_the_root_is_404(mirror: Mirror) -> None:
    (mirror.root / "link").symlink_to(mirror.root.parent / "secret")
    assert mirror.get("/link")[0].status == 404


def test_folders_are_listed(mirror: Mirror) -> None:
    assert mirror.get("/folder")[0].headers["Location"] == "/folder/"
    assert b'<a href="a.zip">a.zip</a>' in mirror.get("/")[1]


def test_a_known_file_is_not_sent_again(mirror: Mirror) -> None:
    date = mirror.get("/blob")[0].headers["Last-Modified"]
    response, body = mirror.get("/blob", If_Modified_Since=date)
    assert (response.status, body) == (304, b"")
    assert mirror.get("/blob", If_Modified_Since="Mon, 01 Jan 2001 00:00:00 GMT")[0].status == 200
    assert mirror.get("/blob", If_Modified_Since="yesterday")[0].status == 200


@pytest.mark.parametrize(
    ("header", "expected"),
    [("bytes=0-9", (0, 9)), ("bytes=100-", (100, 10239)), ("bytes=-5", (10235, 10239)), ("bytes=0-99999", (0, 10239))],
)
def test_a_part_is_sent_as_a_part(mirror: Mirror, header: str, expected: tuple[int, int]) -> None:
    first, last = expected
    response, body = mirror.get("/blob", Range=header)
    assert (response.status, body) == (206, BODY[first : last + 1])
    assert response.headers["Content-Range"] == f"bytes {first}-{last}/{len(BODY)}"


def test_a_part_of_another_version_is_the_whole(mirror: Mirror) -> None:
    date = mirror.get("/blob")[0].headers["Last-Modified"]
    assert mirror.get("/blob", Range="bytes=5-", If_Range=date)[0].status == 206
    assert mirror.get("/blob", Range="bytes=5-", If_Range="Mon, 01 Jan 2001 00:00:00 GMT")[1] == BODY


def test_a_part_beyond_the_end_is_416(mirror: Mirror) -> None:
    response, _ = mirror.get("/blob", Range="bytes=10240-")
    assert (response.status, response.headers["Content-Range"]) == (416, "bytes */10240")


@pytest.mark.parametrize("header", [None, "", "bytes=-", "bytes=0-1,5-6", "lines=0-1"])
def test_other_ranges_are_ignored(header: str | None) -> None:
    assert wanted_range(header, 10) is None


def test_a_client_without_the_authority_is_turned_away(mirror: Mirror) -> None:
    stranger = http.client.HTTPSConnection(
        "localhost", mirror.port, context=ssl.create_default_context(), timeout=PATIENCE
    )
    with pytest.raises(ssl.SSLCertVerificationError):
        stranger.request("GET", "/blob")


def test_old_tls_is_refused(mirror: Mirror) -> None:
    context = mirror.context
    context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    with pytest.warns(DeprecationWarning):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises((ssl.SSLError, ConnectionError)):
        mirror.get("/blob")


def test_a_client_that_says_nothing_holds_up_nobody(mirror: Mirror) -> None:
    with socket.create_connection(("127.0.0.1", mirror.port)):
        assert mirror.get("/text")[1] == b"text\n"


def test_requests_are_logged(mirror: Mirror) -> None:
    mirror.get("/text", User_Agent="Debian APT-HTTP/1.3")
    assert '"GET /text HTTP/1.1" 200 - "Debian APT-HTTP/1.3"' in mirror.log.getvalue()


# --- faults -----------------------------------------------------------------------------------------------------------


def test_no_fault_file_and_an_empty_one_are_honest(mirror: Mirror) -> None:
    assert mirror.get("/blob")[1] == BODY
    mirror.lie()
    assert mirror.get("/blob")[1] == BODY


def test_corrupt_changes_one_byte_and_nothing_else(mirror: Mirror) -> None:
    mirror.lie(blob="corrupt")
    response, body = mirror.get("/blob")
    assert (response.status, len(body)) == (200, len(BODY))
    assert sum(a != b for a, b in zip(body, BODY, strict=True)) == 1
    assert mirror.get("/a.zip")[1] == BODY


def test_faults_end_when_the_file_says_so(mirror: Mirror) -> None:
    mirror.lie(blob="missing")
    assert mirror.get("/blob")[0].status == 404
    mirror.faults.unlink()
    assert mirror.get("/blob")[1] == BODY


def test_faults_reach_a_client_that_has_the_file(mirror: Mirror) -> None:
    date = mirror.get("/blob")[0].headers["Last-Modified"]
    mirror.lie(blob="corrupt")
    assert mirror.get("/blob", If_Modified_Since=date)[0].status == 200


def test_patterns_name_many_paths(mirror: Mirror) -> None:
    mirror.faults.write_text('{"/*.zip": "missing"}', encoding="ascii")
    assert [mirror.get(path)[0].status for path in ("/a.zip", "/blob")] == [404, 200]


def test_truncate_promises_the_whole_and_sends_half(mirror: Mirror) -> None:
    mirror.lie(blob="truncate")
    with pytest.raises(http.client.IncompleteRead) as caught:
        mirror.get("/blob")
    assert caught.value.partial == BODY[: len(BODY) // 2]


def test_slow_is_slow(mirror: Mirror) -> None:
    mirror.lie(blob="slow-40960")
    start = time.monotonic()
    assert mirror.get("/blob")[1] == BODY
    assert time.monotonic() - start > 0.2


def test_503_comes_so_often_for_each_path(mirror: Mirror) -> None:
    mirror.faults.write_text('{"/*": "503-2-times"}', encoding="ascii")
    assert [mirror.get("/blob")[0].status for _ in range(3)] == [503, 503, 200]
    assert mirror.get("/text")[0].status == 503
    mirror.faults.write_text('{"/blob": "503-1-times"}', encoding="ascii")
    assert [mirror.get("/blob")[0].status for _ in range(2)] == [503, 200]


def test_who_has_no_password_gets_nothing(mirror: Mirror) -> None:
    mirror.lie(blob="login-reader:pass")
    assert mirror.get("/blob")[0].status == 401
    assert mirror.get("/blob", Authorization="Basic cmVhZGVyOnBhc3M=")[1] == BODY
    assert mirror.get("/blob", Authorization="Basic cmVhZGVyOm90aGVy")[0].status == 401


@pytest.mark.parametrize("text", ['{"/blob": "corupt"}', '{"/blob": "corr', '{"/blob": "slow-0"}'])
def test_a_fault_that_is_not_understood_is_no_honesty(mirror: Mirror, text: str) -> None:
    mirror.faults.write_text(text, encoding="ascii")
    response, body = mirror.get("/blob")
    assert response.status == 500
    assert b"not understood" in body


@needs("gpgv")
@pytest.mark.parametrize(
    ("kind", "armored"), [("--detach-sign", False), ("--detach-sign", True), ("--clearsign", True)]
)
def test_a_bad_signature_is_a_signature_that_does_not_fit(
    signing: Signer, keys: Pki, tmp_path: Path, kind: str, armored: bool
) -> None:
    keyring, data, signature = (tmp_path / name for name in ("keyring", "data", "signature"))
    keyring.write_bytes(dearmored(keys.packages_key))
    data.write_text("content\n", encoding="ascii")
    signing.sign("packages", data, signature, kind, *(["--armor"] if armored else []))

    def verify() -> subprocess.CompletedProcess[str]:
        signed = [] if kind == "--clearsign" else [str(data)]
        command = ["gpgv", "--keyring", str(keyring), "--status-fd", "1", str(signature), *signed]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert "GOODSIG" in verify().stdout
    signature.write_bytes(badly_signed(signature.read_bytes()))
    found = verify()
    assert found.returncode == 1
    assert "BADSIG" in found.stdout


@pytest.mark.parametrize("change", [corrupted, badly_signed])
def test_nothing_can_be_changed_in_an_empty_body(change: Callable[[bytes], bytes]) -> None:
    assert change(b"") == b""


# --- as a program -----------------------------------------------------------------------------------------------------


def test_server_runs_as_a_single_file(tmp_path: Path, keys: Pki) -> None:
    (tmp_path / "www").mkdir()
    (tmp_path / "www/text").write_text("text\n", encoding="ascii")
    program = tmp_path / "serve.py"
    program.write_text(Path(serve.__file__).read_text("utf-8"), encoding="utf-8")
    command = [sys.executable, "-I", str(program), "--root", str(tmp_path / "www"), "--cert", str(keys.server_cert),
               "--key", str(keys.server_key), "--port", "0", "--bind", "127.0.0.1"]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline().rsplit(":", 1)[1])
        context = ssl.create_default_context(cafile=str(keys.ca_cert))
        connection = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=PATIENCE)
        connection.request("GET", "/text")
        assert connection.getresponse().read() == b"text\n"
        connection.close()
        process.terminate()
        assert process.wait(PATIENCE) == 0
