"""Certificates and OpenPGP keys of the test mirror: made once a machine, never committed.

The test authority may only vouch for names under ``gpufarm.test`` and for this machine itself, so
that trusting it in a node opens nothing else.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.simulator.cache import cache_dir
from tests.simulator.tools import need, run

HOST = "mirror.gpufarm.test"
RENEW_SECONDS = 30 * 24 * 3600
CA_DAYS = 3650
SERVER_DAYS = 397

# Python 3.13 verifies strictly (RFC 5280): key usage and key identifiers must be there.
CA_CONFIG = """\
[req]
prompt = no
distinguished_name = name
x509_extensions = extensions
[name]
CN = gpufarm.core test CA
[extensions]
basicConstraints = critical, CA:TRUE, pathlen:0
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
nameConstraints = critical, permitted;DNS:gpufarm.test, permitted;DNS:localhost, permitted;IP:127.0.0.1/255.255.255.255
"""
SERVER_EXTENSIONS = f"""\
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = DNS:{HOST}, DNS:localhost, IP:127.0.0.1
"""
# What each key stands for upstream.
OPENPGP = {
    "releases": "gpufarm.core test releases (stands for HashiCorp Security)",
    "packages": "gpufarm.core test packages (stands for NVIDIA's repository keys)",
}


@dataclass(frozen=True)
class Pki:
    """Where the keys and certificates are."""

    folder: Path
    releases_fingerprint: str
    packages_fingerprint: str

    @property
    def ca_cert(self) -> Path:
        return self.folder / "ca.crt"

    @property
    def ca_key(self) -> Path:
        return self.folder / "ca.key"

    @property
    def server_cert(self) -> Path:
        return self.folder / "server.crt"

    @property
    def server_key(self) -> Path:
        return self.folder / "server.key"

    @property
    def releases_key(self) -> Path:
        """The armored public key that release checksums are signed with."""
        return self.folder / "releases.asc"

    @property
    def packages_key(self) -> Path:
        """The armored public key that apt repositories are signed with."""
        return self.folder / "packages.asc"

    def private_key(self, name: str) -> Path:
        return self.folder / f"{name}.private.asc"

    def fingerprint(self, name: str) -> str:
        return {"releases": self.releases_fingerprint, "packages": self.packages_fingerprint}[name]


@contextmanager
def gnupg_home() -> Iterator[Path]:
    """Give a private GNUPGHOME with a path short enough for its agent's socket, and end that agent."""
    need("gpg", "gpgconf")
    home = Path(tempfile.mkdtemp(prefix="gpufarm-"))
    try:
        yield home
    finally:
        run(["gpgconf", "--homedir", home, "--kill", "all"])
        shutil.rmtree(home, ignore_errors=True)


def gpg(home: Path, *arguments: str | Path, stdin: bytes | None = None) -> bytes:
    """Run gpg in that home, without questions and without the user's own configuration."""
    return run(["gpg", "--homedir", home, "--no-options", "--batch", "--yes", "--quiet", *arguments], stdin=stdin)


@dataclass(frozen=True)
class Signer:
    """A GNUPGHOME that holds the private keys for as long as something is to be signed."""

    home: Path
    pki: Pki

    def sign(self, name: str, path: Path, signature: Path, kind: str = "--detach-sign", *more: str) -> None:
        """Write ``signature`` over ``path`` with the key ``name``; kind is gpg's word for the form."""
        gpg(self.home, "--digest-algo", "SHA512", "--local-user", self.pki.fingerprint(name), *more,
            "--output", signature, kind, path)  # fmt: skip


@contextmanager
def signer(keys: Pki) -> Iterator[Signer]:
    """Give a Signer with both keys."""
    with gnupg_home() as home:
        for name in OPENPGP:
            gpg(home, "--import", keys.private_key(name))
        yield Signer(home, keys)


def _private(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, 0o600)
        file.write(content)


def _key(algorithm: list[str]) -> bytes:
    return run(["openssl", "genpkey", *algorithm])


EC_KEY = ["-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:prime256v1"]


def _make_authority(folder: Path) -> None:
    _private(folder / "ca.key", _key(EC_KEY))
    with tempfile.NamedTemporaryFile("w", suffix=".cnf") as config:
        config.write(CA_CONFIG)
        config.flush()
        run(["openssl", "req", "-x509", "-new", "-key", folder / "ca.key", "-sha256", "-days", str(CA_DAYS),
             "-config", config.name, "-out", folder / "ca.crt"])  # fmt: skip


def _make_server(folder: Path) -> None:
    _private(folder / "server.key", _key(EC_KEY))
    with tempfile.TemporaryDirectory() as work:
        extensions, request = Path(work, "extensions"), Path(work, "request")
        extensions.write_text(SERVER_EXTENSIONS, encoding="ascii")
        run(["openssl", "req", "-new", "-key", folder / "server.key", "-subj", f"/CN={HOST}", "-out", request])
        run(["openssl", "x509", "-req", "-in", request, "-CA", folder / "ca.crt", "-CAkey", folder / "ca.key",
             "-set_serial", f"0x{os.urandom(16).hex()}", "-sha256", "-days", str(SERVER_DAYS),
             "-extfile", extensions, "-out", folder / "server.crt"])  # fmt: skip


def _make_openpgp(folder: Path) -> None:
    fingerprints: dict[str, str] = {}
    with gnupg_home() as home:
        for name, user in OPENPGP.items():
            gpg(home, "--pinentry-mode", "loopback", "--passphrase", "",
                "--quick-generate-key", f"{user} <{name}@gpufarm.test>", "rsa3072", "sign", "never")  # fmt: skip
            listed = gpg(home, "--with-colons", "--list-keys", f"<{name}@gpufarm.test>").decode()
            fingerprints[name] = next(line for line in listed.splitlines() if line.startswith("fpr:")).split(":")[9]
            (folder / f"{name}.asc").write_bytes(gpg(home, "--armor", "--export", fingerprints[name]))
            _private(folder / f"{name}.private.asc", gpg(home, "--armor", "--export-secret-keys", fingerprints[name]))
    (folder / "fingerprints.json").write_text(json.dumps(fingerprints, indent=2) + "\n", encoding="ascii")


def _valid(certificate: Path, authority: Path) -> bool:
    """Tell whether the certificate is there, signed by the authority, and good for another 30 days."""
    need("openssl")
    if not certificate.is_file() or not authority.is_file():
        return False
    try:
        run(["openssl", "x509", "-in", certificate, "-noout", "-checkend", str(RENEW_SECONDS)])
        run(["openssl", "verify", "-CAfile", authority, certificate])
    except RuntimeError:
        return False
    return True


def pki(folder: Path | None = None) -> Pki:
    """Return the keys and certificates, making or renewing what is missing or about to expire.

    A server certificate is renewed under the same authority, so that nodes which trust that
    authority keep working; a new authority means new node images.
    """
    folder = folder or cache_dir() / "pki"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        authority = folder / "ca.crt"
        if not (_valid(authority, authority) and (folder / "ca.key").is_file()):
            _make_authority(folder)
        if not (_valid(folder / "server.crt", authority) and (folder / "server.key").is_file()):
            _make_server(folder)
        parts = [f"{name}{end}" for name in OPENPGP for end in (".asc", ".private.asc")]
        if not all((folder / part).is_file() for part in [*parts, "fingerprints.json"]):
            _make_openpgp(folder)
        fingerprints = json.loads((folder / "fingerprints.json").read_text(encoding="ascii"))
    return Pki(folder, fingerprints["releases"], fingerprints["packages"])
