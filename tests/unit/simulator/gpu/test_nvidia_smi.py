"""What the nvidia-smi double answers, compared with a recording of the real one."""

from __future__ import annotations

import os
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable

import pytest

from tests.simulator.cache import ROOT
from tests.simulator.gpu import faults

from .conftest import FIXTURES, PROFILES, Node

# What real ones have answered, which parsers are held to as well.
RECORDED = ROOT / "tests/unit/plugins/module_utils/nvidia_smi_corpus"

MakeNode = Callable[[str], Node]

GPU_COUNTS = {
    "t4-x4": 4,
    "a30-x2": 2,
    "a100-40gb-x2": 2,
    "b200-x2": 2,
    "h100-x8": 8,
    "h200-x2": 2,
    "a100-mig-x2": 2,
    "rtx4090-wsl": 1,
}


def paths(element: ET.Element, parent: str = "") -> set[str]:
    """Return the paths of all elements below and including this one."""
    path = f"{parent}/{element.tag}"
    return {path}.union(*(paths(child, path) for child in element))


def labels(text: str) -> set[str]:
    """Return the labels of the text form, each with the indentation that places it, without values."""
    return {re.sub(r" *: .*| +$", "", line) for line in text.splitlines() if line and not line.startswith("GPU 0")}


def recorded_call(command: str) -> str:
    """Return what the recording has for a command."""
    calls = re.split(r"^\$ (.*)\n", (FIXTURES / "other-calls.txt").read_text(), flags=re.MULTILINE)
    return calls[calls.index(command) + 1]


def test_xml_has_exactly_the_paths_of_the_recording(node: MakeNode) -> None:
    recorded = paths(ET.parse(FIXTURES / "q-x.xml").getroot())  # noqa: S314  (our own file)
    assert paths(node("h100-x8").xml()) == recorded
    assert len(recorded) > 250


def test_xml_has_the_order_and_the_fixed_values_of_the_recording(node: MakeNode) -> None:
    varies = {"serial", "uuid", "pdi", "board_id", "pci_bus", "pci_device", "pci_bus_id", "module_id"}
    # Bare metal with NVSwitch, where the recording is a virtual machine.
    varies |= {"virtualization_mode", "state", "status", "cliqueId", "clusterUuid"}
    recorded = ET.parse(FIXTURES / "q-x.xml").getroot().find("gpu")  # noqa: S314  (our own file)
    simulated = node("h100-x8").xml("-i", "0").find("gpu")
    assert recorded is not None
    assert simulated is not None
    assert [one.tag for one in simulated.iter()] == [one.tag for one in recorded.iter()]
    for ours, theirs in zip(simulated.iter(), recorded.iter(), strict=True):
        if ours.tag not in varies:
            assert (ours.tag, (ours.text or "").strip()) == (theirs.tag, (theirs.text or "").strip())


def test_xml_lists_every_gpu_with_values_of_its_own(node: MakeNode) -> None:
    gpus = node("h100-x8").xml().findall("gpu")
    assert len(gpus) == 8
    for key in ("uuid", "serial", "pdi", "pci/pci_bus_id", "minor_number", "board_id", "platformInfo/module_id"):
        assert len({gpu.findtext(key) for gpu in gpus}) == 8, key
    assert [gpu.get("id") for gpu in gpus] == [gpu.findtext("pci/pci_bus_id") for gpu in gpus]


def test_xml_of_a_section_that_the_gpu_does_not_have_is_one_value(node: MakeNode) -> None:
    gpu = node("t4-x4").xml("-i", "0").find("gpu")
    assert gpu is not None
    assert gpu.findtext("remapped_rows") == "N/A"
    assert gpu.find("remapped_rows/remapped_row_pending") is None
    assert gpu.findtext("temperature/gpu_temp_max_threshold") == "96 C"
    assert gpu.find("temperature/gpu_temp_max_tlimit_threshold") is None


def test_xml_of_mig_devices(node: MakeNode) -> None:
    gpus = node("a100-mig-x2").xml().findall("gpu")
    devices = gpus[1].findall("mig_devices/mig_device")
    assert [device.findtext("index") for device in devices] == [str(number) for number in range(7)]
    assert devices[3].findtext("gpu_instance_id") == "10"
    assert devices[3].findtext("fb_memory_usage/total") == "9728 MiB"
    assert devices[3].findtext("device_attributes/shared/multiprocessor_count") == "14"
    assert gpus[0].findtext("utilization/gpu_util") == "N/A"


def test_text_has_the_labels_of_the_recording(node: MakeNode) -> None:
    recorded = labels((FIXTURES / "q.txt").read_text())
    assert labels(node("h100-x8").output("-q", "-i", "0")) == recorded
    assert len(recorded) > 150


def test_text_aligns_as_the_recording(node: MakeNode) -> None:
    def line(text: str, label: str) -> str:
        return next(line for line in text.splitlines() if line.strip().startswith(label))

    recorded, simulated = (FIXTURES / "q.txt").read_text(), node("h100-x8").output("-q", "-i", "0")
    for label in ("Product Name", "HW Thermal Slowdown", "Max", "Device Id", "CUDA Version", "Processes", "EGM"):
        assert line(simulated, label) == line(recorded, label)
    assert simulated.startswith("\n==============NVSMI LOG==============\n\nTimestamp")


def test_display_shows_only_the_sections_asked_for(node: MakeNode) -> None:
    text = node("h100-x8").output("-q", "-i", "0", "-d", "ECC,TEMPERATURE")
    assert "DRAM Uncorrectable" in text
    assert "GPU Current Temp" in text
    assert "Product Name" not in text
    assert "FB Memory Usage" not in text


def test_summary_is_the_recorded_one_but_for_the_bus_id(node: MakeNode) -> None:
    machine = node("h100-x8")
    for number in range(1, 8):
        machine.hide(f"nvidia{number}")
    simulated = machine.output().splitlines()
    recorded = recorded_call("nvidia-smi").splitlines()
    assert re.fullmatch(r"\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4} {7}", simulated[0])
    assert simulated[1:] == [line.replace("00000000:00:06.0", "00000000:1B:00.0") for line in recorded[1:]]


@pytest.mark.parametrize("name", PROFILES)
def test_every_line_of_the_summary_is_as_wide_as_the_table(node: MakeNode, name: str) -> None:
    machine = node(name)
    machine.change(lambda profile: faults.add_process(profile, 0, 4711, "/usr/bin/a-very-long-name" * 3, 1234))
    lines = machine.output().splitlines()
    assert {len(line) for line in lines[1:] if line} == {91}
    assert any("4711" in line and "1234MiB" in line for line in lines)


@pytest.mark.parametrize("name", PROFILES)
def test_list(node: MakeNode, name: str) -> None:
    machine = node(name)
    lines = machine.output("-L").splitlines()
    gpus = [line for line in lines if line.startswith("GPU")]
    for number, (line, gpu) in enumerate(zip(gpus, machine.profile["gpus"], strict=True)):
        product = faults.value(machine.profile, number, "product_name")
        assert line == f"GPU {number}: {product} (UUID: {gpu['uuid']})"
    assert len(gpus) == GPU_COUNTS[name]
    migs = [line for line in lines if not line.startswith("GPU")]
    assert len(migs) == (14 if name == "a100-mig-x2" else 0)
    pattern = r"  MIG 1g\.10gb     Device  [0-6]: \(UUID: MIG-[0-9a-f-]{36}\)"
    assert all(re.fullmatch(pattern, line) for line in migs)


def test_csv_sample_is_the_recorded_one(node: MakeNode) -> None:
    fields = (
        "index,name,uuid,memory.total,driver_version,pci.bus_id,mig.mode.current,persistence_mode,compute_mode,"
        "pstate,temperature.gpu,power.draw"
    )
    header, line = recorded_call(f"nvidia-smi --query-gpu={fields} --format=csv").splitlines()
    simulated = node("h100-x8").output(f"--query-gpu={fields}", "--format=csv").splitlines()
    assert simulated[0] == header
    ours, theirs = simulated[1].split(", "), line.split(", ")
    own = {2, 5, 11}  # uuid, bus id, and the draw, which was another one a moment later
    assert [one for at, one in enumerate(ours) if at not in own] == [
        one for at, one in enumerate(theirs) if at not in own
    ]
    assert re.fullmatch(r"\d+\.\d\d W", ours[11])
    assert len(simulated) == 9


def test_csv_knows_every_field_of_the_recorded_help(node: MakeNode) -> None:
    help_text = recorded_call("nvidia-smi --help-query-gpu")
    names = re.findall(r'^"([\w.]+)"(?: or "([\w.]+)")?$', help_text, flags=re.MULTILINE)
    every = [name for pair in names for name in pair if name]
    assert len(every) > 200
    machine = node("h100-x8")
    for start in range(0, len(every), 60):
        assert len(machine.csv(",".join(every[start : start + 60]), "-i", "0")[0]) == len(every[start : start + 60])
    assert set(re.findall(r'"([^"]+)"', machine.output("--help-query-gpu"))) == {*every, "--query-gpu"}


def test_csv_formats(node: MakeNode) -> None:
    machine = node("t4-x4")
    query = "--query-gpu=gpu_name,memory.total,utilization.gpu,pcie.link.width.current,pci.device_id"
    header = "name, memory.total [MiB], utilization.gpu [%], pcie.link.width.current, pci.device_id"
    with_units, without = "Tesla T4, 15360 MiB, 0 %, 8, 0x1EB810DE", "Tesla T4, 15360, 0, 8, 0x1EB810DE"
    assert machine.output(query, "--format=csv", "-i", "0").splitlines() == [header, with_units]
    assert machine.output(query, "--format=csv,noheader", "-i", "0").splitlines() == [with_units]
    assert machine.output(query, "--format=csv,nounits", "-i", "0").splitlines() == [header, without]
    assert machine.output(query, "--format", "csv,noheader,nounits", "--id=0").splitlines() == [without]


def test_csv_says_not_available_for_what_the_gpu_lacks(node: MakeNode) -> None:
    assert node("rtx4090-wsl").csv("ecc.mode.current,serial,mig.mode.current,fabric.state,memory.total") == [
        ["[N/A]", "[N/A]", "[N/A]", "[N/A]", "24564"]
    ]


def test_csv_sums_the_errors_of_both_memories(node: MakeNode) -> None:
    machine = node("h100-x8")
    machine.change(lambda profile: faults.ecc_errors(profile, 1, 3))
    machine.change(lambda profile: faults.set_value(profile, 1, "ecc_errors.volatile.sram_uncorrectable_parity", "2"))
    fields = "ecc.errors.uncorrected.volatile.total,ecc.errors.uncorrected.volatile.sram"
    assert machine.csv(fields)[0:2] == [["0", "0"], ["5", "2"]]


def test_csv_of_processes(node: MakeNode) -> None:
    machine = node("t4-x4")
    assert machine.output("--query-compute-apps=pid", "--format=csv").splitlines() == ["pid"]
    machine.change(lambda profile: faults.add_process(profile, 2, 4711, "python3", 512))
    query = "--query-compute-apps=gpu_uuid,pid,name,used_memory"
    uuid = machine.profile["gpus"][2]["uuid"]
    assert machine.output(query, "--format=csv").splitlines() == [
        "gpu_uuid, pid, process_name, used_gpu_memory [MiB]",
        f"{uuid}, 4711, python3, 512 MiB",
    ]
    assert machine.csv("memory.used,memory.free", "-i", "2") == [["512", str(15360 - 449 - 512)]]


@pytest.mark.parametrize("which", ["index", "uuid", "bus", "short bus", "serial"])
def test_one_gpu_can_be_chosen(node: MakeNode, which: str) -> None:
    machine = node("h100-x8")
    gpu = machine.profile["gpus"][3]
    bus_id = gpu["pci"]["pci_bus_id"]
    wanted = {
        "index": "3",
        "uuid": gpu["uuid"],
        "bus": bus_id,
        "short bus": bus_id[4:].lower(),
        "serial": gpu["serial"],
    }
    assert machine.csv("index,uuid", "-i", wanted[which]) == [["3", gpu["uuid"]]]


def test_several_gpus_can_be_chosen(node: MakeNode) -> None:
    assert node("h100-x8").csv("index", "-i", "5,2") == [["2"], ["5"]]


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--query-gpu=foo", "--format=csv"], 2, 'Field "foo" is not a valid field to query.\n\n'),
        (["-i", "8"], 6, "No devices were found\n"),
        (["--query-gpu=name", "-i", "8,GPU-no"], 6, "No devices were found\n"),
        (["--query-gpu=name=x"], 2, 'Field "name=x" is not a valid field to query.\n\n'),
        (["--list-gpus=1"], 255, "ERROR: Option --list-gpus=1 is not recognized. Please run 'nvidia-smi -h'.\n\n"),
        (["--help"], 3, ""),
        (["-q", "-d", "ECC,voltage"], 3, ""),
        (["--query-retired-pages=timestamp"], 3, ""),
        (["-pm", "1", "-q"], 3, ""),
        (
            ["-mig", "1", "-L"],
            2,
            "ERROR: Option -mig is not valid for this command. Please run 'nvidia-smi -h' for help.\n\n",
        ),
        (["-mig", "1", "-r"], 3, ""),
        (["mig", "-i", "0"], 3, ""),
        (["nvlink", "-s", "-i"], 3, ""),
        (["topo", "-m", "-m"], 3, ""),
        (["topo", "-s"], 3, ""),
        (["dmon"], 3, ""),
        (["vgpu", "-q"], 3, ""),
    ],
)
def test_wrong_calls(node: MakeNode, arguments: list[str], code: int, text: str) -> None:
    done = node("h100-x8").smi(*arguments)
    assert (done.returncode, done.stdout) == (code, text)
    assert ("is not simulated" in done.stderr) == (code == 3)


def test_every_option_and_word_of_the_recorded_help_is_known(node: MakeNode) -> None:
    """What the double does not do is refused by name; it is never an option that does not exist."""
    text = recorded_call("nvidia-smi -h")
    options = set(re.findall(r"^ {4,}(-\w+),? ", text, flags=re.MULTILINE))
    options |= set(re.findall(r"^ {4,}(?:-\w+,? +)?(--[\w-]+)", text, flags=re.MULTILINE))
    words = set(re.findall(r"^(?: [\w ]+:)? {4}([a-z][a-z0-9-]+) {5,}", text, flags=re.MULTILINE))
    assert (len(options), len(words)) == (89, 23)
    machine = node("t4-x4")
    for word in sorted(options | words):
        assert "recognized" not in machine.smi(word, timeout=300).stdout or word == "--format", word


def test_topology(node: MakeNode) -> None:
    lines = node("h100-x8").output("topo", "-m").splitlines()
    assert lines[0] == "\t\033[4m" + "\t".join(f"GPU{n}" for n in range(8)) + (
        "\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\033[0m"
    )
    assert lines[1].split("\t") == ["GPU0", " X ", *["NV18"] * 7, "0-47,96-143", "0", "", "N/A"]
    assert lines[8].split("\t")[8:] == [" X ", "48-95,144-191", "1", "", "N/A"]
    legend = recorded_call("nvidia-smi topo -m")
    assert "\n".join(lines[9:]) == legend[legend.index("\n\nLegend") + 1 :].rstrip("\n")


def test_topology_without_nvlink(node: MakeNode) -> None:
    lines = node("t4-x4").output("topo", "-m").splitlines()
    assert lines[2].split("\t")[:5] == ["GPU1", "PHB", " X ", "PHB", "PHB"]


def test_errors_of_nvlinks(node: MakeNode) -> None:
    """The recording has two GPUs, of another machine."""
    machine = node("h100-x8")
    recorded = (RECORDED / "580.159.04-2x-h100.nvlink.txt").read_text()
    uuids = iter(re.findall(r"UUID: (\S+)\)", machine.output("-L")))
    wanted = re.sub(r"UUID: \S+\)", lambda _: f"UUID: {next(uuids)})", recorded)
    assert machine.output("nvlink", "-s", "-e", "-i", "0,1") == wanted
    assert machine.output("nvlink", "-e", "-i", "0,1") == re.sub(r"\t Link \d+: 26.562 GB/s\n", "", wanted)
    machine.change(lambda profile: faults.set_value(profile, 1, "nvlink.recovery_errors.7", "3"))
    changed = machine.output("nvlink", "-s", "-e", "-i", "0,1")
    assert changed.count("Link 7: Recovery Errors: 3\n") == 1
    assert changed.replace("Recovery Errors: 3\n", "Recovery Errors: 0\n") == wanted


def test_mig_listings(node: MakeNode) -> None:
    machine = node("h100-x8")
    for number in range(1, 8):
        machine.hide(f"nvidia{number}")
    assert machine.output("mig", "-lgip") == recorded_call("nvidia-smi mig -lgip")
    none = machine.smi("mig", "-lgi")
    assert (none.returncode, none.stdout) == (0, recorded_call("nvidia-smi mig -lgi"))
    instances = node("a100-mig-x2").output("mig", "-lgi", "-i", "0").splitlines()
    assert sum("MIG 1g.10gb" in line for line in instances) == 7
    assert {len(line) for line in instances} == {59}


def test_persistence_mode(node: MakeNode) -> None:
    machine = node("t4-x4")
    done = machine.smi("-pm", "1", "-i", "1")
    if os.geteuid() != 0:
        assert done.returncode == 4
        assert "Insufficient Permissions" in done.stdout
        return
    assert done.stdout == "Enabled persistence mode for GPU 00000000:00:1C.0.\nAll done.\n"
    assert machine.csv("persistence_mode") == [["Disabled"], ["Enabled"], ["Disabled"], ["Disabled"]]
    again = machine.output("-pm", "1", "-i", "1")
    assert again == "Persistence mode is already Enabled for GPU 00000000:00:1C.0.\nAll done.\n"
    assert machine.output("-pm", "0").count("isabled persistence mode") == 1
    assert machine.csv("persistence_mode") == [["Disabled"]] * 4


def test_version(node: MakeNode) -> None:
    assert node("rtx4090-wsl").output("--version").splitlines() == [
        "NVIDIA-SMI version  : 580.102.01",
        "NVML version        : 580.102",
        "DRIVER version      : 581.57",
        "CUDA Version        : 13.0",
    ]


def test_output_to_a_file(node: MakeNode) -> None:
    machine = node("t4-x4")
    target = machine.root / "log"
    target.write_text("old " * 1000)
    assert machine.output("--query-gpu=name,uuid", "-f", str(target)) == ""
    assert target.read_text() == machine.output("--query-gpu=name,uuid")
