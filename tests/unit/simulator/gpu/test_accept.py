"""playbooks/accept.yml over nodes of plain files, each with a Nomad of its own that keeps what the gate changes.

A real Nomad is asked in molecule/gpu_health; here are several nodes, and more of what can go wrong.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpufarm.core.tests.unit.patience import wait_for
from ansible_collections.gpufarm.core.tests.unit.playbooks import playbook_helper
from ansible_collections.gpufarm.core.tests.unit.playbooks.playbook_helper import ALONE
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils.gate_helper import Farm

from tests.simulator.cache import ROOT
from tests.simulator.gpu import faults
from tests.testinfra import printed

from .conftest import Node

MakeNode = Callable[[str], Node]
# Kills the command and its group outright when a file is there, and tells by another what runs for ever.
KILLED = """
setsid "$@" &
until [ -e kill ]; do sleep 0.1; done
kill -s KILL -- -$!
left=600
while set -- /proc/[0-9]* && [ $# -gt 1 ] && [ $left -gt 0 ]; do left=$((left - 1)); sleep 0.5; done
shift
for each in "$@"; do tr '\\0' ' ' <$each/cmdline; echo; done >left
"""
(PRINTED,) = printed.commands(printed.block(ROOT / "README.md", "ansible-playbook -i my-lab.yml gpufarm.core.accept"))
OPEN = {"nomad_tls": "off", "nomad_acl_enabled": False, "ansible_become": False, "agent_url": "http://127.0.0.1:9"}


class Machine:
    """A host of the inventory: its doubles are those that its Python finds, its agent is its own."""

    def __init__(self, name: str, number: int, node: Node, folder: Path) -> None:
        self.name, self.node, self.farm = name, node, Farm(1)
        self.uuids = [f"GPU-0000000{number}-0000-0000-0000-00000000000{gpu}" for gpu in range(2)]
        for gpu, uuid in enumerate(self.uuids):
            node.change(lambda it, gpu=gpu, uuid=uuid: faults.set_value(it, gpu, "uuid", uuid))
        self.mine["NodeResources"]["Devices"] = [
            {
                "Vendor": "nvidia",
                "Type": "gpu",
                "Name": faults.value(node.profile, 0, "product_name"),
                "Instances": [{"ID": uuid, "Healthy": True} for uuid in self.uuids],
                "Attributes": {},
            }
        ]
        self.python = folder / f"python-{name}"
        given = {key: node.environment[key] for key in ("LD_LIBRARY_PATH", "GPUFARM_SIM_ROOT")}
        words = ["exec", "env", *(f"{key}={text}" for key, text in given.items()), sys.executable]
        self.python.write_text(f'#!/bin/sh\n{shlex.join(words)} "$@"\n', encoding="utf-8")
        self.python.chmod(0o755)

    @property
    def mine(self) -> dict[str, Any]:
        return self.farm.nodes["id-0"]

    @property
    def state(self) -> tuple[str, str | None]:
        """Eligibility, and what it is out of work for."""
        return self.mine["SchedulingEligibility"], self.farm.clients["id-0"].get("gpufarm_maintenance")

    def smi(self, before: str) -> Path:
        """An nvidia-smi of its own, which does this before and leaves a file that says that it was asked."""
        made = self.python.with_name(f"{self.name}-smi-{len(before)}")
        real = self.node.build / "nvidia-smi"
        made.write_text(f'#!/bin/sh\n{before}\n: >{made}.asked\nexec {real} "$@"\n', encoding="utf-8")
        made.chmod(0o755)
        return made

    def asked_by(self, **paths: Path) -> dict[str, Any]:
        """The variables of this host, where options name another nvidia-smi."""
        given = self.variables
        return given | {name: {**given[name], "path": str(path)} for name, path in paths.items()}

    @property
    def variables(self) -> dict[str, Any]:
        options = {"path": str(self.node.build / "nvidia-smi"), "dcgm": False}
        return {
            "ansible_connection": "local",
            "ansible_python_interpreter": str(self.python),
            "agent_url": self.farm.agent.url,
            "gpu_health_options": options,
            "accept_options": {"path": options["path"], "memory_share": 0.0001, "peers": False},
        }


class Park:
    def __init__(self, folder: Path, machines: list[Machine]) -> None:
        self.folder, self.machines = folder, {machine.name: machine for machine in machines}

    def run(
        self, *options: str, more: dict[str, Any] | None = None, under: tuple[str, ...] = ALONE, **given: Any
    ) -> tuple[int, str]:
        hosts = {name: machine.variables for name, machine in self.machines.items()} | (more or {})
        inventory = {
            "all": {
                "vars": OPEN,
                "children": {"gpu_nodes": {"hosts": hosts}, "nomad_servers": {"hosts": {"control": {}}}},
            }
        }
        extra = {"__nomad_local_url": "{{ agent_url }}", "accept_level": "start", **given}
        result = playbook_helper.run_playbook(
            self.folder, inventory, "accept.yml", *options, "--extra-vars", json.dumps(extra), under=under
        )
        return result.returncode, " ".join((result.stdout + result.stderr).split())

    @property
    def path(self) -> Path:
        return self.folder / "gpufarm-accepted.jsonl"

    def records(self) -> dict[str, str]:
        if not self.path.exists():
            return {}
        text = self.path.read_text(encoding="utf-8")
        return {record["host"]: record["verdict"] for record in map(json.loads, text.splitlines())}


@pytest.fixture
def park(node: MakeNode, tmp_path: Path) -> Iterator[Callable[..., Park]]:
    if os.geteuid():
        pytest.skip("root alone can start a playbook that sees nothing else that runs on this machine")
    made: list[Machine] = []

    def make(*names: str) -> Park:
        for number, name in enumerate(names):
            one = node("h200-x2")
            one.root = one.root.rename(tmp_path / f"root-{name}")
            made.append(Machine(name, number, one, tmp_path))
        return Park(tmp_path, made)

    yield make
    for machine in made:
        machine.farm.agent.close()


def computes(node: Node) -> bool:
    """Whether a process has the double of CUDA."""
    for path in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            if str(node.build / "libcuda.so.1") in path.read_text(encoding="utf-8", errors="replace"):
                return True
    return False


def test_those_that_pass_are_opened_and_the_others_named(park: Callable[..., Park]) -> None:
    farm = park("a", "b", "c", "d", "f", "g", "h", "i")
    machines = farm.machines
    machines["b"].node.change(lambda it: faults.compute_wrongly(it, 1, "memory"))
    # It had three when it was accepted.
    gone_gpu = dict.fromkeys(("model", "sm_count", "power_limit_w", "figures", "serial"))
    before = [{"uuid": uuid, **gone_gpu} for uuid in (*machines["b"].uuids, "GPU-gone")]
    old = {"date": "2026-11-01T00:00:00Z", "node": "b", "host": "b", "verdict": "accepted", "level": "start"}
    farm.path.write_text(json.dumps({**old, "gpus": before}) + "\n", encoding="utf-8")
    # Nomad has no use for the one that computes wrongly.
    machines["a"].node.change(lambda it: faults.compute_wrongly(it, 1, "memory"))
    machines["a"].mine["NodeResources"]["Devices"][0]["Instances"].pop()
    machines["c"].farm.run_job("id-0", "train")
    # Closed by somebody else, it is tested and stays closed.
    machines["d"].mine["SchedulingEligibility"] = "ineligible"
    # Its agent is none of a client.
    machines["f"].farm.own = None
    # Reached until it is judged, and no more.
    gone = "{{ 'ssh' if __farm_accept_result is defined else 'local' }}"
    away = {"ansible_host": "127.0.0.1", "ansible_port": 1, "ansible_ssh_common_args": "-o BatchMode=yes"}
    # While it is measured another run puts it back.
    machines["h"].node.change(lambda it: faults.compute_wrongly(it, 1, "memory"))
    worked, read = machines["h"].smi(""), machines["h"].farm.read

    def forget(path: str, *more: Any) -> Any:
        if worked.with_name(f"{worked.name}.asked").exists() and path == "/v1/client/metadata":
            machines["h"].mine["SchedulingEligibility"] = "eligible"
            machines["h"].farm.clients["id-0"].clear()
        return read(path, *more)

    machines["h"].farm.read = forget  # type: ignore[method-assign]
    # The work is too much for its driver.
    fine = machines["i"].smi("")
    broken = Node(machines["i"].node.root.with_name("root-i-broken"), machines["i"].node.build)
    shutil.copytree(machines["i"].node.root, broken.root)
    broken.change(lambda it: faults.mismatch_driver(it, "570.1"))
    then = machines["i"].smi(f"[ ! -e {fine}.asked ] || export GPUFARM_SIM_ROOT={broken.root}")
    more = {
        "a": {**machines["a"].variables, "nomad_device_nvidia_ignored_gpu_ids": machines["a"].uuids[1:]},
        "e": away,
        "g": {**machines["g"].variables, **away, "ansible_connection": gone},
        "h": machines["h"].asked_by(accept_options=worked),
        "i": machines["i"].asked_by(accept_options=fine, gpu_health_options=then),
    }
    code, said = farm.run(more=more, accept_max_closed="100%")
    assert (code, farm.records()) == (2, dict.fromkeys("adg", "accepted") | dict.fromkeys("bhi", "failed")), said
    assert {name: machine.state for name, machine in machines.items()} == {
        "a": ("eligible", None),
        "b": ("ineligible", "acceptance, which failed: memory_errors, gpu_missing"),
        "c": ("eligible", None),
        "d": ("ineligible", None),
        "f": ("eligible", None),
        "g": ("ineligible", "acceptance"),
        "h": ("eligible", None),
        "i": ("ineligible", "acceptance, which failed: library_mismatch"),
    }
    accepted = "accepted, 2 GPU(s) at level start, 2 compared with no sibling and 2 with no past; "
    assert f"a: {accepted.replace('2', '1')}open again, after acceptance" in said
    assert f"GPU {machines['b'].uuids[1]}: found" in said and machines["b"].uuids[0] not in said
    assert (
        "c: was not tested: " in said and "1 running allocation, which acceptance would end: train.group[0] (" in said
    )
    assert f"d: {accepted}still closed, as it was before" in said
    assert "e: was not tested: found that Ansible does not reach it (" in said
    assert "--become`. It may be closed all the same." in said
    assert "f: was not tested: found that the agent of this host is no client, and nothing of Nomad's runs. Exp" in said
    assert "g: has passed, and stays closed: Ansible does not reach it (" in said and "g: accepted" not in said
    assert "h: was put back meanwhile by somebody else. Expected: " in said

    # Mended, it goes on where it was left.
    machines["b"].node.change(lambda it: faults.recover_cuda(it, 1))
    with farm.path.open("a", encoding="utf-8") as file:
        file.write('{"date":"20')
    printed_options = shlex.split(PRINTED.replace("rack1-a", "b"))[4:]
    code, said = farm.run(*printed_options, gpu_node_gpus=2)
    assert (code, machines["b"].state) == (0, ("eligible", None)), said
    assert f"{farm.path}: line 8 is no record and counts for none" in said
    *_before, half, last = farm.path.read_text(encoding="utf-8").splitlines()
    assert (half, json.loads(last)["host"], json.loads(last)["verdict"]) == ('{"date":"20', "b", "accepted")


def test_no_more_are_closed_at_a_time_than_may_be(park: Callable[..., Park]) -> None:
    farm = park("a", "b", "c")
    farm.machines["a"].node.change(lambda it: faults.refuse_context(it, 0))
    # Marked, it could not be closed: whether it is so now, nobody knows.
    farm.machines["b"].farm.refuse = "/eligibility"
    code, said = farm.run(accept_max_closed=2)
    assert (code, farm.records()) == (2, {"a": "failed"}), said
    assert "b: was not tested: " in said and "It may be closed all the same." in said
    assert farm.machines["c"].farm.agent.writes == [] and farm.machines["c"].state == ("eligible", None)
    assert (
        "c: was not tested, because a, b failed and are closed, or may be. Expected: at most 2 closed at a time "
        "(accept_max_closed is 2). Next step: "
    ) in said


def test_what_a_killed_run_has_closed_says_so_and_the_next_one_goes_on(
    park: Callable[..., Park], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it goes on, not even what Ansible has put into a session of its own, as it does with its workers."""
    # Without the spare interpreters of these tests, as on any other machine.
    monkeypatch.delenv("PYTHONPATH")
    farm = park("a")
    machine = farm.machines["a"]
    machine.node.change(lambda it: faults.hang_cuda(it, 1))
    options = {**machine.variables["accept_options"], "timeout": 7200}
    killed = threading.Thread(
        target=farm.run,
        kwargs={
            "under": (*ALONE, "sh", "-c", KILLED, "sh"),
            "more": {"a": {**machine.variables, "accept_options": options}},
        },
    )
    killed.start()
    try:
        wait_for(lambda: computes(machine.node))
    finally:
        (farm.folder / "kill").touch()
        killed.join()
    assert (farm.folder / "left").read_text(encoding="utf-8") == ""
    assert machine.state == ("ineligible", "acceptance") and farm.records() == {}
    machine.node.change(lambda it: faults.recover_cuda(it, 1))
    code, said = farm.run()
    assert (code, machine.state, farm.records()) == (0, ("eligible", None), {"a": "accepted"}), said


def test_a_file_that_cannot_be_written_closes_no_node(park: Callable[..., Park]) -> None:
    farm = park("a")
    code, said = farm.run(accept_records=str(farm.folder))
    assert code != 0 and "which is of another kind. Expected: a file" in said
    assert farm.machines["a"].farm.agent.requests == [] and farm.machines["a"].state == ("eligible", None)

    code, said = farm.run(more={"a": {**farm.machines["a"].variables, "accept_options": {"memory_share": 95}}})
    assert code != 0 and "a: accept_options: memory_share is 95. Expected: above 0" in said
    assert farm.machines["a"].farm.agent.requests == []

    # It could be written to before the node was closed, and cannot any more.
    code, said = farm.run(accept_records=f"{farm.folder}{{{{ '' if __farm_accept_node is defined else '/new' }}}}")
    assert code == 2 and "a: stays closed, measured but not judged: " in said and "which is of another kind" in said
    assert farm.machines["a"].state == ("ineligible", "acceptance")
