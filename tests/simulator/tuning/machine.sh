#!/bin/sh
# What a bare-metal machine has and a container shares with this machine: a double lies over each of it, because nothing
# may change this machine's own. Run with each boot of the node. Kinder than a kernel in two things: any governor is taken,
# and so many huge pages are there as are asked for.
set -eu
own=/run/gpufarm-tuning
mkdir -p "$own"
over() { # over FILE CONTENT
    echo "$2" >"$own/${1##*/}"
    mount --bind "$own/${1##*/}" "$1"
}
[ -e /boot/grub/grub.cfg ] || update-grub
over /proc/cmdline "$(sed -n 's/^\tlinux\t/BOOT_IMAGE=/p' /boot/grub/grub.cfg | head -n 1)"
over /proc/sys/kernel/numa_balancing 1
over /proc/sys/vm/nr_hugepages 0
/usr/lib/systemd/systemd-sysctl --prefix=/kernel/numa_balancing --prefix=/vm/nr_hugepages

mount -t tmpfs -o mode=0755 gpufarm /sys/devices/system/cpu/cpufreq
for policy in 0 1; do
    mkdir "/sys/devices/system/cpu/cpufreq/policy$policy"
    echo "conservative ondemand powersave performance schedutil" \
        >"/sys/devices/system/cpu/cpufreq/policy$policy/scaling_available_governors"
    echo schedutil >"/sys/devices/system/cpu/cpufreq/policy$policy/scaling_governor"
done
# A root port and a switch's port with the services, as firmware leaves them, and a device without.
mount -t tmpfs -o mode=0755 gpufarm /sys/bus/pci/devices
mkdir /sys/bus/pci/devices/0000:00:01.0 /sys/bus/pci/devices/0000:02:00.0 /sys/bus/pci/devices/0000:03:00.0
echo 001d >/sys/bus/pci/devices/0000:00:01.0/acs
echo 001d >/sys/bus/pci/devices/0000:02:00.0/acs
