#!/bin/sh
# look.sh USER PROFILE DIR: prints what this host has of minikube, a word and what it is to a line. Changes nothing.
user=$1 profile=$2 dir=$3

sed 's/^/harden /' /proc/sys/net/core/bpf_jit_harden 2>/dev/null
[ ! -x "$dir/minikube" ] || sha256sum "$dir/minikube" | sed 's/\([^ ]*\).*/program \1/'
for folder in "$dir" /usr/local/bin /usr/bin /snap/bin; do
    case "$folder $(readlink "$folder/kubectl")" in
    "$dir minikube" | "$dir $dir/minikube") echo "link $dir/kubectl" ;;
    *) [ ! -x "$folder/kubectl" ] || echo "kubectl $folder/kubectl" ;;
    esac
done

home=$(getent passwd "$user" | cut -d: -f6)
[ -n "$home" ] || exit 0
echo "home $home"
echo "groups $(id -nG "$user")"
[ ! -d "$home/.minikube" ] || echo "folder $home/.minikube"
# A start that has failed leaves the folder alone.
for folder in "$home"/.minikube/profiles/*/; do
    [ ! -d "$folder" ] || echo "profile $(basename "$folder")"
done
config=$home/.minikube/profiles/$profile/config.json
[ ! -e "$config" ] || echo "config $(tr -d '\n' <"$config")"
