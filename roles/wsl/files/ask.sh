#!/bin/sh
# ask.sh SECONDS OWNER INSTALLED PACKAGE...: what a distribution is to a GPU node, a line each, whose first word says what
# the rest is. SECONDS are the control node's clock; OWNER and INSTALLED are commands of the package manager: whose a file
# is, and which of the PACKAGES are there.
set -u
seconds=$1 owner=$2 installed=$3
shift 3
wsl=/usr/lib/wsl

echo "clock $(date +%s) $seconds"
echo "cgroup $(cat /sys/fs/cgroup/cgroup.controllers 2>/dev/null)"
echo "here $(cat /proc/sys/kernel/random/boot_id) $(readlink /proc/self/ns/pid)"
echo "network $(timeout -s KILL 60 wslinfo --networking-mode 2>/dev/null)"
[ ! -d /run/systemd/system ] || echo systemd
[ -x /lib/systemd/systemd ] || [ -x /usr/lib/systemd/systemd ] || echo systemless
[ ! -e /dev/dxg ] || echo dxg
# What a task of Windows holds the distribution by; containers have processes of the same name.
grep -lsxz infinity /proc/[0-9]*/cmdline | while read -r words; do
    [ "$(tr '\0' ' ' 2>/dev/null <"$words")" = '/bin/sleep infinity ' ] || continue
    [ "$(readlink "${words%/cmdline}/ns/pid")" != "$(readlink /proc/self/ns/pid)" ] || echo held
done
# What Windows' driver hangs in, no signal but the last one ends.
timeout -s KILL 60 "$wsl/lib/nvidia-smi" -L 2>&1 | sed 's/^GPU /gpu /; t; s/^/smi /'

for library in /usr/lib/libcuda.so* /usr/lib/libnvidia-ml.so* /usr/lib64/libcuda.so* /usr/lib64/libnvidia-ml.so* \
    /usr/lib/*-linux-gnu/libcuda.so* /usr/lib/*-linux-gnu/libnvidia-ml.so*; do
    real=$(readlink -e "$library") || continue
    case $real in
    "$wsl"/*) ;;
    *) echo "driver $($owner "$real" 2>/dev/null || echo "$real")" ;;
    esac
done
eval "$installed"' "$@"' 2>/dev/null | sed -n 's/^installed /driver /p'

# Folders of Windows' driver store that a specification names, and those that a new one would.
stores() {
    grep -o "$wsl/drivers/[^/\"]*" "$@" | sort -u | tr '\n' ' '
}
for file in /etc/cdi/*.yaml /etc/cdi/*.json /run/cdi/*.yaml /run/cdi/*.json; do
    grep -qs nvidia.com/gpu "$file" || continue
    echo "cdi $file $(stores "$file")"
done
if systemctl cat nvidia-cdi-refresh.service >/dev/null 2>&1; then
    echo "store $(timeout -s KILL 60 nvidia-ctk --quiet cdi generate 2>/dev/null | stores)"
fi
