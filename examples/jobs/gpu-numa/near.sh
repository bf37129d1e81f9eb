#!/bin/sh
# near.sh PROGRAM [ARGUMENT]...: runs a program with the GPUs that Nomad assigned, on the CPUs and in the memory of the NUMA
# nodes that these GPUs are at. Where the firmware tells of none, it runs as it would without this.
set -eu
export CUDA_VISIBLE_DEVICES="$NVIDIA_VISIBLE_DEVICES" PATH="$PATH:/usr/lib/wsl/lib"

# The GPU that a MIG device is a part of.
whole() {
    case $1 in
    MIG-*) nvidia-smi -L | awk -v mig="$1" '/^GPU/ { gpu = $NF } index($0, mig) { print substr(gpu, 1, length(gpu) - 1) }' ;;
    *) echo "$1" ;;
    esac
}

nodes='' cpus=''
for device in $(echo "$NVIDIA_VISIBLE_DEVICES" | tr , ' '); do
    bus=$(nvidia-smi --id="$(whole "$device")" --query-gpu=pci.bus_id --format=csv,noheader)
    # nvidia-smi writes 00000000:1B:00.0 for what the kernel has as 0000:1b:00.0.
    folder=${SYSFS:-/sys}/bus/pci/devices/$(echo "$bus" | tr A-F a-f | sed 's/^0000//')
    node=$(cat "$folder/numa_node" 2>/dev/null || echo -1)
    if [ "$node" -ge 0 ]; then
        nodes=${nodes:+$nodes,}$node
        cpus=${cpus:+$cpus,}$(cat "$folder/local_cpulist")
    else
        echo "near.sh: nothing tells at which NUMA node $device is; this runs on any CPU" >&2
        exec "$@"
    fi
done

if command -v numactl >/dev/null; then
    exec numactl --physcpubind="$cpus" --membind="$nodes" "$@"
fi
# Without numactl memory follows the CPUs, as the kernel gives a process what is next to the one it runs on, and takes from
# the other nodes when that is used up.
exec taskset --cpu-list "$cpus" "$@"
