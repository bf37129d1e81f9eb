#!/bin/sh
# look.sh PATH [UNITS [ETC]]: prints what is at a mount point, one thing to a line. Changes nothing, and opens nothing of what is mounted
# there: who asks a server that is away waits.
path=$1
units=${2:-/etc/systemd/system}
etc=${3:-/etc}
unit=$(systemd-escape --path "$path")
echo "unit $unit"
# What is there by the words of this role's templates is its own. The cache is by its name.
for file in "$units/$unit.mount" "$units/$unit.automount" "$units/gpufarm-data-cache.service"; do
    if [ -e "$file" ]; then
        case $file in
            *mount) grep -qsx 'Description=Shared data of .*' "$file" || { echo "theirs $file"; continue; } ;;
        esac
        echo "file $file $(sha1sum <"$file" | cut -d' ' -f1)"
    fi
done
# Where this role has mounted the data before.
grep -lsx 'Description=Shared data of .*' "$units"/*.mount "$units"/*.automount | while read -r file; do
    sed -n 's/^Where=/former /p' "$file"
done | grep -vx "former $path" | sort -u
echo "automount $(systemctl is-active "$unit.automount")"
# By a run that was cut off before it had systemd read them.
systemctl show "$unit.mount" "$unit.automount" --property=NeedDaemonReload | grep -qx NeedDaemonReload=yes && echo unread
[ -z "$(pidof cachefilesd)" ] || echo "cache runs"
awk -v path="$path" '$2 == path && $3 != "autofs" { print "mount", $1, $3, $4 }' /proc/self/mounts
awk -v path="$path" '$1 !~ /^#/ && $2 == path { print "fstab", $1 }' /etc/fstab 2>/dev/null
if ! awk -v path="$path" '$2 == path { found = 1 } END { exit !found }' /proc/self/mounts; then
    if [ -L "$path" ] || { [ -e "$path" ] && ! [ -d "$path" ]; }; then
        echo "nofolder"
    elif [ -d "$path" ]; then
        find "$path" -mindepth 1 -maxdepth 1 -printf 'beneath %f\n' | LC_ALL=C sort | head -n 3
    fi
fi

# Whose working folder, program or open file is there, and containers that have it mounted at a place of their own.
if grep -q " $path nfs4\? " /proc/self/mounts; then
    device=$(awk -v path="$path" '$5 == path && / - nfs4? / { print $3 }' /proc/self/mountinfo | tail -n 1)
    {
        find /proc/[0-9]*/cwd /proc/[0-9]*/root /proc/[0-9]*/exe /proc/[0-9]*/fd -maxdepth 1 \
            \( -lname "$path" -o -lname "$path/*" \) 2>/dev/null | cut -d/ -f3
        awk -v path="$path" -v device="$device" '$3 == device && $5 != path { split(FILENAME, part, "/"); print part[3] }' \
            /proc/[0-9]*/mountinfo 2>/dev/null
    } | sort -un | while read -r pid; do
        echo "user $pid $(cat "/proc/$pid/comm" 2>/dev/null)"
    done
fi

# Of a server: what of others exports the folder, what this role exports, and who has something of it mounted.
grep -lsE "^[[:space:]]*\"?$path\"?([[:space:]]|$)" "$etc/exports" "$etc"/exports.d/*.exports |
    grep -v '/gpufarm-shared-data.exports$' | sed 's/^/exported /'
sed -n 's/^\(\/[^ ]*\) .*$/own \1/p' "$etc/exports.d/gpufarm-shared-data.exports" 2>/dev/null | sort -u
exportfs -s 2>/dev/null | awk '{ print "export", $1, $2 }'
cat /proc/fs/nfsd/clients/*/info 2>/dev/null | sed -n 's/^address: "\(.*\):[0-9]*"$/client \1/p' | sort -u
exit 0
