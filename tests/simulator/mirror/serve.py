"""HTTPS server of the mirror: one file, standard library only, so that it runs in a bare node image.

Honest by default. A fault file, read again on each request, makes it lie about single paths:

    {"/releases/nomad/*/nomad_*_linux_amd64.zip": "corrupt",
     "/libnvidia-container/gpgkey": "503-2-times"}

Keys are request paths or shell patterns of them. Values:
  corrupt        one byte in the middle of the body is another one
  missing        404
  truncate       the connection ends halfway through the body
  slow           4 KiB a second; slow-N: N bytes a second
  bad-signature  the signature in the body (detached, or within InRelease) no longer fits what it signs
  503-N-times    503 for the first N requests of each path since the fault file last changed
  login-NAME:PASSWORD  401 without this name and password
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import email.utils
import fnmatch
import html
import json
import mimetypes
import os
import re
import signal
import ssl
import sys
import threading
import time
import urllib.parse
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Any

CHUNK = 256 * 1024
SLOW_BYTES_PER_SECOND = 4096
IDLE_SECONDS = 60
FAULT = re.compile(
    r"corrupt|missing|truncate|bad-signature|slow(?:-(?P<rate>[1-9]\d*))?|503-(?P<times>\d+)-times|login-.+:.+"
)
TYPES = {
    ".asc": "text/plain",
    ".deb": "application/vnd.debian.binary-package",
    ".gz": "application/gzip",
    ".json": "application/json",
    ".list": "text/plain",
    ".pin": "text/plain",
    ".pub": "text/plain",
    ".sig": "application/octet-stream",
    ".txt": "text/plain",
    ".zip": "application/zip",
}


def now() -> str:
    """Return the time as the log has it."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


class Faults:
    """What the fault file says, and how often each 503 was already given."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._text = ""
        self._given: dict[str, int] = {}
        self._lock = threading.Lock()

    def of(self, path: str) -> str:
        """Return the fault of a request path, or "" where the server is honest."""
        if self.path is None:
            return ""
        with self._lock:
            try:
                text = self.path.read_text(encoding="utf-8")
            except FileNotFoundError:
                text = ""
            if text != self._text:
                self._text, self._given = text, {}
            try:
                faults = json.loads(text or "{}")
            except ValueError:
                # A half-written file: a fault that tests asked for must not silently become honesty.
                return "unreadable"
            for pattern, fault in faults.items():
                if path == pattern or fnmatch.fnmatchcase(path, pattern):
                    return self._once(path, str(fault))
            return ""

    def _once(self, path: str, fault: str) -> str:
        found = FAULT.fullmatch(fault)
        if not found:
            return "unreadable"
        if found["times"] is None:
            return fault
        given = self._given.get(path, 0)
        self._given[path] = given + 1
        return "503" if given < int(found["times"]) else ""


def corrupted(body: bytes) -> bytes:
    """Return the body with one byte in its middle changed."""
    middle = len(body) // 2
    return body[:middle] + bytes([body[middle] ^ 0x01]) + body[middle + 1 :] if body else body


def badly_signed(body: bytes) -> bytes:
    """Return the body with a signature that is well formed and does not fit what it signs.

    The last byte of the signature's number is changed. An armored signature gets its checksum
    line removed, which is optional (RFC 9580), so that not the armor but the signature is wrong.
    """
    begin = body.rfind(b"-----BEGIN PGP SIGNATURE-----")
    if begin < 0:
        return body[:-1] + bytes([body[-1] ^ 0x01]) if body else body
    lines = body[begin:].splitlines()
    lines = [line for line in lines if not re.fullmatch(rb"=[A-Za-z0-9+/]{4}", line)]
    end = next(number for number, line in enumerate(lines) if line.startswith(b"-----END"))
    line = bytearray(lines[end - 1])
    # The second letter of the last group of four holds whole bits of the signature whatever the padding.
    place = len(line) - 4
    line[place] = ord("B") if line[place] != ord("B") else ord("C")
    lines[end - 1] = bytes(line)
    return body[:begin] + b"\n".join(lines) + b"\n"


def wanted_range(header: str | None, size: int) -> tuple[int, int] | None:
    """Return first and last byte of a single range; None: no usable range was asked for.

    A range that begins beyond the end raises ValueError, for 416.
    """
    found = re.fullmatch(r"bytes=(\d*)-(\d*)", header or "")
    if not found or found.groups() == ("", ""):
        return None
    first, last = found.groups()
    if not first:
        return max(0, size - int(last)), size - 1
    if int(first) >= size or (last and int(last) < int(first)):
        raise ValueError(header)
    return int(first), min(int(last), size - 1) if last else size - 1


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server_version = "gpufarm-mirror"
    timeout = IDLE_SECONDS
    server: Server

    def do_GET(self) -> None:
        self.answer(send_body=True)

    def do_HEAD(self) -> None:
        self.answer(send_body=False)

    def answer(self, *, send_body: bool) -> None:
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        fault = self.server.faults.of(path)
        if fault == "unreadable":
            self.plain(HTTPStatus.INTERNAL_SERVER_ERROR, f"the fault file {self.server.faults.path} is not understood")
            return
        if fault == "503":
            self.plain(HTTPStatus.SERVICE_UNAVAILABLE, "fault: 503")
            return
        if fault.startswith("login-"):
            login = "Basic " + base64.b64encode(fault.removeprefix("login-").encode()).decode()
            if self.headers.get("Authorization") != login:
                self.plain(HTTPStatus.UNAUTHORIZED, "login needed", WWW_Authenticate='Basic realm="mirror"')
                return
            fault = ""
        place = self.server.find(path)
        if fault == "missing" or place is None:
            self.plain(HTTPStatus.NOT_FOUND, f"no such file: {path}")
        elif place.is_dir():
            self.folder(path, place)
        else:
            self.file(place, fault, send_body=send_body)

    def plain(self, status: HTTPStatus, text: str, kind: str = "text/plain", **headers: str) -> None:
        body = f"{text}\n".encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def folder(self, path: str, place: Path) -> None:
        if not path.endswith("/"):
            self.plain(HTTPStatus.MOVED_PERMANENTLY, "", Location=urllib.parse.quote(path) + "/")
            return
        names = sorted(f"{item.name}/" if item.is_dir() else item.name for item in place.iterdir())
        links = "\n".join(f'<a href="{urllib.parse.quote(name)}">{html.escape(name)}</a><br>' for name in names)
        self.plain(HTTPStatus.OK, f"<!doctype html><title>{html.escape(path)}</title>\n{links}", "text/html")

    def file(self, place: Path, fault: str, *, send_body: bool) -> None:
        status = place.stat()
        changed = email.utils.formatdate(int(status.st_mtime), usegmt=True)
        # What a client has from before is of no use to a test that wants it to meet a fault.
        if not fault and self.not_modified(status.st_mtime):
            self.send_response(HTTPStatus.NOT_MODIFIED)
            self.send_header("Last-Modified", changed)
            self.end_headers()
            return
        body: bytes | None = None
        if fault in ("corrupt", "bad-signature"):
            body = (corrupted if fault == "corrupt" else badly_signed)(place.read_bytes())
        size = status.st_size if body is None else len(body)
        try:
            part = None if fault else wanted_range(self.usable_range(changed), size)
        except ValueError:
            self.plain(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, "no such range", Content_Range=f"bytes */{size}")
            return
        first, last = part or (0, size - 1)
        self.send_response(HTTPStatus.PARTIAL_CONTENT if part else HTTPStatus.OK)
        self.send_header("Content-Type", self.content_type(place))
        self.send_header("Content-Length", str(last - first + 1))
        self.send_header("Last-Modified", changed)
        self.send_header("Accept-Ranges", "bytes")
        if part:
            self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        self.end_headers()
        if not send_body:
            return
        if body is not None:
            self.wfile.write(body)
            return
        length = last - first + 1
        if fault == "truncate":
            length //= 2
            self.close_connection = True
        rate = 0
        if fault.startswith("slow"):
            rate = int(fault.partition("-")[2] or SLOW_BYTES_PER_SECOND)
        self.send_bytes(place, first, length, rate)

    def send_bytes(self, place: Path, first: int, length: int, rate: int) -> None:
        """Send a part of a file; a rate above 0 is its limit in bytes a second."""
        with place.open("rb") as file:
            file.seek(first)
            while length > 0:
                chunk = file.read(min(length, max(1, rate // 4) if rate else CHUNK))
                if not chunk:
                    break
                if rate:
                    time.sleep(len(chunk) / rate)
                self.wfile.write(chunk)
                length -= len(chunk)

    def usable_range(self, changed: str) -> str | None:
        condition = self.headers.get("If-Range")
        return None if condition and condition != changed else self.headers.get("Range")

    def not_modified(self, mtime: float) -> bool:
        header = self.headers.get("If-Modified-Since")
        if not header or self.headers.get("Range"):
            return False
        try:
            return int(mtime) <= email.utils.parsedate_to_datetime(header).timestamp()
        except (TypeError, ValueError):
            return False

    def content_type(self, place: Path) -> str:
        known = TYPES.get(place.suffix) or mimetypes.guess_type(place.name)[0]
        # Upstream's index files and keys have no suffix; what is text in them is plain ASCII.
        if known is None and b"\0" not in place.open("rb").read(512):
            return "text/plain"
        return known or "application/octet-stream"

    def log_message(self, format: str, *args: Any) -> None:
        agent = self.headers.get("User-Agent", "-") if hasattr(self, "headers") and self.headers else "-"
        line = f"{now()} {self.client_address[0]} {format % args} {json.dumps(agent)}\n"
        self.server.log.write(line)
        self.server.log.flush()


class Server(ThreadingHTTPServer):
    """The server; a client's TLS handshake happens in that client's own thread."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self, address: tuple[str, int], root: Path, *, cert: Path, key: Path, faults: Faults, log: IO[str]
    ) -> None:
        self.root, self.faults, self.log = root.resolve(), faults, log
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.load_cert_chain(cert, key)
        super().__init__(address, Handler)

    def find(self, path: str) -> Path | None:
        """Return the file or folder of a request path, or None where there is none under the root."""
        if "\0" in path:
            return None
        place = Path(os.path.realpath(f"{self.root}/{path}"))
        inside = place == self.root or self.root in place.parents
        return place if inside and place.exists() else None

    def finish_request(self, request: Any, client_address: Any) -> None:
        request.settimeout(IDLE_SECONDS)
        try:
            with self.context.wrap_socket(request, server_side=True) as secured:
                super().finish_request(secured, client_address)
                # Without a proper end of TLS a client cannot tell an ended body from a cut one; a
                # client that has gone already does not care.
                with contextlib.suppress(OSError, ValueError):
                    secured.settimeout(1)
                    secured.unwrap()
        except OSError as error:
            self.log.write(f"{now()} {client_address[0]} connection ended: {error}\n")
            self.log.flush()


def serve(
    root: Path,
    cert: Path,
    key: Path,
    *,
    port: int = 443,
    bind: str = "0.0.0.0",
    faults: Path | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT; the access log goes to standard output."""
    server = Server((bind, port), root, cert=cert, key=key, faults=Faults(faults), log=sys.stdout)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: threading.Thread(target=server.shutdown).start())
    sys.stdout.write(f"serving {root} on {bind}:{server.server_address[1]}\n")
    sys.stdout.flush()
    server.serve_forever()
    server.server_close()


def arguments(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Add the server's options; where they are not required the caller has defaults."""
    parser.add_argument("--root", type=Path, required=required, help="folder to serve")
    parser.add_argument("--cert", type=Path, required=required, help="server certificate")
    parser.add_argument("--key", type=Path, required=required, help="private key of the certificate")
    parser.add_argument("--port", type=int, default=443)
    parser.add_argument("--bind", default="0.0.0.0")
    parser.add_argument("--faults", type=Path, help="JSON file of faults; it may come and go")


def main() -> None:
    parser = argparse.ArgumentParser(description="HTTPS server of the simulator's mirror")
    arguments(parser, required=True)
    options = parser.parse_args()
    serve(options.root, options.cert, options.key, port=options.port, bind=options.bind, faults=options.faults)


if __name__ == "__main__":
    main()
