#!/usr/bin/python
# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: hashicorp_release
short_description: Keep a program of a verified HashiCorp release installed
version_added: 1.0.0
author:
  - gpufarm contributors (@gpufarm)
description:
  - Brings about the state "version V of this product is installed in this folder, and the zip it came from was
    verified".
  - The list of checksums is verified with C(gpgv) against a key whose primary fingerprint is pinned, and the zip
    against that list, before anything is unpacked. The program is replaced in one step. When anything fails, the old
    program and its receipt stay as they were.
  - A receipt in O(receipt_dir) records what was installed and what it was verified with. While the receipt and the
    program's own checksum agree with the task, no network is used. A program that was deleted or modified afterwards is
    installed again.
  - Works with every server that is laid out like releases.hashicorp.com, so with a mirror of it.
requirements:
  - C(gpgv) on the node, unless O(verify_signature=false). Its package is C(gpgv) on Debian and Ubuntu and C(gnupg2)
    on RHEL.
attributes:
  check_mode:
    support: full
    description: Tells what would change. It downloads nothing.
  diff_mode:
    support: full
    description: Shows version and checksum before and after.
  idempotent:
    support: full
    description: Running the module again changes nothing and uses no network.
  platform:
    platforms: posix
    support: full
    description: Linux only, because it installs the Linux files of a release.
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
  state:
    description:
      - V(present) installs the program where it is missing, or is not the one that was installed.
      - V(verified) changes nothing and uses no network. It fails unless the program is there as it was installed, with
        the owner and mode that the task names.
    type: str
    choices: [present, verified]
    default: present
  downgrade:
    description:
      - Whether an older version may take the place of a newer one, which the receipts in O(receipt_dir) tell of,
        whichever O(dest) that had. What a newer Nomad server has written an older one may not read.
    type: bool
    default: true
  base_url:
    description:
      - Address of the releases server or of its mirror. The files are at C(base_url/product/version/).
      - An absolute path is a folder on the node that has the files in the same layout, as
        M(gpufarm.core.hashicorp_release_download) makes it. Then no network is used.
      - Name and password may stand in it, C(https://name:password@host/); they are shown nowhere, and sent to no other
        server. An C(@) in the path is C(%40) then. Redirections from https to http are refused.
    type: str
    default: https://releases.hashicorp.com
  verify_signature:
    description:
      - Whether the list of checksums must carry a good signature by one of O(key_fingerprints).
      - With V(false) and a O(checksum), only the zip is downloaded. With V(false) and no O(checksum) the zip is only
        compared with the list on the same server, which protects against damage and not against an attacker.
    type: bool
    default: true
  key_url:
    description:
      - Address of the file with the public key, or its absolute path on the node.
    type: str
    default: https://www.hashicorp.com/.well-known/pgp-key.txt
  key_fingerprints:
    description:
      - Full fingerprints of the primary keys that may sign. Other keys in the file are ignored.
      - The default is HashiCorp's release key, as HashiCorp states it on U(https://www.hashicorp.com/trust/security).
    type: list
    elements: str
    default: [C874011F0AB405110D02105534365D9472D7468F]
  checksum:
    description:
      - SHA-256 of the zip for this node's architecture, plain or after C(sha256:).
      - When given, it must hold in addition to the signed list.
    type: str
  dest:
    description:
      - Folder in which the program is installed. It is created when it is missing.
    type: path
    required: true
  binary:
    description:
      - Name of the program in the zip. The default is the value of O(product).
    type: str
  dest_name:
    description:
      - File name of the installed program. The default is the value of O(binary).
    type: str
  owner:
    description:
      - Name of the user that owns the program.
    type: str
  group:
    description:
      - Name of the group that owns the program.
    type: str
  mode:
    description:
      - Permissions of the program.
    type: raw
    default: "0755"
  architecture:
    description:
      - Architecture in the name of the zip. The default is V(amd64) on x86_64 and V(arm64) on aarch64.
    type: str
  validate:
    description:
      - Command that has to end well before a program takes the place of the one that is there; C(%s) in it becomes the
        path of the new one. Where it fails, or has not ended after five minutes, what it prints is told, and the old
        program and its receipt stay.
      - It runs without a shell, so nothing in it is expanded, and only where the program would be replaced.
    type: str
  receipt_dir:
    description:
      - Folder of the receipts, one for each program that this module installed.
    type: path
    default: /var/lib/gpufarm/releases
  timeout:
    description:
      - Seconds to wait for the server each time. A whole download, with every try, may take an hour.
    type: int
    default: 60
  retries:
    description:
      - How often to try again after a failed or interrupted connection, an error of the server (HTTP 5xx) or HTTP 429,
        with growing pauses or those that the server asks for, of 30 seconds at most. HTTP 404 is final.
    type: int
    default: 3
  ca_path:
    description:
      - File with the CA certificates to trust for the downloads, where the node's own do not do.
    type: path
seealso:
  - module: gpufarm.core.hashicorp_release_download
  - module: gpufarm.core.openpgp_key
  - name: HashiCorp's notes on verifying its archives
    description: The manual steps that this module takes.
    link: https://developer.hashicorp.com/well-architected-framework/operational-excellence/verify-hashicorp-binary
"""

EXAMPLES = r"""
- name: Nomad is installed
  gpufarm.core.hashicorp_release:
    product: nomad
    version: 1.11.3
    dest: /usr/local/bin
  notify: Restart Nomad

- name: The NVIDIA device plugin is installed
  gpufarm.core.hashicorp_release:
    product: nomad-device-nvidia
    version: 1.1.0
    dest: /opt/nomad/plugins

- name: Nomad is installed from the company's mirror, which signs with its own key
  gpufarm.core.hashicorp_release:
    product: nomad
    version: 1.11.3
    base_url: https://mirror.example.com/hashicorp
    key_url: https://mirror.example.com/keys/releases.asc
    key_fingerprints: ["{{ mirror_key_fingerprint }}"]
    dest: /usr/local/bin
"""

RETURN = r"""
version:
  description: Version that is installed now, or that would be in check mode.
  type: str
  returned: success
  sample: 1.11.3
previous_version:
  description: Version that was installed before according to the receipt; null when there was no intact one.
  type: str
  returned: success
  sample: 1.10.5
path:
  description: Path of the program.
  type: str
  returned: success
  sample: /usr/local/bin/nomad
architecture:
  description: Architecture of the installed zip.
  type: str
  returned: success
  sample: amd64
binary_sha256:
  description: SHA-256 of the program; null in check mode when it would change.
  type: str
  returned: success
  sample: 0f2b1e0a6b1e57f7b0a1f0a9a4a4a9d0c0f4a8d5b5f5d0f1e9b1e7a3c2d1e0f9
binary_changed:
  description: >-
    Whether the content of the program was replaced, which is when a service must be restarted. It is false when only
    the receipt, the owner or the permissions changed.
  type: bool
  returned: success
  sample: true
zip_sha256:
  description: SHA-256 of the zip; null in check mode when it is not known.
  type: str
  returned: success
  sample: 9b1c0d7de1fa0c51f2a1b7e6b1a7d0d5cf2d6f4b8a1d2e3c4f5a6b7c8d9e0f1a
signature:
  description: Primary fingerprint of the key that signed the list of checksums; null when it was not verified.
  type: str
  returned: success
  sample: C874011F0AB405110D02105534365D9472D7468F
source:
  description: Address of the zip.
  type: str
  returned: success
  sample: https://releases.hashicorp.com/nomad/1.11.3/nomad_1.11.3_linux_amd64.zip
reasons:
  description: Why the program was, or would be, installed; empty when it was there.
  type: list
  elements: str
  returned: success
  sample: [version is 1.10.5, not 1.11.3]
"""

import dataclasses
import hashlib
import os
import platform
import re
import shlex
import tempfile
import time
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpufarm.core.plugins.module_utils import openpgp, release
from ansible_collections.gpufarm.core.plugins.module_utils.commands import run_commands
from ansible_collections.gpufarm.core.plugins.module_utils.text import clean

# Of what a command that refuses a program prints.
WORDS = 1000
VALIDATE_S = 300
# How programs begin that are not in their place yet; Python adds eight letters.
STAGED = ".gpufarm-"
LEFT_S = 3600


@dataclasses.dataclass(frozen=True)
class Plan:
    """The task's options, checked and completed."""

    wanted: release.Wanted
    files: release.ReleaseFiles
    binary: str
    receipt_path: Path


def make_plan(params: dict[str, Any]) -> Plan:
    product, version = params["product"], params["version"]
    architecture = params["architecture"] or release.architecture_of(platform.machine())
    files = release.release_files(params["base_url"], product, version, architecture)
    binary = params["binary"] or product
    dest_name = params["dest_name"] or binary
    for option, value in (("binary", binary), ("dest_name", dest_name)):
        release.check_name(option, value, r"^(?!\.{1,2}$)[^/\0]+$", "a file name without a folder")
    path = str(Path(params["dest"]) / dest_name)
    signers = (
        release.pinned_fingerprints("key_fingerprints", params["key_fingerprints"])
        if params["verify_signature"]
        else []
    )
    return Plan(
        wanted=release.Wanted(
            product=product,
            version=version,
            architecture=architecture,
            path=path,
            checksum=release.normalize_checksum(params["checksum"]) if params["checksum"] else None,
            signers=tuple(signers),
        ),
        files=files,
        binary=binary,
        receipt_path=receipt_path(Path(params["receipt_dir"]), product, path),
    )


def receipt_path(folder: Path, product: str, path: str) -> Path:
    """Where the receipt lies; each place of a product has its own, so that two of them do not replace each other."""
    return folder / f"{product}-{hashlib.sha256(path.encode()).hexdigest()[:16]}.json"


def read_state(plan: Plan) -> tuple[release.Receipt | None, str | None]:
    """The receipt, and the checksum of the program; None for what is not there."""
    try:
        receipt = release.read_receipt(plan.receipt_path.read_text(encoding="utf-8"))
    except (FileNotFoundError, UnicodeDecodeError):
        receipt = None
    path = Path(plan.wanted.path)
    if path.is_dir():
        raise release.ReleaseError(
            found=f"{path} is a folder",
            expected="the program, or nothing, at this path",
            next_step="remove the folder, or choose another 'dest' or 'dest_name'",
        )
    if not path.is_file():
        return receipt, None
    with path.open("rb") as program:
        return receipt, release.sha256(program)


def newest_receipt(plan: Plan) -> release.Receipt | None:
    """What a newer one has written is there also where its program is gone or damaged, or was in another folder."""
    paths = plan.receipt_path.parent.glob(f"{plan.wanted.product}-*.json")
    receipts = [release.read_receipt(path.read_text(encoding="utf-8", errors="replace")) for path in paths]
    of_product = [receipt for receipt in receipts if receipt and receipt.product == plan.wanted.product]
    return max(of_product, key=lambda receipt: numbers(receipt.version), default=None)


def verified_sum(
    module: AnsibleModule, params: dict[str, Any], plan: Plan, network: release.Network
) -> tuple[str, str | None]:
    """The checksum that the zip must have, and the fingerprint that vouches for it."""
    wanted = plan.wanted
    if not wanted.signers and wanted.checksum:
        return wanted.checksum, None
    gpgv = find_gpgv(module) if wanted.signers else ""
    signed_by = None
    keyring = fetch_keyring(plan, params["key_url"], network) if wanted.signers else b""
    sums = release.download_small(plan.files.sums_url, network)
    if wanted.signers:
        signature = release.download_small(plan.files.signature_url, network)
        verdict, said = release.run_gpgv(gpgv, keyring, signature, sums, module.tmpdir)
        signed_by = release.judge_signature(verdict, list(wanted.signers), plan.files.signature_url, said)
        if verdict.expired_key:
            signed = release.without_login(plan.files.sums_url)
            module.warn(f"The key {signed_by} that signed {signed} has expired; its signature is good.")
    elif not wanted.checksum:
        module.warn(
            f"{release.without_login(plan.files.archive_url)} is compared with a list of checksums that nothing "
            "vouches for; set verify_signature=true or pin a checksum."
        )
    listed = release.listed_sum(
        release.parse_sums(sums.decode("utf-8", "replace")),
        wanted.product,
        wanted.version,
        wanted.architecture,
        plan.files.sums_url,
    )
    if wanted.checksum and listed != wanted.checksum:
        raise release.ReleaseError(
            found=f"{plan.files.sums_url} states sha256 {listed} for {plan.files.archive}",
            expected=f"the pinned checksum {wanted.checksum}",
            next_step="check whether the option 'checksum' is that of this version and architecture",
        )
    return listed, signed_by


def find_gpgv(module: AnsibleModule) -> str:
    path = module.get_bin_path("gpgv")
    if path is None:
        raise release.ReleaseError(
            found="the program gpgv is not installed",
            expected="gpgv, which verifies the signature of the release",
            next_step="install the package gpgv (Debian, Ubuntu) or gnupg2 (RHEL)",
        )
    return str(path)


def fetch_keyring(plan: Plan, url: str, network: release.Network) -> bytes:
    """The pinned keys of the key file as a binary keyring."""
    data = release.download_small(url, network)
    expected = f"the public key {' or '.join(plan.wanted.signers)}"
    try:
        keys = openpgp.read_keys(data)
    except openpgp.OpenPGPError as error:
        raise release.ReleaseError(
            found=f"{url} is not an OpenPGP public key: {error}",
            expected=expected,
            next_step="check key_url; a login page or an error page of a proxy is a common cause",
        ) from error
    trusted = [key for key in keys if key.fingerprint in plan.wanted.signers]
    if not trusted:
        raise release.ReleaseError(
            found=f"{url} holds the key {openpgp.describe(keys)}",
            expected=expected,
            next_step="compare with the fingerprint that the signer publishes, and pin it only if it is theirs",
        )
    return openpgp.join_keys(trusted)


def install(module: AnsibleModule, params: dict[str, Any], plan: Plan, before: str | None) -> release.Receipt:
    """Download, verify, unpack and replace; the receipt comes last and stands for all of it."""
    wanted, files = plan.wanted, plan.files
    network = release.Network(
        timeout=params["timeout"], retries=params["retries"], ca_path=params["ca_path"], folder=module.tmpdir
    )
    expected_sum, signed_by = verified_sum(module, params, plan, network)
    target = Path(wanted.path)
    # What is compared and what is unpacked is one open file, as it lies on the disk.
    with release.download(files.archive_url, network) as archive:
        zip_sum = release.sha256(archive)
        if zip_sum != expected_sum:
            raise release.ReleaseError(
                found=f"{files.archive_url} has sha256 {zip_sum}",
                expected=f"sha256 {expected_sum}, as {'signed' if signed_by else 'listed or pinned'}",
                next_step="download again; if it stays so, the file on this server is damaged or was replaced",
            )
        release.make_folder(target.parent)
        # Of installations that were killed; one that goes on is done long before.
        for path in target.parent.glob(f"{STAGED}????????"):
            if time.time() - path.lstat().st_mtime > LEFT_S:
                path.unlink(missing_ok=True)
        # Next to its place, because only within one file system a rename replaces in one step.
        with tempfile.NamedTemporaryFile(prefix=STAGED, dir=target.parent, delete=False) as staged:
            try:
                release.unpack_member(archive, plan.binary, staged, files.archive_url)
                staged.flush()
                os.fsync(staged.fileno())
                with Path(staged.name).open("rb") as program:
                    binary_sum = release.sha256(program)
                if binary_sum != before:
                    # An owner that does not exist must fail while the old program is still in place.
                    set_attributes(module, staged.name)
                    # One that is open for writing does not run.
                    staged.close()
                    validate(module.params["validate"], staged.name, f"{wanted.product} {wanted.version}")
                    module.atomic_move(staged.name, str(target))
            finally:
                Path(staged.name).unlink(missing_ok=True)
    return release.Receipt(
        product=wanted.product,
        version=wanted.version,
        architecture=wanted.architecture,
        path=wanted.path,
        zip_sha256=zip_sum,
        binary_sha256=binary_sum,
        source=release.without_login(files.archive_url),
        signed_by=signed_by,
    )


def validate(command: str | None, path: str, name: str) -> None:
    """Let the task's own command have its word on the new program."""
    if not command:
        return
    (answer,) = run_commands([shlex.split(command.replace("%s", shlex.quote(path)))], VALIDATE_S)
    if answer.returncode != 0:
        lines = f"{answer.error or answer.stdout}\n{answer.stderr}".splitlines()
        words = " ".join(clean(line).strip() for line in lines if line.strip())[:WORDS]
        if answer.timed_out:
            words = f"it did not end within {VALIDATE_S} s"
        raise release.ReleaseError(
            found=f"the command in 'validate' refuses {name} ({words or f'exit code {answer.returncode}'})",
            expected="a program that it accepts; what was there before stays",
            next_step="correct what it names, or set another version",
        )


def set_attributes(module: AnsibleModule, path: str) -> bool:
    wanted = {name: module.params[name] for name in ("owner", "group", "mode")}
    arguments = module.load_file_common_arguments(wanted, path=path)
    return bool(module.set_fs_attributes_if_different(arguments, False))


def write_receipt(module: AnsibleModule, plan: Plan, receipt: release.Receipt) -> None:
    release.make_folder(plan.receipt_path.parent)
    staged = Path(module.tmpdir) / "receipt"
    staged.write_text(receipt.to_json(), encoding="utf-8")
    module.atomic_move(str(staged), str(plan.receipt_path))
    plan.receipt_path.chmod(0o644)


def apply(module: AnsibleModule) -> dict[str, Any]:
    params = release.take_addresses(module.params, "base_url", "key_url")
    plan = make_plan(params)
    wanted = plan.wanted
    only_verify = params["state"] == "verified"
    module.check_mode = module.check_mode or only_verify
    receipt, before = read_state(plan)
    reasons = release.reasons_to_install(wanted, receipt, before)
    intact = receipt is not None and receipt.binary_sha256 == before and receipt.path == wanted.path
    previous = receipt.version if receipt is not None and intact else None
    newest = None if params["downgrade"] else newest_receipt(plan)
    if newest and numbers(newest.version) > numbers(wanted.version):
        raise release.ReleaseError(
            found=f"{newest.path} was {wanted.product} {newest.version}",
            expected=f"a version that is not newer than {wanted.version}, because an older server may not read what a "
            "newer one has written",
            next_step=f"set the version to {newest.version} or a newer one; to go back, restore a snapshot on new "
            "servers",
        )

    after = before
    current = receipt
    if reasons and module.check_mode:
        current, after = None, None
    elif reasons:
        current = install(module, params, plan, before)
        after = current.binary_sha256
    changed = bool(reasons)
    if before is not None or not module.check_mode:
        changed = set_attributes(module, wanted.path) or changed
    if changed and only_verify:
        raise release.ReleaseError(
            found=f"{wanted.path} is not as it was installed: {', '.join(reasons) or 'its owner or mode differs'}",
            expected=f"release {wanted.version} as it was verified when it was installed",
            next_step="run playbooks/site.yml, or the role that installs it, for this host",
        )
    if reasons and current is not None:
        # After everything else: a run that is cut off anywhere before leaves no claim behind.
        write_receipt(module, plan, current)

    result: dict[str, Any] = {
        "changed": changed,
        "version": wanted.version,
        "previous_version": previous,
        "path": wanted.path,
        "architecture": wanted.architecture,
        "binary_sha256": after,
        "binary_changed": bool(reasons) if after is None else after != before,
        "zip_sha256": current.zip_sha256 if current else wanted.checksum,
        "signature": current.signed_by if current else None,
        "source": current.source if current else release.without_login(plan.files.archive_url),
        "reasons": reasons,
    }
    if module._diff:
        result["diff"] = {
            "before_header": wanted.path,
            "after_header": wanted.path,
            "before": describe(wanted.product, previous, before),
            "after": describe(wanted.product, wanted.version, after),
        }
    return result


def numbers(version: str) -> list[int]:
    """The numbers of a version; a beta counts as its release, because it is near enough to go either way."""
    return [int(part) for part in re.findall(r"[0-9]+", re.split("[-+~]", version)[0])]


def describe(product: str, version: str | None, checksum: str | None) -> str:
    lines = f"{product} {version}\n" if version else ""
    return lines + (f"sha256 {checksum}\n" if checksum else "")


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "product": {"type": "str", "required": True},
            "version": {"type": "str", "required": True},
            "state": {"type": "str", "choices": ["present", "verified"], "default": "present"},
            "downgrade": {"type": "bool", "default": True},
            "base_url": {"type": "str", "default": "https://releases.hashicorp.com"},
            "verify_signature": {"type": "bool", "default": True},
            "key_url": {"type": "str", "default": "https://www.hashicorp.com/.well-known/pgp-key.txt", "no_log": False},
            "key_fingerprints": {
                "type": "list",
                "elements": "str",
                "default": ["C874011F0AB405110D02105534365D9472D7468F"],
                "no_log": False,
            },
            "checksum": {"type": "str"},
            "dest": {"type": "path", "required": True},
            "binary": {"type": "str"},
            "dest_name": {"type": "str"},
            "owner": {"type": "str"},
            "group": {"type": "str"},
            "mode": {"type": "raw", "default": "0755"},
            "architecture": {"type": "str"},
            "validate": {"type": "str"},
            "receipt_dir": {"type": "path", "default": "/var/lib/gpufarm/releases"},
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
            msg=f"{platform.node()}: {module.params['product']} could not be installed in {module.params['dest']} "
            f"({error}). Expected: folders that this task may write to, with room for the program. "
            "Next step: check 'dest', 'receipt_dir' and the free space, and use 'become'."
        )
    module.exit_json(**result)


if __name__ == "__main__":
    main()
