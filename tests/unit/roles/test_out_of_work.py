"""What ends the containers of an engine is done on a node that has been taken out of work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import yaml
from ansible.template import trust_as_template
from ansible_collections.gpufarm.core.tests.unit.roles import role_helper

Task = dict[str, Any]
RESTART = "container_toolkit/tasks/restart.yml"
EXCHANGE = "docker/tasks/install.yml"
REMOVAL = "docker/tasks/absent.yml"
CONTAINERS = "docker/tasks/containers.yml"


def restarts(task: Task) -> bool:
    return task.get("ansible.builtin.systemd_service", {}).get("state") == "restarted"


# By file, what ends containers there.
ENDS: dict[str, Callable[[Task], bool]] = {
    RESTART: restarts,
    REMOVAL: lambda task: "packages_absent.yml" in role_helper.included(task),
    EXCHANGE: lambda task: "'packages.yml'" in role_helper.included(task),
}
EXCHANGED = {
    "ansible_facts": role_helper.facts("Debian: Debian 12.11"),
    "docker_managed": True,
    "_common_host": role_helper.host(
        programs={"dockerd": "docker.io"}, packages=("installed docker.io=20.10.24+dfsg1-1+deb12u1",)
    ),
    "docker_packages": ["docker-ce"],
}
TAKEN_OUT = [
    (EXCHANGE, EXCHANGED, True),
    # Nothing was there, or it stays.
    (EXCHANGE, EXCHANGED | {"_common_host": role_helper.host()}, False),
    (EXCHANGE, EXCHANGED | {"docker_packages": []}, False),
    (EXCHANGE, EXCHANGED | {"docker_managed": "false"}, False),
    (EXCHANGE, EXCHANGED | {"docker_packages": ["docker.io=20.10.24+dfsg1-1+deb12u1", "iptables"]}, False),
    (EXCHANGE, EXCHANGED | {"docker_packages": ["docker.io=26.*"]}, True),
    (RESTART, {"__container_toolkit_engine": "docker"}, True),
    (RESTART, {"__container_toolkit_engine": "containerd"}, False),
    (RESTART, {"__container_toolkit_engine": "containerd", "ends": ["a pod"]}, True),
    (RESTART, {"__container_toolkit_engine": "docker", "ansible_check_mode": True}, False),
    (REMOVAL, {"docker_managed": True}, True),
    # An agent that has left the farm was taken out of it before.
    (REMOVAL, {"docker_managed": True, "__nomad_left": True}, False),
]  # fmt: skip


def taken_out(name: str) -> int:
    (number,) = [
        number for number, task in enumerate(role_helper.tasks_of(name)) if "take_out.yml" in role_helper.included(task)
    ]
    return number


@pytest.mark.parametrize("name", ENDS)
def test_containers_end_on_a_node_out_of_work(name: str) -> None:
    ends = [number for number, task in enumerate(role_helper.tasks_of(name)) if ENDS[name](task)]
    assert taken_out(name) < min(ends)


def test_a_reboot_and_another_driver_end_what_computes_without_a_scheduler() -> None:
    """Whatever reboots asks for it, and whatever exchanges or removes the driver."""
    names = [str(path.relative_to(role_helper.ROLES)) for path in role_helper.ROLES.glob("*/tasks/*.yml")]
    tasks = [(name, task) for name in names for task in role_helper.tasks_of(name)]
    asked_for = "__node_maintenance_ends_gpu_work"
    asks = {name: task["vars"][asked_for] for name, task in tasks if asked_for in task.get("vars", {})}
    reboots = {name for name, task in tasks if "ansible.builtin.reboot" in task}
    assert asks.keys() == reboots | {"nvidia_driver/tasks/exchange.yml", "nvidia_driver/tasks/absent.yml"}
    # What computed when this run exchanged the packages has had its time.
    reboot = asks.pop("nvidia_driver/tasks/reboot.yml")
    assert set(asks.values()) == {True} and len(reboots) == 2
    for installed, asked in (({}, True), ({"changed": False}, True), ({"changed": True}, False)):
        assert (
            role_helper.value("asked", {"asked": trust_as_template(reboot), "__nvidia_driver_installed": installed})
            is asked
        )


def test_a_reboot_of_others_can_ask_for_the_same_and_the_example_does() -> None:
    example = role_helper.ROLES.parent / "examples/playbooks/node_maintenance.yml"
    (play,) = yaml.safe_load(example.read_text(encoding="utf-8"))
    assert any("ansible.builtin.reboot" in task for task in play["tasks"])
    (out,) = [task for task in play["tasks"] if "take_out.yml" in role_helper.included(task)]
    assert out["vars"]["node_maintenance_ends_gpu_work"] is True
    known = role_helper.variables("node_maintenance")
    assert role_helper.value("__node_maintenance_ends_gpu_work", known) is False
    for given in (True, "true"):
        known["node_maintenance_ends_gpu_work"] = given
        for owner, ends in (("", True), ("firmware", True), ("gpufarm.core", False), ("gpufarm.core.accept", False)):
            known["node_maintenance_owner"] = owner
            assert role_helper.value("__node_maintenance_ends_gpu_work", known) is ends


def test_no_other_file_restarts_an_engine() -> None:
    names = {
        str(path.relative_to(role_helper.ROLES))
        for path in role_helper.ROLES.glob("*/*/*.yml")
        if path.parent.name in ("tasks", "handlers")
    }
    engines = ("docker", "containerd", "crio", "__container_toolkit_engine")
    found = {
        name for name in names for task in role_helper.tasks_of(name)
        if restarts(task) and any(engine in task["ansible.builtin.systemd_service"]["name"] for engine in engines)
    }  # fmt: skip
    assert found == {RESTART}


@pytest.mark.parametrize(("name", "given", "out"), TAKEN_OUT)
def test_who_is_taken_out_of_work(name: str, given: dict[str, Any], out: bool) -> None:
    task = role_helper.tasks_of(name)[taken_out(name)]
    known = role_helper.variables("_common", name.partition("/")[0])
    known |= {
        "ansible_check_mode": False,
        "__container_toolkit_ending": {"stdout_lines": given.get("ends", [])},
        **given,
    }
    asked = [task["when"]] if isinstance(task["when"], str) else task["when"]
    known["asked"] = trust_as_template("{{ (" + ") and (".join(asked) + ") }}")
    assert role_helper.value("asked", known) is out


def test_a_removal_tells_of_a_node_that_nothing_puts_back() -> None:
    """One that is a part of a whole removal has been told of where the host left the farm."""
    paths = [path for name in ("absent", "leave") for path in role_helper.ROLES.glob(f"*/tasks/{name}.yml")]
    entered = {str(path.relative_to(role_helper.ROLES)): str(role_helper.tasks_of(str(path))) for path in paths}
    takes_out = {name for name, text in entered.items() if "take_out.yml" in text}
    parts = {f"{role}/tasks/absent.yml" for role in ("container_toolkit", "docker", "nvidia_driver")}
    assert takes_out == parts | {"nomad/tasks/leave.yml"}
    for name in takes_out:
        tasks = role_helper.tasks_of(name)
        *_before, told = [task for task in tasks if "node_maintenance" in role_helper.included(task)]
        assert "stays_out.yml" in role_helper.included(told), name
        if name in parts:
            assert told == tasks[-1] and told["when"] == "__nomad_left is not defined"


def test_an_exchange_asks_first_whose_containers_end() -> None:
    asks, takes_out, *_rest = role_helper.tasks_of(EXCHANGE)
    assert "containers.yml" in role_helper.included(asks) and "take_out.yml" in role_helper.included(takes_out)
    assert asks["when"] == takes_out["when"]


@pytest.mark.parametrize("entry", [EXCHANGE, "docker/tasks/absent_check.yml"])
@pytest.mark.parametrize(
    ("running", "policy", "passes"),
    [([], "refuse", True), (["web"], "refuse", False), (["web"], "drain", True), (["web"], None, False)],
)
def test_containers_of_others_do_not_end_unasked(
    entry: str, running: list[str], policy: str | None, passes: bool
) -> None:
    (asks,) = [task for task in role_helper.tasks_of(entry) if "containers.yml" in role_helper.included(task)]
    requires = role_helper.tasks_of(CONTAINERS)[-1]["ansible.builtin.assert"]
    known = {
        **asks["vars"],
        "inventory_hostname": "gpu1",
        "__docker_containers": {"rc": 0, "stdout_lines": running},
        "passes": trust_as_template("{{ " + requires["that"] + " }}"),
        "told": trust_as_template(requires["fail_msg"]),
    } | ({"node_maintenance_policy": policy} if policy else {})
    assert role_helper.value("passes", known) is passes
    told = role_helper.value("told", known)
    assert told.startswith(
        f"gpu1: found containers that run and are not Nomad's ({', '.join(running)}). Expected: none"
    )
    assert f"they end with {'Docker. ' if 'absent' in entry else 'an exchange of Docker'}" in told


@pytest.mark.parametrize(
    ("maintenance", "told"),
    [({"maintenance": "a restart of Docker"}, " The node stays out of work until then."), ({"maintenance": None}, "")],
)
def test_an_engine_that_does_not_start_again_is_told_with_its_node(maintenance: dict[str, Any], told: str) -> None:
    tasks = role_helper.tasks_of(RESTART)
    (restart,) = [task["name"] for task in tasks if restarts(task)]
    (fails,) = [task for task in tasks if "ansible.builtin.fail" in task]
    begun, failed = role_helper.begun(yaml.safe_load((role_helper.ROLES / RESTART).read_text("utf-8")), restart)
    assert failed and begun[-1] == fails["name"]
    known = {
        **role_helper.variables("_common", "container_toolkit"),
        "ansible_check_mode": False,
        "__container_toolkit_engine": "docker",
        "inventory_hostname": "gpu1",
        "ansible_failed_result": {"msg": "Unable to restart service docker: Job failed.\nSee journalctl\n"},
        "__node_maintenance_out": maintenance,
        "said": trust_as_template(fails["ansible.builtin.fail"]["msg"]),
    }
    assert role_helper.value("said", known) == (
        "gpu1: Docker did not restart (Unable to restart service docker: Job failed). Expected: that it runs by its "
        f"settings.{told} Next step: read `journalctl -u docker` on this host, mend what it names, and run this again."
    )
