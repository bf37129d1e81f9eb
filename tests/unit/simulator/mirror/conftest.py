"""Keys made once, and small stand-ins for what takes minutes to build."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.simulator.mirror import pki as pki_module
from tests.simulator.mirror.pki import Pki, Signer, signer

CONTROL = """\
Source: nvidia-container-toolkit
Section: @SECTION@utils
Maintainer: NVIDIA CORPORATION <cudatools@nvidia.com>

Package: nvidia-container-toolkit
Architecture: any
Depends: ${misc:Depends}, nvidia-container-toolkit-base (= @VERSION@), libnvidia-container-tools (= @VERSION@)
Breaks: nvidia-container-runtime (<= 3.5.0-1), nvidia-container-runtime-hook
Description: NVIDIA Container toolkit
 Provides tools and utilities to enable GPU support in containers.

Package: nvidia-container-toolkit-base
Architecture: any
Pre-Depends: ${misc:Pre-Depends}
Depends: ${misc:Depends}
Description: NVIDIA Container Toolkit Base
 Provides tools.

Package: nvidia-container-toolkit-operator-extensions
Architecture: any
Description: for the GPU Operator
"""


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def needs(*tools: str) -> pytest.MarkDecorator:
    missing = [tool for tool in tools if not shutil.which(tool)]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    if not (shutil.which("gpg") and shutil.which("openssl")):
        pytest.skip("not installed: gpg or openssl")
    return pki_module.pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture
def signing(keys: Pki) -> Iterator[Signer]:
    with signer(keys) as ready:
        yield ready


@pytest.fixture
def gpu_double(tmp_path: Path) -> Path:
    folder = tmp_path / "double"
    tools = ("gpufarm-gpu-devices", "gpufarm-gpu-profile", "install-profile.sh", "nv-fabricmanager")
    for name in ("libnvidia-ml.so.1", "libcuda.so.1", "nvidia-smi", *tools):
        write(folder / name, f"double of {name}\n")
    write(folder / "gpufarm-gpu-devices.service", "[Service]\nType=oneshot\n")
    return folder


@pytest.fixture
def nvcc(tmp_path: Path) -> Path:
    for name in ("bin/nvcc", "bin/nvcc.profile", "include/cuda.h", "lib/libcudart_static.a", "nvvm/bin/cicc"):
        write(tmp_path / "nvcc" / name, name)
    return tmp_path / "nvcc"


@pytest.fixture
def toolkit(tmp_path: Path) -> Path:
    """What building the container toolkit leaves: programs, and the parts of its source that are packaged."""
    folder = tmp_path / "toolkit"
    debian = folder / "source/packaging/debian"
    write(debian / "control", CONTROL)
    write(debian / "copyright", "Apache-2.0\n")
    write(debian / "nvidia-container-toolkit.install", "nvidia-container-runtime-hook /usr/bin\n")
    write(
        debian / "nvidia-container-toolkit-base.install",
        "nvidia-ctk /usr/bin\nnvidia-cdi-refresh.service /lib/systemd/system/\n"
        "nvidia-cdi-refresh.env /etc/nvidia-container-toolkit/\n99-nvidia-cdi-refresh.rules /lib/udev/rules.d/\n",
    )
    write(
        debian / "nvidia-container-toolkit-base.maintscript",
        "rm_conffile /etc/systemd/system/nvidia-cdi-refresh.service @VERSION@~ nvidia-container-toolkit-base\n",
    )
    write(debian / "nvidia-container-toolkit-base.postinst", "#!/bin/sh\nset -e\n\n#DEBHELPER#\n\nexit 0\n")
    write(folder / "source/deployments/systemd/nvidia-cdi-refresh.service", "[Service]\nType=oneshot\n")
    write(folder / "source/deployments/systemd/nvidia-cdi-refresh.env", "# none\n")
    write(folder / "source/deployments/udev/99-nvidia-cdi-refresh.rules", "# none\n")
    for program in ("nvidia-ctk", "nvidia-container-runtime-hook"):
        write(folder / program, "#!/bin/sh\n").chmod(0o755)
    return folder
