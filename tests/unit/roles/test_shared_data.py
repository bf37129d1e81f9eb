"""What shared_data asks for, sees and refuses; nothing is mounted here."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.template import trust_as_template
from ansible_collections.gpufarm.core.tests.unit.playbooks import playbook_helper
from ansible_collections.gpufarm.core.tests.unit.roles import role_helper
from ansible_collections.gpufarm.core.tests.unit.roles.role_helper import ROLES

LOOK = ROLES / "shared_data/files/look.sh"
UNEXPORT = ROLES / "shared_data/files/unexport.sh"
HOSTS = {"control": {"ansible_host": "192.0.2.10"}, "node": {}}
SAID = "unit srv-data\nautomount inactive\n"


def value(name: str, said: str = SAID, host: str = "node", platform: str = "Debian: Debian 13.1", **given: Any) -> Any:
    known = {
        **role_helper.variables("_common", "shared_data"),
        "ansible_facts": role_helper.facts(platform),
        "_common_host": role_helper.host(units={"nfs-server.service": {"enabled": "", "active": ""}}),
        "__shared_data_said": {"stdout_lines": said.splitlines()},
        "inventory_hostname": host,
        "hostvars": HOSTS,
        "groups": {"all": list(HOSTS)},
        "shared_data_server": "control",
        "shared_data_clients": ["192.0.2.0/24"],
    }
    return role_helper.value(f"__shared_data_{name}", {**known, **given})


def test_a_host_of_the_inventory_serves_and_the_others_mount() -> None:
    assert [value("serves", host=host) for host in HOSTS] == [True, False]
    assert value("source") == "192.0.2.10:/srv/data"
    assert value("packages", host="control") == ["nfs-kernel-server"]
    assert value("packages") == ["nfs-common"]
    assert value("packages", platform="RedHat: Rocky 9.4", shared_data_cache=True) == ["nfs-utils", "cachefilesd"]


def test_a_server_that_is_there_already_is_left_alone() -> None:
    for given in ({"shared_data_server_managed": False}, {"shared_data_server": "nas.example.com"}):
        assert not any(value("serves", host=host, **given) for host in HOSTS)
    nas = {"shared_data_server": "2001:db8::5", "shared_data_export": "/pool/sets"}
    assert value("source", **nas) == "[2001:db8::5]:/pool/sets"
    assert value("refusal", **nas, shared_data_clients=[]) == ""


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({}, "ro,hard,noatime,vers=4.2,nconnect=4,retry=0"),
        ({"shared_data_soft": True, "shared_data_read_only": False}, "rw,soft,noatime,vers=4.2,nconnect=4,retry=0"),
        (
            {"shared_data_cache": True, "shared_data_version": "4.1", "shared_data_options": ["rsize=1048576"]},
            "ro,hard,noatime,vers=4.1,fsc,nconnect=4,retry=0,rsize=1048576",
        ),
    ],
)
def test_options_of_the_mount(given: dict[str, Any], options: str) -> None:
    assert ",".join(value("options", **given)) == options


MOUNTED = "mount 192.0.2.10:/srv/data nfs4 ro,noatime,vers=4.2,hard,proto=tcp,nconnect=4,addr=192.0.2.10\n"
OURS = "file /etc/systemd/system/srv-data.mount 0\nfile /etc/systemd/system/srv-data.automount 0\nautomount active\n"
THEIRS = "theirs /etc/systemd/system/srv-data.mount\n"


@pytest.mark.parametrize(
    ("host", "said", "given", "told"),
    [
        ("node", "", {"shared_data_server": ""}, "shared_data_server is empty. Expected: who has the data."),
        ("node", "", {"shared_data_path": "/"}, "shared_data_path is /, and"),
        ("node", "", {"shared_data_path": "/srv/../etc"}, "shared_data_path is /srv/../etc, and"),
        ("node", "", {"shared_data_export": "/my sets"}, 'shared_data_export "/my sets". Expected: paths'),
        ("node", "", {"shared_data_nconnect": 17}, "shared_data_nconnect is 17. Expected: from 1 to 16."),
        ("node", "", {"shared_data_options": ["ro,suid"]}, "the variables have ro,suid. Expected:"),
        ("control", "", {"shared_data_clients": ["*(rw)"]}, "the variables have *(rw). Expected:"),
        ("control", "", {"shared_data_clients": []}, "shared_data_clients is empty. Expected: who may read"),
        ("control", "exported /etc/exports\n", {}, "/etc/exports exports /srv/data already."),
        ("node", MOUNTED, {}, "192.0.2.10:/srv/data (nfs4) is mounted at /srv/data, and not by this role."),
        ("node", THEIRS, {}, "/etc/systemd/system/srv-data.mount is there, and not of this role. Expected: no unit"),
        ("node", MOUNTED + THEIRS, {}, "/etc/systemd/system/srv-data.mount is there, and not of this role."),
        ("node", "fstab nas:/x\n", {}, "/etc/fstab mounts nas:/x at /srv/data. Expected: nobody else who does."),
        ("node", "nofolder\n", {}, "/srv/data is a link or a file. Expected: a folder, or nothing."),
        ("node", "beneath a\nbeneath b c\n", {}, "there are files in /srv/data (a, b c), which the mount would hide."),
    ],
)
def test_what_is_refused(host: str, said: str, given: dict[str, Any], told: str) -> None:
    refusal = value("refusal", SAID + said, host, **given)
    assert told in refusal
    assert "Next step: " in refusal


def test_what_is_as_it_should_be_is_not_refused() -> None:
    assert value("refusal") == value("refusal", host="control") == ""
    assert value("refusal", SAID + MOUNTED + OURS) == ""
    # What takes it away asks for no server.
    assert value("refusal", SAID + MOUNTED, shared_data_server="", shared_data_state="absent") == ""


@pytest.mark.parametrize(
    ("said", "given", "told"),
    [
        ("", {}, ["nothing is mounted at /srv/data"]),
        (MOUNTED + OURS, {}, []),
        (MOUNTED, {}, ["nobody mounts it when it is looked at"]),
        (MOUNTED.replace("2.10:", "2.99:") + OURS, {}, ["192.0.2.99:/srv/data is mounted at /srv/data"]),
        (MOUNTED.replace("hard", "soft") + OURS, {}, ["it is mounted with ro,noatime,vers=4.2,soft,"]),
        (
            MOUNTED.replace("ro,", "ro,fsc,") + OURS,
            {"shared_data_cache": True},
            ["nothing is cached, because cachefilesd does not run"],
        ),
        (MOUNTED.replace("ro,", "ro,fsc,") + OURS + "cache runs\n", {"shared_data_cache": True}, []),
    ],
)
def test_what_differs_on_a_mount(said: str, given: dict[str, Any], told: list[str]) -> None:
    differs = value("differs", SAID.replace("automount inactive\n", "") + said, **given)
    assert len(differs) == len(told) and all(text in differ for text, differ in zip(told, differs, strict=True)), (
        differs
    )


def test_what_differs_on_a_server() -> None:
    said = SAID + "export /srv/data 192.0.2.0/24(sync,ro)\n"
    assert value("differs", said, "control") == []
    (differs,) = value("differs", said, "control", shared_data_writers=["192.0.2.7"])
    assert differs == "the NFS server does not export /srv/data to 192.0.2.0/24, 192.0.2.7"


def test_what_differs_is_told_with_what_to_do() -> None:
    tasks = yaml.safe_load((ROLES / "shared_data/tasks/check.yml").read_text(encoding="utf-8"))
    text = trust_as_template(tasks[1]["ansible.builtin.assert"]["fail_msg"])
    mount = value("told", SAID.replace("automount inactive\n", ""), __shared_data_told=text)
    assert re.fullmatch(
        r"node: nothing is mounted at /srv/data.*\. Expected: 192\.0\.2\.10:/srv/data at /srv/data with ro,\S*\. "
        r"Next step: read `journalctl -u srv-data\.mount` on this host, and run gpufarm\.core\.shared_data again\.",
        mount,
    ), mount
    server = value("told", SAID, "control", __shared_data_told=text)
    assert re.fullmatch(
        r"control: the NFS server does not export /srv/data to 192\.0\.2\.0/24\. Expected: .*/srv/data.* exported\. "
        r"Next step: read `exportfs -s` and `journalctl -u nfs-server` on this host, and run "
        r"gpufarm\.core\.shared_data again\.",
        server,
    ), server


def look(path: Path, programs: dict[str, str], *more: str) -> list[str]:
    """Run the look at a folder, with programs that say what is given."""
    folder = path.parent / "programs"
    folder.mkdir(exist_ok=True)
    for name, said in {"systemd-escape": "my-data", "systemctl": "inactive", "pidof": "", **programs}.items():
        (folder / name).write_text(f"#!/bin/sh\nprintf '%s\\n' '{said}'\n", encoding="utf-8")
        (folder / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    command = ["sh", str(LOOK), str(path), *more]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()


def test_look_at_a_folder(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name in (".hidden", "with space", "z1", "z2"):
        (tmp_path / "data" / name).touch()
    said = look(tmp_path / "data", {"exportfs": "/srv/data  192.0.2.0/24(sync,ro)"})
    assert said[:2] == ["unit my-data", "automount inactive"]
    beneath = [line for line in said if line.startswith("beneath ")]
    assert beneath == ["beneath .hidden", "beneath with space", "beneath z1"]
    assert "export /srv/data 192.0.2.0/24(sync,ro)" in said


@pytest.mark.controller
def test_a_folder_that_is_made_is_for_everybody_to_read(tmp_path: Path) -> None:
    """Hardened hosts have a umask of 077; of a folder that is there somebody has chosen the permissions."""
    names = ("Have the folder of the data", "Have the mount point")
    tasks = [
        task for path in ("server", "mount") for task in role_helper.tasks_of(f"shared_data/tasks/{path}.yml")
        if task["name"] in names
    ]  # fmt: skip
    play = {"hosts": "all", "gather_facts": False, "tasks": tasks}
    (tmp_path / "play.yml").write_text(yaml.safe_dump([play]), encoding="utf-8")
    paths = {name: str(tmp_path / place) for name, place in (
        ("__shared_data_exported", "srv/data"), ("shared_data_path", "mnt/the data"),
    )}  # fmt: skip
    given = {**playbook_helper.LOCAL, **paths, "__shared_data_has_export": False, "__shared_data_has_mount": False}

    def enter(*options: str) -> str:
        ran = playbook_helper.run_playbook(
            tmp_path, {"all": {"hosts": {"node": given}}}, str(tmp_path / "play.yml"), *options
        )
        return re.findall(r"node +: ok=\d+ +changed=(\d+) .*failed=0", ran.stdout)[0]

    before = os.umask(0o077)
    try:
        assert enter("--check") == "2" and not Path(paths["shared_data_path"]).exists()
        assert enter() == "2"
        modes = [Path(path).stat().st_mode & 0o777 for path in (*paths.values(), tmp_path / "srv")]
        assert modes == [0o755] * 3
        for path in paths.values():
            Path(path).chmod(0o750)
        assert enter() == "0"
        assert [Path(path).stat().st_mode & 0o777 for path in paths.values()] == [0o750] * 2
    finally:
        os.umask(before)


def test_units_that_a_cut_run_has_left_unread_are_read(tmp_path: Path) -> None:
    """Its handler never came, and the next run finds their files as they should be."""
    (task,) = [
        task for task in role_helper.tasks_of("shared_data/tasks/mount.yml", templates=True)
        if task["name"] == "Have the data mounted when somebody looks, with every boot"
    ]  # fmt: skip
    due = {
        "__shared_data_due": trust_as_template("{{ " + task["when"] + " }}"),
        "__shared_data_units": {"changed": False},
    }
    reload = {"__shared_data_reload": task["ansible.builtin.systemd_service"].get("daemon_reload", False)}
    for said, unread in (("NeedDaemonReload=no", False), ("NeedDaemonReload=no\nNeedDaemonReload=yes", True)):
        lines = look(tmp_path / "data", {"systemctl": said})
        assert ("unread" in lines) is unread
        found = "\n".join(["automount active", *(line for line in lines if line == "unread")])
        assert value("due", found, ansible_check_mode=False, **due) is unread
        assert value("reload", found, **reload) is unread


def test_look_at_nothing_and_at_a_link(tmp_path: Path) -> None:
    assert not [line for line in look(tmp_path / "data", {}) if re.match("beneath|nofolder|mount", line)]
    (tmp_path / "x").mkdir()
    (tmp_path / "x/link").symlink_to(tmp_path)
    assert "nofolder" in look(tmp_path / "x/link", {})


# As exportfs knows what is exported, which files tell only in part.
EXPORTFS = """#!/bin/sh
echo "$*" >>"$0.asked"
[ "$1" = -u ] || exit 1
grep -qxF -e "$2" "$0.table" || { echo "exportfs: Could not find $2 to unexport." >&2; exit 22; }
[ "$2" != broken:/srv/data ] || { echo "exportfs: no room" >&2; exit 1; }
grep -vxF -e "$2" "$0.table" >"$0.left"
mv "$0.left" "$0.table"
"""


def test_the_server_forgets_what_this_role_alone_has_exported(tmp_path: Path) -> None:
    ours = ["a.example:/srv/data", "[2001:db8::/64]:/srv/data", "192.0.2.0/24:/srv/data"]
    others = ["b.example:/srv/data", "192.0.2.0/24:/home"]
    program, exports = tmp_path / "exportfs", tmp_path / "ours.exports"
    program.write_text(EXPORTFS, encoding="utf-8")
    program.chmod(0o755)
    exports.write_text(
        value(
            "text", shared_data_clients=["a.example", "2001:db8::/64", "192.0.2.0/24", "gone.example", "broken"],
            ansible_managed="by us",
            __shared_data_text=trust_as_template((ROLES / "shared_data/templates/exports.j2").read_text("utf-8")),
        ),
        encoding="utf-8",
    )  # fmt: skip

    def forget(*still: str) -> subprocess.CompletedProcess[str]:
        command = ["sh", str(UNEXPORT), str(exports), *still]
        environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    table = tmp_path / "exportfs.table"
    table.write_text("\n".join([*ours, *others]) + "\n", encoding="utf-8")
    # Who has another access now stays exported until that is read.
    ran = forget("/srv/data 192.0.2.0/24", "/srv/data new.example")
    assert (ran.returncode, ran.stdout.split()) == (0, ours[:2]), ran.stderr
    assert table.read_text(encoding="utf-8").split() == [ours[2], *others]
    ran = forget()
    assert (ran.returncode, ran.stdout.split()) == (0, ours[2:])
    assert table.read_text(encoding="utf-8").split() == others
    # One whose file another run has taken away already.
    ours_gone = exports.rename(tmp_path / "aside")
    assert (forget().returncode, forget().stdout) == (0, "")
    ours_gone.rename(exports)
    table.write_text("broken:/srv/data\n", encoding="utf-8")
    ran = forget()
    assert ran.returncode == 1 and "no room" in ran.stderr


def test_no_export_of_others_is_dropped() -> None:
    """``-r`` has the server forget all that no file tells, as what somebody exports until the next boot."""
    asks = {
        name: [task["ansible.builtin.command"] for task in role_helper.tasks_of(f"shared_data/tasks/{name}.yml")
               if "ansible.builtin.command" in task]
        for name in ("server", "unexport")
    }  # fmt: skip
    assert [each for each in asks["server"] + asks["unexport"] if isinstance(each, str)] == ["exportfs -a"] * 2
    still = asks["server"][1]["argv"].replace("lookup('ansible.builtin.file', 'unexport.sh')", "''")
    told = value("told", shared_data_writers=["w"], __shared_data_told=trust_as_template(still))
    assert told[-3:] == ["/etc/exports.d/gpufarm-shared-data.exports", "/srv/data 192.0.2.0/24", "/srv/data w"]
    names = [task["name"] for task in role_helper.tasks_of("shared_data/tasks/unexport.yml")]
    # A run that is cut off knows by the file what is left.
    assert names.index("Have the NFS server forget it") < names.index("Have no export of the data")


def due(name: str, said: list[str], part: str = "when") -> Any:
    """Return whether a task of those that take away the export is due after this look, or what it says."""
    (task,) = [task for task in role_helper.tasks_of("shared_data/tasks/unexport.yml") if task["name"] == name]
    asked = task["when"] if part == "when" else task["ansible.builtin.assert"][part]
    text = trust_as_template(asked if part == "fail_msg" else f"{{{{ {asked} }}}}")
    return value("told", "\n".join(said), "control", __shared_data_told=text)


def test_a_server_that_serves_others_is_neither_stopped_nor_asked_for_its_clients(tmp_path: Path) -> None:
    own, other = "/srv/data 192.0.2.0/24(sync,ro)", "/home 192.0.2.0/24(sync,rw)"
    client = "client 192.0.2.7"
    exports = tmp_path / "etc/exports"
    file = tmp_path / "etc/exports.d/gpufarm-shared-data.exports"
    file.parent.mkdir(parents=True)
    stopped, nobody = "Have no NFS server that serves nothing", "Require that nobody has it mounted"

    def looked(*served: str) -> list[str]:
        said = look(tmp_path / "data", {"exportfs": "\n".join(served)}, "/nowhere", str(tmp_path / "etc"))
        return [line for line in said if line.split() != ["export"]]

    # The folder of before, as long as the file has that.
    file.write_text(f"# by us\n{own}\n/srv/old 192.0.2.0/24(ro)\n", encoding="utf-8")
    alone = looked(own, "/srv/old 192.0.2.0/24(ro)")
    assert due(stopped, alone) and not due(nobody, [*alone, client], "that") and due(nobody, alone, "that")
    assert "192.0.2.7 has something of this server mounted, which exports nothing else. Expected: nobody" in due(
        nobody, [*alone, client], "fail_msg"
    )
    beside = looked(own, other)
    assert not due(stopped, beside) and due(nobody, [*beside, client], "that")
    # Check mode knows by the files that somebody has taken it over, other runs by what is served without this role's.
    exports.write_text(f"{tmp_path}/data *(rw)\n", encoding="utf-8")
    assert not due(stopped, looked(own)) and due(nobody, [*looked(own), client], "that")
    exports.unlink()
    file.unlink()
    assert not due(stopped, looked("/srv/data *(rw)")) and due(stopped, looked())
    names = [task["name"] for task in role_helper.tasks_of("shared_data/tasks/unexport.yml")]
    order = ["Have the NFS server know what is exported by others", "Look what is exported still", stopped]
    assert names[-3:] == order


VOLUME = {
    "metadata": {"labels": {"app.kubernetes.io/managed-by": "gpufarm.core"}},
    "spec": {"nfs": {"server": "192.0.2.10", "path": "/srv/data"}},
}


def volume(name: str, there: dict[str, Any] | None = None, **given: Any) -> Any:
    return value(f"volume_{name}", __shared_data_volume_asked={"stdout": json.dumps(there) if there else ""}, **given)


def test_the_volume_of_kubernetes_has_the_size_and_what_the_mounts_have() -> None:
    spec = volume("wanted", shared_data_kubernetes_size="2Ti")["spec"]
    assert spec["capacity"] == {"storage": "2Ti"} and spec["accessModes"] == ["ReadOnlyMany"]
    assert spec["nfs"] == {"server": "192.0.2.10", "path": "/srv/data"}
    # Kubernetes keeps no empty one, so that each run would set it.
    assert "storageClassName" not in spec
    assert spec["mountOptions"] == ["ro", "hard", "noatime", "vers=4.2", "nconnect=4"]
    written = volume("wanted", shared_data_read_only=False, shared_data_server="2001:db8::5")["spec"]
    assert written["accessModes"] == ["ReadOnlyMany", "ReadWriteMany"] and written["mountOptions"][0] == "rw"
    assert written["nfs"]["server"] == "2001:db8::5"
    # What users ask for fits the default.
    example = yaml.safe_load((ROLES.parent / "examples/kubernetes/shared-data.yml").read_text(encoding="utf-8"))
    claim, pod = example["items"]
    default = volume("wanted")
    assert claim["spec"]["volumeName"] == default["metadata"]["name"]
    assert claim["spec"]["resources"]["requests"] == default["spec"]["capacity"]
    assert set(claim["spec"]["accessModes"]) <= set(default["spec"]["accessModes"])
    assert pod["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


@pytest.mark.parametrize(
    ("there", "given", "told"),
    [
        (None, {"shared_data_server": ""}, "shared_data_server is empty. Expected: who has the data."),
        *((None, {"shared_data_kubernetes_size": size}, f'size is "{size}". Expected: a size such as 500Gi')
          for size in ("", "0", "100GB", "1.5Ti", "100Gi\n")),
        ({**VOLUME, "metadata": {}}, {}, "the cluster has a volume shared-data that is not of this role."),
        ({**VOLUME, "metadata": {}}, {"shared_data_state": "absent"}, "that is not of this role."),
        (VOLUME, {"shared_data_export": "/pool"}, "leads to 192.0.2.10:/srv/data. Expected: 192.0.2.10:/pool, which"),
    ],
)  # fmt: skip
def test_what_is_refused_of_the_volume(there: dict[str, Any] | None, given: dict[str, Any], told: str) -> None:
    refusal = volume("refusal", there, **given)
    assert told in refusal and "Next step: " in refusal
    assert volume("refusal", VOLUME) == volume("refusal") == ""
    assert volume("refusal", VOLUME, shared_data_state="absent", shared_data_server="") == ""


KUBECTL = """#!/bin/sh
[ "$3" = --request-timeout=30s ] || exit 1
shift 3
case "$*" in
    'get nodes --output=name') echo node/gpu-7 ;;
    'get persistentvolume sets --ignore-not-found --output=json') cat "$0.there" ;;
    'apply --filename=-') cat >"$0.there"; echo 'persistentvolume/sets created' ;;
    'delete persistentvolume sets --ignore-not-found --wait=false')
        rm "$0.there"; echo 'persistentvolume "sets" deleted' ;;
    *) echo "error: unknown: $*" >&2; exit 1 ;;
esac
"""


@pytest.mark.controller
def test_the_volume_of_kubernetes_is_had_and_taken_away(tmp_path: Path) -> None:
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(KUBECTL, encoding="utf-8")
    kubectl.chmod(0o755)
    (tmp_path / "kubectl.there").touch()
    role = {"name": "gpufarm.core.shared_data", "tasks_from": "kubernetes.yml"}
    copied = {"src": str(tmp_path / "kubectl.there"), "dest": str(tmp_path / "made"), "mode": "0600"}
    tasks = [
        {"ansible.builtin.include_role": role},
        {"ansible.builtin.copy": copied},
        {"ansible.builtin.include_role": role, "vars": {"shared_data_state": "absent"}},
    ]
    play = [{"hosts": "all", "gather_facts": False, "tasks": tasks}]
    (tmp_path / "play.yml").write_text(json.dumps(play), encoding="utf-8")
    given = {
        **playbook_helper.LOCAL, "ansible_become": False, "kubernetes_kubectl": str(kubectl),
        "kubernetes_kubeconfig": "/etc/kubernetes/admin.conf", "shared_data_server": "nas.example.com",
        "shared_data_kubernetes_volume": "sets", "shared_data_kubernetes_size": "2Ti",
    }  # fmt: skip
    inventory = {"all": {"hosts": {"gpu-7": given}}}
    result = playbook_helper.run_playbook(
        tmp_path, inventory, str(tmp_path / "play.yml"), "--extra-vars", '{"_common_refusal": ""}'
    )
    assert result.returncode == 0, result.stdout + result.stderr
    made = json.loads((tmp_path / "made").read_text(encoding="utf-8"))
    assert (made["kind"], made["metadata"]["name"], made["spec"]["capacity"]) == (
        "PersistentVolume", "sets", {"storage": "2Ti"},
    )  # fmt: skip
    assert not (tmp_path / "kubectl.there").exists() and "changed=3" in result.stdout, result.stdout


def test_look_at_what_this_role_has_mounted_elsewhere(tmp_path: Path) -> None:
    """By the words of its own templates; a mount of somebody else is not taken for one."""
    units = tmp_path / "units"
    units.mkdir()
    for path in ("/srv/old sets", str(tmp_path / "data")):
        for kind in ("mount", "automount"):
            text = value(
                "text", shared_data_path=path, ansible_managed="by us",
                __shared_data_text=trust_as_template((ROLES / f"shared_data/templates/{kind}.j2").read_text("utf-8")),
                __shared_data_cache_ours=False,
            )  # fmt: skip
            (units / f"{path.rpartition('/')[2]}.{kind}").write_text(text, encoding="utf-8")
    others = "[Unit]\nDescription=Home folders\n[Mount]\nWhere=/home\nType=nfs4\n"
    (units / "home.mount").write_text(others, encoding="utf-8")
    said = look(tmp_path / "data", {"systemd-escape": "data"}, str(units))
    assert [line for line in said if line.startswith("former ")] == ["former /srv/old sets"]
    assert [line.split()[1] for line in said if line.startswith("file ")] == [
        str(units / "data.mount"), str(units / "data.automount"),
    ]  # fmt: skip
    assert value("former", "\n".join(said)) == ["/srv/old sets"]
    # Cut off in between, the rest tells of it.
    (units / "old sets.automount").unlink()
    assert "former /srv/old sets" in look(tmp_path / "data", {}, str(units))


@pytest.mark.parametrize("kind", ["mount", "automount"])
def test_a_unit_of_somebody_else_is_refused_and_stays(tmp_path: Path, kind: str) -> None:
    """A disk that is mounted at the path, or a mount of NFS that somebody wrote by hand."""
    units = tmp_path / "units"
    units.mkdir()
    text = "[Unit]\nDescription=Shared data\n[Mount]\nWhat=/dev/sdb1\nWhere=/srv/data\n"
    (units / f"srv-data.{kind}").write_text(text, encoding="utf-8")
    programs = {"systemd-escape": "srv-data", "systemctl": "active" if kind == "automount" else "inactive"}
    said = "\n".join(look(tmp_path / "data", programs, str(units))).replace(str(units), "/etc/systemd/system")
    refusal = value("refusal", said)
    assert refusal.startswith(f"/etc/systemd/system/srv-data.{kind} is there, and not of this role. "), refusal
    # As absent it is neither refused nor touched.
    assert value("refusal", said, shared_data_state="absent") == ""
    assert [value(name, said) for name in ("has_mount", "going", "kinds")] == [False, [], []]


@pytest.mark.parametrize(
    ("given", "goes"),
    [
        ({"shared_data_cache": True}, False),
        ({"shared_data_cache": "yes"}, False),
        ({}, True),
        ({"shared_data_cache": True, "shared_data_state": "absent"}, True),
    ],
)
def test_the_cache_goes_with_the_last_mount(given: dict[str, Any], goes: bool) -> None:
    mount, cache = "/etc/systemd/system/srv-old.mount", "/etc/systemd/system/gpufarm-data-cache.service"
    said = f"unit srv-old\nfile {mount} 0\nfile {cache} 0\n"
    assert sorted(value("going", said, **given)) == sorted([mount, *([cache] if goes else [])])


def test_a_cache_that_is_asked_for_no_more_goes_once_the_mount_is_without_it() -> None:
    tasks = role_helper.tasks_of("shared_data/tasks/mount.yml")
    names = [task["name"] for task in tasks]
    gone = tasks[names.index("Have no cache that nobody asks for")]
    assert names.index("Require that the server lets this host mount") < names.index(gone["name"])
    assert [task["name"] for task in gone["block"]] == ["Have its service stopped", "Have no unit of it"]
    cache = "file /etc/systemd/system/gpufarm-data-cache.service 0\n"
    for said, given, due in ((cache, {}, True), ("", {}, False), (cache, {"shared_data_cache": "yes"}, False)):
        asked = trust_as_template(f"{{{{ {gone['when']} }}}}")
        assert value("told", SAID + said, __shared_data_told=asked, **given) is due


def test_a_former_mount_goes_last_and_is_the_one_that_is_looked_at() -> None:
    """Whose data cannot be had at another place has them where they were, and what is in use has changed nothing."""
    tasks = yaml.safe_load((ROLES / "shared_data/tasks/main.yml").read_text(encoding="utf-8"))
    files = [task.get("ansible.builtin.include_tasks") for task in tasks]
    assert files[-3:] == ["mount.yml", "gone.yml", "former.yml"]
    # A loop's variable of the name of a role's own would be warned of.
    assert tasks[-1]["loop_control"]["loop_var"] not in role_helper.variables("shared_data")
    given = {"__shared_data_asked": "/srv/old", "shared_data_path": "/srv/data"}
    for name, key in (("look", "ansible.builtin.command"), ("unused", "ansible.builtin.assert")):
        (task,) = yaml.safe_load((ROLES / f"shared_data/tasks/{name}.yml").read_text(encoding="utf-8"))
        word = task[key]["argv"][-1] if name == "look" else task[key]["fail_msg"]
        told = value("told", SAID + "user 7 python3\n", **given, __shared_data_told=trust_as_template(word))
        assert told.startswith(
            "/srv/old" if name == "look" else "node: /srv/old is in use by 7 (python3). Expected:"
        ), told
        assert name == "look" or ("because it is to go." in told and "Nothing was changed" not in told)
