#!/bin/sh
# look.sh [ROOT]: prints what this host has of Kubernetes, a word and what it is to a line. Changes nothing.
root=${1:-}

# A host is a node where a kubelet has its credentials. The units of both kinds of RKE2 come in one package.
[ ! -e "$root/etc/kubernetes/kubelet.conf" ] || echo "distribution kubeadm"
for name in k3s rke2; do
    agent=$root/var/lib/rancher/$name/agent
    [ -e "$agent/kubelet.kubeconfig" ] || continue
    echo "distribution $name"
    # What it has made its containerd of when it started; the third version of that file is containerd 2's.
    if grep -qs 'nvidia-container-runtime"' "$agent/etc/containerd/config.toml" "$agent/etc/containerd/config-v3.toml"; then
        echo "runtime nvidia"
    fi
done
sed -n 's/.*--container-runtime-endpoint=\([^ "]*\).*/endpoint \1/p; s/^containerRuntimeEndpoint: *"\{0,1\}\([^ "]*\).*/endpoint \1/p' \
    "$root/var/lib/kubelet/kubeadm-flags.env" "$root/var/lib/kubelet/config.yaml" 2>/dev/null
sed -n 's/.*--hostname-override=\([^ "]*\).*/name \1/p' "$root/var/lib/kubelet/kubeadm-flags.env" 2>/dev/null

echo "hostname $(uname -n)"

for program in /usr/bin/kubectl /usr/local/bin/kubectl /snap/bin/kubectl /var/lib/rancher/rke2/bin/kubectl; do
    [ ! -x "$root$program" ] || echo "kubectl $program"
done
[ ! -x "$root/usr/local/bin/k3s" ] || echo "kubectl /usr/local/bin/k3s kubectl"
for file in /etc/kubernetes/admin.conf /etc/rancher/k3s/k3s.yaml /etc/rancher/rke2/rke2.yaml; do
    [ ! -r "$root$file" ] || echo "kubeconfig $file"
done
exit 0
