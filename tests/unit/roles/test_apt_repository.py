"""The entry that the roles give apt, in the hands of a real apt: what it trusts, and whom it sends a login."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template
from ansible_collections.gpufarm.core.tests.unit.playbooks.playbook_helper import LOCAL, run_playbook
from ansible_collections.gpufarm.core.tests.unit.plugins.modules import release_helper as helper
from ansible_collections.gpufarm.core.tests.unit.roles import role_helper

from tests.simulator.mirror.serve import badly_signed

TASKS = role_helper.ROLES / "_common/tasks"
PACKAGES = (
    b"Package: scenario\nVersion: 1.0\nArchitecture: all\nFilename: ./scenario.deb\nSize: 1\nSHA256: " + b"a" * 64
)
RELEASE = """\
Date: Thu, 01 Jan 2026 00:00:00 UTC
SHA256:
 {sum} {size} Packages
"""

pytestmark = pytest.mark.skipif(
    not (helper.HAS_GPG and shutil.which("apt-get")), reason="gpg and apt are needed to see what apt trusts"
)


gpg = helper.gpg


@pytest.fixture(scope="module")
def signer(gpg: helper.Gpg) -> str:
    return gpg.new_key("repository")


@pytest.fixture
def server(gpg: helper.Gpg, signer: str) -> Iterator[helper.Server]:
    """A flat repository with one package."""
    running = helper.Server()
    running.files["/repo/Packages"] = PACKAGES + b"\n"
    release = RELEASE.format(
        sum=helper.hashlib.sha256(running.files["/repo/Packages"]).hexdigest(),
        size=len(running.files["/repo/Packages"]),
    )
    running.files["/repo/InRelease"] = gpg.run("--local-user", signer, "--clearsign", data=release.encode())
    yield running
    running.close()


def rendered(task: str, repository: dict[str, Any]) -> str:
    """What one of the tasks writes."""
    tasks = {each["name"].split(" {{")[0]: each for each in role_helper.tasks_of("_common/tasks/apt_repository.yml")}
    templar = Templar(DataLoader(), variables={**role_helper.variables("_common"), "common_repository": repository})
    return str(templar.template(trust_as_template(tasks[task]["ansible.builtin.copy"]["content"])))


@pytest.mark.parametrize(
    ("lines", "missing"),
    [
        ([], ["driver=570.*", "module=570.*", "tool"]),
        (["installed driver=570.172.08-1", "installed module=570.195.03-1", "installed tool=1"], []),
        (["installed driver=570.172.08-1", "config-files module=570.172.08-1", "config-files tool=1"],
         ["module=570.*", "tool"]),
        (["installed driver=580.95.05-1", "not-installed module=", "installed tool-more=1"],
         ["driver=570.*", "module=570.*", "tool"]),
        (["installed driver=1570.95.05-1", "installed module=570.1", "installed tool=2"], ["driver=570.*"]),
    ],
)  # fmt: skip
def test_what_is_missing(lines: list[str], missing: list[str]) -> None:
    given = {
        "common_repository": {"packages": ["driver=570.*", "module=570.*", "tool"]},
        "_common_repository_installed": {"stdout_lines": lines},
    }
    assert role_helper.value("_common_repository_missing", {**role_helper.variables("_common"), **given}) == missing


@pytest.mark.parametrize(
    ("entry", "packages", "installed", "complete"),
    [
        (False, {}, ["installed tool=1"], True),
        (False, {"skipped": True}, ["installed tool=1"], True),
        (True, {}, ["installed tool=1"], False),
        (False, {"stdout": "1 to install"}, [], False),
        (False, {"msg": "No package matching"}, [], False),
        # Another package satisfies it.
        (False, {"changed": False}, [], True),
    ],
)
def test_what_needs_no_list(entry: bool, packages: dict[str, Any], installed: list[str], complete: bool) -> None:
    given = {
        "common_repository": {"packages": ["tool"]},
        "_common_repository_entry": {"changed": entry},
        "_common_repository_packages": packages,
        "_common_repository_installed": {"stdout_lines": installed},
    }
    known = role_helper.variables("_common")
    assert role_helper.value("_common_repository_complete", {**known, **given}) is complete
    # dnf's tasks do not list what is installed.
    del given["_common_repository_installed"]
    assert role_helper.value("_common_repository_complete", {**known, **given}) is False


def test_older_entries_go_before_the_own_one_is_there() -> None:
    """cuda-keyring brings its list again where nothing else is to be done, and apt would read nothing any more."""
    tasks = role_helper.tasks_of("_common/tasks/apt_repository.yml")
    names = [task["name"].split(" {{")[0] for task in tasks]
    removal = tasks[names.index("Remove older entries of")]
    assert removal["ansible.builtin.file"]["state"] == "absent" and "when" not in removal
    assert names.index("Remove older entries of") < names.index("Have the repository")


CUDA = "https://developer.download.nvidia.com/compute/cuda/repos/debian12/x86_64"
CONFLICT = f"E:Conflicting values set for option Signed-By regarding source {CUDA}/ /: /usr/share/keyrings/x.gpg != "


@pytest.mark.parametrize(
    ("said", "named"),
    [
        (CONFLICT, ["sources.list", "sources.list.d/mine.list", "sources.list.d/mine.sources"]),
        ("Failed to update apt cache: 404 Not Found", []),
    ],
)
def test_who_else_has_an_entry_of_the_repository_is_named(tmp_path: Path, said: str, named: list[str]) -> None:
    folder = tmp_path / "sources.list.d"
    folder.mkdir()
    (tmp_path / "sources.list").write_text(f"deb https://debian.example/debian bookworm main\ndeb {CUDA}/ /\n")
    (folder / "mine.list").write_text(f"deb [signed-by=/usr/share/keyrings/x.gpg] {CUDA} /\n")
    (folder / "mine.sources").write_text(f"Types: deb\nURIs: {CUDA}/\nSuites: /\n")
    # Another repository, no entry any more, what apt does not read, and the own one.
    (folder / "other.list").write_text(f"deb {CUDA}-cross/ /\n")
    (folder / "off.list").write_text(f"# deb {CUDA}/ /\n")
    (folder / "mine.list.save").write_text(f"deb {CUDA}/ /\n")
    (folder / "cuda.sources").write_text(f"URIs: {CUDA}/\n")
    known = {
        **role_helper.variables("_common"), "common_repository": {"name": "cuda", "url": CUDA, "packages": ["tool"]},
        "_common_bundle": "", "_common_repository_entry": {"changed": False}, "inventory_hostname": "node1",
        "_common_repository_list": {"msg": said}, "_common_repository_packages": {"msg": "no tool"},
    }  # fmt: skip
    look, told = role_helper.tasks_of("_common/tasks/apt_lists.yml")[-2:]
    argv = look["ansible.builtin.command"]["argv"]
    asked = [trust_as_template(part.replace("/etc/apt", str(tmp_path))) for part in argv]
    known["_common_repository_entry_path"] = f"{folder}/cuda.sources"
    command = Templar(DataLoader(), variables=known).template(asked)
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    known[look["register"]] = {"stdout_lines": answer.stdout.splitlines()}
    known |= {name: trust_as_template(text) for name, text in told["vars"].items()}
    message = trust_as_template(told["ansible.builtin.fail"]["msg"])
    found = str(Templar(DataLoader(), variables=known).template(message))
    files = ", ".join(f"{tmp_path}/{name}" for name in named)
    assert (f"Next step: take the lines of {CUDA} out of {files}" in found) is bool(named), found
    assert ("run `apt-get update` on this host" in found) is not bool(named)


NAMES = ("nvidia_repository", "container_toolkit", "docker", "nvidia_driver", "nomad", "nomad_server", "nomad_client")
ENTRY = "/etc/apt/sources.list.d/mine.sources"
KEYRING = "/etc/apt/keyrings/mine.asc"
LOGIN = "/etc/apt/auth.conf.d/mine.conf"
WANTED = {
    "name": "mine", "url": "https://mirror.example/deb", "fingerprints": ["AB12 cd34", "0011"],
    "packages": ["tool=1.*"], "obsolete": ["old.list"],
}  # fmt: skip
WITH_LOGIN = {**WANTED, "url": "https://me:secret@mirror.example/deb"}


def looked_at(repository: dict[str, Any]) -> dict[str, Any]:
    """What is told of a host that has the repository."""
    found = role_helper.host(ENTRY, KEYRING, packages=("installed tool=1.5",))
    found["keyrings"] = {KEYRING: ["0011", "AB12CD34"]}
    found["files"][0]["checksum"] = sha1(rendered("Have the repository", repository))
    if repository is WITH_LOGIN:
        text = rendered("Have the login of the repository", repository)
        found["files"].append({**found["files"][0], "path": LOGIN, "mode": "0600", "checksum": sha1(text)})
    return found


def sha1(text: str) -> str:
    return helper.hashlib.sha1(text.encode()).hexdigest()


def changed(host: dict[str, Any], index: int, key: str, value: object) -> dict[str, Any]:
    files = [dict(file) for file in host["files"]]
    files[index][key] = value
    return {**host, "files": files}


def test_a_repository_of_which_nothing_is_to_be_asked() -> None:
    settled = looked_at(WANTED)
    with_login = looked_at(WITH_LOGIN)
    more = [{**settled["files"][0], "path": path} for path in (LOGIN, "/etc/apt/sources.list.d/old.list")]
    hosts = [
        *({**settled, **change} for change in (
            {"files": []}, {"keyrings": {}}, {"keyrings": {KEYRING: ["0011"]}}, {"packages": []},
            {"keyrings": {KEYRING: ["0011", "0022", "AB12CD34"]}}, {"packages": ["config-files tool=1.5"]},
            {"packages": ["installed tool=2.0"]},
        )),
        *({**settled, "files": [*settled["files"], each]} for each in more),
    ]  # fmt: skip
    changes = (
        (0, "mode", "0600"), (0, "uid", 1000), (0, "checksum", "0"), (0, "path", "/etc/apt/sources.list.d/old.list"),
        (1, "mode", "0600"), (1, "path", "/none"), (2, "mode", "0644"), (2, "checksum", "0"), (2, "path", "/none"),
    )  # fmt: skip
    cases = [{"common_repository": WANTED, "_common_host": host} for host in (settled, *hosts)]
    cases += [
        {"common_repository": WITH_LOGIN, "_common_host": host}
        for host in (with_login, *(changed(with_login, *change) for change in changes))
    ]
    # What this run has changed is asked for again.
    cases.append({**cases[0], "_common_repository_entry": {"changed": False}})
    found = role_helper.values("_common_repository_settled", ["_common"], cases)
    assert [index for index, value in enumerate(found) if value] == [0, 1 + len(hosts)]


def test_all_roles_are_known_to_the_one_look() -> None:
    """What a role reads of _common_host is looked at only where the role says so."""
    given = {
        "ansible_facts": role_helper.facts("Debian: Debian 12.11"),
        "nomad_client_host_volumes": [{"name": "scratch", "path": "/scratch"}],
    }
    (look,) = role_helper.values("_common_look", ["_common", *NAMES], [given])
    items = {f"{kind} {item}" for kind, all_of_it in look.items() for item in all_of_it}
    for item in (
        "files /run/systemd/system", "files /etc/apt/auth.conf.d/*.conf", "files /dev/dxg", "files /usr/bin/gpgv",
        "files /etc/apt/keyrings/nvidia-cuda.asc", "keyrings /etc/apt/keyrings/nvidia-cuda.asc", "packages nvidia-*",
        "packages cuda-*", "packages linux-headers-*", "units nvidia-persistenced.service",
        "units nvidia-fabricmanager.service", "pci_vendors 10de", "packages nvlsm",
        "files /etc/apt/preferences.d/nvidia-container-toolkit", "files /etc/docker/daemon.json", "programs dockerd",
        "json_files /etc/docker/daemon.json", "packages libnvidia-container1", "units nvidia-cdi-refresh.path",
        "packages docker.io", "units docker.service", "files /etc/nomad.d/*.hcl", "files /opt/nomad/data",
        "files /opt/nomad/data/server/serf.keyring", "files /etc/systemd/system/nomad.service", "files /scratch",
    ):  # fmt: skip
        assert item in items


class Apt:
    """apt with its files in a folder of its own."""

    def __init__(self, root: Path, key: bytes) -> None:
        self.root = root
        for folder in ("lists/partial", "cache/archives/partial", "sources", "auth", "trusted"):
            (root / folder).mkdir(parents=True)
        (root / "status").touch()
        (root / "key.asc").write_bytes(key)

    def run(self, *command: str) -> str:
        places = {
            "Dir::State": self.root,
            "Dir::State::lists": self.root / "lists",
            "Dir::State::status": self.root / "status",
            "Dir::Cache": self.root / "cache",
            "Dir::Etc::sourcelist": "/dev/null",
            "Dir::Etc::sourceparts": self.root / "sources",
            "Dir::Etc::netrcparts": self.root / "auth",
            "Dir::Etc::netrc": "/dev/null",
            "Dir::Etc::trusted": "/dev/null",
            "Dir::Etc::trustedparts": self.root / "trusted",
            "APT::Sandbox::User": "root",
            "Acquire::Languages": "none",
            "Acquire::Retries": "0",
            "Acquire::http::Proxy": "DIRECT",
        }
        options = [part for name, value in places.items() for part in ("-o", f"{name}={value}")]
        answer = subprocess.run([*command, *options], capture_output=True, text=True, check=False, timeout=300)
        return answer.stdout + answer.stderr

    def update(self, url: str) -> str:
        repository = {"name": "scenario", "url": url}
        entry = rendered("Have the repository", repository)
        (self.root / "sources/scenario.sources").write_text(
            entry.replace("/etc/apt/keyrings/scenario.asc", str(self.root / "key.asc"))
        )
        return self.run("apt-get", "update")

    def knows_the_package(self) -> bool:
        return "Version: 1.0" in self.run("apt-cache", "show", "scenario")


@pytest.fixture
def apt(tmp_path: Path, gpg: helper.Gpg, signer: str) -> Apt:
    return Apt(tmp_path, gpg.export(signer))


def test_apt_reads_a_repository_whose_signature_holds(apt: Apt, server: helper.Server) -> None:
    said = apt.update(f"{server.url}/repo")
    assert apt.knows_the_package(), said


def test_a_spoiled_inrelease_is_not_read(apt: Apt, server: helper.Server) -> None:
    server.files["/repo/InRelease"] = badly_signed(server.files["/repo/InRelease"])
    said = apt.update(f"{server.url}/repo")
    assert not apt.knows_the_package()
    assert "is not signed" in said or "BADSIG" in said or "bad signature" in said.lower(), said


def test_a_repository_without_a_signature_is_not_read(apt: Apt, server: helper.Server) -> None:
    text = server.files.pop("/repo/InRelease").decode()
    server.files["/repo/Release"] = text[text.index("Date:") : text.index("-----BEGIN PGP SIGNATURE")].encode()
    said = apt.update(f"{server.url}/repo")
    assert not apt.knows_the_package() and "is not signed" in said


def test_another_key_than_the_pinned_one_is_not_enough(apt: Apt, server: helper.Server, gpg: helper.Gpg) -> None:
    other = gpg.new_key("other")
    text = gpg.run("--decrypt", data=server.files["/repo/InRelease"])
    server.files["/repo/InRelease"] = gpg.run("--local-user", other, "--clearsign", data=text)
    said = apt.update(f"{server.url}/repo")
    assert not apt.knows_the_package(), said


def test_nothing_is_trusted_that_is_not_signed() -> None:
    """Neither the entry, nor a role, nor an option of a package manager switches signatures off."""
    words = ("trusted: yes", "trusted=yes", "allow_unauthenticated: true", "disable_gpg_check: true", "allow-insecure",
             "allow-unauthenticated", "sslverify: false", "validate_certs: false")  # fmt: skip
    for path in (TASKS.parents[1]).rglob("*.yml"):
        text = path.read_text(encoding="utf-8").lower()
        assert [word for word in words if word in text] == [], path


def test_a_login_is_apts_alone(apt: Apt, server: helper.Server) -> None:
    server.ask_for_login("/repo/InRelease", "ro+bot:s3/c+ret")
    server.ask_for_login("/repo/Packages", "ro+bot:s3/c+ret")
    url = f"{server.url}/repo".replace("://", "://ro+bot:s3%2Fc+ret@")
    (apt.root / "auth/scenario.conf").write_text(
        rendered("Have the login of the repository", {"name": "x", "url": url})
    )
    said = apt.update(url)
    assert apt.knows_the_package(), said
    entry = (apt.root / "sources/scenario.sources").read_text()
    assert f"URIs: {server.url}/repo/\n" in entry and "s3" not in entry + said


def test_an_address_without_a_login_is_kept_as_it_is() -> None:
    entry = rendered("Have the repository", {"name": "x", "url": "https://mirror.example.com/a@b"})
    assert "URIs: https://mirror.example.com/a@b/\n" in entry


def test_logins_are_shown_to_nobody() -> None:
    tasks = role_helper.tasks_of("_common/tasks/apt_repository.yml")
    task = next(each for each in tasks if each["name"].startswith("Have the login"))
    assert task["no_log"] is True and task["ansible.builtin.copy"]["mode"] == "0600"
    for path in TASKS.glob("*repository.yml"):
        # The address as it is given goes to what hides it, and nowhere else.
        text = path.read_text(encoding="utf-8")
        assert "{{ common_repository.url }}" not in text, path


# An apt whose settings and lists are its own, on this machine.
APART = """
for place in /etc/apt /var/lib/apt /var/cache/apt /run; do mount --bind "$0$place" $place; done
echo $$ >"$0/pid"
exec "$@"
"""


class Node:
    """A node on which the tasks run as a role has them."""

    def __init__(self, home: Path, fingerprint: str, server: helper.Server) -> None:
        # Who logs in is not where paths of the node begin, either.
        self.home, self.server, folder = home, server, home / "node"
        self.folder, self.apt = folder, folder / "etc/apt"
        for name in (
            "etc/apt/apt.conf.d",
            "etc/apt/auth.conf.d",
            "etc/apt/keyrings",
            "etc/apt/preferences.d",
            "etc/apt/sources.list.d",
            "etc/apt/trusted.gpg.d",
            "var/lib/apt/lists/partial",
            "var/cache/apt/archives/partial",
            "run",
        ):
            (folder / name).mkdir(parents=True)
        settings = 'APT::Sandbox::User "root"; Acquire::http::Proxy "DIRECT"; Acquire::Retries "0";'
        (self.apt / "apt.conf.d/test").write_text(settings)
        self.repository: dict[str, Any] = {
            "name": "mine", "key_url": f"{server.url}/key", "fingerprints": [fingerprint], "packages": ["scenario"],
            "obsolete": ["older.list"],
        }  # fmt: skip

    def under(self, *command: str) -> list[str]:
        return ["unshare", "--mount", "sh", "-ec", APART, str(self.folder), *command]

    def have(self, url: str, role: str = "_common", entry: str = "apt_repository.yml", **more: Any) -> str:
        """Have the repository at this address, and tell what was said."""
        tasks = [{"ansible.builtin.include_role": {
            "name": f"gpufarm.core.{role}", "tasks_from": entry, "rolespec_validate": False,
        }}]  # fmt: skip
        play = {"hosts": "all", "gather_facts": False, "tasks": tasks}
        (self.home / "play.yml").write_text(yaml.safe_dump([play]))
        variables = {
            "_common_bundle": "", "_common_family": {"packages": "apt"}, "_common_host": role_helper.host(),
            "common_repository": {**self.repository, "url": url}, **more,
        }  # fmt: skip
        inventory = {"all": {"hosts": {"node1": LOCAL}}}
        options = ("--extra-vars", json.dumps(variables))
        ran = run_playbook(self.home, inventory, str(self.home / "play.yml"), *options, under=self.under())
        return " ".join((ran.stdout + ran.stderr).split())

    def files(self) -> dict[str, tuple[int, str]]:
        """Mode and text of what apt reads, and of what is kept of it elsewhere."""
        return {
            str(path.relative_to(self.folder)): (path.stat().st_mode & 0o777, path.read_text())
            for place in (self.apt, self.folder / "run") for path in place.rglob("*") if path.is_file()
        }  # fmt: skip

    def knows_the_package(self) -> bool:
        ran = subprocess.run(self.under("apt-cache", "show", "scenario"), capture_output=True, text=True, check=False)
        return "Version: 1.0" in ran.stdout


@pytest.fixture
def node(tmp_path: Path, gpg: helper.Gpg, signer: str, server: helper.Server) -> Node:
    if os.geteuid() != 0:
        pytest.skip("root alone has an apt of its own")
    server.files["/key"] = gpg.export(signer)
    return Node(tmp_path, signer, server)


def by_hand(node: Node, *, more: str = "") -> None:
    """Have a list that works, as somebody may have written it."""
    (node.apt / "mine.asc").write_bytes(node.server.files["/key"])
    older = node.apt / "sources.list.d/older.list"
    older.write_text(f"deb [signed-by=/etc/apt/mine.asc] {node.server.url}/repo /\n{more}")
    older.chmod(0o640)


@pytest.mark.controller
def test_a_repository_that_cannot_be_read_takes_no_entry_away(node: Node) -> None:
    by_hand(node)
    before = node.files()
    said = node.have(node.server.url.replace("://", "://robot:secret@") + "/nowhere")
    assert node.files() == before, said
    assert "failed=1" in said and f"{node.server.url}/nowhere" in said and "secret" not in said
    # As apt says it: what was tried is not there any more for `apt-get update`.
    assert "does not have a Release file" in said and "apt-get update" not in said, said
    said = node.have(f"{node.server.url}/repo")
    assert "failed=0" in said and node.knows_the_package(), said
    assert {name for name in node.files() if "older" in name or "run/" in name} == set()


@pytest.mark.controller
def test_another_repository_that_is_broken_takes_no_entry_away(node: Node) -> None:
    by_hand(node)
    (node.apt / "sources.list.d/other.list").write_text(f"deb [trusted=yes] {node.server.url}/other /\n")
    before = node.files()
    said = node.have(f"{node.server.url}/repo")
    assert node.files() == before, said
    assert "failed=1" in said and f"{node.server.url}/other" in said, said


@pytest.mark.controller
def test_a_mirror_that_cannot_be_read_leaves_the_former_one(node: Node, gpg: helper.Gpg) -> None:
    for name in ("InRelease", "Packages"):
        node.server.ask_for_login(f"/repo/{name}", "robot:secret")
    said = node.have(node.server.url.replace("://", "://robot:secret@") + "/repo")
    before = node.files()
    assert "failed=0" in said and before["etc/apt/auth.conf.d/mine.conf"][0] == 0o600, said
    assert not [name for name in before if name.startswith("run/")]
    # Another mirror has another key.
    other = gpg.new_key("mirror")
    node.server.files["/key"] = gpg.export(other)
    node.repository["fingerprints"] = [other]
    said = node.have(node.server.url.replace("://", "://other:hidden@") + "/nowhere")
    assert "failed=1" in said and node.files() == before and node.knows_the_package(), said
    assert "secret" not in said and "hidden" not in said


@pytest.mark.controller
@pytest.mark.parametrize(
    "former", ["Package: nvidia-container-toolkit\nPin: version 1.20.0-*\nPin-Priority: 1001\n", ""]
)
def test_a_version_that_cannot_be_had_unpins_nothing(node: Node, former: str) -> None:
    pin = node.apt / "preferences.d/nvidia-container-toolkit"
    if former:
        pin.write_text(former)
    given = {"role": "container_toolkit", "entry": "install-apt.yml", "_common_is_wsl": False}
    said = node.have(f"{node.server.url}/repo", **given, container_toolkit_version="9.9.9")
    assert "failed=1" in said and "version 9.9.9 of the container toolkit could not be installed" in said, said
    assert (pin.read_text() if pin.exists() else "") == former and len(list(pin.parent.iterdir())) == bool(former)
    # Nothing is to be installed.
    node.repository["packages"] = ["dpkg"]
    said = node.have(f"{node.server.url}/repo", **given, container_toolkit_version="9.9.9")
    assert "failed=0" in said and "Pin: version 9.9.9-*" in pin.read_text(), said
    assert [path.name for path in pin.parent.iterdir()] == [pin.name]


@pytest.mark.controller
def test_a_key_that_its_owner_has_prolonged_is_fetched_anew(node: Node, gpg: helper.Gpg) -> None:
    early = ("--faked-system-time", "20250101T000000")
    key = gpg.new_key("prolonged", expire="1d", faked_time=early[1])
    text = gpg.run("--decrypt", data=node.server.files["/repo/InRelease"])
    node.server.files["/repo/InRelease"] = gpg.run(*early, "--local-user", key, "--clearsign", data=text)
    node.repository["fingerprints"] = [key]
    (node.apt / "keyrings/mine.asc").write_bytes(gpg.export(key))
    gpg.run("--quick-set-expire", key, "0")
    node.server.files["/key"] = gpg.export(key)
    said = node.have(f"{node.server.url}/repo")
    assert "failed=0" in said and node.knows_the_package(), said
    # One that has not been prolonged is told as apt tells it.
    gpg.run("--quick-set-expire", key, "seconds=1")
    time.sleep(2)
    node.server.files["/key"] = gpg.export(key)
    (node.apt / "keyrings/mine.asc").write_bytes(gpg.export(key))
    (node.apt / "sources.list.d/mine.sources").unlink()
    for path in (node.folder / "var/lib/apt/lists").glob("*Release"):
        path.unlink()
    before = node.files()
    said = node.have(f"{node.server.url}/repo")
    assert "failed=1" in said and "EXPKEYSIG" in said and node.files() == before, said


@pytest.mark.controller
def test_a_run_after_one_that_was_killed_knows_what_there_was(node: Node) -> None:
    by_hand(node)
    before = node.files()
    killing = node.apt / "apt.conf.d/kill"
    # Once: the module, which nobody waits for any more, tries again.
    once = f"cd {node.folder}; [ -e killed ] || {{ mv pid killed; kill -KILL $(cat killed); }}"
    killing.write_text(f'APT::Update::Pre-Invoke {{"{once}";}};')
    said = node.have(f"{node.server.url}/nowhere")
    killing.unlink()
    assert "RECAP" not in said and "etc/apt/sources.list.d/mine.sources" in node.files(), said
    said = node.have(f"{node.server.url}/nowhere/either")
    assert "failed=1" in said and node.files() == before, said


@pytest.mark.controller
def test_a_run_that_fails_in_between_takes_nothing_away(node: Node, gpg: helper.Gpg) -> None:
    said = node.have(f"{node.server.url}/repo")
    before = node.files()
    assert "failed=0" in said and "etc/apt/keyrings/mine.asc" in before, said
    other = gpg.new_key("between")
    node.server.files["/key"] = gpg.export(other)
    node.repository["fingerprints"] = [other]
    (node.apt / "auth.conf.d").rmdir()
    said = node.have(node.server.url.replace("://", "://robot:secret@") + "/repo")
    assert "failed=1" in said and node.files() == before and "secret" not in said, said
