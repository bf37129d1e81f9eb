"""What the toolkit role works out: which engines are behind, what is missing, what check mode only announces."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.template import trust_as_template
from ansible_collections.gpufarm.core.tests.unit.patience import PATIENCE_S
from ansible_collections.gpufarm.core.tests.unit.roles import role_helper


def value(name: str, **given: Any) -> Any:
    return role_helper.value(name, {**role_helper.variables("_common", "docker", "container_toolkit"), **given})


def engine(runtimes: dict[str, str], default: str | None = "runc") -> dict[str, Any]:
    return {
        "answers": bool(runtimes),
        "reason": None if runtimes else "silence",
        "runtimes": runtimes,
        "default": default,
    }


def behind(running: dict[str, Any], **given: Any) -> list[str]:
    """Return the engines that do not follow; their settings name the runtime and, where given, a default."""
    settings = {
        name: {"changed": False, "known": True, "runtime": "/nvidia", "default": None, **given} for name in running
    }
    state = {"__container_toolkit_written": {"engines": settings}, "__container_toolkit_state": {"engines": running}}
    found: list[str] = value("__container_toolkit_behind", **state)
    return found


@pytest.mark.parametrize(
    ("running", "default", "follows"),
    [
        (engine({"runc": "", "nvidia": "/nvidia"}), None, True),
        (engine({"runc": "", "nvidia": "/nvidia"}), "runc", True),
        (engine({"runc": "", "nvidia": "/nvidia"}), "nvidia", False),
        (engine({"runc": "", "nvidia": "/nvidia"}, "nvidia"), "runc", False),
        (engine({"runc": "", "nvidia": "/other"}), None, False),
        (engine({"runc": ""}), None, False),
        (engine({}, None), None, False),
    ],
)
def test_an_engine_follows_what_it_has_read(running: dict[str, Any], default: str | None, follows: bool) -> None:
    assert behind({"docker": running}, default=default) == ([] if follows else ["docker"])


def test_only_engines_that_are_behind_are_told_and_those_to_come_are_not() -> None:
    there, missing = engine({"runc": "", "nvidia": "/nvidia"}), engine({})
    assert behind({"docker": there, "containerd": missing, "crio": there}) == ["containerd"]
    assert behind({"containerd": missing}, known=False) == []


def test_settings_that_have_changed_are_followed_even_where_the_runtime_was_known() -> None:
    there = engine({"nvidia": "/nvidia"})
    written = {"changed": True, "known": True, "runtime": "/nvidia", "default": None}
    state = {
        "__container_toolkit_written": {"engines": {"containerd": written, "docker": {**written, "changed": False}}},
        "__container_toolkit_state": {"engines": {"containerd": there, "docker": there}},
    }
    assert value("__container_toolkit_to_follow", **state) == ["containerd"]
    assert value("__container_toolkit_to_follow") == []


@pytest.mark.parametrize(
    ("engines", "programs", "packages"),
    [
        (["docker"], {}, []),
        (["containerd", "podman", "crio"], {}, ["containerd", "podman", "cri-o"]),
        (["containerd", "podman"], {"containerd": "containerd.io"}, ["podman"]),
        # Docker brings its own, which the look before it came did not see.
        (["docker", "containerd", "podman"], {}, ["podman"]),
    ],
)
def test_engines_that_are_missing(engines: list[str], programs: dict[str, str], packages: list[str]) -> None:
    found = {"containerd": "", "crio": "", "podman": "", "dockerd": "", **programs}
    given = {
        "_common_host": role_helper.host(programs=found), "ansible_facts": role_helper.facts("Debian: Debian 12.11"),
        "container_toolkit_engines": engines,
    }  # fmt: skip
    assert value("__container_toolkit_engine_packages", **given) == packages
    if not programs:
        assert value("__container_toolkit_engines_of_distribution", **given) == packages


@pytest.mark.parametrize(
    ("active", "changed", "runtime", "restarted"),
    [
        ("active", True, "", ["containerd"]),
        # An earlier run has changed its files, and ended.
        ("active", False, "/usr/bin/nvidia-container-runtime", ["containerd"]),
        ("active", False, "", []),
        # Another's, whose settings stay.
        ("active", False, "/usr/local/nvidia/toolkit/nvidia-container-runtime", []),
        ("inactive", True, "", []),
    ],
)
def test_an_engine_that_the_runtime_leaves_restarts_until_it_has_read_so(
    active: str, changed: bool, runtime: str, restarted: list[str]
) -> None:
    units = {f"{name}.service": {"enabled": "enabled", "active": active} for name in ("containerd", "crio")}
    given = {
        "_common_host": role_helper.host(units={**units, "crio.service": {"enabled": "", "active": ""}}),
        "__container_toolkit_removed": {"engines": {"containerd": {"changed": changed}, "crio": {"changed": True}}},
        "__container_toolkit_state": {
            "engines": {"containerd": engine({"nvidia": runtime} if runtime else {}), "crio": engine({})}
        },
    }
    assert value("__container_toolkit_to_leave", **given) == restarted


def test_engines_that_do_not_run_and_start_with_the_host() -> None:
    runs = {"enabled": "enabled", "active": "active"}
    units = {
        "containerd.service": runs,
        "crio.service": {**runs, "active": "inactive"},
        "docker.service": {**runs, "active": ""},
    }
    given = {
        "_common_host": role_helper.host(units=units),
        "container_toolkit_engines": ["docker", "podman", "containerd", "crio"],
    }
    assert value("__container_toolkit_stopped", **given) == ["crio.service"]


@pytest.mark.parametrize(
    ("image", "whole"),
    [
        ("cuda:12", "docker.io/library/cuda:12"),
        ("nvidia/cuda:12", "docker.io/nvidia/cuda:12"),
        ("images.example.com/cuda:12", "images.example.com/cuda:12"),
        ("localhost/cuda:12", "localhost/cuda:12"),
        ("mirror:5000/nvidia/cuda:12", "mirror:5000/nvidia/cuda:12"),
    ],
)
def test_engines_are_given_whole_names_of_images(image: str, whole: str) -> None:
    clients = value("__container_toolkit_container", container_toolkit_verify_image=image)
    assert all(whole in clients[engine] for engine in ("docker", "podman", "containerd"))


def test_selinux_keeps_no_container_of_podmans_from_the_gpus() -> None:
    """NVML says "Insufficient Permissions" there."""
    asked = value("__container_toolkit_container", container_toolkit_verify_image="cuda:12")["podman"]
    assert "--security-opt=label=disable" in asked[: asked.index("docker.io/library/cuda:12")]


def test_no_container_of_the_verification_holds_the_play() -> None:
    clients = value("__container_toolkit_container", container_toolkit_verify_image="cuda:12")
    assert {tuple(words[:4]) for words in clients.values()} == {("timeout", "-k", "10", "3600")}


@pytest.mark.parametrize(
    ("silent", "code", "runs", "seen"),
    [(0, 0, 1, "GPU 0: T4\n"), (3, 0, 4, "GPU 0: T4\n"), (9, 0, 5, "\n"), (0, 6, 1, "GPU 0: T4\n")],
)
def test_what_containerd_loses_of_a_container_is_asked_for_again(
    tmp_path: Path, silent: int, code: int, runs: int, seen: str
) -> None:
    ctr = f"""#!/bin/sh
[ "$1" = run ] || exec echo image
echo "$*" >>"$0.runs"
[ "$(wc -l <"$0.runs")" -le {silent} ] || echo 'GPU 0: T4'
exit {code}
"""
    (tmp_path / "ctr").write_text(ctr, encoding="ascii")
    (tmp_path / "ctr").chmod(0o755)
    command = value("__container_toolkit_container", container_toolkit_verify_image="cuda:12")["containerd"]
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert (ran.returncode, ran.stdout, ran.stderr) == (code, seen, "")
    told = (tmp_path / "ctr.runs").read_text(encoding="ascii").splitlines()
    # Each has a name of its own, because containerd may not have forgotten the last one.
    assert len(told) == runs == len(set(told)) and all(line.endswith(" nvidia-smi -L") for line in told)


HANGS = "#!/bin/sh\nsleep 600\n"
DOCKER = """#!/bin/sh
case "$1" in
    info) echo false ;;
    ps) printf '%s\\n' 'container web ' 'container nomad_init_1 ' 'container job 6f147e38' ;;
esac
"""
LIVES = "#!/bin/sh\necho true\n"


@pytest.mark.parametrize(
    ("docker", "code", "told"),
    [(DOCKER, 0, "container web\n"), (LIVES, 0, ""), (HANGS, 1, ""), (DOCKER.replace("printf", "sleep 600;"), 1, "")],
)
def test_a_docker_that_hangs_ends_nothing(tmp_path: Path, docker: str, code: int, told: str) -> None:
    programs = {
        "systemctl": "#!/bin/sh\n",
        "docker": docker,
        # As long as it takes to see that it hangs.
        "timeout": '#!/bin/sh\n[ "$1 $2 $3" = "-k 5 60" ] || exit 99\nshift 3\nexec /usr/bin/timeout 2 "$@"\n',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text, encoding="ascii")
        (tmp_path / name).chmod(0o755)
    script = value("__container_toolkit_ends")
    play = yaml.safe_load((role_helper.ROLES / "docker/tasks/containers.yml").read_text(encoding="utf-8"))
    listing = role_helper.value("text", {"text": trust_as_template(play[0]["ansible.builtin.shell"])})
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ran, listed = (
        subprocess.run(line, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
        for line in (["sh", "-c", script, "sh", "docker"], ["bash", "-c", listing])
    )
    assert (ran.returncode, ran.stdout) == (code, told)
    if docker == HANGS:
        assert listed.returncode == 124


def gpu(index: int | None, uuid: str | None, **more: Any) -> dict[str, Any]:
    return {"index": index, "uuid": uuid, "status": "ok", "mig_mode": None, "mig_devices": [], **more}


def missing(gpus: list[dict[str, Any]], *listed: str, platform: str = "linux", **more: Any) -> set[str]:
    given = {
        "ansible_facts": {"nvidia_smi": {"gpus": gpus, "platform": platform}},
        "__container_toolkit_state": {"cdi_devices": [f"nvidia.com/gpu={name}" for name in listed], **more},
    }
    return {name.removeprefix("nvidia.com/gpu=") for name in value("__container_toolkit_missing", **given)}


def test_every_gpu_and_mig_device_is_in_the_specification_by_index_and_uuid() -> None:
    devices = [{"index": 0, "uuid": "MIG-a"}, {"index": 1, "uuid": "MIG-b"}]
    gpus = [gpu(0, "GPU-a", mig_mode="Disabled"), gpu(1, "GPU-b", mig_mode="Enabled", mig_devices=devices)]
    assert missing(gpus) == {"all", "0", "GPU-a", "1:0", "MIG-a", "1:1", "MIG-b"}
    assert missing(gpus, "all", "0", "GPU-a", "1:0", "MIG-a", "MIG-b") == {"1:1"}
    assert missing(gpus, "all", "0", "GPU-a", "1:0", "MIG-a", "1:1") == {"MIG-b"}
    assert missing(gpus, cdi_by_index=False) == {"all", "GPU-a", "MIG-a", "MIG-b"}
    assert missing([gpu(0, "GPU-a")], platform="wsl") == {"all"}
    assert missing([gpu(0, "GPU-a", mig_mode="Enabled")]) == set()


@pytest.mark.parametrize(("index", "uuid", "status"), [(None, None, "lost"), (1, "GPU-b", "reset_required")])
def test_no_gpu_that_does_not_answer_is_required_of_the_specification(
    index: int | None, uuid: str | None, status: str
) -> None:
    sick = gpu(index, uuid, status=status)
    assert missing([gpu(0, "GPU-a"), sick]) == {"all", "0", "GPU-a"}
    assert missing([gpu(0, "GPU-a"), sick], "all", "0", "GPU-a") == set()


@pytest.mark.parametrize(
    ("current", "listed", "stale"),
    [
        (False, ("all", "0", "GPU-a"), True),
        (True, ("all", "0", "GPU-a"), False),
        (None, ("all", "0", "GPU-a"), False),
        # A GPU that has gone.
        (False, ("all", "0", "GPU-a", "1", "GPU-b"), False),
    ],
)
def test_a_specification_is_of_another_driver(current: bool | None, listed: tuple[str, ...], stale: bool) -> None:
    others = ["management.nvidia.com/gpu=all"]
    given = {
        "ansible_facts": {"nvidia_smi": {"gpus": [gpu(0, "GPU-a")], "platform": "linux"}},
        "__container_toolkit_state": {
            "cdi_devices": [f"nvidia.com/gpu={name}" for name in listed] + others, "cdi_current": current,
        },
    }  # fmt: skip
    assert value("__container_toolkit_stale", **given) is stale


@pytest.mark.parametrize(
    ("wsl", "found"), [(False, ["1.20.1", "1.20.0~rc.1", "1.18.0"]), (True, ["1.20.1", "1.20.0~rc.1"])]
)
def test_versions_of_the_repository_are_such_as_can_be_set(wsl: bool, found: list[str]) -> None:
    versions = ("1.20.1-1", "1.20.1-0", "1.20.0~rc.1-1", "1.18.0-1", "1.17.8-1", "1.0.0~alpha.3-1", "v1")
    lines = [f"nvidia-container-toolkit | {version:>10} | https://mirror.example/deb  Packages" for version in versions]
    given = {
        "__container_toolkit_versions": {"stdout_lines": lines}, "_common_is_wsl": wsl,
        "ansible_facts": role_helper.facts("Debian: Debian 12.11"), "_common_host": role_helper.host(),
    }  # fmt: skip
    assert value("__container_toolkit_versions_found", **given) == found
    for version in found:
        assert value("__container_toolkit_refusal", **given, container_toolkit_version=version) == ""


@pytest.mark.parametrize("version", ["latest", "v1.20.1", "1.20.1-1", "1.20", "", 1.2, "1.20.*", "1.20.1 "])
def test_what_is_no_version_is_refused(version: Any) -> None:
    given = {"ansible_facts": role_helper.facts("Debian: Debian 12.11"), "_common_host": role_helper.host()}
    found = value("__container_toolkit_refusal", **given, container_toolkit_version=version)
    assert found.startswith(f"container_toolkit_version is {version}. Expected: a version such as 1.20.1, "), found
    assert "Next step: " in found
    assert value("__container_toolkit_refusal", **given, container_toolkit_version=version, common_scope="remove") == ""


@pytest.mark.parametrize("manager", ["apt", "dnf"])
def test_a_toolkit_that_does_not_come_is_told_by_the_role(manager: str) -> None:
    path = role_helper.ROLES / f"container_toolkit/tasks/install-{manager}.yml"
    names, failed = role_helper.begun(yaml.safe_load(path.read_text(encoding="utf-8")), "Have the toolkit")
    assert failed and names[-1] == "Require the version to exist"


SETTINGS = {"docker": {"changed": False, "known": True}}
THERE = {
    "__container_toolkit_written": {"engines": SETTINGS},
    "__container_toolkit_state": {"engines": {}, "cdi_devices": []},
}


@pytest.mark.parametrize(
    ("given", "to_come"),
    [
        ({}, False),
        ({"__container_toolkit_state": {"cdi_devices": None}}, True),
        ({"__container_toolkit_written": {"engines": {"containerd": {"changed": False, "known": False}}}}, True),
        *[
            ({f"__container_toolkit_{name}": {"changed": True}}, True)
            for name in ("pin", "installed", "engines_installed", "engines_started", "refreshed")
        ],
        *[
            ({f"__container_toolkit_{name}": {**THERE[f"__container_toolkit_{name}"], "changed": True}}, True)
            for name in ("written", "state")
        ],
        *[({f"__docker_{name}": {"changed": True}}, True) for name in ("installed", "service")],
        # As apt and as dnf say it.
        ({"__docker_installed": {"changed": False, "msg": "No package matching 'docker.io'"}}, True),
        ({"__docker_installed": {"changed": False, "rc": 1, "msg": "Failed to download metadata"}}, True),
        ({"__docker_installed": {"changed": False, "rc": 0, "msg": "Nothing to do"}}, False),
    ],
)  # fmt: skip
def test_what_is_only_announced_is_not_verified(given: dict[str, Any], to_come: bool) -> None:
    assert value("__container_toolkit_to_come", **{**THERE, **given}, ansible_check_mode=True) is to_come
    assert value("__container_toolkit_to_come", **{**THERE, **given}, ansible_check_mode=False) is False


@pytest.mark.parametrize(("register", "to_come"), [("installed", True), ("service", False)])
def test_docker_that_is_to_come_is_not_started(register: str, to_come: bool) -> None:
    given = {f"__docker_{register}": {"changed": True}}
    assert value("__docker_to_come", **given, ansible_check_mode=True) is to_come
    assert value("__docker_to_come", **given, ansible_check_mode=False) is False


@pytest.mark.parametrize(
    ("owner", "packages", "foreign", "exchanged"),
    [
        ("", [], False, False),
        ("docker.io", [], False, False),
        ("docker-ce", [], True, False),
        ("/usr/local/bin/dockerd", [], True, False),
        ("docker-ce", ["docker-ce"], False, False),
        ("", ["docker-ce"], False, False),
        # apt would remove docker.io with all of its containers.
        ("docker.io", ["docker-ce"], False, True),
        # So it would where another version is wanted.
        ("docker-ce", ["docker-ce=5:27.5.1-1~debian.12~bookworm"], False, False),
        ("docker-ce", ["docker-ce=5:27.*", "docker-ce-cli=5:28.*"], False, False),
        ("docker-ce", ["docker-ce=5:28.0.0-1~debian.12~bookworm"], False, True),
    ],
)
def test_docker_from_elsewhere(owner: str, packages: list[str], foreign: bool, exchanged: bool) -> None:
    facts = role_helper.facts("Debian: Debian 12.11")
    host = role_helper.host(programs={"dockerd": owner}, packages=(f"installed {owner}=5:27.5.1-1~debian.12~bookworm",))
    given = {"_common_host": host, "docker_packages": packages, "ansible_facts": facts}
    assert (value("__docker_foreign", **given), value("__docker_exchanged", **given)) == (foreign, exchanged)


@pytest.mark.parametrize(
    ("platform", "says", "wanted"),
    [
        ("Debian: Debian 12.11", b"Y\n", ["docker.io", "iptables", "apparmor"]),
        ("Debian: Debian 13.1", b"Y\n", ["docker.io", "iptables", "docker-cli", "apparmor"]),
        ("Debian: Debian 12.11", b"N\n", ["docker.io", "iptables"]),
        ("Debian: Debian 12.11", None, ["docker.io", "iptables"]),
        ("RedHat: Rocky 9.5", b"Y\n", ["docker-ce", "docker-ce-cli", "containerd.io"]),
    ],
)
def test_docker_has_what_loads_its_profile_where_the_kernel_confines(
    platform: str, says: bytes | None, wanted: list[str]
) -> None:
    """Seen on a Debian that was installed without what its packages recommend: no container started."""
    host = role_helper.host()
    if says is not None:
        checksum = hashlib.sha1(says).hexdigest()  # noqa: S324
        host["files"].append({"path": "/sys/module/apparmor/parameters/enabled", "checksum": checksum})
    given: dict[str, Any] = {"_common_host": host, "ansible_facts": role_helper.facts(platform)}
    assert value("__docker_wanted", **given) == wanted
    assert value("__docker_wanted", **given, docker_packages=["mine"]) == ["mine"]
    # Whoever collects packages does so for hosts that may have it on.
    on_apt = platform.startswith("Debian")
    assert ("apparmor" in value("__docker_wanted", **given, common_scope="bundle")) is on_apt
    # It is there for the kernel, which does not mark it as wanted.
    there = role_helper.host(packages=("installed apparmor=3",), packages_auto=["apparmor"])
    there["files"] = host["files"]
    assert "apparmor" not in value("__docker_missing", **{**given, "_common_host": there})
    assert "apparmor" not in value("__docker_going", **given)
    # It is looked for before anything is known of the kernel.
    del given["_common_host"]
    assert ("apparmor" in value("__docker_looks_at", **given)["packages"]) is on_apt


@pytest.mark.parametrize(
    ("there", "marked", "updates"),
    [
        ((), (), True),
        # A Docker that somebody has installed without what its packages recommend, where lists may be old or empty.
        (("docker.io=1", "iptables=1"), (), True),
        (("docker.io=1", "iptables=1", "apparmor=1"), (), False),
        # What is there is only to be marked as wanted.
        (("docker.io=1", "iptables=1", "apparmor=1"), ("iptables",), False),
    ],
)
def test_lists_are_read_where_a_package_of_docker_is_to_come(
    there: tuple[str, ...], marked: tuple[str, ...], updates: bool
) -> None:
    packages = tuple(f"installed {package}" for package in there)
    programs = {"dockerd": "docker.io" if there else ""}
    known = role_helper.host(packages=packages, packages_auto=list(marked), programs=programs)
    confined = {"path": "/sys/module/apparmor/parameters/enabled", "checksum": hashlib.sha1(b"Y\n").hexdigest()}  # noqa: S324
    known["files"].append(confined)
    tasks = role_helper.tasks_of("docker/tasks/install.yml", templates=True)
    (task,) = [each for each in tasks if each["name"] == "Have Docker"]
    given = {"_common_host": known, "ansible_facts": role_helper.facts("Debian: Debian 12.11"), **task["vars"]}
    assert value("common_packages_update", **given) is updates
    assert value("common_packages_update", **given, _common_bundle="/bundle") is True


SNAP = "/var/snap/docker/current"
AS_A_SNAP = "Docker came as a snap (/var/snap/docker/current). Expected: "
DESKTOP = {"/usr/bin/docker": "/mnt/wsl/docker-desktop/cli-tools/usr/bin/docker"}


@pytest.mark.parametrize(
    ("files", "links", "owner", "given", "told"),
    [
        ([], {}, "", {}, []),
        ([], {"/usr/bin/docker": None}, "", {}, []),
        ([], {"/usr/bin/docker": "/opt/docker/bin/docker"}, "", {}, []),
        ([SNAP], {}, "", {}, [AS_A_SNAP, "`snap remove docker`"]),
        ([SNAP], {}, "", {"docker_packages": ["docker-ce"]}, [AS_A_SNAP]),
        ([SNAP], {}, "", {"docker_managed": False}, [AS_A_SNAP]),
        ([], DESKTOP, "", {}, ["/usr/bin/docker leads to /mnt/wsl/docker-desktop/", "switch its WSL integration off"]),
        # A daemon of the distribution's own is there already, and none is installed beside it.
        ([SNAP], {}, "docker.io", {}, []),
        ([], DESKTOP, "docker-ce", {}, []),
        # Who collects packages for others need not be like them.
        ([SNAP], {}, "", {"common_scope": "bundle"}, []),
        ([], DESKTOP, "", {"common_scope": "bundle"}, []),
    ],
)  # fmt: skip
def test_no_second_docker_beside_one_that_no_package_has_brought(
    files: list[str], links: dict[str, str | None], owner: str, given: dict[str, Any], told: list[str]
) -> None:
    host = role_helper.host(*files, links=links, programs={"dockerd": owner})
    facts = role_helper.facts("Debian: Ubuntu 24.04")
    found = value("__docker_refusal", _common_host=host, ansible_facts=facts, **given)
    assert bool(found) is bool(told) and all(text in found for text in told), found


OF_DOCKER = ["docker-ce", "docker-ce-cli", "containerd.io"]


@pytest.mark.parametrize(
    ("there", "given", "told"),
    [
        (["containerd.io"], {}, "containerd.io"),
        (["docker-ce-cli"], {}, "docker-ce-cli"),
        (["podman-docker"], {}, "podman-docker"),
        (["containerd.io", "docker-ce-cli"], {"docker_packages": ["docker.io"]}, "containerd.io, docker-ce-cli"),
        (["containerd.io", "docker-ce-cli"], {"docker_packages": OF_DOCKER}, ""),
        (["containerd.io"], {"docker_packages": ["docker-ce=5:27.*"]}, ""),
        (["containerd"], {"docker_packages": OF_DOCKER}, "containerd"),
        (["containerd", "docker-cli"], {}, ""),
        (["containerd.io"], {"docker_managed": False}, ""),
        (["containerd.io"], {"common_scope": "bundle"}, ""),
        # Whose containers would end is asked where a daemon is there.
        (["containerd.io"], {"owner": "docker-ce"}, ""),
        (["containerd.io"], {"platform": "RedHat: Rocky 9.5"}, ""),
    ],
)
def test_what_apt_would_remove_for_docker_is_refused(there: list[str], given: dict[str, Any], told: str) -> None:
    """A kubelet whose containerd.io goes has no runtime any more."""
    packages = (*(f"installed {name}=1.7-1" for name in there), "config-files podman-docker=4", "not-installed runc=")
    known = {
        "ansible_facts": role_helper.facts(given.pop("platform", "Debian: Debian 12.11")),
        "_common_host": role_helper.host(packages=packages, programs={"dockerd": given.pop("owner", "")}),
        **given,
    }
    found = value("__docker_refusal", **known)
    assert found.startswith(f"{told} would be removed" if told else "") and bool(found) is bool(told), found
    assert all(text in found for text in ("Expected: ", "Next step: set docker_packages to") if told)
    if told:
        assert set(there) <= set(value("__docker_looks_at", **known)["packages"])


@pytest.mark.parametrize(
    ("packages", "auto", "missing"),
    [
        ((), [], ["docker.io", "iptables"]),
        (("installed docker.io=20-1", "installed iptables=1.8"), [], []),
        (("installed docker.io=20-1", "config-files iptables=1.8"), [], ["iptables"]),
        # It would go with the package that it came for.
        (("installed docker.io=20-1", "installed iptables=1.8"), ["iptables"], ["iptables"]),
    ],
)
def test_packages_of_docker_that_are_missing(packages: tuple[str, ...], auto: list[str], missing: list[str]) -> None:
    host = role_helper.host(packages=packages, packages_auto=auto)
    given = {"_common_host": host, "ansible_facts": role_helper.facts("Debian: Debian 12.11")}
    assert value("__docker_missing", **given) == missing


@pytest.mark.parametrize(
    ("platform", "there", "wanted", "missing"),
    [
        ("Debian: Debian 12.11", "docker-ce=5:27.5.1-1~debian.12~bookworm", "docker-ce=5:27.5.1-1~debian.12~bookworm",
         False),
        ("Debian: Debian 12.11", "docker-ce=5:27.5.1-1~debian.12~bookworm", "docker-ce=5:27.5.*", False),
        ("Debian: Debian 12.11", "docker-ce=5:27.5.1-1~debian.12~bookworm", "docker-ce=5:27.5.1", True),
        ("Debian: Debian 12.11", "docker-ce=5:27.5.1-1~debian.12~bookworm", "docker-ce=5:28.5.*", True),
        ("Debian: Debian 12.11", "docker-ce-cli=5:27.5.1-1~debian.12~bookworm", "docker-ce", True),
        ("RedHat: Rocky 9.5", "docker-ce=27.5.1-1.el9", "docker-ce", False),
        ("RedHat: Rocky 9.5", "docker-ce=27.5.1-1.el9", "docker-ce-27.5.1", False),
        ("RedHat: Rocky 9.5", "docker-ce=27.5.1-1.el9", "docker-ce-27.5*", False),
        ("RedHat: Rocky 9.5", "docker-ce=27.5.1-1.el9", "docker-ce-3:27.5.1-1.el9.x86_64", False),
        ("RedHat: Rocky 9.5", "docker-ce=27.5.1-1.el9", "docker-ce-27.5", True),
        ("RedHat: Rocky 9.5", "docker-ce=27.5.10-1.el9", "docker-ce-27.5.1", True),
        ("RedHat: Rocky 9.5", "docker-ce=27.5.1-1.el9", "docker-ce-cli-27.5.1", True),
    ],
)  # fmt: skip
def test_a_version_of_docker_that_is_there_is_not_missing(
    platform: str, there: str, wanted: str, missing: bool
) -> None:
    """It would be installed by each run, on a node that is taken out of work for it."""
    given = {"ansible_facts": role_helper.facts(platform), "docker_packages": [wanted]}
    given["_common_host"] = role_helper.host(packages=(f"installed {there}",))
    assert value("__docker_missing", **given) == [wanted] * missing
    name = "docker-ce-cli" if "cli" in wanted else "docker-ce"
    others = ["apparmor", *value("__docker_replaces", **given)]
    asked = [package for package in value("__docker_looks_at", **given)["packages"] if package not in others]
    assert asked == value("__docker_going", **given) == [name]


def test_settings_that_are_no_json_are_refused_before_anything_changes() -> None:
    facts = role_helper.facts("Debian: Debian 12.11")
    errors = {"/etc/docker/daemon.json": "Expecting value: line 1 column 1 (char 0)"}
    given = {"ansible_facts": facts, "_common_host": role_helper.host(json_errors=errors)}
    refusal = value("__container_toolkit_refusal", **given)
    assert "(Expecting value: line 1 column 1 (char 0)). Expected: Docker's settings" in refusal
    assert value("__container_toolkit_refusal", ansible_facts=facts, _common_host=role_helper.host()) == ""
    # Who does not use Docker may have what is Docker's as it is.
    given = {**given, "container_toolkit_engines": ["containerd"]}
    assert value("__container_toolkit_refusal", **given) == ""


def test_settings_that_are_no_toml_are_refused_before_anything_changes() -> None:
    errors = {path: "Invalid value" for path in ("/etc/containerd/config.toml", "/etc/crio/crio.conf")}
    given = {
        "ansible_facts": role_helper.facts("Debian: Debian 12.11"),
        "_common_host": role_helper.host(toml_errors=errors),
    }
    for engines, found in (
        (["docker", "crio"], "/etc/crio/crio.conf is no TOML (Invalid value). Expected: settings of CRI-O, to which"),
        (
            ["containerd"],
            "/etc/containerd/config.toml is no TOML (Invalid value). Expected: settings of containerd, to",
        ),
    ):
        assert found in value("__container_toolkit_refusal", container_toolkit_engines=engines, **given)
    assert value("__container_toolkit_refusal", container_toolkit_engines=["docker", "podman"], **given) == ""


@pytest.mark.parametrize(
    ("version", "wsl", "oldest"),
    [("1.17.8", False, "1.18.0"), ("1.18.0", False, ""), ("1.19.0", True, "1.19.1"), ("1.19.1", True, ""),
     ("1.20.1", True, ""), ("1.9.0", False, "1.18.0")],
)  # fmt: skip
def test_a_toolkit_that_does_not_refresh_cdi_is_refused(version: str, wsl: bool, oldest: str) -> None:
    given = {"ansible_facts": role_helper.facts("Debian: Debian 12.11"), "_common_host": role_helper.host()}
    given |= {"_common_is_wsl": wsl, "container_toolkit_version": version}
    found = value("__container_toolkit_refusal", **given)
    told = f"container_toolkit_version is {version}. Expected: {oldest} or newer, because an older one "
    assert found.startswith(told if oldest else "") and bool(found) is bool(oldest)
    assert ("Next step: set container_toolkit_version to one of those" in found) is bool(oldest)
    assert value("__container_toolkit_refusal", common_scope="remove", **given) == ""


CRI_OFF = 'disabled_plugins = ["io.containerd.snapshotter.v1.aufs", "cri"]\nversion = 2\n'


@pytest.mark.parametrize(
    ("platform", "there", "dump", "told"),
    [
        ("Debian: Debian 12.11", "containerd", "disabled_plugins = []\nversion = 2\n", ""),
        ("Debian: Debian 12.11", "", "", ""),
        # As containerd of a major version has it, and as Docker's makers do.
        ("RedHat: Rocky 9.5", "containerd.io", "disabled_plugins = ['io.containerd.cri.v1.runtime']\n", "containerd's"),
        (
            "Debian: Debian 12.11",
            "containerd.io",
            CRI_OFF,
            "containerd's settings have its CRI plugin in disabled_plugins. ",
        ),
        ("RedHat: Rocky 9.5", "containerd.io", "disabled_plugins = []\ncri = ['cri']\n", ""),
        (
            "RedHat: Rocky 9.5",
            "",
            "",
            "there is no containerd, and the package containerd.io comes with its CRI plugin in",
        ),
    ],
)
def test_a_containerd_that_knows_no_runtimes_is_refused(platform: str, there: str, dump: str, told: str) -> None:
    given = {
        "ansible_facts": role_helper.facts(platform), "container_toolkit_engines": ["containerd"],
        "_common_host": role_helper.host(programs={"containerd": there}),
        "__container_toolkit_containerd": {"stdout": dump},
    }  # fmt: skip
    found = value("__container_toolkit_refusal", **given)
    assert found.startswith(told) and bool(found) is bool(told) and ("Next step: " in found) is bool(told), found
    assert value("__container_toolkit_refusal", **{**given, "container_toolkit_engines": ["docker"]}) == ""


@pytest.mark.parametrize(
    ("podman", "cdi", "told"),
    [
        ("3.4.4", None, "Podman is 3.4.4. Expected: 4.1 or newer, because an older one knows no CDI specification. "),
        ("4.1.1", "0.5.0", ""),
        (
            "4.9.3",
            "0.7.0",
            "Podman is 4.9.3, and the CDI specification is of version 0.7.0. Expected: Podman 5.1 or newer",
        ),
        ("5.4.2", "0.7.0", ""),
        ("5.10.0", "0.10.0", ""),
        (None, "0.7.0", ""),
    ],
)
def test_a_podman_that_cannot_read_the_specification_is_refused(podman: str | None, cdi: str | None, told: str) -> None:
    state = {"cdi_version": cdi, "engines": {"podman": {**engine({"crun": ""}), "version": podman}}}
    found = value("__container_toolkit_podman_old", __container_toolkit_state=state, _common_host=role_helper.host())
    assert found.startswith(told) and bool(found) is bool(told) and ("Next step: " in found) is bool(told), found


@pytest.mark.parametrize(
    ("package", "told"),
    [
        ("podman=3.4.4+ds1-1ubuntu1.22.04.3", "Podman is 3.4.4. Expected: 4.1 or newer"),
        ("podman=4:3.0.1-6.el8", "Podman is 3.0.1. Expected: 4.1 or newer"),
        ("podman=4.3.1+ds1-8+deb12u1+b4", ""),
    ],
)
def test_a_podman_that_is_there_is_refused_before_anything_changes(package: str, told: str) -> None:
    given = {
        "ansible_facts": role_helper.facts("Debian: Ubuntu 22.04"), "container_toolkit_engines": ["podman"],
        "_common_host": role_helper.host(packages=(f"installed {package}",)),
    }  # fmt: skip
    found = value("__container_toolkit_refusal", **given)
    assert found.startswith(told) and bool(found) is bool(told), found
    assert value("__container_toolkit_refusal", **{**given, "container_toolkit_engines": ["docker"]}) == ""


@pytest.mark.parametrize(
    ("platform", "there", "told"),
    [
        ("Ubuntu 22.04", "", "Podman is 3.4.4. Expected: 4.1 or newer"),
        ("Ubuntu 24.04", "", ""),
        ("Debian 12", "", ""),
        # Not that of the distribution: it is asked for its version when it runs.
        ("Ubuntu 22.04", "/usr/local/bin/podman", ""),
    ],
)
def test_a_podman_that_is_only_to_come_is_refused_before_anything_changes(platform: str, there: str, told: str) -> None:
    given = {
        "ansible_facts": role_helper.facts(f"Debian: {platform}"), "container_toolkit_engines": ["podman"],
        "_common_host": role_helper.host(programs={"podman": there}),
    }  # fmt: skip
    found = value("__container_toolkit_refusal", **given)
    assert found.startswith(told) and bool(found) is bool(told), found
    assert ("Next step: install a newer one yourself before you run this again" in found) is bool(told)
