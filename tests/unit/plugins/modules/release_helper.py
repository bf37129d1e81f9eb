# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""A releases server for the tests, with real signatures made by gpg, and a way to run a module."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import http.server
import io
import json
import shutil
import ssl
import subprocess
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.common import warnings
from ansible.module_utils.common.parameters import PASS_VARS
from ansible.module_utils.testing import patch_module_args

GPG_MISSING = "gpg and gpgv are needed to make and check real signatures"
HAS_GPG = bool(shutil.which("gpg") and shutil.which("gpgv"))


class Gpg:
    """A key ring of its own in a short-lived folder; gpg's agent needs a short path for its socket."""

    def __init__(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="gpg-", dir="/tmp"))
        self.home.chmod(0o700)

    def run(self, *arguments: str, data: bytes | None = None) -> bytes:
        command = ["gpg", "--homedir", str(self.home), "--batch", "--quiet", "--yes", "--pinentry-mode", "loopback"]
        answer = subprocess.run(
            [*command, "--passphrase", "", *arguments], input=data, capture_output=True, check=False
        )
        assert answer.returncode == 0, answer.stderr.decode()
        return answer.stdout

    def new_key(self, name: str, *, subkey: bool = False, expire: str = "0", faked_time: str = "") -> str:
        """The fingerprint of a new signing key, with a signing subkey where asked for."""
        early = ["--faked-system-time", faked_time] if faked_time else []
        usage = "cert" if subkey else "cert,sign"
        self.run(*early, "--quick-generate-key", f"{name} <{name}@example.com>", "ed25519", usage, expire)
        listing = self.run("--with-colons", "--list-keys", name).decode().splitlines()
        fingerprint = next(line.split(":")[9] for line in listing if line.startswith("fpr:"))
        if subkey:
            self.run(*early, "--quick-add-key", fingerprint, "ed25519", "sign", expire)
        return fingerprint

    def export(self, *names: str, armored: bool = True) -> bytes:
        return self.run(*(["--armor"] if armored else []), "--export", *names)

    def sign(self, data: bytes, fingerprint: str, faked_time: str = "") -> bytes:
        early = ["--faked-system-time", faked_time] if faked_time else []
        return self.run(*early, "--local-user", fingerprint, "--detach-sign", data=data)

    def close(self) -> None:
        if shutil.which("gpgconf"):
            subprocess.run(["gpgconf", "--homedir", str(self.home), "--kill", "all"], check=False, capture_output=True)
        shutil.rmtree(self.home, ignore_errors=True)


@pytest.fixture(scope="module")
def gpg() -> Iterator[Gpg]:
    """A key ring for the tests of a module, which takes it by ``gpg = helper.gpg``."""
    if not HAS_GPG:
        pytest.skip(GPG_MISSING)
    ring = Gpg()
    yield ring
    ring.close()


def send(
    request: http.server.BaseHTTPRequestHandler, content: bytes, length: int | None = None, status: int = 200
) -> None:
    """Answer with this content, and with the truth about its length unless another one is given."""
    request.send_response(status)
    request.send_header("Content-Length", str(len(content) if length is None else length))
    request.end_headers()
    request.wfile.write(content)


@dataclasses.dataclass(frozen=True)
class Certificate:
    """A certificate for localhost that signs itself, and its key."""

    path: Path
    key: Path


def new_certificate(folder: Path, days: int = 2) -> Certificate:
    """Return one that holds for some days, or has ended where they are -1."""
    made = Certificate(folder / "server.crt", folder / "server.key")
    # Python 3.13 wants to be told what the key is for.
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    command += ["-addext", "keyUsage=critical,digitalSignature,keyCertSign", "-days", str(abs(days))]
    command += ["-keyout", str(made.key), "-out", str(made.path)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    if days < 0:
        # Only this command takes such days.
        command = ["openssl", "x509", "-in", str(made.path), "-signkey", str(made.key), "-days", str(days)]
        subprocess.run([*command, "-out", str(made.path)], check=True, capture_output=True, timeout=300)
    return made


class Server:
    """An HTTP server over a dictionary, which counts what it was asked for."""

    def __init__(self, certificate: Certificate | None = None) -> None:
        self.files: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.ended = threading.Event()
        self.hooks: dict[str, Callable[[http.server.BaseHTTPRequestHandler, bytes], None]] = {}
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            ended = outer.ended

            def do_GET(self) -> None:
                outer.requests.append(self.path)
                outer.headers.append(dict(self.headers))
                content = outer.files.get(self.path)
                if self.path in outer.hooks:
                    outer.hooks[self.path](self, content or b"")
                elif content is None:
                    self.send_error(404)
                else:
                    send(self, content)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        # Handlers that a test leaves hanging end with the test, not with the server.
        self._server.block_on_close = False
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate.path, certificate.key)
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()
        self.host = f"127.0.0.1:{self._server.server_address[1]}"
        self.url = f"{'https' if certificate else 'http'}://{self.host}"

    def redirect(self, path: str, target: str, status: int = 302) -> None:
        def hook(request: http.server.BaseHTTPRequestHandler, _content: bytes) -> None:
            request.send_response(status)
            request.send_header("Location", target)
            request.send_header("Content-Length", "0")
            request.end_headers()

        self.hooks[path] = hook

    def ask_for_login(self, path: str, login: str) -> None:
        """Serve a path to this C(name:password) alone, asking for it as servers do."""
        expected = "Basic " + base64.b64encode(login.encode()).decode()

        def hook(request: http.server.BaseHTTPRequestHandler, content: bytes) -> None:
            if request.headers.get("Authorization") == expected:
                send(request, content)
                return
            request.send_response(401)
            request.send_header("WWW-Authenticate", 'Basic realm="mirror"')
            request.send_header("Content-Length", "0")
            request.end_headers()

        self.hooks[path] = hook

    def close(self) -> None:
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()


def make_zip(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as container:
        for name, content in members.items():
            container.writestr(name, content)
    return buffer.getvalue()


@dataclasses.dataclass
class Releases:
    """What upstream does for one product: zips, the list of their checksums, its signature, the key."""

    server: Server
    gpg: Gpg
    signer: str

    def publish(self, product: str, version: str, program: bytes, architectures: tuple[str, ...] = ("amd64",)) -> str:
        folder = f"/{product}/{version}"
        lines = []
        for architecture in architectures:
            name = f"{product}_{version}_linux_{architecture}.zip"
            content = make_zip({"LICENSE.txt": b"licence", product: program + architecture.encode()})
            self.server.files[f"{folder}/{name}"] = content
            lines.append(f"{hashlib.sha256(content).hexdigest()}  {name}\n")
        self.list_sums(product, version, "".join(lines).encode())
        self.server.files["/key.txt"] = self.gpg.export(self.signer)
        return f"{folder}/{product}_{version}_linux_{architectures[0]}.zip"

    def list_sums(self, product: str, version: str, sums: bytes, signer: str | None = None) -> None:
        path = f"/{product}/{version}/{product}_{version}_SHA256SUMS"
        self.server.files[path] = sums
        self.server.files[f"{path}.sig"] = self.gpg.sign(sums, signer or self.signer)


class Outcome(dict[str, Any]):
    """What a module returned."""


def run_module(main: Callable[[], None], capsys: Any, arguments: dict[str, Any], **settings: Any) -> Outcome:
    """Run a module's main() with arguments and return what it printed."""
    capsys.readouterr()
    # Of a module that has run before in this process, which on a node is another one.
    warnings._global_warnings.clear()
    # ansible-core 2.21 tells the options only where it is asked to, and no secret may be among them.
    settings = {**({"inject_invocation": True} if "inject_invocation" in PASS_VARS else {}), **settings}
    extra = {f"_ansible_{name}": value for name, value in settings.items()}
    with patch_module_args({**arguments, **extra}), contextlib.suppress(SystemExit):
        main()
    return Outcome(json.loads(capsys.readouterr().out))
