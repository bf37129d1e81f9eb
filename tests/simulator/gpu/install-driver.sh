#!/bin/sh
# Lays the doubles out as a driver's installation does: install-driver.sh BUILD PROFILE.yml [ROOT]
# BUILD is what `make BUILD=...` filled. Afterwards run ldconfig in the node.
set -eu

build=${1:?usage: install-driver.sh BUILD PROFILE.yml [ROOT]}
profile=${2:?usage: install-driver.sh BUILD PROFILE.yml [ROOT]}
root=${3:-}
root=${root%/}
here=$(cd "$(dirname "$0")" && pwd)
tools=$root/usr/local/lib/gpufarm-simulator

facts=$("$build/gpufarm-gpu-profile" "$profile")
fact() {
    printf '%s\n' "$facts" | sed -n "s/^$1 //p"
}
place() {
    mode=$1 from=$2 to=$root$3
    mkdir -p "$(dirname "$to")"
    rm -f "$to"
    install -m "$mode" "$from" "$to"
}

mkdir -p "$tools" "$root/etc/systemd/system"
install -m 0755 "$build/gpufarm-gpu-profile" "$here/install-profile.sh" "$here/gpufarm-gpu-devices" "$tools/"
install -m 0644 "$here/gpufarm-gpu-devices.service" "$root/etc/systemd/system/"

if [ "$(fact platform)" = wsl ]; then
    # WSL's init does this from the Windows driver: loaders in /usr/lib/wsl/lib, the files proper in the driver store.
    store=$(fact store_path)
    place 0755 "$build/libnvidia-ml.so.1" /usr/lib/wsl/lib/libnvidia-ml.so.1
    place 0755 "$build/libcuda.so.1" /usr/lib/wsl/lib/libcuda.so.1
    ln -sf libcuda.so.1 "$root/usr/lib/wsl/lib/libcuda.so"
    place 0755 "$build/libdxcore.so" /usr/lib/wsl/lib/libdxcore.so
    place 0755 "$build/nvidia-smi" /usr/lib/wsl/lib/nvidia-smi
    place 0755 "$build/libnvidia-ml.so.1" "$store/libnvidia-ml.so.1"
    place 0755 "$build/libnvidia-ml.so.1" "$store/libnvidia-ml_loader.so"
    place 0755 "$build/libcuda.so.1" "$store/libcuda.so.1.1"
    place 0755 "$build/libcuda.so.1" "$store/libcuda_loader.so"
    place 0755 "$build/nvidia-smi" "$store/nvidia-smi"
    # Asked for by name when a CDI specification is made; nothing loads them here.
    for name in libnvidia-ptxjitcompiler.so.1 libnvdxgdmal.so.1; do
        place 0644 /dev/null "$store/$name"
    done
    place 0755 "$build/wsl-uname.so" /usr/local/lib/gpufarm-simulator/wsl-uname.so
    mkdir -p "$root/etc/ld.so.conf.d"
    echo /usr/lib/wsl/lib >"$root/etc/ld.so.conf.d/ld.wsl.conf"
else
    version=$(fact library_version)
    libraries=/usr/lib/$(uname -m)-linux-gnu
    for name in libnvidia-ml libcuda; do
        rm -f "$root$libraries/$name".so.[0-9]*.*
        place 0755 "$build/$name.so.1" "$libraries/$name.so.$version"
        ln -sf "$name.so.$version" "$root$libraries/$name.so.1"
    done
    ln -sf libcuda.so.1 "$root$libraries/libcuda.so"
    place 0755 "$build/nvidia-smi" /usr/bin/nvidia-smi
fi
GPUFARM_GPU_PROFILE=$build/gpufarm-gpu-profile "$here/install-profile.sh" "$profile" "$root"
