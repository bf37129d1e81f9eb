#!/bin/sh
# What WSL's init does before it hands over to systemd, besides Windows' driver: a kernel that says what it is, unless
# $GPUFARM_WSL_KERNEL is the name of one that the user has built. Run by gpufarm-node-init.
set -eu
release=${GPUFARM_WSL_KERNEL:-6.6.87.2-microsoft-standard-WSL2}

echo "$release" >/etc/gpufarm-simulator/kernel-release
printf 'Linux version %s (root@builder) (gcc) #1 SMP PREEMPT_DYNAMIC\n' "$release" \
    >/etc/gpufarm-simulator/kernel-version
mount --bind /etc/gpufarm-simulator/kernel-release /proc/sys/kernel/osrelease
mount --bind /etc/gpufarm-simulator/kernel-version /proc/version
echo /usr/local/lib/gpufarm-simulator/wsl-uname.so >/etc/ld.so.preload
