#!/bin/sh
# Prints "booted" where nothing of the driver has changed since this host was started, else what has. Files of packages keep
# the time of their making, so the time of their last change of any kind counts. An initramfs, the kernel's command line and
# settings of modules are what decides whether another driver takes the GPU first; that of kdump, which RHEL may make while it
# boots, is for a kernel of its own.
started=$(sed -n 's/^btime //p' /proc/stat)
changed() {
    find "$@" -newerct "@${started:-0}" -print -quit 2>/dev/null
}
found=$(
    changed /lib/modules -name 'nvidia*.ko*'
    changed /usr/lib /usr/lib64 -maxdepth 4 -name 'libnvidia-ml.so*'
    changed /etc/modprobe.d /lib/modprobe.d /etc/modules-load.d -name '*.conf'
    changed /boot -maxdepth 3 '(' -name 'init*' ! -name '*kdump*' -o -name grub.cfg -o -path '*/loader/entries/*' ')'
)
echo "${found:-booted}"
