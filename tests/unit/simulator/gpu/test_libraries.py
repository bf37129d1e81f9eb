"""The libraries of the double, as the programs that will load them use them."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.simulator.gpu import faults

from .conftest import PROFILES, SIMULATOR, Node

MakeNode = Callable[[str], Node]

pynvml = pytest.mark.skipif(importlib.util.find_spec("pynvml") is None, reason="nvidia-ml-py is not installed")


def python(machine: Node, code: str, **environment: str) -> Any:
    """Run Python in the node and return what it leaves in `answer`."""
    # Some of pynvml's calls return a ctypes number, some bytes.
    program = textwrap.dedent(code) + (
        "\nimport json; "
        "print(json.dumps(answer, default=lambda it: it.decode() if isinstance(it, bytes) else it.value))\n"
    )
    done = machine.run(sys.executable, "-c", program, extra=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def needed(library: Path) -> set[str]:
    text = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True, check=True).stdout
    return {line.split("[")[1].rstrip("]") for line in text.splitlines() if "(NEEDED)" in line}


def test_nothing_but_glibc_is_needed_at_run_time(build: Path) -> None:
    files = [path for path in build.iterdir() if path.suffix != ".o"]
    assert {path.name for path in files} == {
        "libnvidia-ml.so.1",
        "libcuda.so.1",
        "libdxcore.so",
        "wsl-uname.so",
        "nvidia-smi",
        "gpufarm-gpu-profile",
    }
    for path in files:
        assert needed(path) <= {"libc.so.6", "libm.so.6"}, path.name


def test_the_libraries_keep_their_parser_to_themselves(build: Path) -> None:
    for name in ("libnvidia-ml.so.1", "libcuda.so.1", "libdxcore.so"):
        listing = subprocess.run(
            ["nm", "-D", "--defined-only", str(build / name)], capture_output=True, text=True, check=True
        )
        symbols = {line.split()[-1] for line in listing.stdout.splitlines()}
        assert symbols
        assert not {symbol for symbol in symbols if not symbol.startswith(("nvml", "cu", "D3DKMT", "gpufarmSim"))}


@pynvml
def test_pynvml_reads_a_whole_gpu(node: MakeNode) -> None:
    machine = node("h100-x8")
    machine.change(lambda profile: faults.add_process(profile, 5, 4711, "python3", 512))
    answer = python(
        machine,
        """
        from pynvml import *
        nvmlInit()
        h = nvmlDeviceGetHandleByIndex(5)
        pci = nvmlDeviceGetPciInfo(h)
        answer = dict(
            count=nvmlDeviceGetCount(), name=nvmlDeviceGetName(h), uuid=nvmlDeviceGetUUID(h),
            serial=nvmlDeviceGetSerial(h), index=nvmlDeviceGetIndex(h), minor=nvmlDeviceGetMinorNumber(h),
            driver=nvmlSystemGetDriverVersion(), nvml=nvmlSystemGetNVMLVersion(), cuda=nvmlSystemGetCudaDriverVersion(),
            memory=nvmlDeviceGetMemoryInfo(h).total, memory2=nvmlDeviceGetMemoryInfo(h, nvmlMemory_v2).reserved,
            used1=nvmlDeviceGetMemoryInfo(h).used, used2=nvmlDeviceGetMemoryInfo(h, nvmlMemory_v2).used,
            utilization=nvmlDeviceGetUtilizationRates(h).gpu, bus=pci.busId, legacy=pci.busIdLegacy,
            numbers=[pci.domain, pci.bus, pci.device, pci.pciDeviceId, pci.pciSubSystemId],
            mig=nvmlDeviceGetMigMode(h), is_mig=nvmlDeviceIsMigDeviceHandle(h), ecc=nvmlDeviceGetEccMode(h),
            errors=nvmlDeviceGetTotalEccErrors(h, NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC),
            power=[nvmlDeviceGetPowerUsage(h), nvmlDeviceGetPowerManagementLimit(h),
                   nvmlDeviceGetPowerManagementLimitConstraints(h)],
            temperature=nvmlDeviceGetTemperature(h, NVML_TEMPERATURE_GPU),
            processes=[[p.pid, p.usedGpuMemory] for p in nvmlDeviceGetComputeRunningProcesses(h)],
            graphics=len(nvmlDeviceGetGraphicsRunningProcesses(h)),
            architecture=nvmlDeviceGetArchitecture(h) == NVML_DEVICE_ARCH_HOPPER,
            brand=nvmlDeviceGetBrand(h) == NVML_BRAND_NVIDIA, capability=nvmlDeviceGetCudaComputeCapability(h),
            clocks=[nvmlDeviceGetMaxClockInfo(h, NVML_CLOCK_SM), nvmlDeviceGetClockInfo(h, NVML_CLOCK_MEM)],
            supported=len(nvmlDeviceGetSupportedGraphicsClocks(h, 2619)),
            rows=nvmlDeviceGetRemappedRows(h), histogram=nvmlDeviceGetRowRemapperHistogram(h).max,
            affinity=list(nvmlDeviceGetCpuAffinity(h, 3)), persistence=nvmlDeviceGetPersistenceMode(h),
            links=sum(nvmlDeviceGetNvLinkState(h, link) for link in range(18)),
            level=[nvmlDeviceGetTopologyCommonAncestor(h, nvmlDeviceGetHandleByIndex(i)) for i in (0, 4)],
            bar=nvmlDeviceGetBAR1MemoryInfo(h).bar1Total, state=nvmlDeviceGetPerformanceState(h),
            reasons=nvmlDeviceGetCurrentClocksEventReasons(h), by_uuid=nvmlDeviceGetIndex(
                nvmlDeviceGetHandleByUUID(nvmlDeviceGetUUID(h))),
            by_bus=nvmlDeviceGetIndex(nvmlDeviceGetHandleByPciBusId(pci.busId)),
            field=nvmlDeviceGetFieldValues(h, [NVML_FI_DEV_MEMORY_TEMP])[0].value.uiVal,
            part=nvmlDeviceGetBoardPartNumber(h), vbios=nvmlDeviceGetVbiosVersion(h),
            gsp=nvmlDeviceGetGspFirmwareVersion(h), process=nvmlSystemGetProcessName(4711),
        )
        fabric = c_nvmlGpuFabricInfo_v2_t()
        nvmlDeviceGetGpuFabricInfoV(h, byref(fabric))
        answer["fabric"] = [fabric.state, fabric.status]
        nvmlShutdown()
        """,
    )
    gpu = machine.profile["gpus"][5]
    mib = 1024 * 1024
    expected = {
        "count": 8,
        "name": "NVIDIA H100 80GB HBM3",
        "uuid": gpu["uuid"],
        "serial": gpu["serial"],
        "index": 5,
        "minor": 5,
        "driver": "580.159.04",
        "nvml": "13.580.159.04",
        "cuda": 13000,
        "memory": 81559 * mib,
        "memory2": 480 * mib,
        "used1": (480 + 512) * mib,
        "used2": 512 * mib,
        "utilization": 0,
        "bus": "00000000:C3:00.0",
        "legacy": "0000:C3:00.0",
        "numbers": [0, 0xC3, 0, 0x233010DE, 0x16C110DE],
        "mig": [0, 0],
        "is_mig": 0,
        "ecc": [1, 1],
        "errors": 0,
        "power": [70540, 700000, [200000, 700000]],
        "temperature": 34,
        "processes": [[4711, 512 * mib]],
        "graphics": 0,
        "architecture": True,
        "brand": True,
        "capability": [9, 0],
        "clocks": [1980, 2619],
        "supported": 110,
        "rows": [0, 0, 0, 0],
        "histogram": 2560,
        # CPUs 48-95 and 144-191, in 64-bit words.
        "affinity": [
            sum(1 << cpu % 64 for cpu in (*range(48, 96), *range(144, 192)) if cpu // 64 == word) for word in range(3)
        ],
        "persistence": 1,
        "links": 18,
        "level": [50, 40],
        "bar": 131072 * mib,
        "state": 0,
        "reasons": 1,
        "by_uuid": 5,
        "by_bus": 5,
        "field": 37,
        "part": "695-2G520-0200-000",
        "vbios": "96.00.DA.00.0C",
        "gsp": "580.159.04",
        "process": "python3",
        "fabric": [3, 0],
    }
    assert answer == expected


@pynvml
def test_links_lead_to_switches_that_are_not_on_the_bus(node: MakeNode) -> None:
    """As two H200 in a virtual machine say. NVIDIA's device plugin asks each link before it gives a GPU."""
    program = """
        from pynvml import *
        nvmlInit()
        h = nvmlDeviceGetHandleByIndex(0)
        answer = []
        for link in (0, 17, 18):
            try:
                pci = nvmlDeviceGetNvLinkRemotePciInfo(h, link)
                numbers = [pci.domain, pci.bus, pci.device, pci.pciDeviceId, pci.pciSubSystemId]
                answer.append([pci.busId, pci.busIdLegacy, *numbers])
            except NVMLError as error:
                answer.append(error.value)
    """
    whole = 0xFFFFFFFF
    remote = ["FFFFFFFF:FF:FF.0", "FFFFFFF:FF:FF.0", whole, 0xFF, 0xFF, whole, 0]
    invalid, not_supported = 2, 3
    assert python(node("h200-x2"), program) == [remote, remote, invalid]
    assert python(node("t4-x4"), program) == [not_supported] * 3


@pynvml
def test_pynvml_reads_mig_devices(node: MakeNode) -> None:
    machine = node("a100-mig-x2")
    answer = python(
        machine,
        """
        from pynvml import *
        nvmlInit()
        parent = nvmlDeviceGetHandleByIndex(1)
        migs = [nvmlDeviceGetMigDeviceHandleByIndex(parent, i) for i in range(nvmlDeviceGetMaxMigDeviceCount(parent))]
        mig = nvmlDeviceGetHandleByUUID(nvmlDeviceGetUUID(migs[2]))
        attributes = nvmlDeviceGetAttributes_v2(mig)
        instance = nvmlDeviceGetGpuInstanceById(parent, nvmlDeviceGetGpuInstanceId(mig))
        answer = dict(
            uuids=[nvmlDeviceGetUUID(one) for one in migs], name=nvmlDeviceGetName(mig),
            is_mig=nvmlDeviceIsMigDeviceHandle(mig), memory=nvmlDeviceGetMemoryInfo(mig).total >> 20,
            parent=nvmlDeviceGetIndex(nvmlDeviceGetDeviceHandleFromMigDeviceHandle(mig)),
            instances=[nvmlDeviceGetGpuInstanceId(mig), nvmlDeviceGetComputeInstanceId(mig)],
            attributes=[attributes.multiprocessorCount, attributes.gpuInstanceSliceCount, attributes.memorySizeMB],
            profile=nvmlGpuInstanceGetInfo(instance).profileId,
            slices=nvmlDeviceGetGpuInstanceProfileInfo(parent, NVML_GPU_INSTANCE_PROFILE_1_SLICE).instanceCount,
        )
        try:
            nvmlDeviceGetUtilizationRates(parent)
        except NVMLError_NotSupported:
            answer["utilization"] = "not supported"
        """,
    )
    migs = machine.profile["gpus"][1]["mig_devices"]
    assert answer == {
        "uuids": [mig["uuid"] for mig in migs],
        "name": "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
        "is_mig": 1,
        "memory": 9728,
        "parent": 1,
        "instances": [9, 0],
        "attributes": [14, 1, 9728],
        "profile": 19,
        "slices": 7,
        "utilization": "not supported",
    }


@pynvml
@pytest.mark.parametrize(
    ("change", "error"),
    [
        (faults.unload_driver, "DriverNotLoaded"),
        (lambda profile: faults.mismatch_driver(profile, "1.2.3"), "LibRmVersionMismatch"),
        (faults.deny_driver, "Unknown"),
        (lambda profile: faults.lose_gpu(profile, 0), "GpuIsLost"),
        (lambda profile: faults.break_gpu(profile, 0), "Unknown"),
        (lambda profile: faults.require_reset(profile, 0), "ResetRequired"),
        (faults.block_driver, "OperatingSystem"),
    ],
)
def test_pynvml_meets_the_faults(node: MakeNode, change: faults.Change, error: str) -> None:
    machine = node("t4-x4")
    machine.change(change)
    answer = python(
        machine,
        """
        from pynvml import *
        try:
            nvmlInit()
            nvmlDeviceGetTemperature(nvmlDeviceGetHandleByIndex(0), NVML_TEMPERATURE_GPU)
            answer = None
        except NVMLError as error:
            answer = type(error).__name__
        """,
    )
    assert answer == f"NVMLError_{error}"


@pynvml
def test_a_running_program_meets_changes_and_events(node: MakeNode) -> None:
    machine = node("t4-x4")
    answer = python(
        machine,
        f"""
        import sys
        sys.path.insert(0, {str(SIMULATOR.parents[2])!r})
        from pathlib import Path
        from pynvml import *
        from tests.simulator.gpu import faults
        path = Path({str(machine.profile_path)!r})
        def change(what):
            faults.apply(path.read_text, path.write_text, what)
        nvmlInit()
        h = nvmlDeviceGetHandleByIndex(2)
        events = nvmlEventSetCreate()
        nvmlDeviceRegisterEvents(h, nvmlEventTypeXidCriticalError, events)
        answer = [nvmlDeviceGetTemperature(h, 0)]
        change(lambda profile: faults.set_value(profile, 2, "temperature.gpu_temp", "90 C"))
        answer.append(nvmlDeviceGetTemperature(h, 0))
        change(lambda profile: faults.lose_gpu(profile, 2))
        answer.append(nvmlEventSetWait_v2(events, 1000).eventData)
        try:
            nvmlDeviceGetTemperature(h, 0)
        except NVMLError_GpuIsLost:
            answer.append("lost")
        answer.append(nvmlDeviceGetCount())
        change(lambda profile: faults.recover_gpu(profile, 2))
        answer.append(nvmlDeviceGetTemperature(h, 0))
        """,
    )
    assert answer == [31, 90, 79, "lost", 4, 90]


@pynvml
def test_the_ancestor_of_the_nomad_plugin_finds_what_it_cannot_do_without(node: MakeNode) -> None:
    """It takes a GPU without a minor number for unsupported, under WSL too."""
    for name in PROFILES:
        answer = python(
            node(name),
            """
            from pynvml import *
            nvmlInit()
            h = nvmlDeviceGetHandleByIndex(0)
            answer = [nvmlDeviceGetMinorNumber(h), nvmlDeviceGetBAR1MemoryInfo(h).bar1Total > 0,
                      nvmlDeviceGetMaxPcieLinkGeneration(h) > 2, nvmlDeviceGetMaxClockInfo(h, NVML_CLOCK_MEM) > 0,
                      nvmlDeviceGetPowerManagementLimit(h) > 0, nvmlDeviceGetDisplayMode(h) in (0, 1),
                      nvmlDeviceGetDisplayActive(h) in (0, 1), nvmlDeviceGetPersistenceMode(h) in (0, 1),
                      nvmlDeviceGetAccountingMode(h), nvmlDeviceGetAccountingBufferSize(h)]
            """,
        )
        assert answer == [0, True, True, True, True, True, True, True, 0, 4000], name


CUDA = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
code = cuda.cuInit(0)
answer = {"init": code, "devices": []}
count = ctypes.c_int()
if not code:
    cuda.cuDeviceGetCount(ctypes.byref(count))
for ordinal in range(count.value):
    device, uuid, name = ctypes.c_int(), (ctypes.c_ubyte * 16)(), ctypes.create_string_buffer(96)
    memory = ctypes.c_size_t()
    cuda.cuDeviceGet(ctypes.byref(device), ordinal)
    cuda.cuDeviceGetUuid_v2(uuid, device)
    cuda.cuDeviceGetName(name, 96, device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    answer["devices"].append([bytes(uuid).hex(), name.value.decode(), memory.value >> 20])
text = ctypes.c_char_p()
cuda.cuGetErrorString(code, ctypes.byref(text))
answer["text"] = text.value.decode()
version = ctypes.c_int()
cuda.cuDriverGetVersion(ctypes.byref(version))
answer["version"] = version.value
"""


def plain(uuid: str) -> str:
    return uuid.split("-", 1)[1].replace("-", "")


def test_cuda_sees_all_gpus(node: MakeNode) -> None:
    machine = node("t4-x4")
    answer = python(machine, CUDA)
    assert answer["devices"] == [[plain(gpu["uuid"]), "Tesla T4", 15360] for gpu in machine.profile["gpus"]]
    assert (answer["init"], answer["text"], answer["version"]) == (0, "no error", 12080)


@pytest.mark.parametrize(
    ("choose", "seen"),
    [
        ("2,0", [2, 0]),
        ("{3},{1:.12}", [3, 1]),
        ("1,9,2", [1]),
        ("1,1", []),
        ("", []),
        ("-1", []),
        ("GPU-none", []),
    ],
)
def test_cuda_honours_cuda_visible_devices(node: MakeNode, choose: str, seen: list[int]) -> None:
    machine = node("t4-x4")
    uuids = [gpu["uuid"] for gpu in machine.profile["gpus"]]
    answer = python(machine, CUDA, CUDA_VISIBLE_DEVICES=choose.format(*uuids))
    assert [device[0] for device in answer["devices"]] == [plain(uuids[one]) for one in seen]
    assert answer["init"] == (0 if seen else 101 if choose == "1,1" else 100)


def test_cuda_counts_among_the_visible_gpus(node: MakeNode) -> None:
    machine = node("t4-x4")
    machine.hide("nvidia0")
    answer = python(machine, CUDA, CUDA_VISIBLE_DEVICES="0")
    assert [device[0] for device in answer["devices"]] == [plain(machine.profile["gpus"][1]["uuid"])]


def test_cuda_sees_one_mig_device_at_most(node: MakeNode) -> None:
    machine = node("a100-mig-x2")
    first, second = (gpu["mig_devices"] for gpu in machine.profile["gpus"])
    assert [device[0] for device in python(machine, CUDA)["devices"]] == [plain(first[0]["uuid"])]
    answer = python(machine, CUDA, CUDA_VISIBLE_DEVICES=second[4]["uuid"] + "," + first[1]["uuid"])
    assert answer["devices"] == [[plain(second[4]["uuid"]), "NVIDIA A100-SXM4-80GB MIG 1g.10gb", 9728]]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (faults.unload_driver, 100),
        (lambda profile: faults.mismatch_driver(profile, "1.2.3"), 803),
        (faults.deny_driver, 100),
        (faults.block_driver, 100),
    ],
)
def test_cuda_meets_the_faults(node: MakeNode, change: faults.Change, code: int) -> None:
    machine = node("t4-x4")
    machine.change(change)
    assert python(machine, CUDA)["init"] == code


def test_cuda_leaves_out_a_gpu_that_requires_a_reset(node: MakeNode) -> None:
    machine = node("t4-x4")
    machine.change(lambda profile: faults.require_reset(profile, 0))
    uuids = [plain(gpu["uuid"]) for gpu in machine.profile["gpus"]]
    assert [device[0] for device in python(machine, CUDA)["devices"]] == uuids[1:]


def test_dxcore_tells_the_driver_store(node: MakeNode) -> None:
    """The calls, in the order and with the sizes of the container toolkit's internal/dxcore."""
    code = """
    import ctypes as c
    library = c.CDLL("libdxcore.so")
    class Adapter(c.Structure):
        _fields_ = [("handle", c.c_uint), ("low", c.c_uint), ("high", c.c_int), ("sources", c.c_uint), ("b", c.c_uint)]
    class Enum(c.Structure):
        _fields_ = [("filter", c.c_ulonglong), ("count", c.c_uint), ("adapters", c.POINTER(Adapter))]
    class Query(c.Structure):
        _fields_ = [("handle", c.c_uint), ("type", c.c_uint), ("data", c.c_void_p), ("size", c.c_uint)]
    class Registry(c.Structure):
        _fields_ = [("type", c.c_uint), ("flags", c.c_uint), ("name", c.c_wchar * 260), ("value", c.c_uint),
                    ("physical", c.c_uint), ("size", c.c_uint), ("status", c.c_uint), ("output", c.c_ulonglong)]
    request = Enum(1, 0, None)
    assert library.D3DKMTEnumAdapters3(c.byref(request)) == 0
    answer = [request.count]
    if request.count:
        adapters = (Adapter * request.count)()
        request.adapters = adapters
        assert library.D3DKMTEnumAdapters3(c.byref(request)) == 0
        version = c.c_uint()
        assert library.D3DKMTQueryAdapterInfo(c.byref(
            Query(adapters[0].handle, 13, c.cast(c.byref(version), c.c_void_p), 4))) == 0
        answer.append(version.value >= 2700)
        ask = Registry(type=2)
        assert library.D3DKMTQueryAdapterInfo(c.byref(
            Query(adapters[0].handle, 48, c.cast(c.byref(ask), c.c_void_p), c.sizeof(ask)))) == 0
        size = ask.size
        buffer = c.create_string_buffer(c.sizeof(Registry) + size + 4)
        again = Registry.from_buffer(buffer)
        again.type, again.size = 2, size
        assert library.D3DKMTQueryAdapterInfo(c.byref(
            Query(adapters[0].handle, 48, c.cast(buffer, c.c_void_p), c.sizeof(Registry) + size))) == 0
        answer.append(c.wstring_at(c.addressof(buffer) + Registry.output.offset, size // 4))
    """
    machine = node("rtx4090-wsl")
    assert python(machine, code) == [1, True, machine.profile["driver"]["store_path"]]
    machine.hide("dxg")
    assert python(machine, code) == [0]
    assert python(node("t4-x4"), code) == [0]


def test_uname_answers_a_wsl_kernel(build: Path) -> None:
    done = subprocess.run(
        ["uname", "-r"],
        env=os.environ | {"LD_PRELOAD": str(build / "wsl-uname.so")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "6.6.87.2-microsoft-standard-WSL2\n"
    assert platform.release() not in done.stdout


@pytest.mark.parametrize("name", PROFILES)
def test_installing_lays_out_what_the_container_toolkit_looks_for(build: Path, tmp_path: Path, name: str) -> None:
    profile = SIMULATOR / "profiles" / f"{name}.yml"
    (tmp_path / "run/gpufarm-simulator").mkdir(parents=True)
    state = tmp_path / "run/gpufarm-simulator/state.yml"
    state.touch()
    install = [str(SIMULATOR / "install-driver.sh"), str(build), str(profile), str(tmp_path)]
    for _ in range(2):  # an installation over another one is the same
        subprocess.run(install, check=True, capture_output=True)
    node = faults.load(profile.read_text())
    installed = tmp_path / "etc/gpufarm-simulator/gpu.yml"
    if node["platform"] == "wsl":
        store = tmp_path / node["driver"]["store_path"].lstrip("/")
        names = {path.name for path in store.iterdir()}
        assert {
            "libcuda.so.1.1",
            "libnvidia-ml.so.1",
            "nvcubins.bin",
            "nvidia-smi",
            "libnvidia-ptxjitcompiler.so.1",
        } <= names
        assert (tmp_path / "usr/lib/wsl/lib/libdxcore.so").exists()
        copy = store / "nvcubins.bin"
    else:
        version = node["driver"]["version"]
        libraries = tmp_path / f"usr/lib/{platform.machine()}-linux-gnu"
        assert (libraries / "libnvidia-ml.so.1").readlink() == Path(f"libnvidia-ml.so.{version}")
        assert (libraries / f"libcuda.so.{version}").is_file()
        copy = tmp_path / f"lib/firmware/nvidia/{version}/gsp_ga10x.bin"
    assert installed.stat().st_ino == copy.stat().st_ino
    assert installed.read_text() == profile.read_text()
    assert not state.exists()


def test_another_driver_version_leaves_no_firmware_of_the_old_one(build: Path, tmp_path: Path) -> None:
    script = str(SIMULATOR / "install-profile.sh")
    environment = os.environ | {"GPUFARM_GPU_PROFILE": str(build / "gpufarm-gpu-profile")}
    for name in ("t4-x4", "h100-x8"):
        profile = str(SIMULATOR / "profiles" / f"{name}.yml")
        subprocess.run([script, profile, str(tmp_path)], check=True, capture_output=True, env=environment)
    copies = [path.parent.name for path in tmp_path.glob("lib/firmware/nvidia/*/*.bin")]
    assert copies == ["580.159.04"]


def test_a_file_that_is_no_profile_is_refused(build: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.yml"
    for text in (
        "",
        "---\ngpus: [{model: none, uuid: GPU-1}]\n...\n",
        "---\ngpus: [{model: a}]\nmodels: {a: {}}\n...\n",
    ):
        broken.write_text(text)
        done = subprocess.run(
            [str(build / "gpufarm-gpu-profile"), str(broken)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 1
        assert "is not a GPU profile" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="mknod needs root and a mount namespace")
def test_devices_are_made_from_the_profile(build: Path, tmp_path: Path) -> None:
    """The script works on /dev and /proc/driver, so it runs in a mount namespace with a /dev of its own."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for path in (build / "gpufarm-gpu-profile", SIMULATOR / "gpufarm-gpu-devices", SIMULATOR / "install-profile.sh"):
        shutil.copy(path, tools)
    (tmp_path / "etc").mkdir()
    shutil.copy(SIMULATOR / "profiles" / "a100-mig-x2.yml", tmp_path / "etc/gpu.yml")
    script = f"""
        set -e
        mount -t tmpfs tmpfs /mnt
        mkdir -p /mnt/etc /mnt/upper /mnt/work /mnt/firmware
        for folder in /etc /run; do mount -t tmpfs tmpfs $folder; done
        mkdir -p /etc/gpufarm-simulator
        cp {tmp_path}/etc/gpu.yml /etc/gpufarm-simulator/gpu.yml
        mkdir -p /lib/firmware; mount -t tmpfs tmpfs /lib/firmware
        mount -t tmpfs -o dev,mode=755 tmpfs /dev; mknod -m 666 /dev/null c 1 3
        {tools}/gpufarm-gpu-devices
        stat -c '%n %t %T' /dev/nvidia*
        ls /dev/nvidia-caps | wc -l
        cat /proc/driver/nvidia-caps/mig-minors | tail -n 2
        cat /proc/driver/nvidia/gpus/0000:07:00.0/information
        module=/lib/modules/$(uname -r)/updates/dkms
        mkdir -p /lib/modules; mount -t tmpfs tmpfs /lib/modules
        mkdir -p $module; echo license=NVIDIA >$module/nvidia.ko
        {tools}/gpufarm-gpu-devices; head -n 1 /proc/driver/nvidia/version
        rm -r /proc/driver/nvidia
        {tools}/gpufarm-gpu-devices; head -n 1 /proc/driver/nvidia/version
        rm $module/nvidia.ko
        {tools}/gpufarm-gpu-devices; head -n 1 /proc/driver/nvidia/version
    """
    done = subprocess.run(
        ["unshare", "-m", "--propagation", "private", "sh", "-c", script], capture_output=True, text=True, check=False
    )
    if "mount:" in done.stderr:
        pytest.skip(f"no mounts here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "/dev/nvidia1 c3 1" in lines
    assert "/dev/nvidiactl c3 ff" in lines
    assert "/dev/nvidia-uvm 1fe 0" in lines
    assert "30" in lines  # config, monitor, and two for each of fourteen MIG devices
    assert "gpu1/gi13/ci0/access 256" in lines
    assert any(line.startswith("GPU UUID:") for line in lines)
    # The module that is installed is loaded by the next boot, and stays then.
    machine = platform.machine()
    kinds = [f"Open Kernel Module for {machine}", f"{machine} Kernel Module", f"{machine} Kernel Module"]
    assert [line for line in lines if line.startswith("NVRM")] == [
        f"NVRM version: NVIDIA UNIX {kind}  580.159.04  Release Build  (simulated)" for kind in kinds
    ]


def test_no_struct_of_the_library_is_longer_than_the_caller_expects() -> None:
    """The sizes of NVML's structures on a 64-bit machine, as pynvml has them."""
    module = pytest.importorskip("pynvml")
    sizes = {
        "nvmlPciInfo_t": 68,
        "c_nvmlMemory_v2_t": 40,
        "c_nvmlProcessInfo_v2_t": 24,
        "c_nvmlDeviceAttributes": 40,
        "c_nvmlGpuInstanceProfileInfo_t": 48,
        "c_nvmlFieldValue_t": 40,
        "c_nvmlGpuFabricInfo_v2_t": 36,
    }
    assert {name: ctypes.sizeof(getattr(module, name)) for name in sizes} == sizes
