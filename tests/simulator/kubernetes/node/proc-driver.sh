#!/bin/sh
# A hook of the OCI runtime for each container: what NVIDIA's driver has in every /proc, a pod's too. By it the device plugin
# finds the device nodes of MIG's instances.
set -eu
root=$(sed -n 's/.*"bundle":"\([^"]*\)".*/\1/p')/rootfs
[ ! -d "$root/proc/driver" ] || mount --bind /proc/driver "$root/proc/driver"
