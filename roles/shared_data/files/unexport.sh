#!/bin/sh
# unexport.sh FILE ["PATH CLIENT"]...: has the NFS server forget what the file exports, but for these, and prints what. What
# somebody has exported until the next boot stays; exportfs -r would drop it.
file=$1
shift
[ -e "$file" ] || exit 0
sed -n 's/^\(\/[^ ]*\) \([^(]*\)(.*$/\1 \2/p' "$file" | grep -vxF -e "$(printf '%s\n' "$@")" | while read -r path client; do
    case $client in *:*) client="[$client]" ;; esac
    if said=$(exportfs -u "$client:$path" 2>&1); then
        echo "$client:$path"
    else
        case $said in *'Could not find'*) ;; *) echo "$said" >&2; exit 1 ;; esac
    fi
done
