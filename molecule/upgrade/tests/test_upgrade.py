"""An upgrade in waves: jobs go on, the first wave that is not well is the last, and the next run goes on from there."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.simulator.docker import docker
from tests.simulator.farm import jobs
from tests.simulator.gpu import faults
from tests.simulator.mirror import build
from tests.testinfra.helpers import wait_for
from tests.testinfra.playbooks import Run, changed_tasks, run_in_scenario, words

FARM = "upgrade"
SERVERS = ["upgrade-server", "upgrade-server2", "upgrade-server3"]
# Options of `docker exec`.
HOW_TO_ASK: list[str] = []
T4, H200, H100 = "upgrade-t4", "upgrade-h200", "upgrade-h100"
SECRETS = Path(os.environ["MOLECULE_EPHEMERAL_DIRECTORY"]) / "nomad-secrets"
OLD, NEW = (product.version for product in build.NOMADS)
WAVES = ("--extra-vars", json.dumps({"upgrade_waves": [1], "verify_timeout": 30}))
DROP_IN = "/etc/systemd/system/nomad.service.d"
BEFORE = "/var/lib/gpufarm/upgrade.json"
# Read after the role's own files.
FAULT = "/etc/nomad.d/zz-fault.hcl"
# Where Nomad starts a task anew or elsewhere, it is another allocation or an event of it.
JOB = """
job "NAME" {
  type = "TYPE"
  constraint {
    attribute = "${node.unique.name}"
    value     = "NODE"
  }
  group "gpu" {
    restart {
      attempts = 0
      mode     = "fail"
    }
    reschedule {
      attempts  = 0
      unlimited = false
    }
    task "train" {
      driver       = "DRIVER"
      kill_timeout = "1s"
      config {
        CONFIG
        command      = "sleep"
        args         = ["86400"]
      }
      resources {
        cpu    = 50
        memory = 64
        device "nvidia/gpu" {}
      }
    }
  }
}
"""


def api(path: str) -> Any:
    return json.loads(docker("exec", *HOW_TO_ASK, SERVERS[0], "nomad", "operator", "api", path))


def ask_with_secrets() -> None:
    """Ask with certificates and a token from now on."""
    tls = "/etc/nomad.d/tls"
    given = {
        "ADDR": "https://127.0.0.1:4646", "CACERT": f"{tls}/ca.pem", "CLIENT_CERT": f"{tls}/agent.pem",
        "CLIENT_KEY": f"{tls}/agent-key.pem", "TOKEN": (SECRETS / "nomad-management-token.txt").read_text("ascii"),
    }  # fmt: skip
    HOW_TO_ASK.extend(part for name, value in given.items() for part in ("--env", f"NOMAD_{name}={value}"))


def allocations() -> dict[str, list[tuple[str, str, list[str]]]]:
    """Return the allocations of each job, with their states and what happened to their tasks."""
    return {
        job["ID"]: [
            (each["ID"], each["ClientStatus"], [event["Type"] for event in task["Events"]])
            for each in api(f"/v1/job/{job['ID']}/allocations")
            for task in (each["TaskStates"] or {}).values()
        ]
        for job in api("/v1/jobs")
    }


def running() -> dict[str, list[str]]:
    """Return the agents by the version that runs, as Nomad knows it."""
    found = [(member["Name"].removesuffix(".global"), member["Tags"]["build"])
             for member in api("/v1/agent/members")["Members"]]  # fmt: skip
    found += [(node["Name"], node["Version"]) for node in api("/v1/nodes")]
    return {version: sorted(name for name, its in found if its == version) for version in {each for _, each in found}}


def uuid_of(node: str, gpu: int) -> str:
    return str(faults.load(docker("exec", node, "cat", faults.PROFILE_PATH))["gpus"][gpu]["uuid"])


def upgrade(*options: str) -> tuple[Run, str]:
    run = run_in_scenario("playbooks/upgrade.yml", *options)
    return run, words(run.output)


@pytest.fixture(scope="module", autouse=True)
def at_work() -> Iterator[dict[str, list[tuple[str, str, list[str]]]]]:
    """A long job on a GPU in a container, and one that is a process, which end for good where an agent loses them."""
    jobs.load_image(FARM, "h100")
    image = f'image = "{jobs.job_image()}"\n        network_mode = "none"'
    for name, kind, node, driver, config in (
        ("long", "batch", H100, "docker", image), ("serving", "service", T4, "raw_exec", "")
    ):  # fmt: skip
        text = JOB.replace("NAME", name).replace("TYPE", kind).replace("NODE", node)
        text = text.replace("DRIVER", driver).replace("CONFIG", config)
        jobs.nomad(FARM, "job", "run", "-detach", "-", text=text)
    wait_for("the jobs run", lambda: [each[0][1:2] for each in allocations().values() if each] == [("running",)] * 2)
    yield allocations()


def test_farm_begins_with_the_older_version() -> None:
    assert running() == {OLD: sorted([*SERVERS, T4, H200, H100])}


def test_nodes_were_handed_what_the_control_machine_has() -> None:
    """Each has verified it, and none of it stays there."""
    for node in [*SERVERS, T4, H200, H100]:
        receipts = docker("exec", node, "sh", "-c", "cat /var/lib/gpufarm/releases/nomad*; ls /var/lib/gpufarm")
        sources = re.findall(r'"source": "(.*)"', receipts)
        assert sources and all(source.startswith("/var/lib/gpufarm/handed/nomad") for source in sources), receipts
        assert receipts.count('"signed_by": "') == len(sources) and "\nhanded" not in receipts


def test_check_mode_announces_the_upgrade_and_changes_nothing(at_work: dict[str, Any]) -> None:
    run, told = upgrade("--check")
    assert run.code == 0, run.output
    assert f"in waves, each verified before the next:' - {H100} - {H200} - {T4}" in told, run.output
    assert set(changed_tasks(run.output)) >= {"Have the verified Nomad release"}
    assert running() == {OLD: sorted([*SERVERS, T4, H200, H100])}
    assert allocations() == at_work
    assert "upgrade.json" not in docker("exec", H100, "ls", "/var/lib/gpufarm")


def test_server_that_fails_stops_every_node(tmp_path: Path) -> None:
    """Beside one that nobody reaches, so that not all hosts of the servers' play fail in it."""
    gone = tmp_path / "gone.yml"
    host = {"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 1}
    gone.write_text(json.dumps({"nomad_servers": {"hosts": {"gone": host}}}), encoding="utf-8")
    # No configuration beside it is a valid one, so none is written.
    for server in SERVERS:
        docker("exec", server, "sh", "-c", f"echo '}}' >{FAULT}")
    run, told = upgrade("-i", str(gone), *WAVES)
    for server in SERVERS:
        docker("exec", server, "rm", FAULT)
    assert run.code != 0
    assert f"{H100}: nothing is changed here, because gone, {', '.join(SERVERS)} failed above." in told, run.output
    assert running() == {OLD: sorted([*SERVERS, T4, H200, H100])}
    assert "upgrade.json" not in docker("exec", T4, "ls", "/var/lib/gpufarm")


def test_first_bad_wave_is_the_last(at_work: dict[str, Any]) -> None:
    # A GPU goes with the first restart of its agent.
    fault = f"mkdir -p {DROP_IN} && printf '[Service]\\nExecStartPre=/bin/rm -f /dev/nvidia7\\n' >{DROP_IN}/fault.conf"
    docker("exec", H100, "sh", "-c", f"{fault} && systemctl daemon-reload")
    run, told = upgrade(*WAVES)
    assert run.code != 0
    assert f"in waves, each verified before the next:' - {H100} - {H200} - {T4}" in told, run.output
    assert f"after the upgrade. Expected also: {uuid_of(H100, 7)}, which were here before it." in told, run.output
    assert running() == {NEW: sorted([*SERVERS, H100]), OLD: sorted([H200, T4])}
    assert allocations() == at_work
    assert docker("exec", H100, "cat", BEFORE).count("GPU-") == 8

    # Repaired, as the message says.
    docker("exec", H100, "sh", "-c", f"rm -r {DROP_IN} && systemctl daemon-reload")
    faults.show_gpu(H100, 7)
    docker("exec", H100, "systemctl", "restart", "nomad")


def test_gpu_that_nomad_alone_lacks_ends_the_second_wave(at_work: dict[str, Any]) -> None:
    """nvidia-smi lists it; an agent that starts again reads that its plugin is to leave it out."""
    uuid = uuid_of(H200, 1)
    text = f'plugin "nomad-device-nvidia" {{ config {{ ignored_gpu_ids = ["{uuid}"] }} }}'
    docker("exec", H200, "sh", "-c", f"printf '%s\\n' '{text}' >{FAULT}")
    run, told = upgrade(*WAVES)
    assert run.code != 0
    # What has not come to its end comes first.
    assert f"in waves, each verified before the next:' - {H100} - {H200} - {T4}" in told, run.output
    assert f"Node {H200}: found 1 GPU without it. Expected: GPU {uuid}." in told, run.output
    assert running() == {NEW: sorted([*SERVERS, H100, H200]), OLD: [T4]}
    assert "upgrade.json" not in docker("exec", H100, "ls", "/var/lib/gpufarm")
    assert allocations() == at_work

    docker("exec", H200, "rm", FAULT)
    docker("exec", H200, "systemctl", "restart", "nomad")


def test_next_run_goes_on_without_a_sick_node(at_work: dict[str, Any]) -> None:
    faults.apply_to_container(T4, lambda profile: faults.lose_gpu(profile, 3))
    run, told = upgrade()
    faults.apply_to_container(T4, lambda profile: faults.recover_gpu(profile, 3))
    assert run.code != 0
    assert f"in waves, each verified before the next:' - {H200} - {H100} - 'left out, because" in told, run.output
    assert f"their GPUs are not well: {T4}'" in told, run.output
    assert f"{T4}: was not upgraded, because before it GPUs did not answer: " in told, run.output
    assert running() == {NEW: sorted([*SERVERS, H200, H100]), OLD: [T4]}
    assert allocations() == at_work


def test_next_run_goes_on_to_the_end(at_work: dict[str, Any]) -> None:
    run, told = upgrade()
    assert run.code == 0, run.output
    assert f"in waves, each verified before the next:' - {T4} - {H100} - {H200}" in told, run.output
    assert running() == {NEW: sorted([*SERVERS, T4, H200, H100])}
    assert allocations() == at_work
    for name in (T4, H200, H100):
        assert "upgrade.json" not in docker("exec", name, "ls", "/var/lib/gpufarm")
    assert {node["SchedulingEligibility"] for node in api("/v1/nodes")} == {"eligible"}


def test_older_version_is_refused() -> None:
    run, told = upgrade("--extra-vars", f"nomad_version={OLD}")
    assert run.code != 0
    assert f"Nomad {NEW} runs, and nomad_version is {OLD}." in told, run.output
    assert running() == {NEW: sorted([*SERVERS, T4, H200, H100])}


def test_open_farm_becomes_a_secure_one(at_work: dict[str, Any]) -> None:
    """One node after the others; nothing but the agents starts anew, and no heartbeat is missed."""
    # Molecule keeps its folder.
    shutil.rmtree(SECRETS, ignore_errors=True)
    secure = ("--extra-vars", json.dumps({"nomad_tls": "generate", "nomad_acl_enabled": True,
                                          "nomad_secrets_dir": str(SECRETS)}))  # fmt: skip
    run = run_in_scenario("playbooks/site.yml", "--limit", f"all:!{T4}", *secure)
    assert run.code == 0, run.output
    ask_with_secrets()
    assert f"goes on understanding agents without TLS, because of {T4}." in words(run.output), run.output
    assert {node["Status"] for node in api("/v1/nodes")} == {"ready"}
    assert allocations() == at_work

    run = run_in_scenario("playbooks/site.yml", *secure)
    assert run.code == 0, run.output
    assert {node["Status"] for node in api("/v1/nodes")} == {"ready"}
    assert allocations() == at_work
    events = [event["Message"] for node in api("/v1/nodes") for event in api(f"/v1/node/{node['ID']}")["Events"]]
    assert "Node registered" in events
    assert [event for event in events if "heartbeat" in event] == []
    for server in SERVERS:
        assert "tls-upgrade.hcl" not in docker("exec", server, "ls", "/etc/nomad.d")

    run = run_in_scenario("playbooks/site.yml", *secure)
    assert set(run.changed.values()) == {0}, run.output
