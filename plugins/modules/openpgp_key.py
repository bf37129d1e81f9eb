#!/usr/bin/python
# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: openpgp_key
short_description: Keep an OpenPGP public key with a pinned fingerprint as a keyring file
version_added: 1.0.0
author:
  - gpufarm contributors (@gpufarm)
description:
  - Brings about the state "this OpenPGP public key, whose primary fingerprint is pinned, is at this path",
    in the form that apt's C(Signed-By) reads.
  - Nothing is written before every primary key in the downloaded file has a fingerprint in O(fingerprints).
  - Needs neither gpg nor any package on the node.
  - While O(dest) holds exactly the pinned keys, nothing is downloaded.
attributes:
  check_mode:
    support: full
    description: >-
      Can run in check mode and tells what would change. It downloads the key only where the answer depends on it,
      which is when O(dest) holds some, but not all, of the pinned keys, or with O(force=true).
  diff_mode:
    support: full
    description: Shows the fingerprints of the primary keys before and after.
  idempotent:
    support: full
    description: Running the module again changes nothing and uses no network.
  platform:
    platforms: posix
    support: full
    description: Works on every POSIX system.
options:
  url:
    description:
      - Address of the key, armored or binary. Exactly one of O(url) and O(src) is required.
      - Name and password may stand in it, C(https://name:password@host/); they are shown nowhere, and sent to no other
        server. An C(@) in the path is C(%40) then. Redirections from https to http are refused.
    type: str
  src:
    description:
      - Path of a key file that is already on the node.
    type: path
  fingerprints:
    description:
      - The full fingerprints of the primary keys that the file may hold, as the publisher prints them.
        Spaces are allowed.
      - A key with any other fingerprint in the file is an error. During a key rotation list both keys.
    type: list
    elements: str
    required: true
  dest:
    description:
      - Path of the keyring. A name that ends in C(.asc) is written ASCII-armored, every other one binary.
      - Its folder is created when it is missing.
    type: path
    required: true
  owner:
    description:
      - Name of the user that owns the file.
    type: str
  group:
    description:
      - Name of the group that owns the file.
    type: str
  mode:
    description:
      - Permissions of the file. apt reads keyrings as its own unprivileged user, so it must be readable by everyone.
    type: raw
    default: "0644"
  timeout:
    description:
      - Seconds to wait for the server each time. The whole download, with every try, may take five minutes.
    type: int
    default: 30
  retries:
    description:
      - How often to try again after a failed connection, an error of the server (HTTP 5xx) or HTTP 429, with growing
        pauses or those that the server asks for, of 30 seconds at most.
    type: int
    default: 3
  ca_path:
    description:
      - File with the CA certificates to trust for O(url), where the node's own do not do.
    type: path
  force:
    description:
      - Fetch the key even when O(dest) already holds it, as after its owner has prolonged it.
    type: bool
    default: false
seealso:
  - module: gpufarm.core.hashicorp_release
  - module: ansible.builtin.deb822_repository
"""

EXAMPLES = r"""
- name: The key of the NVIDIA container toolkit's repository is there
  gpufarm.core.openpgp_key:
    url: https://nvidia.github.io/libnvidia-container/gpgkey
    fingerprints:
      - C95B 321B 61E8 8C18 09C4  F759 DDCA E044 F796 ECB0
    dest: /etc/apt/keyrings/nvidia-container-toolkit.gpg

- name: The key of a mirror is there, from a file that was copied to the node
  gpufarm.core.openpgp_key:
    src: /usr/local/share/mirror.asc
    fingerprints: "{{ mirror_key_fingerprints }}"
    dest: /etc/apt/keyrings/mirror.asc
"""

RETURN = r"""
dest:
  description: Path of the keyring.
  type: str
  returned: success
  sample: /etc/apt/keyrings/nvidia-container-toolkit.gpg
fingerprints:
  description: >-
    Fingerprints of the primary keys in the keyring, sorted. In check mode those that it would hold;
    where nothing was downloaded that is what is pinned.
  type: list
  elements: str
  returned: success
  sample: [C95B321B61E88C1809C4F759DDCAE044F796ECB0]
downloaded:
  description: Whether the key was downloaded.
  type: bool
  returned: success
  sample: false
public_keys:
  description: The primary keys. Empty where check mode did not read them.
  type: list
  elements: dict
  returned: success
  contains:
    fingerprint:
      description: Full fingerprint, upper case, without spaces.
      type: str
      sample: C95B321B61E88C1809C4F759DDCAE044F796ECB0
    user_ids:
      description: User IDs as the key states them.
      type: list
      elements: str
      sample: ["NVIDIA CORPORATION (Open Source Projects) <cudatools@nvidia.com>"]
"""

import platform
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpufarm.core.plugins.module_utils import openpgp, release


def read_existing(path: Path) -> tuple[bytes, list[openpgp.PublicKey]]:
    """What is at the destination; a file that is no keyring counts as one without keys."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return b"", []
    except OSError as error:
        raise release.ReleaseError(
            found=f"{path} cannot be read ({error.strerror})",
            expected="a keyring file, or nothing, at this path",
            next_step="remove what is there, or choose another 'dest'",
        ) from error
    try:
        return data, openpgp.read_keys(data)
    except openpgp.OpenPGPError:
        return data, []


def read_source(params: dict[str, Any], folder: str) -> tuple[bytes, str]:
    """The offered key file and where it came from."""
    if params["url"]:
        network = release.Network(
            timeout=params["timeout"], retries=params["retries"], ca_path=params["ca_path"], folder=folder
        )
        return release.download_small(params["url"], network), params["url"]
    try:
        return Path(params["src"]).read_bytes(), params["src"]
    except OSError as error:
        raise release.ReleaseError(
            found=f"{params['src']} cannot be read ({error.strerror})",
            expected="a file with the public key",
            next_step="copy the key to the node first, or use the option 'url'",
        ) from error


def check_pinned(keys: list[openpgp.PublicKey], pinned: list[str], source: str) -> None:
    """Refuse a key file with any primary key that is not pinned."""
    strange = [key for key in keys if key.fingerprint not in pinned]
    if strange:
        raise release.ReleaseError(
            found=f"{source} holds the key {openpgp.describe(strange)}",
            expected=f"only {', '.join(pinned)}",
            next_step="compare with the fingerprint that the publisher states, and pin it only if it is theirs",
        )


def apply(module: AnsibleModule) -> dict[str, Any]:
    params = release.take_addresses(module.params, "url")
    pinned = release.pinned_fingerprints("fingerprints", params["fingerprints"])
    dest = Path(params["dest"])
    armored = dest.suffix == ".asc"
    before_data, before_keys = read_existing(dest)
    before = sorted({key.fingerprint for key in before_keys})

    keys = before_keys
    downloaded = False
    certain = before == pinned and not params["force"]
    # Fetching in check mode is worth it only where it decides the answer; a new node may not even have its CAs yet.
    partly = bool(before) and set(before) <= set(pinned)
    skipped = module.check_mode and not certain and not partly and not params["force"]
    if not certain and not skipped:
        data, source = read_source(params, module.tmpdir)
        downloaded = bool(params["url"])
        try:
            keys = openpgp.read_keys(data)
        except openpgp.OpenPGPError as error:
            raise release.ReleaseError(
                found=f"{source} is not an OpenPGP public key: {error}",
                expected=f"the public key {', '.join(pinned)}",
                next_step="check the address; a login page or an error page of a proxy is a common cause",
            ) from error
        check_pinned(keys, pinned, source)

    content = before_data
    if not skipped:
        packets = openpgp.join_keys(keys)
        same = before_data and openpgp.join_keys(before_keys) == packets
        if not same or openpgp.is_armored(before_data) != armored:
            content = openpgp.armor(packets) if armored else packets
    changed = skipped or content != before_data
    after = pinned if skipped else sorted({key.fingerprint for key in keys})

    if changed and not module.check_mode:
        write(module, dest, content)
    if dest.exists() or not module.check_mode:
        wanted = {name: params[name] for name in ("owner", "group", "mode")}
        attributes = module.load_file_common_arguments(wanted, path=str(dest))
        changed = module.set_fs_attributes_if_different(attributes, changed)
    result: dict[str, Any] = {
        "changed": changed,
        "dest": str(dest),
        "fingerprints": after,
        "downloaded": downloaded,
        "public_keys": [
            {"fingerprint": key.fingerprint, "user_ids": list(key.user_ids)} for key in ([] if skipped else keys)
        ],
    }
    if module._diff:
        lines = [f"{dest}\n" + "".join(f"{item}\n" for item in items) if items else "" for items in (before, after)]
        result["diff"] = {"before": lines[0], "after": lines[1]}
    return result


def write(module: AnsibleModule, dest: Path, content: bytes) -> None:
    """Replace the keyring in one step, so that apt never reads half a file."""
    release.make_folder(dest.parent)
    staged = Path(module.tmpdir) / "keyring"
    staged.write_bytes(content)
    module.atomic_move(str(staged), str(dest))


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "url": {"type": "str"},
            "src": {"type": "path"},
            "fingerprints": {"type": "list", "elements": "str", "required": True, "no_log": False},
            "dest": {"type": "path", "required": True},
            "owner": {"type": "str"},
            "group": {"type": "str"},
            "mode": {"type": "raw", "default": "0644"},
            "timeout": {"type": "int", "default": 30},
            "retries": {"type": "int", "default": 3},
            "ca_path": {"type": "path"},
            "force": {"type": "bool", "default": False},
        },
        mutually_exclusive=[("url", "src")],
        required_one_of=[("url", "src")],
        supports_check_mode=True,
    )
    try:
        result = apply(module)
    except release.ReleaseError as error:
        module.fail_json(msg=f"{platform.node()}: {error}")
    except OSError as error:
        module.fail_json(
            msg=f"{platform.node()}: {module.params['dest']} could not be written ({error}). "
            "Expected: a folder that this task may write to. Next step: check 'dest' and use 'become'."
        )
    module.exit_json(**result)


if __name__ == "__main__":
    main()
