"""Visibility, faults, and changes while a program runs."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.simulator.gpu import faults

from .conftest import SIMULATOR, Node

MakeNode = Callable[[str], Node]

LOST = "GPU is lost.  Reboot the system to recover this GPU"


def test_gpus_without_a_device_node_are_not_there(node: MakeNode) -> None:
    machine = node("t4-x4")
    machine.hide("nvidia0")
    machine.hide("nvidia2")
    uuids = [gpu["uuid"] for gpu in machine.profile["gpus"]]
    assert machine.csv("index,uuid,count") == [["0", uuids[1], "2"], ["1", uuids[3], "2"]]
    assert [gpu.findtext("minor_number") for gpu in machine.xml().findall("gpu")] == ["1", "3"]


def test_no_gpu_at_all(node: MakeNode) -> None:
    machine = node("t4-x4")
    for number in range(4):
        machine.hide(f"nvidia{number}")
    for arguments in ([], ["-L"], ["-q", "-x"], ["--query-gpu=name", "--format=csv"]):
        done = machine.smi(*arguments)
        assert (done.returncode, done.stdout) == (6, "No devices were found\n")


def test_mig_devices_are_visible_by_their_capabilities(node: MakeNode) -> None:
    machine = node("a100-mig-x2")
    for capability in (machine.root / "dev/nvidia-caps").iterdir():
        if capability.name not in {"nvidia-cap84", "nvidia-cap85"}:  # gpu0/gi9/access and gpu0/gi9/ci0/access
            capability.unlink()
    migs = [line for line in machine.output("-L").splitlines() if "MIG 1g" in line]
    assert migs == [f"  MIG 1g.10gb     Device  0: (UUID: {machine.profile['gpus'][0]['mig_devices'][2]['uuid']})"]
    machine.hide("nvidia-caps/nvidia-cap84")
    assert "MIG 1g" not in machine.output("-L")


@pytest.mark.parametrize("place", ["lib/firmware/nvidia/570.195.03/gsp_ga10x.bin", "usr/lib/wsl/lib/nvcubins.bin"])
def test_a_container_has_the_profile_in_a_file_that_the_toolkit_mounts(node: MakeNode, place: str) -> None:
    machine = node("t4-x4")
    copy = machine.root / place
    copy.parent.mkdir(parents=True)
    machine.profile_path.rename(copy)
    assert len(machine.output("-L").splitlines()) == 4


def test_the_profile_of_the_node_comes_first(node: MakeNode) -> None:
    machine = node("t4-x4")
    copy = machine.root / "lib/firmware/nvidia/1/gsp_ga10x.bin"
    copy.parent.mkdir(parents=True)
    copy.write_text("---\nplatform: linux\ngpus: []\n...\n")
    assert len(machine.output("-L").splitlines()) == 4


NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA "
    "driver is installed and running.\n\n"
)


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        (faults.unload_driver, 9, NO_DRIVER),
        (
            lambda profile: faults.mismatch_driver(profile, "580.95.05"),
            18,
            "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.159\n",
        ),
        (faults.deny_driver, 255, "Failed to initialize NVML: Unknown Error\n"),
        (faults.block_driver, 17, "Failed to initialize NVML: GPU access blocked by the operating system\n"),
    ],
)
def test_faults_of_the_driver(node: MakeNode, change: faults.Change, code: int, text: str) -> None:
    machine = node("h100-x8")
    machine.change(change)
    for arguments in ([], ["-L"], ["-q", "-x"], ["--query-gpu=name", "--format=csv"], ["--version"], ["topo", "-m"]):
        done = machine.smi(*arguments)
        assert (done.returncode, done.stdout) == (code, text)
    machine.change(faults.restore_driver)
    assert len(machine.output("-L").splitlines()) == 8


def test_a_machine_without_a_profile_has_no_driver_and_one_without_a_control_node_is_kept_from_it(
    node: MakeNode,
) -> None:
    machine = node("h100-x8")
    machine.hide("nvidiactl")
    blocked = (17, "Failed to initialize NVML: GPU access blocked by the operating system\n")
    assert (machine.smi().returncode, machine.smi().stdout) == blocked
    other = node("t4-x4")
    other.profile_path.unlink()
    assert (other.smi().returncode, other.smi().stdout) == (9, NO_DRIVER)


@pytest.mark.parametrize("how", ["fault", "no dxg"])
def test_wsl_blocked_by_windows(node: MakeNode, how: str) -> None:
    machine = node("rtx4090-wsl")
    if how == "fault":
        machine.change(faults.block_driver)
    else:
        machine.hide("dxg")
    done = machine.smi()
    assert done.returncode == 17
    assert done.stdout == (
        "Failed to initialize NVML: GPU access blocked by the operating system\n"
        "Failed to properly shut down NVML: GPU access blocked by the operating system\n"
    )


@pytest.mark.parametrize(
    ("change", "code", "reason"), [(faults.lose_gpu, 15, LOST), (faults.break_gpu, 255, "Unknown Error")]
)
def test_a_gpu_off_the_bus(node: MakeNode, change: Callable[..., None], code: int, reason: str) -> None:
    machine = node("h100-x8")
    machine.change(lambda profile: change(profile, 2))
    for arguments in ([], ["-q", "-x"], ["-q"], ["--query-gpu=name", "--format=csv"], ["-i", "2"]):
        done = machine.smi(*arguments)
        assert (done.returncode, done.stdout) == (
            code,
            f"Unable to determine the device handle for GPU0000:52:00.0: {reason}\n",
        )
    assert machine.csv("index", "-i", "1,3") == [["1"], ["3"]]
    listed = machine.smi("-L")
    assert listed.returncode == code
    assert listed.stdout.count("(UUID:") == 7
    machine.change(lambda profile: faults.recover_gpu(profile, 2))
    assert len(machine.output("-L").splitlines()) == 8


RESET = "GPU requires reset"


def test_a_gpu_that_requires_a_reset_is_named_and_its_sensors_are_errors(node: MakeNode) -> None:
    machine = node("h100-x8")
    machine.change(lambda profile: faults.require_reset(profile, 2))
    uuid = machine.profile["gpus"][2]["uuid"]
    fields = (
        "index,uuid,memory.total,pstate,temperature.gpu,utilization.gpu,clocks.sm,clocks_event_reasons.active,"
        "ecc.errors.uncorrected.volatile.total,power.draw,fan.speed,clocks.max.sm,gpu_recovery_action"
    )
    sick, well = machine.csv(fields, "-i", "2,3")
    assert sick == ["2", uuid, "81559", *[f"[{RESET}]"] * 6, "[N/A]", "[N/A]", "1980", "Reset"]
    assert well[3:5] == ["P0", "34"]
    gpu = machine.xml("-i", "2").find("gpu")
    assert gpu is not None
    assert {
        gpu.findtext(key) for key in ("temperature/gpu_temp", "performance_state", "ecc_errors/tpc_repair_pending")
    } == {RESET}
    assert (gpu.findtext("uuid"), gpu.findtext("fan_speed"), gpu.findtext("gpu_recovery_action")) == (
        uuid,
        "N/A",
        "Reset",
    )
    row = machine.output("-i", "2").splitlines()[8:10]
    assert [line.split()[-2] for line in row] == ["ERR!", "Default"]
    assert row[1].split()[1:9] == ["N/A", "ERR!", "ERR!", "N/A", "/", "N/A", "|", "0MiB"]
    assert {len(line) for line in row} == {91}
    assert len(machine.output("-L").splitlines()) == 8
    machine.change(lambda profile: faults.reset_gpu(profile, 2))
    assert machine.csv("pstate,gpu_recovery_action", "-i", "2") == [["P0", "None"]]


@pytest.mark.parametrize("take_back", [faults.recover_gpu, faults.reset_gpu])
def test_a_required_reset_ends_with_a_reset_and_other_states_do_not(take_back: Callable[..., None]) -> None:
    profile = faults.load((SIMULATOR / "profiles/t4-x4.yml").read_text())
    faults.require_reset(profile, 1)
    take_back(profile, 1)
    assert "state" not in faults.find_gpu(profile, 1)
    faults.lose_gpu(profile, 1)
    faults.reset_gpu(profile, 1)
    assert faults.find_gpu(profile, 1)["state"] == "lost"


def test_a_hanging_gpu_blocks_until_it_is_let_go(node: MakeNode) -> None:
    machine = node("t4-x4")
    machine.change(lambda profile: faults.hang_gpu(profile, 1))
    with pytest.raises(subprocess.TimeoutExpired):
        machine.smi("-L", timeout=1.0)
    assert machine.csv("index", "-i", "0") == [["0"]]
    waiting = subprocess.Popen(
        [str(machine.build / "nvidia-smi"), "-L"], env=machine.environment, stdout=subprocess.PIPE, text=True
    )
    time.sleep(0.4)
    assert waiting.poll() is None
    machine.change(lambda profile: faults.recover_gpu(profile, 1))
    text, _ = waiting.communicate(timeout=300)
    assert len(text.splitlines()) == 4


def test_a_hanging_gpu_fails_in_the_end(node: MakeNode) -> None:
    machine = node("t4-x4")
    machine.change(lambda profile: faults.hang_gpu(profile, 1, 0.3))
    assert machine.smi("-i", "1").returncode == 255


def test_mig_switched_while_the_node_runs(node: MakeNode) -> None:
    machine = node("h100-x8")
    machine.change(lambda profile: faults.set_mig(profile, 0, ["3g.40gb", "1g.10gb"], pending=True))
    assert machine.csv("mig.mode.current,mig.mode.pending")[:2] == [["Disabled", "Enabled"], ["Disabled", "Disabled"]]
    machine.change(lambda profile: faults.set_mig(profile, 0, ["3g.40gb", "1g.10gb"]))
    assert [mig["placement"] for mig in machine.profile["gpus"][0]["mig_devices"]] == ["0", "4"]
    for minor in (66, 67, 75, 76):
        (machine.root / f"dev/nvidia-caps/nvidia-cap{minor}").touch()
    assert [line[:26] for line in machine.output("-L").splitlines()[1:3]] == [
        "  MIG 3g.40gb     Device  ",
        "  MIG 1g.10gb     Device  ",
    ]
    machine.change(lambda profile: faults.set_mig(profile, 0, None))
    assert len(machine.output("-L").splitlines()) == 8


def test_remapped_rows_and_recovery_action(node: MakeNode) -> None:
    machine = node("h100-x8")
    machine.change(lambda profile: faults.remap_rows(profile, 4))
    fields = "remapped_rows.pending,remapped_rows.failure,remapped_rows.uncorrectable,gpu_recovery_action"
    assert machine.csv(fields, "-i", "3,4") == [["No", "No", "0", "None"], ["Yes", "No", "1", "Reset"]]


def test_faults_name_what_they_did_not_find(node: MakeNode) -> None:
    profile = node("t4-x4").profile
    with pytest.raises(LookupError, match="no GPU 4; it has 4"):
        faults.lose_gpu(profile, 4)
    with pytest.raises(LookupError, match="GPU-none; it has GPU-"):
        faults.lose_gpu(profile, "GPU-none")
    with pytest.raises(LookupError, match="has no MIG"):
        faults.set_mig(profile, 0, ["1g.10gb"])


def test_a_loop_follows_the_changes(node: MakeNode) -> None:
    machine = node("t4-x4")
    looping = subprocess.Popen(
        [
            str(machine.build / "nvidia-smi"),
            "--query-gpu=temperature.gpu",
            "--format=csv,noheader",
            "-i",
            "0",
            "-lms",
            "50",
        ],
        env=machine.environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert looping.stdout is not None
    assert looping.stdout.readline() == "31\n"
    machine.change(lambda profile: faults.set_value(profile, 0, "temperature.gpu_temp", "88 C"))
    seen = {looping.stdout.readline() for _ in range(20)}
    looping.send_signal(signal.SIGTERM)
    looping.wait(timeout=300)
    looping.stdout.close()
    assert "88\n" in seen


def test_a_reader_never_sees_a_torn_profile(node: MakeNode) -> None:
    """The profile is cut off and rewritten in small pieces while programs read it: each sees all GPUs or waits."""
    machine = node("h100-x8")
    text = machine.profile_path.read_bytes()
    stop = threading.Event()

    def rewrite() -> None:
        with machine.profile_path.open("r+b", buffering=0) as profile:
            while not stop.is_set():
                profile.seek(0)
                profile.truncate(0)
                for start in range(0, len(text), 512):
                    profile.write(text[start : start + 512])
                    time.sleep(0.0002)
                time.sleep(0.05)

    writer = threading.Thread(target=rewrite)
    writer.start()
    try:
        for _ in range(60):
            done = machine.smi("-L")
            assert (done.returncode, len(done.stdout.splitlines())) == (0, 8), done.stdout
    finally:
        stop.set()
        writer.join()


def test_a_running_program_keeps_its_state_over_a_broken_profile(node: MakeNode) -> None:
    machine = node("t4-x4")
    looping = subprocess.Popen(
        [str(machine.build / "nvidia-smi"), "--query-gpu=index", "--format=csv,noheader", "-lms", "20"],
        env=machine.environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert looping.stdout is not None
    assert [looping.stdout.readline() for _ in range(4)] == ["0\n", "1\n", "2\n", "3\n"]
    machine.profile_path.write_text("---\nplatform: [linux\ngpus: {\n...\n")
    assert [looping.stdout.readline() for _ in range(8)] == ["0\n", "1\n", "2\n", "3\n"] * 2
    looping.terminate()
    looping.wait(timeout=300)
    looping.stdout.close()


def test_a_profile_without_an_end_counts_once_it_rests(node: MakeNode) -> None:
    machine = node("t4-x4")
    text = machine.profile_path.read_text()
    assert text.endswith("\n...\n")
    machine.profile_path.write_text(text.removesuffix("...\n"))
    start = time.monotonic()
    assert len(machine.output("-L").splitlines()) == 4
    assert time.monotonic() - start > 0.5
    old = time.time() - 10
    os.utime(machine.profile_path, (old, old))
    start = time.monotonic()
    assert len(machine.output("-L").splitlines()) == 4
    assert time.monotonic() - start < 0.9


def test_faults_in_a_container_keep_the_inode(node: MakeNode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The command goes through docker exec; here a stand-in runs what it is given, in the node's root."""
    machine = node("t4-x4")
    copy = machine.root / "lib/firmware/nvidia/570.195.03/gsp_ga10x.bin"
    copy.parent.mkdir(parents=True)
    copy.write_text("old")
    docker = tmp_path / "docker"
    log = tmp_path / "log"
    docker.write_text(
        "#!/bin/sh\n"
        f'echo "$*" | head -n 1 >> {log}\n'
        '[ "$1" = exec ] && shift; [ "$1" = -i ] && shift; shift\n'
        "for last; do :; done\n"
        f'last=$(printf "%s" "$last" | sed -E "s,/(etc/gpufarm|lib/firmware|dev/nvidia),{machine.root}/\\1,g")\n'
        'case $1 in sh) exec sh -c "$last";; cat) exec cat "$last";; rm) exec rm -f "$last";; esac\n'
    )
    docker.chmod(0o755)
    monkeypatch.setenv("GPUFARM_DOCKER", str(docker))
    inode = machine.profile_path.stat().st_ino
    assert faults.main(["some-node", "lose-gpu", "3"]) == 0
    assert machine.profile_path.stat().st_ino == inode
    assert copy.read_text() == machine.profile_path.read_text()
    assert machine.smi().returncode == 15
    assert log.read_text().splitlines()[0] == f"exec some-node cat {faults.PROFILE_PATH}"
    assert log.read_text().splitlines()[1].startswith("exec -i some-node sh -c")
    assert faults.main(["some-node", "recover-gpu", "3"]) == 0
    assert faults.main(["some-node", "hide-gpu", "3"]) == 0
    assert len(machine.output("-L").splitlines()) == 3


def test_faults_report_a_container_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPUFARM_DOCKER", "/bin/false")
    assert faults.main(["nowhere", "lose-gpu", "0"]) == 1
    assert "nowhere" in capsys.readouterr().err


# The kernel log


def profile_of(name: str) -> faults.Profile:
    return faults.load((SIMULATOR / "profiles" / f"{name}.yml").read_text())


@pytest.mark.parametrize(
    ("which", "number", "text", "message"),
    [
        (1, 79, None, "NVRM: Xid (PCI:0000:00:1c): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."),
        ("1", 46, None, "NVRM: Xid (PCI:0000:00:1c): 46, pid=4711, name=python"),
        ("GPU-3672890b-e127-9850-0c65-415ee8cf8a17", 48, "DBE", "NVRM: Xid (PCI:0000:00:1b): 48, DBE"),
    ],
)
def test_an_xid_is_told_as_the_driver_tells_it(which: int | str, number: int, text: str | None, message: str) -> None:
    assert faults.xid_message(profile_of("t4-x4"), which, number, text) == message


def test_no_xid_of_an_unknown_gpu_nor_under_wsl() -> None:
    with pytest.raises(LookupError, match="no GPU 4"):
        faults.xid_message(profile_of("t4-x4"), 4, 79)
    with pytest.raises(LookupError, match="Windows has it"):
        faults.xid_message(profile_of("rtx4090-wsl"), 0, 79)


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A docker that runs in this folder what it is told to run in a container, with stand-ins for systemd and journald.

    The node's /dev, /run and /proc are folders here. Its journald imports /dev/kmsg as far as `broken` is not there.
    """
    root = tmp_path / "node"
    for folder in ("bin", "dev", "run/systemd/journal", "proc", "etc/gpufarm-simulator"):
        (root / folder).mkdir(parents=True)
    shutil.copy(SIMULATOR / "profiles/t4-x4.yml", root / "etc/gpufarm-simulator/gpu.yml")
    (root / "proc/uptime").write_text("6421.19 1.00\n")
    scripts = {
        "docker": f"""
            shift; [ "$1" = -i ] && shift; shift
            for word do
                shift
                set -- "$@" "$(printf '%s' "$word" | sed -E 's,/(dev/(\\.?kmsg)|run/|proc/|etc/),{root}/\\1,g')"
            done
            PATH={root}/bin:$PATH exec "$@"
        """,
        "systemd-run": 'while [ "$1" != sh ]; do shift; done; "$@" >/dev/null 2>&1 & echo $! >$0.pid',
        "systemctl": f"""
            echo "$*" >>$0.calls
            [ -e {root}/broken ] || python3 -c '
            import os, struct
            fifo = os.open("{root}/dev/kmsg", os.O_RDWR)
            while True:
                head, _, message = os.read(fifo, 8192).decode().partition(";")
                priority, sequence, usec, _ = head.split(",")
                assert (priority, usec) == ("3", "6421190000"), head
                with open("{root}/run/systemd/journal/kernel-seqnum", "wb") as file:
                    file.write(struct.pack("=Q", int(sequence) + 1))
                with open("{root}/log", "a") as file:
                    file.write(message)
                with open("{root}/sequences", "a") as file:
                    file.write(sequence + chr(10))
            ' >/dev/null 2>&1 &
            echo $! >$0.pid
        """,
        "journalctl": f"cat {root}/log 2>/dev/null",
    }
    for name, script in scripts.items():
        path = root / "bin" / name
        path.write_text(f"#!/bin/sh\n{textwrap.dedent(script)}\n")
        path.chmod(0o755)
    monkeypatch.setenv("GPUFARM_DOCKER", str(root / "bin/docker"))
    yield root
    for path in (root / "bin").glob("*.pid"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(path.read_text()), signal.SIGKILL)


def test_the_first_xid_gives_the_node_a_kernel_log(docker: Path) -> None:
    assert faults.main(["node", "xid", "1", "79"]) == 0
    assert faults.main(["node", "xid", "2", "48", "--text", 'it\'s "so" $HOME']) == 0
    assert (docker / "log").read_text().splitlines() == [
        "NVRM: Xid (PCI:0000:00:1c): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
        'NVRM: Xid (PCI:0000:00:1d): 48, it\'s "so" $HOME',
    ]
    assert (docker / "sequences").read_text().splitlines() == ["0", "1"]
    assert (docker / "dev/kmsg").is_fifo()
    assert (docker / "bin/systemctl.calls").read_text() == "restart systemd-journald\n"


def test_a_node_has_the_kernels_first_line(docker: Path) -> None:
    faults.start_kernel_log("node")
    (line,) = (docker / "log").read_text().splitlines()
    assert line.startswith(f"Linux version {os.uname().release} ")


def test_an_xid_that_journald_does_not_import_is_an_error(docker: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (docker / "broken").touch()
    assert faults.main(["node", "xid", "1", "79"]) == 1
    assert "journald did not import the message" in capsys.readouterr().err


def test_the_machines_own_kernel_log_is_left_alone(docker: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (docker / "dev/kmsg").symlink_to("/dev/null")
    assert faults.main(["node", "xid", "1", "79"]) == 1
    assert "which nothing here writes to" in capsys.readouterr().err


def test_the_documentation_names_every_profile() -> None:
    text = (SIMULATOR.parents[2] / "docs/molecule.md").read_text(encoding="utf-8")
    (named,) = re.findall(r"Profiles are ([^.]*?),\s+whose node", text)
    assert sorted(re.findall("`([^`]+)`", named)) == sorted(
        path.stem for path in (SIMULATOR / "profiles").glob("*.yml")
    )
