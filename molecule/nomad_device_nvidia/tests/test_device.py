from __future__ import annotations

from testinfra.host import Host

from tests.testinfra.helpers import gpu_uuids, nomad_gpus, restarts, wait_for

testinfra_hosts = ["device-t4"]


def test_nomad_has_every_gpu_of_the_node(host: Host) -> None:
    wanted = sorted(gpu_uuids(host))
    assert len(wanted) == 4
    wait_for(f"Nomad has {wanted}", lambda: sorted(nomad_gpus(host, "device-t4")) == wanted)


def test_plugin_is_the_verified_release(host: Host) -> None:
    plugin = host.file("/opt/nomad/plugins/nomad-device-nvidia")
    assert plugin.mode == 0o755
    assert plugin.user == "root"
    assert plugin.sha256sum in host.check_output("cat /var/lib/gpufarm/releases/nomad-device-nvidia-*.json")


def test_agent_started_once(host: Host) -> None:
    assert restarts(host, "nomad") == 1
