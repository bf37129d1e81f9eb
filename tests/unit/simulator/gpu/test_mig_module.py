"""The module nvidia_mig against the double, which has the real rules."""

from __future__ import annotations

import dataclasses
import os
import platform
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gpufarm.core.plugins.module_utils.commands import Command
from ansible_collections.gpufarm.core.plugins.module_utils.mig.listings import Instance
from ansible_collections.gpufarm.core.plugins.module_utils.mig.planning import Plan
from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi import Gpu, empty_gpu, gathering
from ansible_collections.gpufarm.core.plugins.modules import nvidia_mig
from ansible_collections.gpufarm.core.tests.unit.plugins.modules import release_helper as helper

from tests.simulator.gpu import faults

from .conftest import Node

MakeNode = Callable[[str], Node]
H100 = "GPU 0 (NVIDIA H100 80GB HBM3, GPU-U)"
A100 = "GPU 0 (NVIDIA A100-SXM4-80GB, GPU-U)"
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


def assert_says(outcome: helper.Outcome, told: str) -> None:
    """That it failed with this text, whatever the UUIDs of GPUs are."""
    assert without_uuids(outcome["msg"]) == f"{platform.node()}: {told}"


def without_uuids(text: str) -> str:
    return re.sub("GPU-[0-9a-f-]{36}", "GPU-U", text)


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
    assert set(done["gpus"][0]) == set(yaml.safe_load(nvidia_mig.RETURN)["gpus"]["contains"])
    assert [done["gpus"][0][key] for key in ("index", "name", "mig_mode", "processes")] == [
        0, "NVIDIA H100 80GB HBM3", "Enabled", []
    ]  # fmt: skip
    assert [(each["profile"], each["start"]) for each in done["gpus"][0]["instances"]] == [
        *(("1g.10gb", start) for start in range(4)), ("3g.40gb", 4)
    ]  # fmt: skip
    whole = [f"GPU {number} (NVIDIA H100 80GB HBM3, GPU-U): MIG Disabled" for number in range(8)]
    cut = [*(f"  1g.10gb at {start}" for start in range(4)), "  3g.40gb at 4"]
    shown = {when: without_uuids(text).splitlines() for when, text in done["diff"].items()}
    assert shown == {"before": whole, "after": [f"{H100}: MIG Enabled", *cut, *whole[1:]]}
    assert sorted(done["gpus"][0]["create_at_boot"]) == sorted(announced["gpus"][0]["create_at_boot"])

    again = made.run(**arguments)
    assert not again["changed"] and [each["changes"] for each in again["gpus"]] == [[]] * 8

    back = made.run(layout="disabled")
    assert back["changed"] and made.divided() == [Counter()] * 8
    assert back["gpus"][0]["changes"][-1] == "disable MIG" and back["gpus"][0]["create_at_boot"] == []


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


def test_an_instance_with_work_stays_before_others(machine: Callable[[str], Machine]) -> None:
    made = machine("a100-mig-x2")
    made.node.change(lambda profile: faults.add_process(profile, 0, 4242, "python", 1024, instance="9/0"))
    outcome = made.run(layout={"1g.10gb": 1})
    assert [[each["id"] for each in gpu["instances"]] for gpu in outcome["gpus"]] == [[9], [7]]
    assert_says(
        made.run(layout={"7g.80gb": 1}),
        f"on {A100} are processes, 4242 (python). Expected: none on what is to go. Next step: end them, or have the "
        "role gpufarm.core.nvidia_mig take the node out of work first.",
    )


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
        outcome,
        f"on {H100} are processes, 4242 (python). Expected: none on what is to go. Next step: end them, or have the "
        "role gpufarm.core.nvidia_mig take the node out of work first.",
    )
    assert made.node.csv("mig.mode.pending")[0] == ["Disabled"]
    announced = made.run(check=True, gpus=[{"index": 0, "layout": SEVEN}])
    assert announced["gpus"][0]["processes"] == ["4242 (python)"]


def test_where_nobody_knows_who_computes_all_of_it_is_in_the_way() -> None:
    gpu: Gpu = {**empty_gpu(), "mig_mode": "Enabled", "processes": None}
    instance = Instance(1, "1g.10gb", 0, 1, ("1g.10gb",))
    target = nvidia_mig.Target(gpu, SEVEN, [], [instance])
    unknown = ["unknown ones, as nvidia-smi lists none"]
    assert target.in_the_way(Plan((instance,), ())) == unknown
    assert target.in_the_way(Plan((), ())) == []
    whole = dataclasses.replace(target, layout={})
    assert whole.in_the_way(Plan((), ())) == unknown
    # Nobody can end them, and out of work they are as unknown.
    with pytest.raises(nvidia_mig.MigError) as refused:
        nvidia_mig.Node({"path": None, "timeout": 1, "reset": False}).bring_about(whole)
    said = str(refused.value)
    assert said.startswith("nvidia-smi does not list the processes on GPU None. Expected: a list, because what ")
    assert said.endswith(
        "Next step: see what `nvidia-smi -q -d PIDS` says of them on this host; where nobody uses that GPU, destroy "
        "1g.10gb at 0, disable MIG by nvidia-smi yourself, and run this again."
    )


def test_an_ampere_that_nobody_holds_needs_no_reset(machine: Callable[[str], Machine]) -> None:
    made = machine("a100-mig-x2")
    assert made.run(layout="disabled")["changed"] and made.divided() == [Counter()] * 2
    assert made.run(layout=SEVEN)["changed"] and made.divided() == [Counter(SEVEN)] * 2


PENDING = f"the MIG mode of {A100} is pending"


@pytest.mark.parametrize(
    ("profile", "layout", "reset", "holders", "told"),
    [
        (
            "a100-mig-x2", "disabled", False, [],
            f"{PENDING}. Expected: Disabled at once, or after a reset of the GPU. Next step: reboot the node, or set "
            "'reset' (nvidia_mig_reset of the role), for which nothing may hold it.",
        ),
        (
            "a100-mig-x2", "disabled", False, ["77 (dcgm)", "78 (exporter)"],
            f"{PENDING}; it is held by 77 (dcgm), 78 (exporter). Expected: Disabled at once, or after a reset of the "
            "GPU. Next step: reboot the node, or set 'reset' (nvidia_mig_reset of the role), for which nothing may "
            "hold it.",
        ),
        (
            "a100-mig-x2", "disabled", True, [],
            "`nvidia-smi -i GPU-U --gpu-reset`, to have the MIG mode take effect, ended with 255 and said: The "
            "following GPUs could not be reset: GPU 00000000:07:00.0: In use by another client 1 device is currently "
            "being used by one or more other processes (e.g., Fabric Manager, CUDA application, graphics application "
            "such as an X server, or a monitoring application such as another instance of nvidia-smi). Please first "
            "kill all processes using this device and all compute applications running in the system. "
            "Expected: that it does so. Next step: mend what it names, and run this again; what is done is found as "
            "it is.",
        ),
        (
            "h100-x8", SEVEN, True, [],
            "`nvidia-smi -i GPU-U -mig 1`, to enable MIG, ended with 19 and said: Unable to enable MIG Mode for GPU "
            "00000000:1B:00.0: In use by another client Terminating early due to previous errors. Expected: that it "
            "does so. Next step: mend what it names, and run this again; what is done is found as it is.",
        ),
        (
            "h100-x8", SEVEN, False, ["77 (dcgm)", "78 (exporter)"],
            "`nvidia-smi -i GPU-U -mig 1`, to enable MIG, ended with 19 and said: Unable to enable MIG Mode for GPU "
            "00000000:1B:00.0: In use by another client Terminating early due to previous errors; it is held by 77 "
            "(dcgm), 78 (exporter). Expected: that it does so. Next step: mend what it names, and run this again; what "
            "is done is found as it is.",
        ),
    ],
)  # fmt: skip
def test_a_process_that_begins_meanwhile(
    machine: Callable[[str], Machine],
    monkeypatch: pytest.MonkeyPatch,
    *,
    profile: str,
    layout: Any,
    reset: bool,
    holders: list[str],
    told: str,
) -> None:
    """The double lets no program that only watches keep a mode back, so one that works begins just then."""
    made, call = machine(profile), nvidia_mig.Node.call

    def called(node: nvidia_mig.Node, *arguments: str) -> Any:
        if "-mig" in arguments:
            made.node.change(lambda profile: faults.add_process(profile, 0, 4242, "python", 1024))
        return call(node, *arguments)

    monkeypatch.setattr(nvidia_mig.Node, "call", called)
    monkeypatch.setattr(nvidia_mig, "device_holders", lambda *given: holders if given == (0, "/") else [])
    assert_says(made.run(layout=layout, reset=reset), told)


def test_what_is_left_is_told(machine: Callable[[str], Machine], monkeypatch: pytest.MonkeyPatch) -> None:
    made = machine("h100-x8")
    monkeypatch.setattr(nvidia_mig.Node, "bring_about", lambda _node, _target: None)
    assert_says(
        made.run(gpus=[{"index": 0, "layout": {"3g.40gb": 2}}]),
        f"nvidia-smi did what it was asked for, and this is still to be done: {H100}: enable MIG; {H100}: create "
        f"3g.40gb at 0; {H100}: create 3g.40gb at 4. Expected: the layout. Next step: see `nvidia-smi mig -lgi` and "
        "the kernel's log on this host.",
    )


NUMBERS = (
    "Expected: numbers above 0 by profile, such as {'1g.10gb': 7}. Next step: correct it; whole GPUs are 'disabled'."
)
OF_GPUS = (
    "Expected: one of uuid, index and model, of a GPU of this node: "
    f"{', '.join(f'{number} (GPU-U)' for number in range(8))}. Next step: correct the entry."
)
PROFILES = (
    "1g.10gb (7, at 0, 1, 2, 3, 4, 5, 6); 1g.10gb+me (1, at 0, 1, 2, 3, 4, 5, 6); 1g.20gb (4, at 0, 2, 4, 6); "
    "2g.20gb (3, at 0, 2, 4); 3g.40gb (2, at 0, 4); 4g.40gb (1, at 0); 7g.80gb (1, at 0). Next step: correct the "
    "layout."
)
A_LAYOUT = "Expected: disabled, numbers by profile such as {'1g.10gb': 7}, or the name of a layout: "


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            {"layout": {"1g.5gb": 7}},
            f"{H100} has no MIG profile 1g.5gb. Expected: profiles that it has: {PROFILES}",
        ),
        (
            {"layout": {"3g.40gb": 3}},
            f"{H100} has no room for 3 of 3g.40gb. Expected: GPU instances that do not overlap, of 7 compute slices in "
            f"all; it has, how many at most and where they begin: {PROFILES}",
        ),
        (
            {"layout": "notebook", "layouts": {"notebooks": NOTEBOOKS, "all": SEVEN}},
            f"the option 'layout' is 'notebook'. {A_LAYOUT}all, notebooks. Next step: correct it, or add the layout of "
            "that name.",
        ),
        (
            {"gpus": [{"index": 3, "layout": "notebooks"}]},
            f"the layout of GPU 3 is 'notebooks'. {A_LAYOUT}there is none. Next step: correct it, or add the layout of "
            "that name.",
        ),
        (
            {"layout": "a", "layouts": {"a": "b", "b": SEVEN}},
            f"the option 'layout' is 'a'. {A_LAYOUT}a, b. Next step: correct it, or add the layout of that name.",
        ),
        ({"layout": "a", "layouts": {"a": {}}}, f"the layout a is {{}}. {NUMBERS}"),
        ({"layout": {"1g.10gb": 0}}, f"the option 'layout' is {{'1g.10gb': 0}}. {NUMBERS}"),
        ({"layout": {"1g.10gb": "many"}}, f"the option 'layout' is {{'1g.10gb': 'many'}}. {NUMBERS}"),
        ({"layout": [7]}, f"the option 'layout' is [7]. {NUMBERS}"),
        ({"gpus": [{"index": 9, "layout": SEVEN}]}, f"an entry of 'gpus' is for {{'index': 9}}. {OF_GPUS}"),
        ({"gpus": [{"uuid": "GPU-1", "layout": SEVEN}]}, f"an entry of 'gpus' is for {{'uuid': 'GPU-1'}}. {OF_GPUS}"),
        (
            {"gpus": [{"index": 0, "model": "x", "layout": SEVEN}]},
            f"an entry of 'gpus' is for {{'index': 0, 'model': 'x'}}. {OF_GPUS}",
        ),
        ({"gpus": [{"layout": SEVEN}]}, f"an entry of 'gpus' is for no GPU. {OF_GPUS}"),
    ],
)
def test_layouts_that_cannot_be(machine: Callable[[str], Machine], arguments: dict[str, Any], told: str) -> None:
    made = machine("h100-x8")
    assert_says(made.run(**arguments), told)
    assert made.node.csv("mig.mode.pending") == [["Disabled"]] * 8


def test_gpus_without_mig(machine: Callable[[str], Machine]) -> None:
    made = machine("t4-x4")
    assert_says(
        made.run(layout=SEVEN),
        "GPU 0 (Tesla T4, GPU-U) has no MIG mode. Expected: a GPU that can be divided: A30, A100, H100 and newer of "
        "their kind. Next step: give this GPU no layout, or 'disabled'.",
    )
    assert made.run(layout="disabled")["gpus"] == [] and made.run()["gpus"] == []


A_DRIVER = (
    "Expected: a driver that lists its GPUs, and no WSL, where there is no MIG. Next step: run "
    "gpufarm.core.nvidia_driver on this host first, or give it no layout."
)


def test_a_driver_that_does_not_answer(machine: Callable[[str], Machine]) -> None:
    made = machine("h100-x8")
    made.node.change(faults.unload_driver)
    assert_says(
        made.run(layout=SEVEN),
        f"{made.node.build}/nvidia-smi -q -x ended with exit code 9 and said: NVIDIA-SMI has failed because it "
        "couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA driver is installed and "
        "running. Load the kernel module (modprobe nvidia), or reboot if the driver was just installed. "
        f"{A_DRIVER}",
    )


def test_wsl_has_none(machine: Callable[[str], Machine]) -> None:
    made = machine("rtx4090-wsl")
    (made.node.root / "usr/lib/wsl/lib").mkdir(parents=True)
    assert_says(made.run(layout=SEVEN), f"this is a WSL distribution. {A_DRIVER}")


def test_a_gpu_that_is_lost(machine: Callable[[str], Machine]) -> None:
    made = machine("h200-x2")
    made.node.change(lambda profile: faults.lose_gpu(profile, 1))
    for layout in ("disabled", {"1g.18gb": 7}):
        assert_says(
            made.run(layout=layout),
            f"GPU 1 does not answer: {made.node.build}/nvidia-smi -q -x ended with exit code 15 and said: Unable to "
            "determine the device handle for GPU0000:00:07.0: GPU is lost. Reboot the system to recover this GPU. Look "
            "for Xid 79 in the kernel log; drain the node, then reboot it or reseat the GPU. Expected: a GPU that "
            "answers. Next step: run playbooks/health.yml, which says what to do, or leave it out of the layout.",
        )


def test_who_has_a_device_open(tmp_path: Path) -> None:
    """nvidia-smi lists no process that only watches."""
    for pid, name, links in (
        (1, b"init", []),
        (100, b"exporter", ["/dev/null", "/dev/nvidia1"]),
        (77, b"dcgm\xff", ["/dev/nvidia1"]),
        (78, b"python", ["/dev/nvidia10"]),
        (os.getpid(), b"this", ["/dev/nvidia1"]),
    ):
        folder = tmp_path / "proc" / str(pid) / "fd"
        folder.mkdir(parents=True)
        (folder.parent / "comm").write_bytes(name + b"\n")
        for number, target in enumerate(links):
            (folder / str(number)).symlink_to(target)
    # One that ends just then.
    (tmp_path / "proc/2").mkdir()
    assert nvidia_mig.device_holders(1, str(tmp_path)) == ["77 (dcgm\N{REPLACEMENT CHARACTER})", "100 (exporter)"]
    assert nvidia_mig.device_holders(None, str(tmp_path)) == []


def test_a_driver_that_tells_no_profiles_while_mig_is_off(
    machine: Callable[[str], Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, call = machine("h100-x8"), nvidia_mig.Node.call

    def called(node: nvidia_mig.Node, *arguments: str) -> Any:
        answer = call(node, *arguments)
        silent = arguments[-1] in ("-lgip", "-lgipp") and ["Enabled"] not in made.node.csv("mig.mode.current")
        return dataclasses.replace(answer, stdout="No MIG-enabled devices found.\n") if silent else answer

    monkeypatch.setattr(nvidia_mig.Node, "call", called)
    changes = ["enable MIG", "create 1 of 3g.40gb", "create 4 of 1g.10gb"]
    announced = made.run(check=True, gpus=[{"index": 0, "layout": NOTEBOOKS}])["gpus"][0]
    assert (announced["changes"], announced["create_at_boot"]) == (changes, [])
    done = made.run(gpus=[{"index": 0, "layout": NOTEBOOKS}])["gpus"][0]
    assert (done["changes"], done["create_at_boot"]) == (changes, ["19:0", "19:1", "19:2", "19:3", "9:4"])
    assert made.divided() == [Counter(NOTEBOOKS), *[Counter()] * 7]


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (
            Command((), None, error="Permission denied"),
            "`nvidia-smi mig {what}` could not be started (Permission denied)",
        ),
        (
            Command((), None, "| 0 ", timed_out=True, limit=60),
            "`nvidia-smi mig {what}` did not end within 60 s",
        ),
        (
            Command((), 255, "Failed to list: Unknown\n  Error\n"),
            "`nvidia-smi mig {what}` ended with 255 and said: Failed to list: Unknown Error",
        ),
        # As where a GPU is lost.
        (
            Command((), 6, "No devices were found\n"),
            "`nvidia-smi mig {what}` ended with 6 and said: No devices were found",
        ),
    ],
)
@pytest.mark.parametrize("what", ["-lgip", "-lgipp", "-lgi", "-lci"])
def test_a_list_that_does_not_come_is_not_an_empty_one(
    machine: Callable[[str], Machine], monkeypatch: pytest.MonkeyPatch, answer: Command, told: str, what: str
) -> None:
    """Instances that are there would be called missing, and the node be taken out of work for them."""
    made, call = machine("a100-mig-x2"), nvidia_mig.Node.call
    monkeypatch.setattr(
        nvidia_mig.Node, "call", lambda node, *words: answer if words[-1] == what else call(node, *words)
    )
    assert_says(
        made.run(check=True, layout=SEVEN),
        f"{told.format(what=what)}. Expected: a list, or that there is nothing to list. Next step: run it on this "
        "host, and see the kernel's log.",
    )


def test_gpus_that_have_no_instances_yet_are_known_by_what_nvidia_smi_says(machine: Callable[[str], Machine]) -> None:
    made = machine("a100-mig-x2")
    for emptied in (["-dci"], ["-dci", "-dgi"]):
        for what in emptied:
            made.node.output("mig", what)
        assert made.run(layout=SEVEN)["changed"] and made.divided() == [Counter(SEVEN)] * 2


def test_whole_gpus_need_no_profiles(machine: Callable[[str], Machine], monkeypatch: pytest.MonkeyPatch) -> None:
    made = machine("a100-mig-x2")
    monkeypatch.setattr(nvidia_mig, "parse_profiles", lambda *_said: {})
    assert made.run(layout="disabled")["changed"] and made.divided() == [Counter()] * 2


def test_a_mode_that_is_pending_is_taken_back(machine: Callable[[str], Machine]) -> None:
    made = machine("h100-x8")
    made.node.change(lambda profile: faults.set_mig(profile, 0, [], pending=True))
    assert made.node.csv("mig.mode.current,mig.mode.pending", "-i", "0") == [["Disabled", "Enabled"]]
    outcome = made.run(layout="disabled")
    assert [each["changes"] for each in outcome["gpus"]] == [["disable MIG"], *[[]] * 7]
    assert made.node.csv("mig.mode.current,mig.mode.pending", "-i", "0") == [["Disabled", "Disabled"]]
