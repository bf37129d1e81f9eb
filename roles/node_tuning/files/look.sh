#!/bin/sh
# look.sh [acs] [UNIT...]: prints what the settings of the role are at, one to a line. Changes nothing.
# A policy whose CPUs are all offline cannot be read.
for policy in /sys/devices/system/cpu/cpufreq/policy*; do
    governor=$(cat "$policy/scaling_governor" 2>/dev/null) || continue
    echo "governor ${policy##*/} $governor"
    echo "governors $(cat "$policy/scaling_available_governors")"
done | sort -u
for key in kernel/numa_balancing vm/nr_hugepages fs/nr_open; do
    [ ! -r "/proc/sys/$key" ] || echo "sysctl $(echo "$key" | tr / .) $(cat "/proc/sys/$key")"
done
sed -n 's/^MemTotal: *\([0-9]*\) kB/memory \1/p; s/^Hugepagesize: *\([0-9]*\) kB/page \1/p' /proc/meminfo
echo "cmdline $(cat /proc/cmdline)"
echo "virtual $(systemd-detect-virt --vm)"

# What the next boot begins with, a line for each kernel. A grub.cfg may be there that systemd-boot reads no more.
loader=
for said in /sys/firmware/efi/efivars/LoaderInfo-*; do
    [ ! -r "$said" ] || ! tr -d '\000' <"$said" | grep -q systemd-boot || loader=systemd-boot
done
if [ -n "$loader" ]; then
    echo "loader $loader"
elif [ -x /usr/sbin/grubby ]; then
    echo "loader grubby"
    grubby --info=ALL 2>/dev/null | sed -n 's/^args="\(.*\)"$/boot \1/p'
elif [ -x /usr/sbin/update-grub ] && [ -e /boot/grub/grub.cfg ]; then
    echo "loader grub"
    sed -n 's/^[[:space:]]*linux[^[:space:]]*[[:space:]]*[^[:space:]]*vmlinu[^[:space:]]*/boot/p' /boot/grub/grub.cfg
else
    for file in /boot /efi /boot/efi; do
        [ ! -e "$file/loader/loader.conf" ] || echo "loader systemd-boot"
    done
fi

# Files that the last boot has read as they are now.
started=$(sed -n 's/^btime //p' /proc/stat)
for file in /boot/grub/grub.cfg /boot/loader/entries /etc/sysctl.d/99-zz-gpufarm-tuning.conf \
    /etc/systemd/system/*.service.d/gpufarm-tuning.conf; do
    [ ! -e "$file" ] || [ -n "$(find "$file" -newermt "@${started:-0}")" ] || echo "booted $file"
done

# Files that have the last word over those of the role.
grep -lsE '^[^#;]*(numa_balancing|nr_hugepages|memlock|nofile)' /etc/sysctl.d/*.conf /run/sysctl.d/*.conf \
    /usr/local/lib/sysctl.d/*.conf /usr/lib/sysctl.d/*.conf /etc/security/limits.d/*.conf |
    LC_ALL=C awk -F/ '$NF > "99-zz-gpufarm-tuning.conf" { print "later " $0 }'

# What was there before the role came.
for file in /var/lib/gpufarm/tuning/*; do
    [ ! -f "$file" ] || echo "before ${file##*/} $(cat "$file")"
done

if [ "${1:-}" = acs ]; then
    shift
    command -v setpci >/dev/null || echo "acs setpci missing"
    for device in /sys/bus/pci/devices/*; do
        control=$(setpci -s "${device##*/}" ECAP_ACS+6.w 2>/dev/null) && echo "acs ${device##*/} $control"
    done
fi
for unit in "$@"; do
    main=$(systemctl show --property=MainPID --value "$unit.service" 2>/dev/null)
    [ "${main:-0}" = 0 ] || sed -n "s/^Max locked memory *\([^ ]*\) .*/limit $unit memlock \1/p
        s/^Max open files *\([^ ]*\) .*/limit $unit open_files \1/p" "/proc/$main/limits"
done
exit 0
