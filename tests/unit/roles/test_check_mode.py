"""What check mode says of packages that it cannot look up: that they would come, not that nothing would change."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ansible_collections.gpufarm.core.tests.unit.playbooks.playbook_helper import LOCAL, of_its_own, run_playbook
from ansible_collections.gpufarm.core.tests.unit.plugins.modules import release_helper
from ansible_collections.gpufarm.core.tests.unit.roles import role_helper

from tests.simulator.cache import ROOT

gpg = release_helper.gpg
NOBODYS = "gpufarm-that-nobody-has"
UNITS = {"docker.service": {"enabled": "disabled", "active": "inactive"}}


@pytest.mark.parametrize(
    ("role", "entry", "given"),
    [
        ("docker", "install", {"docker_packages": [NOBODYS]}),
        ("_common", "verifiers", {"_common_verifiers": {"/usr/bin/that": NOBODYS}}),
        ("container_toolkit", "engines", {
            "__container_toolkit_engine_packages": [NOBODYS], "__container_toolkit_stopped": [],
        }),
        ("nomad_client", "bridge", {"__nomad_client_cni_wanted": [NOBODYS], "__nomad_client_cni_paths": ["/nowhere"]}),
        ("_common", "packages", {"common_packages": [NOBODYS], "common_packages_for": "setpci"}),
    ],
)  # fmt: skip
def test_packages_that_are_missing_would_come(tmp_path: Path, role: str, entry: str, given: dict[str, object]) -> None:
    """Lists that were never read, as an image of a cloud has them, have the same answer as a name of nobody's."""
    play = {
        "hosts": "localhost",
        "connection": "local",
        "gather_facts": False,
        "tasks": [
            {"ansible.builtin.include_role": {
                "name": f"gpufarm.core.{role}", "tasks_from": f"{entry}.yml", "rolespec_validate": False,
            }},
        ],
        "handlers": [{"name": "Restart Nomad", "ansible.builtin.debug": {"msg": "notified"}}],
    }  # fmt: skip
    (tmp_path / "play.yml").write_text(json.dumps([play]), encoding="utf-8")
    variables = {
        "_common_bundle": "",
        "_common_family": {"packages": "apt"},
        "_common_packages_environment": {},
        "_common_host": role_helper.host("/run/systemd/system", units=UNITS),
        **given,
    }
    ran = subprocess.run(
        [str(Path(sys.executable).with_name("ansible-playbook")), "--check", "--extra-vars", json.dumps(variables),
         str(tmp_path / "play.yml")],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search(r"^localhost +: .* changed=1 ", ran.stdout, re.MULTILINE), ran.stdout
    assert ("notified" in ran.stdout) is (role == "nomad_client")


# What dnf prints of removals: whatever needs them, and what came for them, is in sections of its own.
DNF = """#!/bin/sh
echo "$*" >>{folder}/asked
case "$*" in
*--userinstalled*) printf 'nvidia-open\\nbash\\nmine\\n' ;;
*--assumeyes*) exit 0 ;;
*' remove stuck') echo 'Error: The operation would result in removing: systemd' >&2; exit 1 ;;
*' remove gone') echo 'No match for argument: gone' >&2; printf 'No packages marked for removal.\\nNothing to do.\\n' ;;
*)
    printf 'Dependencies resolved.\\n Package  Architecture\\nRemoving:\\n nvidia-open  noarch  3:580\\n'
    case "$*" in *needed)
        printf 'Removing dependent packages:\\n mine\\n       x86_64  1.0\\n theirs  x86_64  1.0\\n' ;;
    esac
    printf 'Removing unused dependencies:\\n kmod-nvidia-open-dkms  noarch  3:580\\n\\nTransaction Summary\\n'
    echo 'Operation aborted.' >&2
    exit 1
    ;;
esac
"""


def test_what_came_for_packages_of_dnf_goes_with_them_and_nothing_else(tmp_path: Path) -> None:
    """nvidia-open brings the driver; an autoremove would take what others no longer need, too."""
    program = tmp_path / "bin/dnf"
    program.parent.mkdir()
    program.write_text(DNF.replace("{folder}", str(tmp_path)), encoding="ascii")
    program.chmod(0o755)
    hosts = {name: {"common_packages": [name]} for name in ("nvidia-open", "gone", "stuck", "needed")}
    inventory = {"all": {"hosts": hosts, "vars": {"ansible_connection": "local"}}}
    (tmp_path / "hosts.json").write_text(json.dumps(inventory), encoding="utf-8")
    role = {"name": "gpufarm.core._common", "tasks_from": "packages_absent.yml"}
    play = {
        "hosts": "all", "gather_facts": False, "tasks": [{"ansible.builtin.include_role": role}],
        "vars": {"ansible_python_interpreter": sys.executable},
        "environment": {"PATH": f"{program.parent}:{os.environ['PATH']}"},
    }  # fmt: skip
    (tmp_path / "play.yml").write_text(json.dumps([play]), encoding="utf-8")
    for mode in (["--check"], []):
        ran = subprocess.run(
            [str(Path(sys.executable).with_name("ansible-playbook")), "-i", str(tmp_path / "hosts.json"), *mode,
             "--extra-vars", json.dumps({"_common_family": {"packages": "dnf"}}),
             str(tmp_path / "play.yml")],
            cwd=ROOT, env={**os.environ, "COLUMNS": "1000"}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        told = " ".join(ran.stdout.split())
        found = {line[0]: line[1:] for line in re.findall(r"(?m)^(\S+) +:.*changed=(\d).*failed=(\d)", ran.stdout)}
        wanted = {"nvidia-open": ("1", "0"), "gone": ("0", "0"), "stuck": ("0", "1"), "needed": ("0", "1")}
        assert found == wanted, ran.stdout
        assert "needed: with needed would go what somebody has installed by name: mine. Expected: " in told
        assert "stuck: dnf cannot work out what goes with stuck (Error: The operation would result in" in told
        removed = [line for line in (tmp_path / "asked").read_text().splitlines() if "--assumeyes" in line]
        assert removed == (
            [] if mode else ["--assumeyes --setopt=clean_requirements_on_remove=True remove nvidia-open"]
        )


NVIDIAS, OTHERS = "610C7B14E068A878070DA4E99CD0A493D42D0685", "C95B321B61E88C1809C4F759DDCAE044F796ECB0"
# Another key, as RHEL 10.1 has one that gpg cannot read.
UNREAD = "fd431d51\n"


@pytest.mark.parametrize(
    ("said", "pinned", "trusted"),
    [
        ("package gpg-pubkey is not installed\n", [NVIDIAS], False),
        (f"{UNREAD}f796ecb0\n", [NVIDIAS], False),
        # As rpm 4 names keys, and rpm 6.
        (f"{UNREAD}d42d0685\n", [NVIDIAS], True),
        (f"{UNREAD}{NVIDIAS.lower()}\n", [NVIDIAS], True),
        (f"{NVIDIAS[:8].lower()}\n", [NVIDIAS], False),
        ("d42d0685\n", [NVIDIAS, OTHERS], False),
        ("d42d0685\nf796ecb0\n", [NVIDIAS, OTHERS], True),
    ],
)
def test_a_key_that_rpm_trusts(said: str, pinned: list[str], trusted: bool) -> None:
    given = {"_common_repository_key": {"fingerprints": pinned}, "_common_repository_trusted": {"stdout": said}}
    known = role_helper.variables("_common")
    assert role_helper.value("_common_repository_key_trusted", {**known, **given}) is trusted


RPM = """#!/bin/sh
printf '%s\\n' "$*" >>{folder}/asked
[ "$1 $2 $3 $4" != "--query gpg-pubkey --queryformat %{version}\\\\n" ] || printf 'fd431d51\\nd42d0685\\n'
"""


def test_a_key_is_trusted_once(tmp_path: Path) -> None:
    """And again where its file has changed: it may be the same key, prolonged."""
    tasks = role_helper.tasks_of("_common/tasks/dnf_repository.yml")
    hosts = {
        name: {
            "_common_repository_key": {"fingerprints": [key], "changed": changed},
            "common_repository": {"name": name},
        }
        for name, key, changed in (("new", OTHERS, False), ("known", NVIDIAS, False), ("changed", NVIDIAS, True))
    }
    inventory = {"all": {"hosts": hosts, "vars": {"ansible_connection": "local"}}}
    (tmp_path / "hosts.json").write_text(json.dumps(inventory), encoding="utf-8")
    play = {
        "hosts": "all", "gather_facts": False,
        "tasks": [
            {"ansible.builtin.import_role": {"name": "gpufarm.core._common", "tasks_from": "variables.yml"}},
            *(task for task in tasks if "rpm" in str(task.get("ansible.builtin.command"))),
        ],
        "vars": {"ansible_python_interpreter": sys.executable},
        "environment": {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"},
    }  # fmt: skip
    (tmp_path / "play.yml").write_text(json.dumps([play]), encoding="utf-8")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/rpm").write_text(RPM.replace("{folder}", str(tmp_path)), encoding="ascii")
    (tmp_path / "bin/rpm").chmod(0o755)
    for mode in (["--check"], []):
        ran = subprocess.run(
            [str(Path(sys.executable).with_name("ansible-playbook")), "-i", str(tmp_path / "hosts.json"), *mode,
             str(tmp_path / "play.yml")],
            cwd=ROOT, env={**os.environ, "COLUMNS": "1000"}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        found = dict(re.findall(r"(?m)^(\S+) +:.*changed=(\d).*failed=0", ran.stdout))
        assert found == {"new": "1", "known": "0", "changed": "1"}, ran.stdout + ran.stderr
        asked = sorted(line for line in (tmp_path / "asked").read_text().splitlines() if "--query" not in line)
        assert asked == ([] if mode else [f"--import /etc/pki/rpm-gpg/{name}.asc" for name in ("changed", "new")])


@pytest.mark.controller
@pytest.mark.skipif(os.geteuid() != 0, reason="root alone has an /etc of its own")
@pytest.mark.parametrize(
    ("login", "former", "before", "mode"),
    [
        ("robot:s3cret@", "", "600 root", 0o600),
        # From a mirror that asked for nobody's name.
        ("robot:s3cret@", "[main]\ncachedir = /there\n", "600 root", 0o600),
        ("", "", "", 0o644),
    ],
)
def test_a_password_of_dnfs_is_roots_alone_before_it_is_there(
    tmp_path: Path, login: str, former: str, before: str, mode: int
) -> None:
    """The module writes first, and sets the mode then."""
    tasks = [
        task for task in role_helper.tasks_of("_common/tasks/dnf_repository.yml")
        if "block" not in task and ("/etc/yum.repos.d" in str(task) or "ansible.builtin.yum_repository" in task)
    ]  # fmt: skip
    assert "ansible.builtin.yum_repository" in tasks[-1]
    look = f"stat --format='%a %U' /etc/yum.repos.d/mine.repo >{tmp_path}/before || true"
    play = {
        "hosts": "all", "gather_facts": False,
        "tasks": [
            {"ansible.builtin.import_role": {"name": "gpufarm.core._common", "tasks_from": "variables.yml"}},
            *tasks[:-1], {"ansible.builtin.shell": look}, tasks[-1],
        ],
    }  # fmt: skip
    (tmp_path / "play.yml").write_text(json.dumps([play]), encoding="utf-8")
    under = of_its_own(tmp_path)
    (tmp_path / "etc/yum.repos.d").mkdir(exist_ok=True)
    file = tmp_path / "etc/yum.repos.d/mine.repo"
    if former:
        file.write_text(former, encoding="ascii")
    repository = {"name": "mine", "url": f"https://{login}mirror.example/rpm"}
    inventory = {"all": {"hosts": {"node1": {**LOCAL, "common_repository": repository}}}}
    ran = run_playbook(tmp_path, inventory, str(tmp_path / "play.yml"), under=under)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert (tmp_path / "before").read_text(encoding="ascii").strip() == before
    text = file.read_text(encoding="ascii")
    assert file.stat().st_mode & 0o777 == mode and ("password = s3cret" in text) is bool(login) and former in text
    again = run_playbook(tmp_path, inventory, str(tmp_path / "play.yml"), under=under)
    # The look.
    assert re.search(r"changed=1 .*failed=0", again.stdout), again.stdout


# Asks as dnf does: by the entry that there is, and for the first file of a repository.
DNF_READS = """#!{python}
import configparser, sys, urllib.request
given = "--assumeyes --refresh --disablerepo=* --enablerepo=mine makecache".split()
if sys.argv[1:] != given:
    sys.exit(f"dnf: no answer to {sys.argv[1:]}")
entries = configparser.ConfigParser(interpolation=None)
entries.read("/etc/yum.repos.d/mine.repo")
if not entries.has_section("mine"):
    sys.exit("Error: Unknown repo: 'mine'")
try:
    urllib.request.urlopen(entries["mine"]["baseurl"] + "/repodata/repomd.xml")
except OSError:
    sys.exit("Errors during downloading metadata for repository 'mine':\\nError: Failed to download metadata for repo")
"""


@pytest.mark.controller
@pytest.mark.skipif(os.geteuid() != 0 or not release_helper.HAS_GPG, reason="root alone has an /etc of its own")
def test_a_repository_that_dnf_cannot_read_is_as_it_was(tmp_path: Path, gpg: release_helper.Gpg) -> None:
    """RHEL's dnf does nothing any more where one repository does not answer."""
    mirror, keys = release_helper.Server(), [gpg.new_key("former"), gpg.new_key("other")]
    mirror.files = {"/rpm/repodata/repomd.xml": b"<repomd/>", "/0": gpg.export(keys[0]), "/1": gpg.export(keys[1])}
    under = of_its_own(tmp_path)
    for folder in ("etc/yum.repos.d", "etc/pki/rpm-gpg", "bin"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    for name, program in (("dnf", DNF_READS), ("rpm", RPM)):
        text = program.replace("{python}", sys.executable).replace("{folder}", str(tmp_path))
        (tmp_path / "bin" / name).write_text(text, encoding="ascii")
        (tmp_path / "bin" / name).chmod(0o755)
    entry = {"name": "gpufarm.core._common", "tasks_from": "dnf_repository.yml", "rolespec_validate": False}
    play = {
        "hosts": "all", "gather_facts": False, "tasks": [{"ansible.builtin.include_role": entry}],
        "environment": {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"},
    }  # fmt: skip
    (tmp_path / "play.yml").write_text(json.dumps([play]), encoding="utf-8")

    def have(path: str, key: int = 0) -> tuple[str, dict[str, tuple[int, bytes]]]:
        url = mirror.url.replace("://", "://robot:s3cret@") + path
        wanted = {"name": "mine", "url": url, "key_url": f"{mirror.url}/{key}", "fingerprints": [keys[key]]}
        given = {"_common_family": {"packages": "dnf"}, "_common_host": role_helper.host(), "common_repository": wanted}
        options = ("--extra-vars", json.dumps(given))
        ran = run_playbook(
            tmp_path, {"all": {"hosts": {"node1": LOCAL}}}, str(tmp_path / "play.yml"), *options, under=under
        )
        places = [tmp_path / "etc/yum.repos.d", tmp_path / "etc/pki/rpm-gpg", *(tmp_path / "run").glob("gpufarm-*")]
        files = [path for place in places for path in place.rglob("*") if path.is_file()]
        return " ".join((ran.stdout + ran.stderr).split()), {
            path.name: (path.stat().st_mode & 0o777, path.read_bytes()) for path in files
        }

    try:
        said, found = have("/nowhere")
        assert "failed=1" in said and not found, said
        said, former = have("/rpm")
        assert "failed=0" in said and sorted(former) == ["mine.asc", "mine.repo"], said
        said, found = have("/nowhere", key=1)
        assert "failed=1" in said and found == former, said
        assert "(Error: Failed to download metadata for repo)" in said and "s3cret" not in said
        assert f"Expected: {mirror.url}/nowhere to answer as a repository" in said
        # A mirror that is away stops nobody where it is the one that there was.
        mirror.files.clear()
        mirror.files["/0"] = gpg.export(keys[0])
        said, found = have("/rpm")
        assert "failed=0" in said and found == former, said
    finally:
        mirror.close()
