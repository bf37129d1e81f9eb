#!/usr/bin/python
# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: hashicorp_release_download
short_description: Keep the files of a HashiCorp release in a folder
version_added: 1.0.0
author:
  - gpufarm contributors (@gpufarm)
description:
  - Brings about the state "this folder has what is needed to install this release", namely the zip of an architecture,
    the list of checksums, its signature, and the key, laid out as on releases.hashicorp.com.
  - What is there and whole is not downloaded again, so a folder that was filled elsewhere needs no network. The zip is
    whole when it has the checksum of the list. Whoever installs from the folder verifies the signature, which
    M(gpufarm.core.hashicorp_release) does.
  - Several processes may work on one folder at the same time; the first downloads, and the others wait for it.
attributes:
  check_mode:
    support: full
    description: Tells what is not there. It downloads nothing.
  diff_mode:
    support: none
    description: Large files have no difference that is worth showing.
  idempotent:
    support: full
    description: Running the module again changes nothing and uses no network.
  platform:
    platforms: posix
    support: full
    description: It uses no program of the machine.
options:
  product:
    description:
      - Name of the product on the releases server, such as V(nomad) or V(nomad-device-nvidia).
    type: str
    required: true
  version:
    description:
      - Version of the release, without a leading V(v).
    type: str
    required: true
  architecture:
    description:
      - Architecture in the name of the zip.
    type: str
    default: amd64
  base_url:
    description:
      - Address of the releases server or of its mirror. The files are at C(base_url/product/version/).
      - Name and password may stand in it, C(https://name:password@host/); they are shown nowhere. An C(@) in
        the path is C(%40) then.
    type: str
    default: https://releases.hashicorp.com
  key_url:
    description:
      - Address of the file with the public key.
    type: str
    default: https://www.hashicorp.com/.well-known/pgp-key.txt
  key_fingerprints:
    description:
      - Full fingerprints of the primary keys that may sign. A file in the folder that holds none of them is replaced,
        and the lists and signatures are downloaded again.
    type: list
    elements: str
    default: [C874011F0AB405110D02105534365D9472D7468F]
  dest:
    description:
      - The folder. It is created when it is missing.
    type: path
    required: true
  timeout:
    description:
      - Seconds to wait for the server each time. A whole download, with every try, may take an hour.
    type: int
    default: 60
  retries:
    description:
      - How often to try again after a failed or interrupted connection, an error of the server (HTTP 5xx) or HTTP 429.
    type: int
    default: 3
  ca_path:
    description:
      - File with the CA certificates to trust for the downloads, where the machine's own do not do.
    type: path
seealso:
  - module: gpufarm.core.hashicorp_release
"""

EXAMPLES = r"""
- name: Nomad is in a folder that is carried to a site without internet
  gpufarm.core.hashicorp_release_download:
    product: nomad
    version: 1.11.3
    architecture: arm64
    dest: /srv/releases

- name: Nomad is installed from that folder, which the site's nodes mount
  gpufarm.core.hashicorp_release:
    product: nomad
    version: 1.11.3
    base_url: /srv/releases
    key_url: /srv/releases/pgp-key.txt
    dest: /usr/local/bin
"""

RETURN = r"""
files:
  description: Paths of the files below O(dest); the last one is the key.
  type: list
  elements: str
  returned: success
  sample:
    - nomad/1.11.3/nomad_1.11.3_linux_amd64.zip
    - nomad/1.11.3/nomad_1.11.3_SHA256SUMS
    - nomad/1.11.3/nomad_1.11.3_SHA256SUMS.sig
    - pgp-key.txt
downloaded:
  description: Those of RV(files) that were, or in check mode would be, downloaded; empty when all were there.
  type: list
  elements: str
  returned: success
  sample: []
"""

import contextlib
import fcntl
import functools
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpufarm.core.plugins.module_utils import openpgp, release

# As upstream calls it.
KEY = "pgp-key.txt"
ARMORED = b"-----BEGIN PGP SIGNATURE-----"
TAG_SIGNATURE = 2


@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Whoever comes second finds what the first has downloaded."""
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def keep(source: IO[bytes], target: Path, require: Callable[[Path], None]) -> None:
    """Have the whole file at this path, or the old one where C(require) fails for it."""
    with tempfile.NamedTemporaryFile(prefix=".gpufarm-", dir=target.parent, delete=False) as staged:
        try:
            shutil.copyfileobj(source, staged)
            staged.close()
            path = Path(staged.name)
            require(path)
            path.chmod(0o644)
            path.replace(target)
        finally:
            Path(staged.name).unlink(missing_ok=True)


def keys_of(path: Path) -> list[str]:
    """The fingerprints of a file's keys, none where it holds none."""
    try:
        return [key.fingerprint for key in openpgp.read_keys(path.read_bytes())]
    except (OSError, openpgp.OpenPGPError):
        return []


def is_signature(path: Path) -> bool:
    """Whether it is one at all, which a page that asks for a login is not; whoever installs verifies it."""
    try:
        data = path.read_bytes()
        return data.startswith(ARMORED) or any(each.tag == TAG_SIGNATURE for each in openpgp.packets(data))
    except (OSError, openpgp.OpenPGPError):
        return False


def require_signature(path: Path, url: str) -> None:
    if not is_signature(path):
        raise release.ReleaseError(
            found=f"{url} is no OpenPGP signature",
            expected="that of the list of checksums",
            next_step="check the address; a login page or an error page of a proxy is a common cause",
        )


def require_key(path: Path, url: str, pinned: list[str]) -> None:
    found = keys_of(path)
    if not set(found) & set(pinned):
        raise release.ReleaseError(
            found=f"{url} holds {', '.join(found) or 'no OpenPGP key'}",
            expected=f"a key with the fingerprint {' or '.join(pinned)}",
            next_step="check key_url and key_fingerprints; a login page or an error page of a proxy is a common cause",
        )


def require_another_key(path: Path, url: str, pinned: list[str], signed: Iterable[Path]) -> None:
    """Take away what the former key has signed, of all releases; it comes anew, by a later run where this one ends."""
    require_key(path, url, pinned)
    for each in signed:
        each.unlink(missing_ok=True)


@functools.lru_cache(maxsize=1024)
def sum_of(archive: Path, _inode: int, _size: int, _changed: int) -> str:
    """The SHA-256 of a file, which is read again only where it has become another."""
    with archive.open("rb") as file:
        return release.sha256(file)


def is_whole(archive: Path, listed: str | None) -> bool:
    try:
        there = archive.stat()
        return sum_of(archive, there.st_ino, there.st_size, there.st_mtime_ns) == listed
    except FileNotFoundError:
        return False


def apply(module: AnsibleModule) -> dict[str, Any]:
    params = release.take_addresses(module.params, "base_url", "key_url")
    pinned = release.pinned_fingerprints("key_fingerprints", params["key_fingerprints"])
    product, version, architecture = params["product"], params["version"], params["architecture"]
    there = Path(params["dest"])
    upstream = release.release_files(params["base_url"], product, version, architecture)
    local = release.release_files(str(there), product, version, architecture)
    archive, sums, signature = (Path(path) for path in (local.archive_url, local.sums_url, local.signature_url))
    network = release.Network(timeout=params["timeout"], retries=params["retries"], ca_path=params["ca_path"])

    def listed() -> str:
        text = sums.read_text(encoding="utf-8", errors="replace")
        return release.listed_sum(release.parse_sums(text), product, version, architecture, upstream.sums_url)

    def missing() -> dict[Path, str]:
        """What is not there or not whole, and where it comes from. A list and its signature belong together."""
        found = {}
        keyed = bool(set(keys_of(there / KEY)) & set(pinned))
        try:
            wanted = listed() if is_signature(signature) else None
        except (FileNotFoundError, release.ReleaseError):
            wanted = None
        # Another key has signed what is there.
        if wanted is None or not keyed:
            found = {signature: upstream.signature_url, sums: upstream.sums_url}
        if not is_whole(archive, wanted):
            found[archive] = upstream.archive_url
        if not keyed:
            found[there / KEY] = params["key_url"]
        return found

    def fetch(target: Path, url: str, require: Callable[[Path], None] = lambda _path: None) -> None:
        downloaded.append(target)
        with release.download(url, network) as source:
            keep(source, target, require)

    def complete() -> None:
        found = missing()
        if there / KEY in found:
            former = keys_of(there / KEY)
            fetch(
                there / KEY, params["key_url"],
                lambda path: require_another_key(
                    path, params["key_url"], pinned, there.glob("*/*/*_SHA256SUMS*") if former else ()
                ),
            )  # fmt: skip
        if signature in found:
            fetch(signature, found[signature], lambda path: require_signature(path, upstream.signature_url))
            fetch(sums, found[sums])
        wanted = listed()
        if not is_whole(archive, wanted):
            fetch(archive, upstream.archive_url)
            if not is_whole(archive, wanted):
                archive.unlink()
                raise release.ReleaseError(
                    found=f"{upstream.archive_url} has not the sha256 {wanted} that {upstream.sums_url} lists",
                    expected="the zip of this release",
                    next_step="download again; if it stays so, the file on this server is damaged or was replaced",
                )

    downloaded: list[Path] = []
    # A folder that has everything is not written to.
    if module.check_mode:
        downloaded = list(missing())
    elif missing():
        release.make_folder(archive.parent)
        # A key is that of all releases in the folder.
        with one_at_a_time(there):
            complete()
    return {
        "changed": bool(downloaded),
        "files": [str(path.relative_to(there)) for path in (archive, sums, signature, there / KEY)],
        "downloaded": [str(path.relative_to(there)) for path in downloaded],
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "product": {"type": "str", "required": True},
            "version": {"type": "str", "required": True},
            "architecture": {"type": "str", "default": "amd64"},
            "base_url": {"type": "str", "default": "https://releases.hashicorp.com"},
            "key_url": {"type": "str", "default": "https://www.hashicorp.com/.well-known/pgp-key.txt", "no_log": False},
            "key_fingerprints": {
                "type": "list",
                "elements": "str",
                "default": ["C874011F0AB405110D02105534365D9472D7468F"],
                "no_log": False,
            },
            "dest": {"type": "path", "required": True},
            "timeout": {"type": "int", "default": 60},
            "retries": {"type": "int", "default": 3},
            "ca_path": {"type": "path"},
        },
        supports_check_mode=True,
    )
    try:
        result = apply(module)
    except release.ReleaseError as error:
        module.fail_json(msg=f"{platform.node()}: {error}")
    except OSError as error:
        module.fail_json(
            msg=f"{platform.node()}: the release cannot be kept in {module.params['dest']} ({error}). Expected: a "
            "folder that this task may write to, with room for the zip. Next step: check 'dest' and the free space."
        )
    module.exit_json(**result)


if __name__ == "__main__":
    main()
