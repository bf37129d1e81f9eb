"""The module nvidia_mig against the double, which has the real rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi import gathering
from ansible_collections.gpufarm.core.plugins.modules import nvidia_mig
from ansible_collections.gpufarm.core.tests.unit.plugins.modules import release_helper as helper

from tests.simulator.gpu import faults

from .conftest import Node

MakeNode = Callable[[str], Node]
SEVEN = {"1g.10gb": 7}
NOTEBOOKS = {"3g.40gb": 1, "1g.10gb": 4}


class Machine:
    """The module on a node of plain files."""

    def __init__(self, node: Node, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.node, self._capsys = node, capsys
        for name, text in node.environment.items():
            monkeypatch.setenv(name, text)
        collect = gathering.collect
        monkeypatch.setattr(
            nvidia_mig, "collect", lambda *args, **given: collect(*args, **{**given, "root": str(node.root)})
        )

    def run(self, check: bool = False, diff: bool = False, **arguments: Any) -> helper.Outcome:
        given = {"path": str(self.node.build / "nvidia-smi"), **arguments}
        return helper.run_module(nvidia_mig.main, self._capsys, given, check_mode=check, diff=diff)

    def divided(self) -> list[Counter[str]]:
        """The MIG devices of each GPU, by nvidia-smi's own list."""
        found: list[Counter[str]] = []
        for line in self.node.output("-L").splitlines():
            if line.startswith("GPU"):
                found.append(Counter())
            else:
                found[-1][line.split()[1]] += 1
        return found

    def uuids(self) -> set[str]:
        return {line.split("UUID: ")[1].rstrip(")") for line in self.node.output("-L").splitlines() if " MIG " in line}


@pytest.fixture
def machine(
    node: MakeNode, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], Machine]:
    return lambda profile: Machine(node(profile), monkeypatch, capsys)


def assert_says(outcome: helper.Outcome, *parts: str) -> None:
    assert outcome.get("failed"), outcome
    for part in (*parts, "Expected: ", "Next step: "):
        assert part in outcome["msg"]


def test_whole_gpus_become_a_layout_and_whole_again(machine: Callable[[str], Machine]) -> None:
    made = machine("h100-x8")
    arguments = {
        "layout": "disabled",
        "gpus": [{"index": 0, "layout": "notebooks"}],
        "layouts": {"notebooks": NOTEBOOKS},
    }
    announced = made.run(check=True, diff=True, **arguments)
    assert announced["changed"] and made.divided() == [Counter()] * 8
    # Where the larger one leaves four places to the others.
    changes = ["enable MIG", "create 3g.40gb at 4", *(f"create 1g.10gb at {start}" for start in range(4))]
    assert announced["gpus"][0]["changes"] == changes
    assert [each["changes"] for each in announced["gpus"][1:]] == [[]] * 7

    done = made.run(diff=True, **arguments)
    assert done["changed"] and done["gpus"][0]["changes"] == announced["gpus"][0]["changes"]
    assert made.divided() == [Counter(NOTEBOOKS), *[Counter()] * 7]
    assert done["gpus"][0]["mig_mode"] == "Enabled" and len(done["gpus"][0]["instances"]) == 5
    assert "3g.40gb at" in done["diff"]["after"] and "3g.40gb" not in done["diff"]["before"]
    assert sorted(done["gpus"][0]["create_at_boot"]) == sorted(announced["gpus"][0]["create_at_boot"])

    again = made.run(**arguments)
    assert not again["changed"] and [each["changes"] for each in again["gpus"]] == [[]] * 8

    whole = made.run(layout="disabled")
    assert whole["changed"] and made.divided() == [Counter()] * 8
    assert whole["gpus"][0]["changes"][-1] == "disable MIG" and whole["gpus"][0]["create_at_boot"] == []


def test_what_create_at_boot_says_makes_the_same_layout(machine: Callable[[str], Machine]) -> None:
    made = machine("h100-x8")
    told = made.run(gpus=[{"index": 2, "layout": NOTEBOOKS}])["gpus"][0]["create_at_boot"]
    made.run(layout="disabled")
    made.node.output("-i", "2", "-mig", "1")
    made.node.output("mig", "-i", "2", "-cgi", ",".join(told), "-C")
    assert not made.run(gpus=[{"index": 2, "layout": NOTEBOOKS}])["changed"]


def test_instances_that_fit_stay(machine: Callable[[str], Machine]) -> None:
    made = machine("a100-mig-x2")
    before = made.uuids()
    fewer = made.run(layout={"1g.10gb": 3})
    assert fewer["changed"] and made.uuids() < before and len(made.uuids()) == 6
    kept = made.uuids()
    mixed = made.run(layout={"1g.10gb": 3, "3g.40gb": 1})
    assert mixed["changed"] and kept <= made.uuids(), mixed
    assert made.divided() == [Counter({"1g.10gb": 3, "3g.40gb": 1})] * 2


def test_an_instance_without_its_compute_instance_is_made_again(machine: Callable[[str], Machine]) -> None:
    made = machine("a100-mig-x2")
    made.node.output("mig", "-i", "0", "-gi", "7", "-dci")
    outcome = made.run(layout=SEVEN)
    assert [each["changes"] for each in outcome["gpus"]] == [["destroy 1g.10gb at 0", "create 1g.10gb at 0"], []]
    assert made.divided() == [Counter(SEVEN)] * 2


def test_the_narrowest_entry_counts(machine: Callable[[str], Machine]) -> None:
    made = machine("h100-x8")
    uuid = made.node.csv("uuid")[1][0]
    outcome = made.run(
        check=True,
        layout={"7g.80gb": 1},
        gpus=[
            {"model": "NVIDIA H100 80GB HBM3", "layout": "disabled"},
            {"index": 0, "layout": SEVEN},
            {"index": 1, "layout": SEVEN},
            {"uuid": uuid, "layout": NOTEBOOKS},
            {"model": "Tesla T4", "layout": SEVEN},
        ],
    )
    assert [len(each["changes"]) for each in outcome["gpus"]] == [8, 6, 0, 0, 0, 0, 0, 0]


def test_a_process_in_the_way_is_named_and_nothing_is_done(machine: Callable[[str], Machine]) -> None:
    made = machine("h100-x8")
    made.node.change(lambda profile: faults.add_process(profile, 0, 4242, "python", 1024))
    outcome = made.run(gpus=[{"index": 0, "layout": SEVEN}])
    assert_says(
        outcome, "GPU 0 (NVIDIA H100 80GB HBM3, GPU-", "are processes, 4242 (python). Expected: none on what is"
    )
    assert made.node.csv("mig.mode.pending")[0] == ["Disabled"]
    announced = made.run(check=True, gpus=[{"index": 0, "layout": SEVEN}])
    assert announced["gpus"][0]["processes"] == ["4242 (python)"]


def test_a_pending_mode_takes_effect_with_leave_to_reset(machine: Callable[[str], Machine]) -> None:
    """On an A100 that something holds, which is no process of its table, the mode waits."""
    made = machine("a100-mig-x2")
    assert made.run(layout="disabled")["changed"] and made.divided() == [Counter()] * 2
    assert made.run(layout=SEVEN)["changed"] and made.divided() == [Counter(SEVEN)] * 2


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"layout": {"1g.5gb": 7}}, "has no MIG profile 1g.5gb"),
        ({"layout": {"3g.40gb": 3}}, "has no room for 3 of 3g.40gb"),
        ({"layout": "notebook", "layouts": {"notebooks": NOTEBOOKS}}, "is 'notebook'. Expected: disabled, numbers by"),
        ({"layout": "a", "layouts": {"a": "b", "b": SEVEN}}, "the option 'layout' is 'a'"),
        ({"layout": {"1g.10gb": 0}}, "Expected: numbers above 0 by profile"),
        ({"layout": {"1g.10gb": "many"}}, "Expected: numbers above 0 by profile"),
        ({"layout": [7]}, "Expected: numbers above 0 by profile"),
        ({"gpus": [{"index": 9, "layout": SEVEN}]}, "an entry of 'gpus' is for {'index': 9}"),
        ({"gpus": [{"uuid": "GPU-1", "layout": SEVEN}]}, "an entry of 'gpus' is for {'uuid': 'GPU-1'}"),
        (
            {"gpus": [{"index": 0, "model": "x", "layout": SEVEN}]},
            "an entry of 'gpus' is for {'index': 0, 'model': 'x'}",
        ),
        ({"gpus": [{"layout": SEVEN}]}, "an entry of 'gpus' is for no GPU"),
    ],
)
def test_layouts_that_cannot_be(machine: Callable[[str], Machine], arguments: dict[str, Any], told: str) -> None:
    made = machine("h100-x8")
    assert_says(made.run(**arguments), told)
    assert made.node.csv("mig.mode.pending") == [["Disabled"]] * 8


def test_gpus_without_mig(machine: Callable[[str], Machine]) -> None:
    made = machine("t4-x4")
    assert_says(made.run(layout=SEVEN), "GPU 0 (Tesla T4, GPU-", ") has no MIG mode. Expected: a GPU that can be")
    assert made.run(layout="disabled")["gpus"] == [] and made.run()["gpus"] == []


def test_a_driver_that_does_not_answer(machine: Callable[[str], Machine]) -> None:
    made = machine("h100-x8")
    made.node.change(faults.unload_driver)
    assert_says(made.run(layout=SEVEN), "couldn't communicate with the NVIDIA driver", "run gpufarm.core.nvidia_driver")


def test_wsl_has_none(machine: Callable[[str], Machine]) -> None:
    made = machine("rtx4090-wsl")
    (made.node.root / "usr/lib/wsl/lib").mkdir(parents=True)
    assert_says(made.run(layout=SEVEN), "this is a WSL distribution. Expected: ")


def test_a_gpu_that_is_lost(machine: Callable[[str], Machine]) -> None:
    made = machine("h200-x2")
    made.node.change(lambda profile: faults.lose_gpu(profile, 1))
    assert_says(made.run(layout="disabled"), " does not answer: ")


def test_who_has_a_device_open(tmp_path: Any) -> None:
    """nvidia-smi lists no process that only watches."""
    device = tmp_path / "dev"
    for pid, name, links in ((1, "init", []), (77, "dcgm", ["/dev/nvidia1"]), (78, "python", ["/dev/nvidia10"])):
        folder = tmp_path / "proc" / str(pid) / "fd"
        folder.mkdir(parents=True)
        (folder.parent / "comm").write_text(f"{name}\n")
        for number, target in enumerate(links):
            (folder / str(number)).symlink_to(target)
    assert nvidia_mig.device_holders(1, str(tmp_path)) == ["77 (dcgm)"]
    assert nvidia_mig.device_holders(None, str(tmp_path)) == [] and not device.exists()
