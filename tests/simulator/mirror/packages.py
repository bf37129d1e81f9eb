"""The Debian packages of the mirror: upstream's names, versions and dependencies.

The container toolkit's control data, maintainer scripts and units are read from its own source at
build time. The driver's packages carry the GPU double under the names of NVIDIA's files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.simulator.tools import BuildError

LIBRARIES = "/usr/lib/x86_64-linux-gnu"
# Two versions of each: a pin, a change of branch and "what is installed stays" mean nothing where there is one.
DRIVERS = {"570": ("570.172.08", "570.195.03"), "580": ("580.95.05", "580.159.04")}
# The newest CUDA that the driver of a branch runs.
DRIVER_CUDA = {"570": "12.8", "580": "13.0"}
CUDA = {"12.8": ("12.8.0", "12.8.1"), "13.0": ("13.0.1", "13.0.2")}
# The version of nvcc, which for 13.0 cuda.txt pins; one of CUDA 12.8 cannot be had that way.
NVCC = {"12.8": "12.8.93", "13.0": "13.0.88"}
NVCC_DOUBLE = """\
#!/bin/sh
if [ "$*" != --version ]; then
    echo "nvcc fatal   : this double compiles nothing" >&2
    exit 1
fi
echo "nvcc: NVIDIA (R) Cuda compiler driver"
echo "Cuda compilation tools, release @RELEASE@, V@VERSION@"
"""
CUDA_PIN = """\
Package: *
Pin: release l=NVIDIA CUDA
Pin-Priority: 600
"""


@dataclass(frozen=True)
class File:
    """Something that is put into an archive: its bytes, or where they are, and its mode."""

    source: bytes | Path
    mode: int = 0o644

    def content(self) -> bytes:
        return self.source if isinstance(self.source, bytes) else self.source.read_bytes()


@dataclass(frozen=True)
class Deb:
    """One binary package; ``fields`` are those of its control file beyond the usual."""

    name: str
    version: str
    description: str
    architecture: str = "amd64"
    fields: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, File] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    scripts: Mapping[str, str] = field(default_factory=dict)

    def control(self, installed_kib: int) -> str:
        values = {
            "Package": self.name,
            "Version": self.version,
            "Architecture": self.architecture,
            "Maintainer": "gpufarm.core simulator <mirror@gpufarm.test>",
            "Installed-Size": str(installed_kib),
            "Section": "utils",
            "Priority": "optional",
            **self.fields,
            "Description": self.description,
        }
        return "".join(f"{name}: {value}\n" for name, value in values.items() if value)


# --- NVIDIA container toolkit -----------------------------------------------------------------------------------------

# What debhelper puts in place of #DEBHELPER# for units that a package brings.
SYSTEMD = {
    "postinst": """\
if [ "$1" = configure ] || [ "$1" = abort-upgrade ]; then
    for unit in {units}; do
        deb-systemd-helper unmask "$unit" >/dev/null || true
        if deb-systemd-helper --quiet was-enabled "$unit"; then
            deb-systemd-helper enable "$unit" >/dev/null || true
        else
            deb-systemd-helper update-state "$unit" >/dev/null || true
        fi
    done
    if [ -d /run/systemd/system ]; then
        systemctl --system daemon-reload >/dev/null || true
        deb-systemd-invoke start {units} >/dev/null || true
    fi
fi
""",
    "prerm": """\
if [ -d /run/systemd/system ] && [ "$1" = remove ]; then
    deb-systemd-invoke stop {units} >/dev/null || true
fi
""",
    "postrm": """\
if [ -d /run/systemd/system ]; then
    systemctl --system daemon-reload >/dev/null || true
fi
if [ "$1" = remove ]; then
    deb-systemd-helper mask {units} >/dev/null || true
fi
if [ "$1" = purge ]; then
    deb-systemd-helper purge {units} >/dev/null || true
    deb-systemd-helper unmask {units} >/dev/null || true
fi
""",
}
NO_LEGACY = (
    "libnvidia-container is not built for the simulator: this package has its name and version and holds no\n"
    "library. The toolkit's modes cdi and jit-cdi do without it; its legacy mode does not work.\n"
)


def stanzas(control: str) -> Iterator[dict[str, str]]:
    """Yield the stanzas of a control file, continuation lines kept as they are."""
    for block in re.split(r"\n\s*\n", control.strip()):
        fields: dict[str, str] = {}
        name = ""
        for line in block.splitlines():
            if line[:1].isspace():
                fields[name] += "\n" + line
            else:
                name, _, value = line.partition(":")
                fields[name] = value.strip()
        yield fields


def relations(value: str) -> str:
    """Return package relations without the variables that debhelper would have filled in."""
    parts = [part.strip() for part in value.split(",")]
    return ", ".join(part for part in parts if part and not part.startswith("${"))


def maintainer_scripts(packaging: Path, name: str, version: str, units: list[str]) -> dict[str, str]:
    """Return upstream's maintainer scripts of a package with debhelper's parts in their place."""
    maintscript = packaging / f"{name}.maintscript"
    lines = maintscript.read_text(encoding="utf-8") if maintscript.is_file() else ""
    helpers = "".join(
        f'dpkg-maintscript-helper {line} -- "$@"\n' for line in lines.replace("@VERSION@", version).splitlines() if line
    )
    found: dict[str, str] = {}
    for script in ("preinst", "postinst", "prerm", "postrm"):
        own = packaging / f"{name}.{script}"
        added = helpers + (SYSTEMD.get(script, "").format(units=" ".join(units)) if units else "")
        if own.is_file():
            found[script] = own.read_text(encoding="utf-8").replace("#DEBHELPER#", added)
        elif added:
            found[script] = f"#!/bin/sh\nset -e\n{added}"
    return found


def installed_files(artefact: Path, packaging: Path, name: str) -> dict[str, File]:
    """Return the files that upstream's .install list puts into a package."""
    places = [artefact, artefact / "source/deployments/systemd", artefact / "source/deployments/udev"]
    files: dict[str, File] = {}
    for line in (packaging / f"{name}.install").read_text(encoding="utf-8").splitlines():
        source, folder = line.split()
        path = next((place / source for place in places if (place / source).is_file()), None)
        if path is None:
            raise BuildError(f"{name}.install of {packaging} names {source}, which was not built and is no unit file.")
        mode = 0o755 if folder.rstrip("/").endswith("/bin") else 0o644
        files[f"/{folder.strip('/')}/{source}"] = File(path, mode)
    return files


def container_toolkit(artefact: Path, version: str) -> list[Deb]:
    """Return the four packages of a toolkit version."""
    packaging = artefact / "source/packaging/debian"
    control = (packaging / "control").read_text(encoding="utf-8").replace("@VERSION@", version)
    debs: list[Deb] = []
    for fields in stanzas(control):
        name = fields.get("Package", "")
        if name not in ("nvidia-container-toolkit", "nvidia-container-toolkit-base"):
            continue
        files = installed_files(artefact, packaging, name)
        units = sorted(Path(path).name for path in files if re.fullmatch(r"/lib/systemd/system/[^/]+", path))
        files[f"/usr/share/doc/{name}/copyright"] = File(packaging / "copyright")
        kept = ("Pre-Depends", "Depends", "Recommends", "Suggests", "Breaks", "Replaces", "Conflicts", "Provides")
        debs.append(
            Deb(
                name=name,
                version=version,
                description=fields["Description"],
                fields={key: relations(fields[key]) for key in kept if key in fields},
                files=files,
                scripts=maintainer_scripts(packaging, name, version, units),
            )
        )
    for name, depends in (
        ("libnvidia-container-tools", f"libnvidia-container1 (>= {version})"),
        ("libnvidia-container1", ""),
    ):
        debs.append(
            Deb(
                name=name,
                version=version,
                description="empty double of NVIDIA's package\n " + NO_LEGACY.strip().replace("\n", "\n "),
                fields={"Depends": depends},
                files={f"/usr/share/doc/{name}/README": File(NO_LEGACY.encode())},
            )
        )
    return debs


# --- NVIDIA driver ----------------------------------------------------------------------------------------------------

LDCONFIG = {"triggers": "activate-noawait ldconfig\n"}
DEVICES = "gpufarm-gpu-devices"
TOOLS = "/usr/local/lib/gpufarm-simulator"
DEVICE_TOOLS = (DEVICES, "gpufarm-gpu-profile", "install-profile.sh")
# Where DKMS would build and load the module, the double makes the device nodes of the GPUs that the
# node's profile plugs in, and tells the kind of the module by its license. nvidia-cdi-refresh.service looks for the
# module's name in modules.dep.
# The profile names the driver that is installed. A module of another version that is loaded already stays until the
# node starts again, which takes its kernel_version away (gpufarm-node-init).
KERNEL_POSTINST = f"""\
#!/bin/sh
set -e
profile=/etc/gpufarm-simulator/gpu.yml
said() {{
    sed -n "/^driver:/,/^[^ ]/s/^  $1: //p" "$profile"
}}
if [ "$1" = configure ]; then
    stays=
    if [ -e "$profile" ]; then
        if [ -e /dev/nvidiactl ]; then
            stays=$(said kernel_version)
            [ -n "$stays" ] || stays=$(said version)
            [ "$stays" != @VERSION@ ] || stays=
        fi
        new=$(sed -e '/^driver:/,/^[^ ]/{{/^  kernel_version: /d' \\
            -e "s/^  version: .*/  version: @VERSION@${{stays:+\\\\n  kernel_version: $stays}}/" \\
            -e 's/^  cuda_version: .*/  cuda_version: "@CUDA@"/' -e '}}' "$profile")
        if [ "$new" != "$(cat "$profile")" ]; then
            printf '%s\\n' "$new" >"$profile"
            # The copy for containers is named by the version and is made anew without this mark.
            rm -f /run/gpufarm-simulator/linked
        fi
    fi
    modules=/lib/modules/$(uname -r)
    mkdir -p "$modules/updates/dkms"
    echo 'license=@LICENSE@' >"$modules/updates/dkms/nvidia.ko"
    # depmod writes it with every module that DKMS installs; nvidia-cdi-refresh.path waits for that.
    touch "$modules/modules.dep"
    others=$(sed '/^updates.dkms.nvidia[.]ko:/d' "$modules/modules.dep")
    printf '%s\\n' ${{others:+"$others"}} 'updates/dkms/nvidia.ko:' >"$modules/modules.dep"
    if [ -d /run/systemd/system ]; then
        systemctl --system daemon-reload
        systemctl enable --quiet {DEVICES}.service
        [ -n "$stays" ] || systemctl restart {DEVICES}.service
    fi
fi
"""
KERNEL_PRERM = f"""\
#!/bin/sh
set -e
if [ "$1" = remove ]; then
    modules=/lib/modules/$(uname -r)
    rm -f "$modules/updates/dkms/nvidia.ko"
    [ ! -e "$modules/modules.dep" ] || sed -i '/^updates.dkms.nvidia[.]ko:/d' "$modules/modules.dep"
    [ ! -d /run/systemd/system ] || systemctl disable --quiet --now {DEVICES}.service || true
fi
"""
# The daemon holds the GPUs of a driver that is loaded, so it starts anew with the double's devices.
PERSISTENCED = """\
#!/bin/sh
exec nvidia-smi -pm "${1:-1}"
"""
PERSISTENCED_UNIT = f"""\
[Unit]
Description=NVIDIA Persistence Daemon (simulated)
After={DEVICES}.service
PartOf={DEVICES}.service

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/bin/nvidia-persistenced
ExecStopPost=/usr/bin/nvidia-persistenced 0

[Install]
WantedBy=multi-user.target
"""
# As NVIDIA's package has it: nothing enables or starts it when it is installed, nothing starts it again.
FABRIC_MANAGER = "nv-fabricmanager"
FABRIC_MANAGER_UNIT = f"""\
[Unit]
Description=NVIDIA fabric manager service
After=network-online.target {DEVICES}.service
Requires=network-online.target

[Service]
User=root
PrivateTmp=false
Type=forking
TimeoutStartSec=240
PIDFile=/run/nvidia-fabricmanager/nv-fabricmanager.pid
ExecStart=/usr/bin/{FABRIC_MANAGER} -c /usr/share/nvidia/nvswitch/fabricmanager.cfg
ExecStopPost=/usr/bin/{FABRIC_MANAGER} --stopped
LimitCORE=infinity

[Install]
WantedBy=multi-user.target
"""
DOUBLE = "double of NVIDIA's package, with the simulator's GPUs in place of a driver"


def drivers(double: Path) -> Iterator[Deb]:
    """Yield the packages of every driver branch; one repository lists all branches."""
    for branch, versions in DRIVERS.items():
        for version in versions:
            yield from driver(double, branch, version)
            yield fabric_manager(double, branch, version)


def pinning(kept: str, versions: str, version: str) -> Deb:
    """Return the package that keeps the driver on a branch, or on one version of it."""
    preferences = f"Package: *nvidia* libcuda1 cuda-drivers*\nPin: version {versions}\nPin-Priority: 1001\n"
    return Deb(
        name=f"nvidia-driver-pinning-{kept}",
        version=version,
        description=DOUBLE,
        # One at a time; the file is a configuration file and stays until a purge.
        fields={"Provides": "nvidia-driver-pinning", "Conflicts": "nvidia-driver-pinning"},
        # apt reads files that end with .pref, or that have no ending at all.
        files={
            f"/etc/apt/preferences.d/nvidia-driver-pinning-{kept}{'.pref' * ('.' in kept)}": File(preferences.encode())
        },
    )


def driver(double: Path, branch: str, upstream: str) -> list[Deb]:
    """Return the packages of one driver version."""
    version = f"{upstream}-1"
    postinst = KERNEL_POSTINST.replace("@VERSION@", upstream).replace("@CUDA@", DRIVER_CUDA[branch])
    licenses = {"nvidia-kernel-open-dkms": "Dual MIT/GPL", "nvidia-kernel-dkms": "NVIDIA"}
    library = (double / "libnvidia-ml.so.1").read_bytes()
    needed = "libc6" + (", libyaml-0-2" if b"libyaml-0.so.2" in library else "")

    def deb(name: str, *depends: str, **more: Mapping[str, object]) -> Deb:
        exact = [entry.replace("(=)", f"(= {version})") for entry in depends]
        return Deb(name=name, version=version, description=DOUBLE, fields={"Depends": ", ".join(exact)}, **more)  # type: ignore[arg-type]

    def kernel_module(name: str, other: str) -> Deb:
        return Deb(
            name=name,
            version=version,
            description=DOUBLE,
            fields={
                "Depends": f"nvidia-kernel-support (= {version}), nvidia-modprobe (= {version})",
                "Provides": f"nvidia-kernel-{upstream}",
                "Conflicts": other,
            },
            files={
                f"/lib/systemd/system/{DEVICES}.service": File(double / f"{DEVICES}.service"),
                **{f"{TOOLS}/{tool}": File(double / tool, 0o755) for tool in DEVICE_TOOLS},
            },
            scripts={"postinst": postinst.replace("@LICENSE@", licenses[name]), "prerm": KERNEL_PRERM},
        )

    modules = "nvidia-kernel-open-dkms (=) | nvidia-kernel-dkms (=)"
    return [
        deb(
            "libnvidia-ml1",
            needed,
            files={f"{LIBRARIES}/libnvidia-ml.so.{upstream}": File(library)},
            links={f"{LIBRARIES}/libnvidia-ml.so.1": f"libnvidia-ml.so.{upstream}"},
            scripts=LDCONFIG,
        ),
        deb(
            "libcuda1",
            needed,
            files={f"{LIBRARIES}/libcuda.so.{upstream}": File(double / "libcuda.so.1")},
            links={
                f"{LIBRARIES}/libcuda.so.1": f"libcuda.so.{upstream}",
                f"{LIBRARIES}/libcuda.so": "libcuda.so.1",
            },
            scripts=LDCONFIG,
        ),
        deb("nvidia-smi", "libnvidia-ml1 (=)", files={"/usr/bin/nvidia-smi": File(double / "nvidia-smi", 0o755)}),
        deb("nvidia-modprobe"),
        deb("nvidia-kernel-support", "firmware-nvidia-gsp (=)"),
        deb("firmware-nvidia-gsp"),
        deb(
            "nvidia-persistenced",
            "libnvidia-ml1 (=)",
            "nvidia-smi (=)",
            files={
                "/usr/bin/nvidia-persistenced": File(PERSISTENCED.encode(), 0o755),
                "/lib/systemd/system/nvidia-persistenced.service": File(PERSISTENCED_UNIT.encode()),
            },
        ),
        kernel_module("nvidia-kernel-open-dkms", "nvidia-kernel-dkms"),
        kernel_module("nvidia-kernel-dkms", "nvidia-kernel-open-dkms"),
        deb(
            "nvidia-driver-cuda",
            "libcuda1 (=)",
            "libnvidia-ml1 (=)",
            "nvidia-smi (=)",
            "nvidia-persistenced (=)",
            modules,
        ),
        deb("nvidia-driver", "nvidia-driver-cuda (=)", modules),
        deb(f"nvidia-open-{branch}", "nvidia-driver (=)", "nvidia-kernel-open-dkms (=)"),
        deb("nvidia-open", f"nvidia-open-{branch} (=)"),
        deb(f"cuda-drivers-{branch}", "nvidia-driver (=)", "nvidia-kernel-dkms (=)"),
        deb("cuda-drivers", f"cuda-drivers-{branch} (=)"),
        pinning(branch, f"{branch}.*", version),
        pinning(upstream, f"{upstream}-*", version),
    ]


def fabric_manager(double: Path, branch: str, upstream: str) -> Deb:
    """Return Fabric Manager; up to branch 575 its name has the branch."""
    program = (double / FABRIC_MANAGER).read_text(encoding="utf-8").replace("@VERSION@", upstream)
    other = {name: "nvidia-fabricmanager" for name in ("Provides", "Replaces", "Conflicts")}
    return Deb(
        name="nvidia-fabricmanager" if int(branch) >= 580 else f"nvidia-fabricmanager-{branch}",
        version=f"{upstream}-1",
        description=DOUBLE,
        fields={"Depends": "libc6", **(other if int(branch) < 580 else {})},
        files={
            f"/usr/bin/{FABRIC_MANAGER}": File(program.encode(), 0o755),
            "/usr/share/nvidia/nvswitch/fabricmanager.cfg": File(b"DAEMONIZE=1\nFABRIC_MODE=0\n"),
            "/lib/systemd/system/nvidia-fabricmanager.service": File(FABRIC_MANAGER_UNIT.encode()),
        },
    )


# --- CUDA toolkit -----------------------------------------------------------------------------------------------------


def cuda_toolkits(nvcc: Path) -> list[Deb]:
    """Return the toolkit packages of every CUDA version: names, dependencies, version.json and one real compiler."""
    debs = [
        Deb(
            name="cuda-toolkit-config-common",
            version=f"{max(version for versions in CUDA.values() for version in versions)}-1",
            architecture="all",
            description="double of NVIDIA's package",
            files={"/etc/ld.so.conf.d/000_cuda.conf": File(b"/usr/local/cuda/targets/x86_64-linux/lib\n")},
        )
    ]
    for short, versions in CUDA.items():
        for version in versions:
            debs += cuda_toolkit(short, version)
    debs += compiler(nvcc, "13.0")
    double = NVCC_DOUBLE.replace("@RELEASE@", "12.8").replace("@VERSION@", NVCC["12.8"])
    debs.append(cuda_part("cuda-nvcc", "12.8", "", {"bin/nvcc": File(double.encode(), 0o755)}))
    return debs


def cuda_part(
    name: str, short: str, depends: str, files: Mapping[str, File], links: Mapping[str, str] | None = None
) -> Deb:
    """Return a package of the toolkit whose files are below its folder."""
    prefix, dashed = f"/usr/local/cuda-{short}", short.replace(".", "-")
    return Deb(
        name=f"{name}-{dashed}",
        version=f"{NVCC[short]}-1",
        description="double of NVIDIA's package",
        fields={"Depends": f"cuda-toolkit-{dashed}-config-common{depends}"},
        files={f"{prefix}/{path}": file for path, file in files.items()},
        links={f"{prefix}/{path}": aim for path, aim in (links or {}).items()},
    )


def compiler(nvcc: Path, short: str) -> list[Deb]:
    """Return the packages of NVIDIA's compiler: real, and where upstream's have it."""
    dashed, target = short.replace(".", "-"), "targets/x86_64-linux"

    def below(folder: str, place: str) -> dict[str, File]:
        paths = sorted(path for path in (nvcc / folder).rglob("*") if path.is_file())
        return {
            f"{place}/{path.relative_to(nvcc / folder)}": File(path, 0o755 if path.parent.name == "bin" else 0o644)
            for path in paths
        }

    return [
        cuda_part("cuda-nvcc", short, f", g++, libnvvm-{dashed}", below("bin", "bin")),
        cuda_part("libnvvm", short, "", below("nvvm", "nvvm")),
        cuda_part(
            "cuda-cudart-dev", short, "", {**below("include", f"{target}/include"), **below("lib", f"{target}/lib")},
            {"include": f"{target}/include", "lib64": f"{target}/lib"},
        ),
    ]  # fmt: skip


def cuda_toolkit(short: str, version: str) -> list[Deb]:
    """Return the packages of one version of the toolkit."""
    prefix, dashed, major = f"/usr/local/cuda-{short}", short.replace(".", "-"), short.split(".", maxsplit=1)[0]
    statement = {"cuda": {"name": "CUDA SDK", "version": version}}
    priority = short.replace(".", "")
    # Of 12.8 there is no more here.
    parts = ("cuda-nvcc", "cuda-cudart-dev") if short == "13.0" else ("cuda-nvcc",)
    return [
        Deb(
            name=f"cuda-toolkit-{dashed}-config-common",
            version=f"{version}-1",
            architecture="all",
            description="double of NVIDIA's package",
            fields={"Depends": "cuda-toolkit-config-common"},
            files={f"{prefix}/version.json": File((json.dumps(statement, indent=3) + "\n").encode())},
            scripts={
                "postinst": "#!/bin/sh\nset -e\n"
                f"update-alternatives --install /usr/local/cuda cuda {prefix} {priority}\n",
                "prerm": f'#!/bin/sh\nset -e\n[ "$1" = upgrade ] || update-alternatives --remove cuda {prefix}\n',
            },
        ),
        Deb(
            name=f"cuda-toolkit-{dashed}",
            version=f"{version}-1",
            description="double of NVIDIA's meta package of the CUDA toolkit",
            fields={
                "Depends": f"cuda-toolkit-{dashed}-config-common (= {version}-1)"
                + "".join(f", {part}-{dashed} (>= {NVCC[short]})" for part in parts)
            },
        ),
        Deb(
            name=f"cuda-toolkit-{major}",
            version=f"{version}-1",
            description="double of NVIDIA's meta package of the CUDA toolkit",
            fields={"Depends": f"cuda-toolkit-{dashed} (>= {version})"},
        ),
    ]


def cuda_keyring(distribution: str, url: str, key: bytes) -> Deb:
    """Return the package that brings a CUDA repository's key, source entry and pin."""
    keyring = "/usr/share/keyrings/cuda-archive-keyring.gpg"
    source = f"deb [signed-by={keyring}] {url} /\n"
    return Deb(
        name="cuda-keyring",
        version="1.1-1",
        architecture="all",
        description="double of NVIDIA's package, with the mirror's key and address",
        files={
            keyring: File(key),
            f"/etc/apt/sources.list.d/cuda-{distribution}-x86_64.list": File(source.encode()),
            "/etc/apt/preferences.d/cuda-repository-pin-600": File(CUDA_PIN.encode()),
        },
    )
