"""The program with which the role cuda tries a toolkit, on the double. A machine code of NVIDIA's compiler is recorded:

nvcc -arch=sm_75 -cubin -o check-sm_75.cubin roles/cuda/files/check.cu     (CUDA 13.0)
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from ansible_collections.gpufarm.core.tests.unit.simulator.gpu.conftest import FIXTURES, Node

from tests.simulator.cache import ROOT
from tests.simulator.gpu import faults

MakeNode = Callable[[str], Node]
MACHINE_CODE = str(FIXTURES / "check-sm_75.cubin")
# What the program takes of the toolkit's header; nvcc itself compiles it in the scenario cuda.
HEADER = """
typedef int CUresult;
typedef unsigned long long CUdeviceptr;
typedef struct context *CUcontext;
typedef struct module *CUmodule;
typedef struct function *CUfunction;
typedef struct stream *CUstream;
enum { CUDA_ERROR_OUT_OF_MEMORY = 2, CUDA_ERROR_DEVICE_UNAVAILABLE = 46 };
enum { CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76 };
"""


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory) -> str:
    if not shutil.which("g++"):
        pytest.skip("g++ is needed to build the program")
    folder = tmp_path_factory.mktemp("check")
    (folder / "cuda.h").write_text(HEADER, encoding="ascii")
    source, program = ROOT / "roles/cuda/files/check.cu", folder / "check"
    subprocess.run(
        ["g++", "-Wall", "-Wextra", "-Werror", f"-I{folder}", "-x", "c++", str(source), "-o", str(program), "-ldl"],
        check=True,
    )
    return str(program)


def test_it_tells_the_architecture_and_runs_machine_code_of_it(node: MakeNode, check: str) -> None:
    made = node("t4-x4")
    assert made.run(check).stdout == "sm_75\n"
    done = made.run(check, MACHINE_CODE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert node("h100-x8").run(check).stdout == "sm_90\n"


def test_machine_code_of_another_architecture_does_not_run(node: MakeNode, check: str) -> None:
    done = node("h100-x8").run(check, MACHINE_CODE)
    assert (done.returncode, done.stderr) == (1, "cuModuleLoadData: CUDA_ERROR_NO_BINARY_FOR_GPU\n")


def test_what_goes_wrong_is_told(node: MakeNode, check: str, tmp_path: Path) -> None:
    made = node("t4-x4")
    (tmp_path / "empty").touch()
    done = made.run(check, str(tmp_path / "empty"))
    assert (done.returncode, done.stderr) == (1, "cuModuleLoadData: CUDA_ERROR_INVALID_PTX\n")
    made.change(lambda profile: faults.compute_wrongly(profile, 0, "memory"))
    done = made.run(check, MACHINE_CODE)
    assert done.returncode == 1 and done.stderr.startswith("number ") and " and not " in done.stderr
    done = made.run(check, MACHINE_CODE, extra={"CUDA_VISIBLE_DEVICES": "1"})
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("code", "returned", "told"),
    [(46, 3, "DEVICE_UNAVAILABLE"), (2, 3, "OUT_OF_MEMORY"), (802, 1, "SYSTEM_NOT_READY")],
)
def test_a_gpu_that_others_have_is_none_that_is_bad(
    node: MakeNode, check: str, code: int, returned: int, told: str
) -> None:
    made = node("t4-x4")
    made.change(lambda profile: faults.refuse_context(profile, 0, code))
    done = made.run(check, MACHINE_CODE)
    assert (done.returncode, done.stderr) == (returned, f"cuCtxCreate_v2: CUDA_ERROR_{told}\n")
