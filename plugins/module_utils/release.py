# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Downloads that are verified before they are used.

The functions that decide (names, checksum lists, what gpgv said, receipts) are pure; the few
that touch the network or the disk do one thing each and raise C(ReleaseError).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import http.client
import itertools
import json
import os
import re
import signal
import ssl
import stat
import struct
import tempfile
import time
import urllib.error
import urllib.parse
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from ansible.module_utils.urls import open_url
from ansible_collections.gpufarm.core.plugins.module_utils import commands, openpgp, retry
from ansible_collections.gpufarm.core.plugins.module_utils.problem import FoundError
from ansible_collections.gpufarm.core.plugins.module_utils.text import clean

ARCHITECTURES = {"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64", "arm64": "arm64"}
SMALL_FILE_LIMIT = 4 * 1024 * 1024
ARCHIVE_LIMIT = 2 * 1024 * 1024 * 1024
RECEIPT_FORMAT = 1

# How long a download may take, every try and pause included.
SMALL_FILE_SECONDS = 300.0
ARCHIVE_SECONDS = 3600.0
GPGV_SECONDS = 60.0

_CHUNK = 1024 * 1024
_USER_AGENT = "gpufarm.core"
_REDIRECTIONS = 5
_ADDRESS = re.compile(r"https?://(?:[^/?#\s]*@)?(?:[^/?#\s@:\[\]]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?(?:[/?#]\S*)?")


class ReleaseError(FoundError):
    """A release, or a key, is not as it must be."""

    def __init__(self, found: str, expected: str, next_step: str) -> None:
        super().__init__(*map(without_login, (found, expected, next_step)))


# --- addresses -------------------------------------------------------------------------------


def without_login(text: str) -> str:
    """The text with addresses that hold no name and no password; what is said of a mirror is read by many."""
    return re.sub(r"(https?://)[^/?#\s]*@", r"\1", text)


def shown(url: str) -> str:
    """An address as it may be shown; where a login may be anywhere in it, only how it begins."""
    return without_login(url) if _ADDRESS.fullmatch(url) or "@" not in url else f"{url.partition(':')[0]}:..."


def take_addresses(params: dict[str, Any], *options: str) -> dict[str, Any]:
    """The options as they were given; those that Ansible shows at C(-vvv), C(params), lose their logins."""
    given = dict(params)
    params.update({option: shown(given[option]) for option in options if given[option]})
    return given


# --- names -----------------------------------------------------------------------------------


def architecture_of(machine: str) -> str:
    """The architecture in release file names for what C(platform.machine()) says."""
    try:
        return ARCHITECTURES[machine.lower()]
    except KeyError:
        raise ReleaseError(
            found=f"this machine's architecture is '{machine}'",
            expected="x86_64 (amd64) or aarch64 (arm64)",
            next_step="set the option 'architecture' if the releases server has files for this machine",
        ) from None


@dataclasses.dataclass(frozen=True)
class ReleaseFiles:
    """Names and addresses of one release, laid out as on releases.hashicorp.com."""

    archive: str
    archive_url: str
    sums_url: str
    signature_url: str


def check_name(option: str, value: str, pattern: str, expected: str) -> None:
    """Refuse an option that is no such name, before it becomes a part of an address or of a path."""
    if not re.match(pattern, value):
        raise ReleaseError(
            found=f"the option '{option}' is '{value}'",
            expected=expected,
            next_step=f"correct the option '{option}'",
        )


def release_files(base_url: str, product: str, version: str, architecture: str) -> ReleaseFiles:
    check_name("product", product, r"^[a-z0-9][a-z0-9-]*$", "a product name such as nomad or nomad-device-nvidia")
    check_name("version", version, r"^[0-9][0-9A-Za-z.+~-]*$", "a version such as 1.11.3, without a leading v")
    check_name("architecture", architecture, r"^[a-z0-9_]+$", "an architecture such as amd64 or arm64")
    folder = f"{base_url.rstrip('/')}/{product}/{version}"
    archive = f"{product}_{version}_linux_{architecture}.zip"
    sums = f"{folder}/{product}_{version}_SHA256SUMS"
    return ReleaseFiles(archive=archive, archive_url=f"{folder}/{archive}", sums_url=sums, signature_url=f"{sums}.sig")


# --- checksums -------------------------------------------------------------------------------


def parse_sums(text: str) -> dict[str, str]:
    """File name to SHA-256 of a list as sha256sum writes it."""
    sums = {}
    for line in text.splitlines():
        match = re.match(r"^([0-9A-Fa-f]{64})[ \t]+\*?(\S+)$", line.strip())
        if match:
            sums[match.group(2)] = match.group(1).lower()
    return sums


def listed_sum(sums: dict[str, str], product: str, version: str, architecture: str, url: str) -> str:
    """The checksum of this architecture's archive, or an error that says which ones there are."""
    name = f"{product}_{version}_linux_{architecture}.zip"
    if name in sums:
        return sums[name]
    prefix, suffix = f"{product}_{version}_linux_", ".zip"
    there = sorted(
        file[len(prefix) : -len(suffix)] for file in sums if file.startswith(prefix) and file.endswith(suffix)
    )
    raise ReleaseError(
        found=f"{url} lists no {name}; it has these Linux architectures: {', '.join(there) or 'none'}",
        expected=f"a checksum for linux_{architecture}",
        next_step=f"choose a version of {product} that is released for {architecture}, or another architecture",
    )


def normalize_checksum(text: str) -> str:
    """A pinned SHA-256, written plain or as C(sha256:...)."""
    plain = text.strip().lower()
    if plain.startswith("sha256:"):
        plain = plain[len("sha256:") :]
    if not re.match(r"^[0-9a-f]{64}$", plain):
        raise ReleaseError(
            found=f"the option 'checksum' is '{text}'",
            expected="64 hexadecimal digits, plain or after 'sha256:'",
            next_step="copy the line of this architecture from the SHA256SUMS file of the release",
        )
    return plain


def sha256(file: IO[bytes]) -> str:
    """The checksum of an open file from its beginning on."""
    file.seek(0)
    digest = hashlib.sha256()
    for chunk in iter(lambda: file.read(_CHUNK), b""):
        digest.update(chunk)
    return digest.hexdigest()


def checksum_of(path: Path) -> str | None:
    """The SHA-256 of a file, None where there is none."""
    try:
        with path.open("rb") as file:
            return sha256(file)
    except FileNotFoundError:
        return None


# --- network ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Network:
    """How to reach a server, and where what comes from there lies; C(timeout) is for each single wait."""

    timeout: int = 60
    retries: int = 3
    ca_path: str | None = None
    folder: str | None = None
    pause: Callable[[float], None] = time.sleep


class _Interrupted(Exception):
    """The connection ended before the whole file was there."""


class _OutOfTime(Exception):
    """No OSError, which some layers take for an address that does not answer and then try the next one."""


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """End what is in hand after so long: the time-out of a socket begins anew with each byte."""

    def end(_number: int, _frame: object) -> None:
        raise _OutOfTime

    before = signal.signal(signal.SIGALRM, end)
    # Again some seconds later, for the case that the first one met a callback, which swallows exceptions.
    signal.setitimer(signal.ITIMER_REAL, seconds, 5.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _write(sink: IO[bytes], chunk: bytes, source: str) -> None:
    try:
        sink.write(chunk)
    except OSError as error:
        raise ReleaseError(
            found=f"what came from {source} could not be written ({error.strerror})",
            expected="room for the archive and the unpacked program",
            next_step="free disk space, or point Ansible's remote_tmp to a larger file system",
        ) from error


def check_address(url: str) -> None:
    """Refuse what is no address of a file on a server."""
    if not _ADDRESS.fullmatch(url):
        raise ReleaseError(
            found=f"the address is '{shown(url)}'",
            expected="https://host/path or http://host/path, in a password every special character as %XX",
            next_step="correct the option that holds the address",
        )


def _open(url: str, network: Network) -> Any:
    """The answer to a request. Redirections are followed here, where each can be looked at before it is taken."""
    first = url
    for _hop in range(_REDIRECTIONS + 1):
        try:
            return open_url(
                url,
                timeout=network.timeout,
                ca_path=network.ca_path,
                http_agent=_USER_AGENT,
                decompress=False,
                follow_redirects="no",
                # A login for this host in somebody's netrc must not be sent along.
                use_netrc=False,
            )
        except urllib.error.HTTPError as error:
            target = error.headers.get("Location")
            if error.code not in (301, 302, 303, 307, 308) or not target:
                raise
            error.close()
            url = _next_address(url, target)
    raise ReleaseError(
        found=f"{first} leads from one address to the next, more than {_REDIRECTIONS} times",
        expected="the file, or an address that has it",
        next_step="check what the server delivers at this address",
    )


def _next_address(url: str, target: str) -> str:
    """Where a redirection leads; the login goes with it to the same server only."""
    old, new = urllib.parse.urlsplit(url), urllib.parse.urlsplit(urllib.parse.urljoin(url, target))
    if not _ADDRESS.fullmatch(new.geturl()) or (old.scheme, new.scheme) == ("https", "http"):
        raise ReleaseError(
            found=f"{url} leads to '{shown(new.geturl())}'",
            expected=f"an address that starts with {old.scheme}://",
            next_step="name the address of a mirror that delivers the file itself",
        )
    if (new.scheme, new.netloc) == (old.scheme, old.netloc.rpartition("@")[2]):
        new = new._replace(netloc=old.netloc)
    return new.geturl()


def _receive(url: str, network: Network, limit: int, sink: IO[bytes]) -> None:
    """One try to download into C(sink)."""
    received = 0
    with _open(url, network) as answer:
        stated = answer.headers.get("Content-Length", "")
        while True:
            chunk = answer.read(_CHUNK)
            if not chunk:
                break
            received += len(chunk)
            if received > limit:
                raise ReleaseError(
                    found=f"{url} is larger than {limit} bytes",
                    expected="a file of a release",
                    next_step="check what the server delivers at this address",
                )
            _write(sink, chunk, url)
    # http.client does not complain about a body that ends early when it is read in pieces.
    if stated.isdecimal() and received != int(stated):
        raise _Interrupted(f"the connection ended after {received} of {stated} bytes")


def _final_answer(url: str, status: int, reason: str) -> ReleaseError:
    if status == 404:
        return ReleaseError(
            found=f"{url} does not exist (HTTP 404)",
            expected="the file of this release",
            next_step="check product/version, or base_url of your mirror",
        )
    return ReleaseError(
        found=f"{url} answered HTTP {status} {reason}".rstrip(),
        expected="HTTP 200",
        next_step="check the address and this node's access to the server (proxy, login, mirror)",
    )


def download(url: str, network: Network, limit: int = ARCHIVE_LIMIT, seconds: float = ARCHIVE_SECONDS) -> IO[bytes]:
    """What is at C(url), as an open file that has no name, tried again where that can help; a path is opened itself.

    Each try has a file of its own: in one file, a long answer that broke off would stay behind the short one that
    came whole.
    """
    if url.startswith("/"):
        return _open_local(Path(url), limit)
    check_address(url)
    deadline = time.monotonic() + seconds
    for attempt in itertools.count(1):
        asked = None
        try:
            with contextlib.ExitStack() as stack:
                file = stack.enter_context(tempfile.TemporaryFile(dir=network.folder))
                with _time_limit(max(deadline - time.monotonic(), 0.001)):
                    _receive(url, network, limit, file)
                file.seek(0)
                stack.pop_all()
                return file
        except urllib.error.HTTPError as error:
            reason = clean(str(error.reason))
            if error.code not in retry.STATUS:
                raise _final_answer(url, error.code, reason) from error
            trouble = f"HTTP {error.code} {reason}".rstrip()
            asked = error.headers.get("Retry-After")
            if asked:
                trouble += f", Retry-After: {clean(asked)}"
        except _OutOfTime:
            trouble = f"not complete after {seconds:.0f} seconds"
        except (OSError, http.client.HTTPException, _Interrupted) as error:
            # OSError is the base of URLError, of SSLError and of every time-out, on every Python.
            cause = getattr(error, "reason", error)
            trouble = clean(str(cause)) or type(cause).__name__
            if isinstance(cause, ssl.SSLCertVerificationError):
                raise ReleaseError(
                    found=f"the certificate of {url} is not trusted ({trouble})",
                    expected="a certificate that this node trusts",
                    next_step="install the CA of the mirror on the node, or name it in the option 'ca_path'",
                ) from error
        pause = retry.pause_s(attempt, asked)
        if attempt > network.retries or pause is None or time.monotonic() + pause >= deadline:
            break
        network.pause(pause)
    tried = "tried once" if attempt == 1 else f"tried {attempt} times"
    raise ReleaseError(
        found=f"{url} could not be downloaded ({trouble}; {tried})",
        expected="a complete answer of the server",
        next_step="check name resolution, proxy and firewall of this node, or set the address of a mirror",
    )


def _open_local(path: Path, limit: int) -> IO[bytes]:
    """A file that somebody has brought to this machine."""
    trouble = f"is larger than {limit} bytes"
    try:
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(path.open("rb"))
            if os.fstat(file.fileno()).st_size <= limit:
                stack.pop_all()
                return file
    except OSError as error:
        trouble = f"cannot be read ({error.strerror})"
    raise ReleaseError(
        found=f"{path} {trouble}",
        expected="a file of a release, in a folder laid out like releases.hashicorp.com",
        next_step="bring the file there, or name the address of a server that has it",
    )


def download_small(url: str, network: Network, limit: int = SMALL_FILE_LIMIT) -> bytes:
    """A small file (a key, a signature, a checksum list) as bytes."""
    with download(url, network, limit, SMALL_FILE_SECONDS) as file:
        return file.read()


# --- signature -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class GpgvVerdict:
    """What gpgv's status lines say."""

    primary_fingerprints: tuple[str, ...]
    bad: bool
    revoked: bool
    expired_key: bool
    expired_signature: bool
    missing_keys: tuple[str, ...]


def parse_gpgv_status(text: str) -> GpgvVerdict:
    """The lines of C(gpgv --status-fd), see doc/DETAILS in GnuPG."""
    primary, missing = [], []
    seen = set()
    for line in text.splitlines():
        words = line.split()
        if len(words) < 2 or words[0] != "[GNUPG:]":
            continue
        seen.add(words[1])
        if words[1] == "VALIDSIG" and len(words) >= 12:
            # A primary key that signs itself is named twice; very old gpgv named it once.
            primary.append(words[-1].upper())
        elif words[1] == "ERRSIG" and len(words) >= 3:
            missing.append(words[8].upper() if len(words) >= 9 and len(words[8]) >= 40 else words[2].upper())
    return GpgvVerdict(
        primary_fingerprints=tuple(primary),
        bad="BADSIG" in seen,
        revoked="REVKEYSIG" in seen,
        expired_key="EXPKEYSIG" in seen,
        expired_signature="EXPSIG" in seen,
        missing_keys=tuple(missing),
    )


def pinned_fingerprints(option: str, values: Sequence[str]) -> list[str]:
    """The fingerprints that a module's option pins, normalized and sorted; at least one."""
    try:
        pinned = sorted({openpgp.normalize_fingerprint(value) for value in values})
    except openpgp.OpenPGPError as error:
        raise ReleaseError(
            found=f"in the option '{option}', {error}",
            expected="full fingerprints as 'gpg --show-keys' prints them",
            next_step="copy the whole fingerprint, a short key ID does not identify a key",
        ) from error
    if not pinned:
        raise ReleaseError(
            found=f"the option '{option}' is empty",
            expected="at least one full fingerprint",
            next_step="pin the one that the signer publishes; the roles' variables for it end in key_fingerprints",
        )
    return pinned


def judge_signature(verdict: GpgvVerdict, pinned: list[str], url: str, said: str = "") -> str:
    """The pinned primary fingerprint that signed; an error for everything else."""
    expected = f"a good signature by {' or '.join(pinned)}"
    if verdict.bad:
        raise ReleaseError(
            found=f"{url} holds a BAD signature, the checksum list is not what was signed",
            expected=expected,
            next_step="do not use this mirror before you know who changed the file; compare with another source",
        )
    if verdict.revoked:
        raise ReleaseError(
            found=f"{url} was signed with a revoked key",
            expected=expected,
            next_step="look for the signer's notice on the revocation and for newly signed files",
        )
    if verdict.expired_signature:
        raise ReleaseError(
            found=f"the signature in {url} has expired",
            expected=expected,
            next_step="fetch the signature that the signer has renewed",
        )
    for primary in verdict.primary_fingerprints:
        if primary in pinned:
            return primary
    if verdict.primary_fingerprints:
        raise ReleaseError(
            found=f"{url} was signed by {', '.join(verdict.primary_fingerprints)}",
            expected=expected,
            next_step="check the option 'key_fingerprints' against the fingerprint that the signer publishes",
        )
    if verdict.missing_keys:
        raise ReleaseError(
            found=f"{url} was signed by key {', '.join(verdict.missing_keys)}, which the key file does not hold",
            expected=expected,
            next_step="check key_url and key_fingerprints, or whether the mirror signs with another key",
        )
    raise ReleaseError(
        found=f"{url} holds no signature that gpgv can read" + (f" ({said})" if said else ""),
        expected=expected,
        next_step="check what the server delivers at this address",
    )


def run_gpgv(
    gpgv: str, keyring: bytes, signature: bytes, data: bytes, folder: str, *, seconds: float = GPGV_SECONDS
) -> tuple[GpgvVerdict, str]:
    """Let gpgv check a detached signature; returns its verdict and its last words."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        work = Path(name)
        for file, content in (("keyring.gpg", keyring), ("data.sig", signature), ("data", data)):
            (work / file).write_bytes(content)
        command = [gpgv, "--homedir", name, "--status-fd", "1"]
        command += ["--keyring", str(work / "keyring.gpg"), str(work / "data.sig"), str(work / "data")]
        (answer,) = commands.run_commands([command], seconds)
    if answer.returncode is None:
        raise ReleaseError(
            found=f"{gpgv} did not run ({answer.error or f'it gave no answer within {seconds:.0f} s and was killed'})",
            expected=f"a gpgv that checks a signature within {seconds:.0f} seconds",
            next_step="reinstall the package gpgv (Debian, Ubuntu) or gnupg2 (RHEL)",
        )
    last = answer.stderr.strip().splitlines()
    return parse_gpgv_status(answer.stdout), last[-1] if last else ""


# --- archive ---------------------------------------------------------------------------------


def unpack_member(archive: IO[bytes], member: str, target: IO[bytes], source: str, limit: int = ARCHIVE_LIMIT) -> None:
    """Write one member of a zip to an open file; no name in the zip becomes a path."""
    expected = f"a zip that holds the file '{member}'"
    try:
        with zipfile.ZipFile(archive) as container:
            try:
                info = container.getinfo(member)
            except KeyError:
                names = ", ".join(sorted(container.namelist())[:10]) or "nothing"
                raise ReleaseError(
                    found=f"{source} does not hold '{member}', it holds: {clean(names)}",
                    expected=expected,
                    next_step="set the option 'binary' to the name of the program in the zip",
                ) from None
            # Zips that were not made on Unix say nothing of the kind of file.
            if stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG) or info.file_size > limit:
                raise ReleaseError(
                    found=f"'{member}' in {source} is no regular file or larger than {limit} bytes",
                    expected=expected,
                    next_step="check what the server delivers at this address",
                )
            # zipfile never unpacks more than that size, and checks the CRC at the end.
            with container.open(info) as stream:
                for chunk in iter(lambda: stream.read(_CHUNK), b""):
                    _write(target, chunk, source)
    # What zipfile says of a file that was made to confuse it.
    except (OSError, ValueError, RuntimeError, EOFError, struct.error, zipfile.BadZipFile, zlib.error) as error:
        raise ReleaseError(
            found=f"{source} could not be unpacked ({error})",
            expected=expected,
            next_step="compare the file with the one that the publisher offers",
        ) from error


# --- files -----------------------------------------------------------------------------------


def make_folder(path: Path) -> None:
    """Have a folder, and those above it, that others can read: apt does as a user of its own, whatever our umask."""
    if not path.exists():
        make_folder(path.parent)
        # Another process of this run may have made it meanwhile.
        path.mkdir(exist_ok=True)
        path.chmod(0o755)


# --- receipt ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Receipt:
    """What was installed where, and what it was verified with; written after everything else."""

    product: str
    version: str
    architecture: str
    path: str
    zip_sha256: str
    binary_sha256: str
    source: str
    signed_by: str | None

    def to_json(self) -> str:
        return json.dumps({"format": RECEIPT_FORMAT, **dataclasses.asdict(self)}, indent=2, sort_keys=True) + "\n"


def read_receipt(text: str) -> Receipt | None:
    """A receipt; None for one that is damaged or of another format, which then counts as absent."""
    try:
        fields: Any = json.loads(text)
    except ValueError:
        return None
    if not isinstance(fields, dict) or fields.pop("format", None) != RECEIPT_FORMAT:
        return None
    names = {field.name for field in dataclasses.fields(Receipt)}
    if set(fields) != names:
        return None
    if not all(isinstance(value, str) or (key == "signed_by" and value is None) for key, value in fields.items()):
        return None
    return Receipt(**fields)


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What the task asks for, as far as a receipt can answer it."""

    product: str
    version: str
    architecture: str
    path: str
    checksum: str | None
    signers: tuple[str, ...]


def reasons_to_install(wanted: Wanted, receipt: Receipt | None, binary_sha256: str | None) -> list[str]:
    """Why the program must be installed; an empty list means that it is there and was verified."""
    if binary_sha256 is None:
        return ["the program is not there"]
    if receipt is None:
        return ["there is no receipt of a verified installation"]
    reasons = [
        f"{name} is {getattr(receipt, name)}, not {getattr(wanted, name)}"
        for name in ("product", "version", "architecture", "path")
        if getattr(receipt, name) != getattr(wanted, name)
    ]
    if receipt.binary_sha256 != binary_sha256:
        reasons.append("the program is not the one that was installed")
    if wanted.checksum is not None and receipt.zip_sha256 != wanted.checksum:
        reasons.append("the pinned checksum is not the one of the installed archive")
    if wanted.signers and receipt.signed_by not in wanted.signers:
        reasons.append("its signature was not verified with a key that is pinned now")
    return reasons
