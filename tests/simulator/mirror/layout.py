"""Release archives and apt repositories, laid out on disk as upstream's servers serve them."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.simulator.mirror import packages
from tests.simulator.mirror.packages import Deb, File
from tests.simulator.mirror.pki import HOST, Pki, Signer, signer
from tests.simulator.mirror.serve import badly_signed
from tests.simulator.tools import BuildError, need, run

BASE_URL = f"https://{HOST}"
# HashiCorp publishes the signature a second time under the name of its key.
RELEASE_KEY_ID = "72D7468F"
# The key files that NVIDIA publishes in each CUDA repository.
CUDA_KEY_FILES = {"debian12": "3bf863cc.pub", "debian13": "8793F200.pub", "wsl-ubuntu": "3bf863cc.pub"}
ZIP_DATE = (2020, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class Artefacts:
    """What was built, by version."""

    nomad: Mapping[str, Path] = field(default_factory=dict)
    nvidia_plugin: Mapping[str, Path] = field(default_factory=dict)
    container_toolkit: Mapping[str, Path] = field(default_factory=dict)
    gpu_double: Path | None = None
    nvcc: Path | None = None


def urls(base: str = BASE_URL) -> dict[str, str]:
    """Return where each of upstream's servers is on a mirror that is served at ``base``."""
    base = base.rstrip("/")
    return {
        "hashicorp_releases": f"{base}/releases",
        "hashicorp_key": f"{base}/releases/pgp-key.txt",
        "container_toolkit_repository": f"{base}/libnvidia-container",
        "container_toolkit_key": f"{base}/libnvidia-container/gpgkey",
        "cuda_repositories": f"{base}/cuda/repos",
    }


def role_variables(keys: Pki, base: str = BASE_URL) -> dict[str, object]:
    """Return the variables that point the collection's roles at a mirror that is served at ``base``."""
    where = urls(base)
    return {
        "nomad_release_url": where["hashicorp_releases"],
        "nomad_release_key_url": where["hashicorp_key"],
        "nomad_release_key_fingerprints": [keys.releases_fingerprint],
        "container_toolkit_repository_url": where["container_toolkit_repository"],
        "container_toolkit_repository_key_fingerprints": [keys.packages_fingerprint],
        "nvidia_repository_url": where["cuda_repositories"],
        "nvidia_repository_key_fingerprints": [keys.packages_fingerprint],
    }


# --- release archives -------------------------------------------------------------------------------------------------


def release(www: Path, name: str, version: str, members: Mapping[str, File], keys: Signer) -> Path:
    """Lay out one version of a HashiCorp product: archive, checksums, signatures, index.json."""
    folder = www / "releases" / name / version
    folder.mkdir(parents=True)
    stem = f"{name}_{version}"
    archive = folder / f"{stem}_linux_amd64.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        for member, item in members.items():
            info = zipfile.ZipInfo(member, ZIP_DATE)
            info.external_attr = (0o100000 | item.mode) << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            file.writestr(info, item.content())
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    sums = folder / f"{stem}_SHA256SUMS"
    sums.write_text(f"{digest}  {archive.name}\n", encoding="ascii")
    signature = folder / f"{sums.name}.sig"
    keys.sign("releases", sums, signature)
    named = folder / f"{sums.name}.{RELEASE_KEY_ID}.sig"
    shutil.copy(signature, named)
    index = {
        "builds": [
            {
                "arch": "amd64",
                "filename": archive.name,
                "name": name,
                "os": "linux",
                "url": f"{BASE_URL}/releases/{name}/{version}/{archive.name}",
                "version": version,
            }
        ],
        "name": name,
        "shasums": sums.name,
        "shasums_signature": signature.name,
        "shasums_signatures": [named.name, signature.name],
        "version": version,
    }
    (folder / "index.json").write_text(json.dumps(index), encoding="ascii")
    return folder


def release_index(www: Path, name: str) -> None:
    """Write the index of all versions of a product."""
    folder = www / "releases" / name
    versions = {path.parent.name: json.loads(path.read_text("ascii")) for path in sorted(folder.glob("*/index.json"))}
    (folder / "index.json").write_text(json.dumps({"name": name, "versions": versions}), encoding="ascii")


# --- packages and repositories ----------------------------------------------------------------------------------------


def build_deb(deb: Deb, folder: Path) -> Path:
    """Build a .deb and return its path."""
    need("dpkg-deb")
    target = folder / f"{deb.name}_{deb.version}_{deb.architecture}.deb"
    with tempfile.TemporaryDirectory(prefix="gpufarm-deb-") as work:
        root = Path(work, "root")
        control = root / "DEBIAN"
        control.mkdir(parents=True)
        for path, item in deb.files.items():
            place = root / path.lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(item.content())
            place.chmod(item.mode)
        for path, aim in deb.links.items():
            place = root / path.lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(aim)
        size = sum(path.stat().st_size for path in root.rglob("*") if path.is_file() and not path.is_symlink())
        (control / "control").write_text(deb.control(size // 1024 + 1), encoding="utf-8")
        for name, text in deb.scripts.items():
            (control / name).write_text(text, encoding="utf-8")
            (control / name).chmod(0o755)
        conffiles = [path for path in deb.files if path.startswith("/etc/")]
        if conffiles:
            (control / "conffiles").write_text("".join(f"{path}\n" for path in conffiles), encoding="utf-8")
        for place in [root, *root.rglob("*")]:
            if place.is_dir():
                place.chmod(0o755)
        # The lightest compression: the archive is read once or twice, on this machine.
        run(["dpkg-deb", "--root-owner-group", "-Zgzip", "-z1", "--build", root, target])
    return target


def flat_repository(folder: Path, origin: str, label: str, keys: Signer) -> None:
    """Index and sign the .debs of a folder: Packages, Packages.gz, Release, InRelease, Release.gpg."""
    need("apt-ftparchive")
    listing = run(["apt-ftparchive", "packages", "."], cwd=folder)
    (folder / "Packages").write_bytes(listing)
    (folder / "Packages.gz").write_bytes(gzip.compress(listing, mtime=0))
    fields = {"Origin": origin, "Label": label, "Architectures": "amd64", "Suite": "", "Codename": ""}
    options = [f"-oAPT::FTPArchive::Release::{name}={value}" for name, value in fields.items() if value]
    statement = run(["apt-ftparchive", *options, "release", "."], cwd=folder)
    released = folder / "Release"
    released.write_bytes(statement)
    keys.sign("packages", released, folder / "InRelease", "--clearsign")
    keys.sign("packages", released, folder / "Release.gpg", "--detach-sign", "--armor")


def toolkit_repository(www: Path, toolkits: Mapping[str, Path], keys: Signer) -> None:
    """Lay out NVIDIA's container toolkit repository with four packages of each version."""
    base = www / "libnvidia-container"
    folder = base / "stable/deb/amd64"
    folder.mkdir(parents=True)
    for version, artefact in toolkits.items():
        for deb in packages.container_toolkit(artefact, f"{version}-1"):
            build_deb(deb, folder)
    flat_repository(folder, "https://nvidia.github.io/libnvidia-container", "NVIDIA CORPORATION", keys)
    shutil.copy(keys.pki.packages_key, base / "gpgkey")
    # Upstream's file leaves $(ARCH) to apt and signed-by to whoever installs it.
    (base / "stable/deb/nvidia-container-toolkit.list").write_text(
        f"deb {urls()['container_toolkit_repository']}/stable/deb/$(ARCH) /\n"
        f"#deb {urls()['container_toolkit_repository']}/experimental/deb/$(ARCH) /\n",
        encoding="ascii",
    )


def cuda_repositories(www: Path, double: Path, nvcc: Path, keys: Signer) -> None:
    """Lay out NVIDIA's CUDA repositories: toolkits everywhere, drivers wherever Linux has its own."""
    with tempfile.TemporaryDirectory(dir=www, prefix="pool-") as work:
        pool = Path(work)
        toolkits = [build_deb(deb, pool) for deb in packages.cuda_toolkits(nvcc)]
        drivers = [build_deb(deb, pool) for deb in packages.drivers(double)]
        for distribution, key_file in CUDA_KEY_FILES.items():
            folder = www / "cuda/repos" / distribution / "x86_64"
            folder.mkdir(parents=True)
            for path in toolkits if distribution.startswith("wsl") else [*toolkits, *drivers]:
                os.link(path, folder / path.name)
            url = f"{urls()['cuda_repositories']}/{distribution}/x86_64/"
            keyring = packages.cuda_keyring(distribution, url, dearmored(keys.pki.packages_key))
            build_deb(keyring, folder)
            shutil.copy(keys.pki.packages_key, folder / key_file)
            (folder / f"cuda-{distribution}.pin").write_text(packages.CUDA_PIN, encoding="ascii")
            flat_repository(folder, "NVIDIA", "NVIDIA CUDA", keys)


def dearmored(key: Path) -> bytes:
    """Return the binary form of an armored public key."""
    need("gpg")
    return run(["gpg", "--no-options", "--batch", "--dearmor"], stdin=key.read_bytes())


def lay_out(www: Path, artefacts: Artefacts, pki: Pki) -> None:
    """Lay out everything that was built under ``www``."""
    if artefacts.gpu_double is None or artefacts.nvcc is None:
        raise BuildError("The GPU double or nvcc is missing. Next step: run `python -m tests.simulator.mirror build`.")
    www.mkdir(parents=True)
    with signer(pki) as keys:
        for name, versions in (("nomad", artefacts.nomad), ("nomad-device-nvidia", artefacts.nvidia_plugin)):
            for version, folder in versions.items():
                members = {"LICENSE.txt": File(folder / "LICENSE.txt"), name: File(folder / name, 0o755)}
                release(www, name, version, members, keys)
            release_index(www, name)
        publish_key(www, pki)
        toolkit_repository(www, artefacts.container_toolkit, keys)
        cuda_repositories(www, artefacts.gpu_double, artefacts.nvcc, keys)
    spoil(www)
    make_readable([www, *www.rglob("*")])


def spoil(www: Path) -> None:
    """Lay out releases and packages once more under ``spoiled``, where no signature fits what it signs.

    Unlike a fault of the server it is there for every test at any time, and no other test can run into it.
    """
    for part in ("releases", "libnvidia-container"):
        shutil.copytree(www / part, www / "spoiled" / part, copy_function=os.link)
    for path in (www / "spoiled").rglob("*"):
        if path.suffix in (".sig", ".gpg") or path.name == "InRelease":
            body = badly_signed(path.read_bytes())
            path.unlink()
            path.write_bytes(body)


def publish_key(www: Path, pki: Pki) -> None:
    """Publish the release key where HashiCorp's site has it, and beside the releases."""
    for place in (www / "releases/pgp-key.txt", www / ".well-known/pgp-key.txt"):
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(pki.releases_key, place)


def make_readable(paths: Iterable[Path]) -> None:
    """Let a server that runs as another user read the paths."""
    for path in paths:
        path.chmod(0o755 if path.is_dir() else 0o644)
