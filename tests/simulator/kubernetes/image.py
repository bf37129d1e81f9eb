"""The node image with Kubernetes: the node's own, with Debian's packages and programs built from upstream's modules."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.simulator.cache import built, key_of
from tests.simulator.docker import docker, docker_binary, exists
from tests.simulator.mirror import build
from tests.simulator.node.image import node_image

HERE = Path(__file__).resolve().parent
SUITE = "trixie"
# By which a platform of Molecule's asks for it, as for gpufarm-node:trixie.
NAME = "kubernetes"
PACKAGES = "containerd containernetworking-plugins etcd-server runc"
# NVIDIA's devices and their capabilities (gpu/gpufarm-gpu-devices). A cgroup can give a container nothing that the
# node's own has not, which for Docker's and ctr's containers nobody notices.
DEVICE_RULES = [f"--device-cgroup-rule=c {major}:* rwm" for major in (195, 510, 511)]


def pause() -> Path:
    """Return the folder that holds `pause`, in whose sandbox a pod's containers are."""
    source = build.kubernetes()

    def compile_pause(folder: Path) -> None:
        compiler = "gcc -Os -static -DVERSION=3.10.1 -o /out/pause /src/pause.c"
        build.in_builder("pause", compiler, {source: "/src:ro", folder: "/out"}, {})

    return built("kubernetes-pause", [str(source), build.BUILDER_SUITE, build.BUILDER_PACKAGES], compile_pause)


def _packages(parent: str) -> str:
    """Return the name of the parent with Debian's packages, making it if it is missing."""
    image = f"gpufarm-kubernetes-packages:{key_of([parent, PACKAGES])}"
    if exists("image", image):
        return image
    name = f"gpufarm-kubernetes-packages-{os.getpid()}"
    install = f"apt-get update -q && apt-get install -qy --no-install-recommends {PACKAGES} && apt-get clean"
    flags = [*build.network_flags(), "--env", "DEBIAN_FRONTEND=noninteractive"]
    command = [docker_binary(), "run", "--name", name, *flags, parent, "sh", "-c", install]
    try:
        build.step("packages of a Kubernetes node", lambda: build.logged("kubernetes-packages", command))
        # Not committed: what the build is told of this machine's network is no part of a node.
        export = subprocess.Popen([docker_binary(), "export", name], stdout=subprocess.PIPE)
        subprocess.run([docker_binary(), "import", "-", image], stdin=export.stdout, check=True, capture_output=True)
        export.wait()
    finally:
        if exists("container", name):
            docker("rm", "--force", name)
    return image


def kubernetes_image() -> str:
    """Return the name of the node image with Kubernetes, building it and what is in it where that is missing."""
    plugin = build.k8s_device_plugin()
    programs = [build.kubernetes() / "kube", pause() / "pause", plugin / "nvidia-device-plugin",
                plugin / "gpu-feature-discovery"]  # fmt: skip
    parent = _packages(node_image(SUITE))
    image = f"gpufarm-node:{NAME}-{key_of([parent, HERE, *map(str, programs)])}"
    if not exists("image", image):
        with tempfile.TemporaryDirectory(prefix="gpufarm-kubernetes-") as folder:
            context = Path(folder)
            shutil.copytree(HERE / "node", context / "node")
            (context / "programs").mkdir()
            for program in programs:
                shutil.copy2(program, context / "programs")
            version = context / "programs/device-plugin-version"
            version.write_text(build.K8S_DEVICE_PLUGIN.version + "\n", encoding="ascii")
            docker("build", "--quiet", "--build-arg", f"BASE={parent}", "--tag", image,
                   "--file", str(HERE / "Dockerfile"), folder)  # fmt: skip
    docker("tag", image, f"gpufarm-node:{NAME}")
    return image
