"""Archives and repositories are laid out as upstream's, and their signatures hold."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import subprocess
import zipfile
from pathlib import Path

import pytest

from tests.simulator.mirror import layout, packages
from tests.simulator.mirror.layout import Artefacts, dearmored, flat_repository, lay_out, release, release_index
from tests.simulator.mirror.packages import Deb, File, stanzas
from tests.simulator.mirror.pki import Pki, Signer
from tests.simulator.tools import BuildError, run

from .conftest import needs

REPOSITORY_TOOLS = needs("apt-ftparchive", "dpkg-deb", "gpgv")


@pytest.fixture
def keyring(keys: Pki, tmp_path: Path) -> Path:
    path = tmp_path / "packages.gpg"
    path.write_bytes(dearmored(keys.packages_key))
    return path


@pytest.fixture
def nomad(tmp_path: Path, signing: Signer) -> Path:
    members = {"LICENSE.txt": File(b"licence\n"), "nomad": File(b"\x7fELF" + os.urandom(4096), 0o755)}
    return release(tmp_path / "www", "nomad", "1.11.3", members, signing)


def control(path: Path) -> dict[str, str]:
    return next(stanzas(run(["dpkg-deb", "--field", path]).decode()))


# --- releases ---------------------------------------------------------------------------------------------------------


def test_release_has_upstreams_files(nomad: Path) -> None:
    assert nomad.parts[-3:] == ("releases", "nomad", "1.11.3")
    assert sorted(path.name for path in nomad.iterdir()) == [
        "index.json",
        "nomad_1.11.3_SHA256SUMS",
        "nomad_1.11.3_SHA256SUMS.72D7468F.sig",
        "nomad_1.11.3_SHA256SUMS.sig",
        "nomad_1.11.3_linux_amd64.zip",
    ]


def test_checksums_fit_the_archive(nomad: Path) -> None:
    archive = nomad / "nomad_1.11.3_linux_amd64.zip"
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    assert (nomad / "nomad_1.11.3_SHA256SUMS").read_text("ascii") == f"{digest}  {archive.name}\n"


def test_archive_holds_the_program_with_its_mode(nomad: Path) -> None:
    with zipfile.ZipFile(nomad / "nomad_1.11.3_linux_amd64.zip") as archive:
        assert archive.namelist() == ["LICENSE.txt", "nomad"]
        assert archive.getinfo("nomad").external_attr >> 16 & 0o777 == 0o755
        assert archive.getinfo("LICENSE.txt").external_attr >> 16 & 0o777 == 0o644


@needs("gpgv")
@pytest.mark.parametrize("suffix", ["sig", "72D7468F.sig"])
def test_release_signature_holds_and_breaks_with_its_content(
    nomad: Path, keys: Pki, tmp_path: Path, suffix: str
) -> None:
    keyring = tmp_path / "releases.gpg"
    keyring.write_bytes(dearmored(keys.releases_key))
    sums = nomad / "nomad_1.11.3_SHA256SUMS"
    command = ["gpgv", "--keyring", str(keyring), "--status-fd", "1", f"{sums}.{suffix}", str(sums)]
    good = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"VALIDSIG {keys.releases_fingerprint}" in good.stdout
    sums.write_text("0" * 64 + "  nomad_1.11.3_linux_amd64.zip\n", encoding="ascii")
    bad = subprocess.run(command, capture_output=True, text=True, check=False)
    assert bad.returncode == 1
    assert "BADSIG" in bad.stdout


def test_index_lists_every_version(nomad: Path, signing: Signer, tmp_path: Path) -> None:
    release(tmp_path / "www", "nomad", "1.10.5", {"nomad": File(b"old", 0o755)}, signing)
    release_index(tmp_path / "www", "nomad")
    index = json.loads((nomad.parent / "index.json").read_text("ascii"))
    assert sorted(index["versions"]) == ["1.10.5", "1.11.3"]
    assert index["versions"]["1.11.3"]["builds"][0]["filename"] == "nomad_1.11.3_linux_amd64.zip"


# --- the toolkit's packages -------------------------------------------------------------------------------------------


def test_toolkit_packages_take_dependencies_from_upstreams_control(toolkit: Path) -> None:
    debs = {deb.name: deb for deb in packages.container_toolkit(toolkit, "1.20.1-1")}
    assert sorted(debs) == [
        "libnvidia-container-tools",
        "libnvidia-container1",
        "nvidia-container-toolkit",
        "nvidia-container-toolkit-base",
    ]
    assert debs["nvidia-container-toolkit"].fields["Depends"] == (
        "nvidia-container-toolkit-base (= 1.20.1-1), libnvidia-container-tools (= 1.20.1-1)"
    )
    assert debs["nvidia-container-toolkit-base"].fields["Depends"] == ""


def test_toolkit_packages_bring_upstreams_units_and_scripts(toolkit: Path) -> None:
    base = next(d for d in packages.container_toolkit(toolkit, "1.20.1-1") if d.name.endswith("-base"))
    assert base.files["/usr/bin/nvidia-ctk"].mode == 0o755
    assert base.files["/lib/systemd/system/nvidia-cdi-refresh.service"].mode == 0o644
    assert "#DEBHELPER#" not in base.scripts["postinst"]
    assert "deb-systemd-invoke start nvidia-cdi-refresh.service" in base.scripts["postinst"]
    assert 'nvidia-cdi-refresh.service 1.20.1-1~ nvidia-container-toolkit-base -- "$@"' in base.scripts["preinst"]


def test_a_file_that_upstream_lists_and_nobody_built_stops_the_build(toolkit: Path) -> None:
    (toolkit / "nvidia-ctk").unlink()
    with pytest.raises(BuildError, match="names nvidia-ctk, which was not built"):
        packages.container_toolkit(toolkit, "1.20.1-1")


@pytest.mark.parametrize("script", ["postinst", "prerm", "postrm", "preinst"])
def test_maintainer_scripts_are_valid_shell(toolkit: Path, gpu_double: Path, nvcc: Path, script: str) -> None:
    debs = [
        *packages.container_toolkit(toolkit, "1.20.1-1"),
        *packages.drivers(gpu_double),
        *packages.cuda_toolkits(nvcc),
    ]
    found = [deb.scripts[script] for deb in debs if script in deb.scripts]
    assert found
    for text in found:
        subprocess.run(["sh", "-n"], input=text, text=True, check=True)


# --- the driver's packages --------------------------------------------------------------------------------------------


def test_branches_depend_on_exactly_their_own_version(gpu_double: Path) -> None:
    names = {"libnvidia-ml1", "libcuda1", "nvidia-smi", "nvidia-driver-cuda", "nvidia-kernel-open-dkms"}
    for deb in packages.drivers(gpu_double):
        for relation in deb.fields.get("Depends", "").replace("|", ",").split(","):
            name, _, condition = relation.strip().partition(" ")
            if name in names:
                assert condition == f"(= {deb.version})", deb.name


def test_libraries_are_named_by_version(gpu_double: Path) -> None:
    debs = {(deb.name, deb.version): deb for deb in packages.drivers(gpu_double)}
    library = debs["libnvidia-ml1", "570.195.03-1"]
    assert list(library.files) == ["/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.570.195.03"]
    assert dict(library.links) == {"/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1": "libnvidia-ml.so.570.195.03"}
    assert debs["libcuda1", "580.159.04-1"].links["/usr/lib/x86_64-linux-gnu/libcuda.so"] == "libcuda.so.1"


@pytest.mark.parametrize(
    ("loaded", "before", "after"),
    [
        (False, "  version: 570.172.08\n", "  version: 580.159.04\n"),
        (True, "  version: 570.172.08\n", "  version: 580.159.04\n  kernel_version: 570.172.08\n"),
        (True, "  version: 580.159.04\n", "  version: 580.159.04\n"),
        # Another version again before the node has restarted, and back to the one that is loaded.
        (
            True,
            "  version: 570.195.03\n  kernel_version: 580.95.05\n",
            "  version: 580.159.04\n  kernel_version: 580.95.05\n",
        ),
        (True, "  version: 570.195.03\n  kernel_version: 580.159.04\n", "  version: 580.159.04\n"),
    ],
)
def test_a_module_that_is_loaded_stays_until_the_node_restarts(
    gpu_double: Path, tmp_path: Path, loaded: bool, before: str, after: str
) -> None:
    debs = {(deb.name, deb.version): deb for deb in packages.drivers(gpu_double)}
    name, kind = ("nvidia-kernel-dkms", "NVIDIA") if loaded else ("nvidia-kernel-open-dkms", "Dual MIT/GPL")
    text = debs[name, "580.159.04-1"].scripts["postinst"]
    for path in ("/etc/gpufarm-simulator", "/dev/nvidiactl", "/lib/modules", "/run/"):
        text = text.replace(path, f"{tmp_path}{path}")
    profile = tmp_path / "etc/gpufarm-simulator/gpu.yml"
    profile.parent.mkdir(parents=True)
    profile.write_text(f'driver:\n{before}  cuda_version: "12.8"\n\ngpus:\n  - version: mine\n...\n', encoding="ascii")
    if loaded:
        (tmp_path / "dev").mkdir()
        (tmp_path / "dev/nvidiactl").touch()
    subprocess.run(["sh", "-s", "configure"], input=text, text=True, check=True)
    assert profile.read_text("ascii") == f'driver:\n{after}  cuda_version: "13.0"\n\ngpus:\n  - version: mine\n...\n'
    (dependencies,) = (tmp_path / "lib/modules").glob("*/modules.dep")
    assert dependencies.read_text("ascii") == "updates/dkms/nvidia.ko:\n"
    assert (dependencies.parent / "updates/dkms/nvidia.ko").read_text("ascii") == f"license={kind}\n"


def test_the_compiler_has_the_version_that_is_downloaded_and_lies_as_upstreams(nvcc: Path) -> None:
    pinned = (Path(packages.__file__).parent / "cuda.txt").read_text("ascii")
    assert f"nvidia-cuda-nvcc=={packages.NVCC['13.0']} " in pinned
    debs = {deb.name: deb for deb in packages.cuda_toolkits(nvcc)}
    files = {path: file.mode for deb in debs.values() for path, file in deb.files.items() if "cuda-13.0" in path}
    assert {path.removeprefix("/usr/local/cuda-13.0/"): mode for path, mode in files.items()} == {
        "version.json": 0o644, "bin/nvcc": 0o755, "bin/nvcc.profile": 0o755, "nvvm/bin/cicc": 0o755,
        "targets/x86_64-linux/include/cuda.h": 0o644, "targets/x86_64-linux/lib/libcudart_static.a": 0o644,
    }  # fmt: skip
    assert debs["cuda-cudart-dev-13-0"].links["/usr/local/cuda-13.0/include"] == "targets/x86_64-linux/include"
    needed = debs["cuda-toolkit-13-0"].fields["Depends"]
    assert "cuda-nvcc-13-0 (>= 13.0.88)" in needed and "cuda-cudart-dev-13-0 (>= 13.0.88)" in needed
    # As upstream's, which alone has nothing to compile a program with.
    assert "cudart" not in debs["cuda-nvcc-13-0"].fields["Depends"]
    (double,) = debs["cuda-nvcc-12-8"].files.values()
    said = subprocess.run(["sh", "-s", "--", "--version"], input=double.content(), capture_output=True, check=True)
    assert b"release 12.8, V12.8.93" in said.stdout


def test_a_double_that_links_to_libyaml_brings_it(gpu_double: Path) -> None:
    before = next(deb for deb in packages.drivers(gpu_double) if deb.name == "libnvidia-ml1")
    (gpu_double / "libnvidia-ml.so.1").write_bytes(b"\0libyaml-0.so.2\0")
    after = next(deb for deb in packages.drivers(gpu_double) if deb.name == "libnvidia-ml1")
    assert (before.fields["Depends"], after.fields["Depends"]) == ("libc6", "libc6, libyaml-0-2")


# --- repositories -----------------------------------------------------------------------------------------------------


@REPOSITORY_TOOLS
def test_deb_holds_what_was_said(tmp_path: Path) -> None:
    deb = Deb(
        name="example",
        version="1-1",
        description="an example\n of two lines",
        fields={"Depends": "libc6", "Breaks": ""},
        files={"/usr/bin/example": File(b"#!/bin/sh\n", 0o755), "/etc/example": File(b"x\n")},
        links={"/usr/bin/other": "example"},
        scripts={"postinst": "#!/bin/sh\n"},
    )
    path = layout.build_deb(deb, tmp_path)
    assert path.name == "example_1-1_amd64.deb"
    fields = control(path)
    assert (fields["Depends"], fields["Description"]) == ("libc6", "an example\n of two lines")
    assert "Breaks" not in fields
    listing = run(["dpkg-deb", "--contents", path]).decode().splitlines()
    assert any(line.startswith("-rwxr-xr-x root/root") and line.endswith("./usr/bin/example") for line in listing)
    assert any("./usr/bin/other -> example" in line for line in listing)
    assert run(["dpkg-deb", "--info", path, "conffiles"]) == b"/etc/example\n"


@REPOSITORY_TOOLS
def test_flat_repository_is_indexed_and_signed(tmp_path: Path, signing: Signer, keyring: Path) -> None:
    folder = tmp_path / "repository"
    folder.mkdir()
    deb = layout.build_deb(Deb(name="example", version="1-1", description="an example"), folder)
    flat_repository(folder, "NVIDIA", "NVIDIA CUDA", signing)
    entry = next(stanzas((folder / "Packages").read_text("utf-8")))
    assert entry["Filename"] == f"./{deb.name}"
    assert entry["SHA256"] == hashlib.sha256(deb.read_bytes()).hexdigest()
    assert gzip.decompress((folder / "Packages.gz").read_bytes()) == (folder / "Packages").read_bytes()
    statement = (folder / "Release").read_text("utf-8")
    assert "Label: NVIDIA CUDA\n" in statement
    assert hashlib.sha256((folder / "Packages").read_bytes()).hexdigest() in statement
    run(["gpgv", "--keyring", keyring, folder / "InRelease"])
    run(["gpgv", "--keyring", keyring, folder / "Release.gpg", folder / "Release"])


@REPOSITORY_TOOLS
def test_everything_is_where_roles_look_for_it(
    tmp_path: Path, keys: Pki, gpu_double: Path, nvcc: Path, toolkit: Path
) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    keyring = tmp_path / "packages.gpg"
    keyring.write_bytes(dearmored(keys.packages_key))
    for name in ("nomad", "nomad-device-nvidia", "LICENSE.txt"):
        (programs / name).write_text(name, encoding="ascii")
    www = tmp_path / "www"
    lay_out(www, Artefacts({"1.11.3": programs}, {"1.1.0": programs}, {"1.20.1": toolkit}, gpu_double, nvcc), keys)
    assert (www / "releases/nomad-device-nvidia/1.1.0/nomad-device-nvidia_1.1.0_linux_amd64.zip").is_file()
    assert (www / "releases/pgp-key.txt").read_bytes() == keys.releases_key.read_bytes()
    assert (www / "libnvidia-container/gpgkey").read_bytes() == keys.packages_key.read_bytes()
    assert "stable/deb/$(ARCH) /" in (www / "libnvidia-container/stable/deb/nvidia-container-toolkit.list").read_text()
    for distribution, key_file in {"debian12": "3bf863cc.pub", "debian13": "8793F200.pub"}.items():
        folder = www / "cuda/repos" / distribution / "x86_64"
        assert (folder / key_file).is_file()
        assert (folder / "cuda-keyring_1.1-1_all.deb").is_file()
        listed = [(e["Package"], e["Version"]) for e in stanzas((folder / "Packages").read_text("utf-8"))]
        for version in ("570.172.08-1", "570.195.03-1", "580.95.05-1", "580.159.04-1"):
            assert ("nvidia-driver-cuda", version) in listed
        assert ("cuda-toolkit-13-0", "13.0.1-1") in listed
        assert len(listed) == len(set(listed))
        run(["gpgv", "--keyring", keyring, folder / "InRelease"])
    wsl = [e["Package"] for e in stanzas((www / "cuda/repos/wsl-ubuntu/x86_64/Packages").read_text("utf-8"))]
    assert "cuda-toolkit-13-0" in wsl
    assert not [name for name in wsl if "driver" in name or name.startswith(("nvidia", "libnvidia", "libcuda"))]
    assert not list(www.glob("pool-*"))
    signed = {path.relative_to(www) for path in www.glob("releases/**/*.sig")}
    signed |= {Path("libnvidia-container/stable/deb/amd64", name) for name in ("InRelease", "Release.gpg")}
    for path in (each for each in (www / "spoiled").rglob("*") if each.is_file()):
        original = www / path.relative_to(www / "spoiled")
        assert (path.read_bytes() == original.read_bytes()) is (original.relative_to(www) not in signed), path
    assert len(signed) == 6


def test_laying_out_without_the_gpu_double_says_what_to_do(tmp_path: Path, keys: Pki) -> None:
    with pytest.raises(BuildError, match=r"GPU double or nvcc is missing\. Next step"):
        lay_out(tmp_path / "www", Artefacts(), keys)


def test_role_variables_point_below_the_base(keys: Pki) -> None:
    variables = layout.role_variables(keys, "https://mirror.example/")
    assert variables["nomad_release_url"] == "https://mirror.example/releases"
    assert variables["nomad_release_key_fingerprints"] == [keys.releases_fingerprint]
    assert variables["nvidia_repository_key_fingerprints"] == [keys.packages_fingerprint]
