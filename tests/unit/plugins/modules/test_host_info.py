# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import datetime
import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpufarm.core.plugins.module_utils import openpgp
from ansible_collections.gpufarm.core.plugins.modules import host_info
from ansible_collections.gpufarm.core.tests.unit.plugins.modules import release_helper as helper
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

EXTENDED_STATES = """\
Package: iptables
Architecture: amd64
Auto-Installed: 1

Package: docker.io
Architecture: amd64
Auto-Installed: 0
"""


def sha1(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()  # noqa: S324 # as find tells it


class Host:
    """The module among programs that answer as a test wants."""

    def __init__(self, folder: Path, capsys: Any) -> None:
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.capsys = capsys

    def has(self, program: str, script: str = "exit 0") -> Path:
        path = self.bin / program
        path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        path.chmod(0o755)
        return path

    def look(self, **asked: Any) -> dict[str, Any]:
        found: dict[str, Any] = helper.run_module(host_info.main, self.capsys, asked)
        assert found["changed"] is False
        return found


@pytest.fixture
def host(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Host:
    found = Host(tmp_path, capsys)
    monkeypatch.setattr(host_info, "SYSTEM_PATH", str(found.bin))
    monkeypatch.setattr(host_info, "EXTENDED_STATES", str(tmp_path / "extended_states"))
    return found


def test_nothing_is_told_that_nobody_asked_for(host: Host) -> None:
    found = host.look()
    assert found["user_id"] == os.getuid()
    assert found["kernel"] == os.uname().release
    names = ("files", "links", "certificates", "certificate_ends", "certificate_names", "json_errors", "toml_errors",
             "keyrings", "nomad_state_left", "packages", "packages_auto", "pci_devices", "programs",
             "units")  # fmt: skip
    assert not any(found[name] for name in names)


def test_the_clock_is_told_beside_that_of_who_asks(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_info.time, "time", lambda: 1795536000.9)
    assert host.look(asked_at=1795532400)["clock"] == {"asked_at": 1795532400, "host": 1795536000}
    assert host.look()["clock"]["asked_at"] is None


def test_files_and_folders(host: Host, tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir(mode=0o750)
    (tmp_path / "conf/b.hcl").write_text("b", encoding="utf-8")
    (tmp_path / "conf/a.hcl").write_text("a", encoding="utf-8")
    (tmp_path / "conf/a.hcl").chmod(0o4640)
    (tmp_path / "conf/not").touch()
    (tmp_path / "way").symlink_to("conf")
    (tmp_path / "broken.hcl").symlink_to("nowhere")
    (tmp_path / "[odd]").touch()
    # Not to be told in JSON.
    (tmp_path / "conf" / os.fsdecode(b"\xff.hcl")).touch()
    names = ["conf", "conf/*.hcl", "conf/a.hcl", "way", "broken.hcl", "[odd]", "none"]
    found = host.look(files=[f"{tmp_path}/{name}" for name in names])["files"]
    assert [each["path"].removeprefix(f"{tmp_path}/") for each in found] == [
        "[odd]", "broken.hcl", "conf", "conf/a.hcl", "conf/b.hcl", "way",
    ]  # fmt: skip
    by_name = {Path(each["path"]).name: each for each in found}
    assert by_name["a.hcl"] == {
        "path": f"{tmp_path}/conf/a.hcl", "mode": "4640", "uid": os.getuid(), "gid": os.getgid(), "isdir": False,
        "isreg": True, "checksum": sha1(b"a"), "managed": False,
    }  # fmt: skip
    assert (by_name["conf"]["isdir"], by_name["conf"]["isreg"], by_name["conf"]["mode"]) == (True, False, "0750")
    assert (by_name["way"]["isdir"], by_name["way"]["checksum"]) == (True, None)
    assert (by_name["broken.hcl"]["isdir"], by_name["broken.hcl"]["isreg"]) == (False, False)


def test_a_folder_that_does_not_answer_is_none(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a network drive's, of which the name alone can be read."""

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "stat", refuse)
    (found,) = host.look(files=[str(tmp_path)])["files"]
    assert found["isdir"] is False


def test_a_large_file_is_not_read(host: Host, tmp_path: Path) -> None:
    for name, size in (("most", host_info.LARGE), ("more", host_info.LARGE + 1)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)
    more, most = host.look(files=[f"{tmp_path}/mo*"])["files"]
    assert more["checksum"] is None
    assert most["checksum"] == sha1(b"\0" * host_info.LARGE)


def test_who_has_written_a_file(host: Host, tmp_path: Path) -> None:
    """Nomad's packages and most people begin with a comment as well."""
    written = {
        "ours": "# Ansible managed\nname = \"a\"\n", "ours_alone": "# Ansible managed", "ours_n": "# Ansible managed\n",
        "role_of_others": "# Ansible managed\n\nname = \"a\"\n", "comment": "# Ansible managed\n#\nname = \"a\"\n",
        "more": "# Ansible managed: by me\nname = \"a\"\n", "windows": "# Ansible managed\n\r\nname = \"a\"\n",
        "package": "# Copyright IBM Corp.\n# Ansible managed\n", "hand": "name = \"a\" # Ansible managed\n", "none": "",
    }  # fmt: skip
    for name, text in written.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "way").symlink_to(tmp_path / "ours")
    found = host.look(files=[str(tmp_path / name) for name in [*written, "way"]])["files"]
    assert {Path(file["path"]).name for file in found if file["managed"]} == {
        name for name in written if name.startswith("ours")
    }


@pytest.mark.controller
@pytest.mark.parametrize(
    ("kept", "left"),
    [
        (["client/client-id", "server/raft/raft.db"], ["client/client-id", "server"]),
        (["client/client-id"], ["client/client-id"]),
        (["server/serf.keyring"], ["server"]),
        # What the role alone has made, and what an agent that never joined has.
        ([], []),
        (["client/state.db", "host_volumes/a"], []),
    ],
)
def test_what_an_agent_of_nomad_has_kept_in_another_folder(
    host: Host, tmp_path: Path, kept: list[str], left: list[str]
) -> None:
    # It needs the control machine's Ansible.
    from ansible_collections.gpufarm.core.plugins.filter.nomad_hcl import nomad_hcl  # noqa: PLC0415

    config, old, new = (tmp_path / name for name in ("nomad.hcl", "n o", "new"))
    (old / "plugins").mkdir(parents=True)
    for name in kept:
        (old / name).parent.mkdir(parents=True, exist_ok=True)
        (old / name).touch()
    told = nomad_hcl({"name": "data_dir", "data_dir": str(old), "server": {"data_dir": "/raft"}})

    def look(wanted: Path) -> list[str]:
        found: list[str] = host.look(nomad_config=str(config), nomad_data_dir=str(wanted))["nomad_state_left"]
        return found

    # Not there yet.
    assert look(new) == []
    config.write_text(f"# Ansible managed\n{told}", encoding="utf-8")
    assert look(new) == [f"{old}/{name}" for name in left]
    (tmp_path / "link").symlink_to(old)
    for same in (old, Path(f"{old}/"), tmp_path / "link"):
        assert look(same) == []
    # It was moved, and a link left in its place.
    old.rename(new)
    assert look(new) == []
    old.symlink_to(new)
    assert look(new) == []
    # Somebody else's.
    assert look(tmp_path / "third") == [f"{old}/{name}" for name in left]
    config.write_text(told, encoding="utf-8")
    assert look(tmp_path / "third") == []
    config.write_text('# Ansible managed\nname = "a"\n', encoding="utf-8")
    assert look(tmp_path / "third") == []


def test_certificates_without_their_keys(host: Host, tmp_path: Path) -> None:
    first, second = (f"-----BEGIN CERTIFICATE-----\n{text}\n-----END CERTIFICATE-----" for text in ("MIIB+/a=", "MIIC"))
    key = "-----BEGIN PRIVATE KEY-----\nMIGH\n-----END PRIVATE KEY-----"
    (tmp_path / "both.pem").write_text(f"{key}\n{first}\n{second}\n", encoding="utf-8")
    (tmp_path / "key.pem").write_text(key, encoding="utf-8")
    (tmp_path / "torn.pem").write_text(first[:-10], encoding="utf-8")
    names = ("both", "key", "torn", "none")
    found = host.look(certificates=[f"{tmp_path}/{name}.pem" for name in names])
    assert found["certificates"] == {f"{tmp_path}/{name}.pem": first if name == "both" else None for name in names}
    # None of these is one in truth.
    assert set(found["certificate_ends"].values()) == {None}
    assert "MIGH" not in str(found)


def test_when_certificates_end_and_for_whom_they_are(host: Host, tmp_path: Path) -> None:
    names = ("2026", "2051")
    for name in names:
        key = ec.generate_private_key(ec.SECP256R1())
        # Without a zone it is UTC.
        begin, end = (datetime.datetime(int(name) - ago, 1, 2, 3, 4, 5) for ago in (1, 0))
        of = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        names_of = [x509.DNSName(f"client.{name}.nomad"), x509.DNSName("localhost")]
        extension = x509.Extension(x509.SubjectAlternativeName.oid, False, x509.SubjectAlternativeName(names_of))
        made = x509.CertificateBuilder(of, of, key.public_key(), 1, begin, end, [extension]).sign(key, hashes.SHA256())
        (tmp_path / name).write_bytes(made.public_bytes(serialization.Encoding.PEM))
    found = host.look(certificates=[f"{tmp_path}/{name}" for name in (*names, "none")])
    ends = {f"{tmp_path}/2026": 1767323045, f"{tmp_path}/2051": 2556241445, f"{tmp_path}/none": None}
    assert found["certificate_ends"] == ends
    assert list(found["certificate_names"].values()) == [
        ["client.2026.nomad", "localhost"],
        ["client.2051.nomad", "localhost"],
        [],
    ]


@pytest.mark.parametrize("name", ["tls", "acl"])
def test_whether_an_agent_speaks_tls_or_has_acls_by_its_file(host: Host, tmp_path: Path, name: str) -> None:
    cases = {
        f'name = "t4"\n\n{name} {{\n  http = true\n}}\n': True,
        f"{name}{{\n}}\n": True,
        "": False,
        f"# {name} {{\n": False,
        f"vault {{\n  {name} {{\n  }}\n}}\n": False,
        f"{name}_like {{\n}}\n": False,
    }
    paths = [tmp_path / f"{number}.hcl" for number in range(len(cases))]
    for path, text in zip(paths, cases):  # Python 3.9 has no strict
        path.write_text(text, encoding="utf-8")
    found = host.look(agent_files=[*map(str, paths), f"{tmp_path}/none.hcl", str(tmp_path)])[f"agent_{name}"]
    assert list(found.values()) == [*cases.values(), None, None]


def test_what_is_no_toml(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("good", "version = 2\n"), ("empty", ""), ("cut", "imports = [")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    paths = [f"{tmp_path}/{name}" for name in ("good", "empty", "cut", "none")]
    found = host.look(toml_files=paths)["toml_errors"]
    assert list(found) == ([f"{tmp_path}/cut"] if host_info.tomllib else [])
    # As on a host whose Python has nothing to read it with.
    monkeypatch.setattr(host_info, "tomllib", None)
    assert host.look(toml_files=paths)["toml_errors"] == {}


def test_what_is_no_json(host: Host, tmp_path: Path) -> None:
    for name, text in (("good", "{}"), ("empty", ""), ("cut", '{"a": ')):
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "latin").write_bytes(b'{"a": "\xe4"}')
    (tmp_path / "broken").symlink_to("nowhere")
    names = ["good", "empty", "cut", "latin", "broken", "none"]
    found = host.look(json_files=[f"{tmp_path}/{name}" for name in names])["json_errors"]
    assert set(found) == {f"{tmp_path}/{name}" for name in ("empty", "cut", "latin", "broken")}
    assert found[f"{tmp_path}/empty"] == "Expecting value: line 1 column 1 (char 0)"


@pytest.mark.skipif(not helper.HAS_GPG, reason="gpg makes the keys")
def test_the_keys_of_a_keyring(host: Host, tmp_path: Path) -> None:
    gpg = helper.Gpg()
    try:
        fingerprints = sorted([gpg.new_key("one"), gpg.new_key("two")])
        binary = gpg.run("--export", *fingerprints)
    finally:
        gpg.close()
    armored = openpgp.armor(binary)
    for name, data in (("right.asc", armored), ("right.gpg", binary), ("wrong.asc", binary), ("wrong.gpg", armored),
                       ("text.asc", b"no key"), ("empty.asc", b"")):  # fmt: skip
        (tmp_path / name).write_bytes(data)
    names = ["right.asc", "right.gpg", "wrong.asc", "wrong.gpg", "text.asc", "empty.asc", "none.asc"]
    found = host.look(keyrings=[f"{tmp_path}/{name}" for name in names])["keyrings"]
    assert found == {f"{tmp_path}/{name}": fingerprints if "right" in name else [] for name in names}


def test_packages_of_dpkg(host: Host, tmp_path: Path) -> None:
    (tmp_path / "extended_states").write_bytes(EXTENDED_STATES.encode() + b"\nPackage: \xff\n")
    host.has("rpm", "exit 9")
    host.has(
        "dpkg-query",
        "form='${db:Status-Status} ${Package}=${Version}\n'\n"
        "echo 'dpkg-query: no packages found matching none' >&2\n"
        '[ "$*" = "--show --showformat $form docker.io ipt* none" ] || exit 2\n'
        "printf 'installed docker.io=20-1\\ninstalled iptables=1.8\\nnot-installed iptoys=\\n'\n"
        "echo 'config-files iptraf=1'\nexit 1",
    )
    found = host.look(packages=["docker.io", "ipt*", "none"])
    assert found["packages"] == ["installed docker.io=20-1", "installed iptables=1.8", "config-files iptraf=1"]
    assert found["packages_auto"] == ["iptables"]


@pytest.mark.skipif(not shutil.which("dpkg-query"), reason="no dpkg here")
def test_the_real_dpkg(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_info, "SYSTEM_PATH", "/usr/bin:/bin")
    found = host.look(packages=["dpk?", "no-such-package"], programs=["dpkg", "no-such-program"])
    assert [line.split("=")[0] for line in found["packages"]] == ["installed dpkg"]
    assert found["programs"] == {"dpkg": "dpkg", "no-such-program": ""}


def test_packages_of_rpm(host: Host) -> None:
    host.has(
        "rpm",
        "form='installed %{NAME}=%{VERSION}-%{RELEASE}\n'\n"
        '[ "$*" = "--query --all --queryformat $form a* b" ] && printf "installed b=1-1\\ninstalled a=1-1\\n"',
    )
    found = host.look(packages=["a*", "b"])
    assert found["packages"] == ["installed a=1-1", "installed b=1-1"]
    assert found["packages_auto"] == []


def test_neither_dpkg_nor_rpm_nor_systemd(host: Host) -> None:
    found = host.look(packages=["a"], units=["a.service"])
    assert found["packages"] == []
    assert found["units"] == {"a.service": {"enabled": "", "active": ""}}


def test_where_links_lead(host: Host, tmp_path: Path) -> None:
    """As they are written: what they lead to need not be there."""
    link, file, gone = tmp_path / "docker", tmp_path / "file", tmp_path / "gone"
    link.symlink_to("/mnt/wsl/docker-desktop/docker")
    file.touch()
    asked = [str(link), str(file), str(gone), f"{file}/below"]
    found = host.look(links=asked)["links"]
    assert found == dict.fromkeys(asked) | {str(link): "/mnt/wsl/docker-desktop/docker"}


def test_who_has_brought_a_program(host: Host) -> None:
    dockerd = host.has("dockerd")
    host.has("dpkg-query", f'[ "$1 $2" = "--search {dockerd}" ] && echo "docker.io: $2"')
    assert host.look(programs=["dockerd", "none"])["programs"] == {"dockerd": "docker.io", "none": ""}
    host.has("dpkg-query", "echo 'no path found' >&2; exit 1")
    assert host.look(programs=["dockerd"])["programs"] == {"dockerd": str(dockerd)}
    (host.bin / "dpkg-query").unlink()
    host.has("rpm", f"[ \"$*\" = '--query --queryformat %{{NAME}}\n --file {dockerd}' ] && echo docker-ce")
    assert host.look(programs=["dockerd"])["programs"] == {"dockerd": "docker-ce"}
    host.has("rpm", "echo 'file is not owned by any package'; exit 1")
    assert host.look(programs=["dockerd"])["programs"] == {"dockerd": str(dockerd)}
    (host.bin / "rpm").unlink()
    assert host.look(programs=["dockerd"])["programs"] == {"dockerd": str(dockerd)}


def test_units(host: Host) -> None:
    host.has(
        "systemctl",
        '[ "$*" = "show --property=UnitFileState,ActiveState -- docker.service none.service other.path" ] || exit 1\n'
        "printf 'ActiveState=active\\nUnitFileState=enabled\\n\\n'\n"
        "printf 'ActiveState=inactive\\nUnitFileState=\\n\\nActiveState=failed\\nUnitFileState=disabled\\n'",
    )
    assert host.look(units=["docker.service", "none.service", "other.path"])["units"] == {
        "docker.service": {"enabled": "enabled", "active": "active"},
        "none.service": {"enabled": "", "active": ""},
        "other.path": {"enabled": "disabled", "active": "failed"},
    }


@pytest.mark.parametrize(
    ("program", "asked"),
    [
        ("rpm", {"packages": ["a"]}),
        ("rpm", {"programs": ["rpm"]}),
        ("dpkg-query", {"packages": ["a"]}),
        ("systemctl", {"units": ["a.service"]}),
    ],
)
def test_what_never_answers_is_told(
    host: Host, monkeypatch: pytest.MonkeyPatch, program: str, asked: dict[str, list[str]]
) -> None:
    path = host.has(program, "exec sleep 600")
    monkeypatch.setattr(host_info, "ANSWER_S", 0.2)
    found = helper.run_module(host_info.main, host.capsys, asked)
    told = f"{path} did not end within 0.2 s. Expected: an answer. Next step: see what it waits for on this host"
    assert found["failed"] and told in found["msg"]
    # Nor does one that is broken say that nothing is there.
    path.write_bytes(b"\x7fELF")
    found = helper.run_module(host_info.main, host.capsys, asked)
    assert found["failed"] and f"{path} could not be started (" in found["msg"], found


def test_pci_devices(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = tmp_path / "pci/0000:05:00.0"
    device.mkdir(parents=True)
    for name, text in (("vendor", "0x10de"), ("device", "0x22a3"), ("class", "0x068000")):
        (device / name).write_text(f"{text}\n", encoding="ascii")
    monkeypatch.setattr(host_info, "PCI_DEVICES", str(tmp_path / "pci"))
    assert host.look(pci_vendors=["10de", "15b3"])["pci_devices"] == [
        {"address": "0000:05:00.0", "vendor": "10de", "device": "22a3", "class": "068000", "nvswitch_bridge": False},
    ]  # fmt: skip
    assert host.look(pci_vendors=["8086"])["pci_devices"] == []
