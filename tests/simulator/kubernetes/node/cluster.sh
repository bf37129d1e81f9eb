#!/bin/sh
# cluster.sh: a cluster of this node alone, as kubeadm makes one, with all images that it needs. They are made of the node's
# own programs, under the names that upstream's have; what a pod asks for besides is not to be had.
set -eu
version=$(kubectl version --client --output=json | sed -n 's/.*"gitVersion": "v\(.*\)",/\1/p')
share=/usr/share/gpufarm-simulator/kubernetes
work=$(mktemp -d -p /var/tmp)
trap 'rm -rf "$work"' EXIT

# image FOLDER NAME...: has containerd know what is in the folder as an image by each name.
image() {
    folder=$1
    shift
    tar --directory "$folder" --create --file "$work/layer.tar" --owner=0 --group=0 .
    digest=$(sha256sum "$work/layer.tar" | cut -d ' ' -f 1)
    cat >"$work/config.json" <<JSON
{"architecture": "amd64", "os": "linux", "config": {"Env": ["PATH=/usr/local/bin:/usr/bin:/bin"], "Entrypoint": $entrypoint},
 "rootfs": {"type": "layers", "diff_ids": ["sha256:$digest"]}, "history": [{"created_by": "cluster.sh"}]}
JSON
    names=$(printf '"%s",' "$@")
    echo "[{\"Config\": \"config.json\", \"RepoTags\": [${names%,}], \"Layers\": [\"layer.tar\"]}]" >"$work/manifest.json"
    tar --directory "$work" --create config.json manifest.json layer.tar | ctr --namespace k8s.io images import - >/dev/null
    rm -rf "$work/layer.tar" "$folder"
}
# programs FOLDER PROGRAM...: copies programs with the libraries that they load, each to where it is, and what the toolkit
# and the driver's libraries expect of an image.
programs() {
    folder=$1
    shift
    libraries=/lib/$(uname -m)-linux-gnu
    set -- "$@" /bin/sh /sbin/ldconfig "$libraries/libdl.so.2" "$libraries/libm.so.6" "$libraries/libpthread.so.0"
    mkdir -p "$folder/tmp" "$folder/etc"
    # shellcheck disable=SC2046 # one argument for each library
    cp --dereference --parents $( (printf '%s\n' "$@"; ldd "$@" | grep -o '/[^ ]*[.]so[^ :]*') | sort -u) "$folder"
}

mkdir -p "$work/kube/usr/local/bin" "$work/pause"
cp "$share/kube" "$work/kube/usr/local/bin/"
for name in kube-apiserver kube-controller-manager kube-scheduler; do
    ln -s kube "$work/kube/usr/local/bin/$name"
done
entrypoint='[]'
image "$work/kube" "registry.k8s.io/kube-apiserver:v$version" "registry.k8s.io/kube-controller-manager:v$version" \
    "registry.k8s.io/kube-scheduler:v$version"
cp "$share/pause" "$work/pause/"
entrypoint='["/pause"]'
image "$work/pause" "$(sed -n 's/.*sandbox_image = "\(.*\)"/\1/p' /etc/containerd/config.toml)"
programs "$work/plugin" "$share/nvidia-device-plugin" "$share/gpu-feature-discovery"
mkdir -p "$work/plugin/usr/bin"
mv "$work/plugin$share/nvidia-device-plugin" "$work/plugin$share/gpu-feature-discovery" "$work/plugin/usr/bin/"
entrypoint='["nvidia-device-plugin"]'
image "$work/plugin" "nvcr.io/nvidia/k8s-device-plugin:v$(cat "$share/device-plugin-version")"
library=$(/usr/bin/python3 -c 'import os; print(os.path.dirname(os.__file__))')
programs "$work/job" /bin/sleep /usr/bin/python3 "$library"/lib-dynload/*.so
cp --archive --parents "$library" "$work/job"
entrypoint='[]'
image "$work/job" docker.io/library/gpufarm-test:1

# The kubelet's cgroups are to be the node's: below its container's in the machine's tree, or all that it sees.
cgroup=$(sed -n 's|^[0-9]*:memory:\(/.*\)|\1|p' /proc/1/cgroup | sed 's|/init.scope$||')
sed -e "s|@CGROUP@|${cgroup:-/}|; s|@NAME@|$(hostname)|; s|@VERSION@|$version|" "$share/kubeadm.yaml" >"$work/kubeadm.yaml"
systemctl enable --quiet kubelet
# Of what it would say about the node, nothing can be otherwise in a container.
kubeadm init --config "$work/kubeadm.yaml" --skip-phases=addon --ignore-preflight-errors=all
kubectl --kubeconfig /etc/kubernetes/admin.conf wait --for=condition=Ready --timeout=300s node --all
