# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Who has signed a file, by what gpgv says of it."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ansible_collections.gpufarm.core.plugins.module_utils import commands, openpgp
from ansible_collections.gpufarm.core.plugins.module_utils.release.addresses import ReleaseError

GPGV_SECONDS = 60.0


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
