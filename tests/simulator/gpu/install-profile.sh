#!/bin/sh
# Installs a GPU profile on a node: install-profile.sh PROFILE.yml [ROOT]
#
# Besides /etc/gpufarm-simulator/gpu.yml it makes the copy that travels into containers: nvidia-ctk mounts the GSP
# firmware of the driver version (Linux) and nvcubins.bin of the driver store (WSL). The copy is a hard link where that
# is possible, so that a change in place reaches containers that run already.
#
# Run it in the node rather than in the image: overlayfs breaks hard links of a lower layer at the first write.
set -eu

profile=${1:?usage: install-profile.sh PROFILE.yml [ROOT]}
root=${2:-}
root=${root%/}
here=$(cd "$(dirname "$0")" && pwd)

for tool in "${GPUFARM_GPU_PROFILE:-}" "$here/gpufarm-gpu-profile" gpufarm-gpu-profile; do
    if [ -n "$tool" ] && command -v "$tool" >/dev/null; then
        break
    fi
done

facts=$("$tool" "$profile")
fact() {
    printf '%s\n' "$facts" | sed -n "s/^$1 //p"
}

folder=$root/etc/gpufarm-simulator
target=$folder/gpu.yml
mkdir -p "$folder"
linked=$root/run/gpufarm-simulator/linked
if [ "$profile" -ef "$target" ] && [ -e "$linked" ]; then
    exit 0
elif [ "$profile" -ef "$target" ]; then
    # The node starts from an image: give the profile an inode of the node's own layer, if it is not a mount.
    cp -p "$target" "$target.new"
    mv -f "$target.new" "$target" 2>/dev/null || rm -f "$target.new"
elif [ -e "$target" ]; then
    cat "$profile" >"$target"
else
    cp "$profile" "$target"
    chmod 0644 "$target"
fi

if [ "$(fact platform)" = wsl ]; then
    copy=$root$(fact store_path)/nvcubins.bin
else
    copy=$root/lib/firmware/nvidia/$(fact driver_version)/gsp_ga10x.bin
fi
# The firmware of another driver version would be found first.
rm -f "$root"/lib/firmware/nvidia/*/gsp_ga10x.bin "$root"/usr/lib/wsl/drivers/*/nvcubins.bin
mkdir -p "$(dirname "$copy")"
ln -f "$target" "$copy" 2>/dev/null || cp "$target" "$copy"

# In the node itself this is the first time since it booted: GPUs forget what they do not keep.
if [ -z "$root" ]; then
    "$tool" --boot "$target"
fi

# What commands set at run time belongs to the profile that was there before.
rm -f "$root/run/gpufarm-simulator/state.yml"

# In the node itself the link is made once a boot, so that running containers keep the file they have mounted.
if [ -z "$root" ]; then
    mkdir -p "${linked%/*}"
    touch "$linked"
fi
