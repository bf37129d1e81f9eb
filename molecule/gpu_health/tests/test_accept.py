"""playbooks/accept.yml: a node is tested while it is closed, and opened where it passes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from testinfra.host import Host

from tests.simulator.gpu import faults
from tests.testinfra.helpers import gpu_uuids, nomad_api, wait_for
from tests.testinfra.playbooks import Run, run_in_scenario, words

NODE = "health-t4"
testinfra_hosts = [NODE]
CLOSED = "gpufarm_maintenance"

JOB = """
job "busy" {
  type = "batch"
  group "one" {
    task "sleep" {
      driver = "raw_exec"
      config {
        command = "sleep"
        args    = ["3600"]
      }
    }
  }
}
"""


def node(host: Host) -> dict[str, Any]:
    """Return what Nomad's servers know of the node."""
    found: dict[str, Any] = nomad_api(
        host, f"/v1/node/{nomad_api(host, '/v1/agent/self')['stats']['client']['node_id']}"
    )
    return found


def meta(host: Host) -> dict[str, str]:
    """Return the meta that the node's own agent has; servers learn of it seconds later."""
    found: dict[str, str] = nomad_api(host, "/v1/client/metadata")["Meta"]
    return found


class Acceptance:
    """Runs of the playbook, and what they have written."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "records" / "accepted.jsonl"

    def __call__(self, *options: str, timeout: int = 60, **given: Any) -> Run:
        variables = {
            "accept_records": str(self.path),
            # A T4 here has half of the lanes; and device memory is this machine's own.
            "accept_options": {"memory_share": 0.01, "peers": False, "host_min_percent": 40, "timeout": timeout},
            "gpu_node_gpus": 4,
            **given,
        }
        return run_in_scenario("playbooks/accept.yml", "--extra-vars", json.dumps(variables), *options)

    def records(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def accept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Acceptance]:
    def fill(profile: faults.Profile) -> None:
        for number in range(4):
            faults.set_value(profile, number, "fb_memory_usage.used", "14600 MiB")

    def mend(profile: faults.Profile) -> None:
        for number in range(4):
            faults.recover_cuda(profile, number)
            faults.find_gpu(profile, number).pop("fb_memory_usage", None)

    faults.apply_to_container(NODE, fill)
    yield Acceptance(tmp_path_factory.mktemp("accept"))
    faults.apply_to_container(NODE, mend)


def told(record: dict[str, Any]) -> set[tuple[str, str | None]]:
    return {(problem["code"], problem["uuid"]) for problem in record["problems"]}


def test_check_tells_what_would_be_measured_and_changes_nothing(host: Host, accept: Acceptance) -> None:
    before = node(host)
    run = accept("--check")
    assert run.code == 0, run.output
    assert f"{NODE}: would be closed, and measured at level quick: {', '.join(gpu_uuids(host))}" in words(run.output)
    assert (accept.records(), accept.path.parent.exists()) == ([], False)
    after = node(host)
    assert [after[key] for key in ("SchedulingEligibility", "Meta")] == [
        before[key] for key in ("SchedulingEligibility", "Meta")
    ]


def test_a_node_with_work_is_refused_by_name(host: Host, accept: Acceptance) -> None:
    host.check_output("echo %s > /root/busy.hcl && nomad job run -detach /root/busy.hcl", JOB)

    def running() -> bool:
        return [each["ClientStatus"] for each in nomad_api(host, "/v1/job/busy/allocations")] == ["running"]

    try:
        wait_for("the job runs", running)
        run = accept()
        assert run.code != 0, run.output
        assert f"{NODE}: 1 running allocation, which acceptance would end: busy.one[0] (" in words(run.output)
        assert running() and node(host)["SchedulingEligibility"] == "eligible"
        assert accept.records() == []
    finally:
        host.check_output("nomad job stop -purge -detach busy")
    wait_for("the job has ended", lambda: host.run("pgrep -x sleep -a | grep 3600").rc != 0)


def test_a_node_that_is_well_is_opened_and_has_its_record(host: Host, accept: Acceptance) -> None:
    run = accept()
    assert run.code == 0, run.output
    told = "4 GPU(s) at level quick, 0 compared with no sibling and 4 with no past; open again, after acceptance"
    assert f"{NODE}: accepted, {told}" in words(run.output)
    assert node(host)["SchedulingEligibility"] == "eligible" and CLOSED not in meta(host)
    (record,) = accept.records()
    assert (record["node"], record["verdict"], record["problems"]) == (NODE, "accepted", [])
    assert [gpu["uuid"] for gpu in record["gpus"]] == gpu_uuids(host)
    for gpu in record["gpus"]:
        assert gpu["serial"] and gpu["vbios_version"] and gpu["power_limit_w"] == 70
        assert (gpu["model"], gpu["siblings"], gpu["accepted_before"]) == ("Tesla T4", 3, None)
        assert gpu["figures"]["memory_read_gb_per_s"] > 0


def test_a_card_that_is_slow_is_named_by_all_three_and_stays_closed(host: Host, accept: Acceptance) -> None:
    slow = gpu_uuids(host)[1]
    faults.apply_to_container(NODE, lambda profile: faults.slow_memory(profile, 1))
    run = accept()
    assert run.code != 0, run.output
    first, record = accept.records()
    assert record["verdict"] == "failed"
    assert told(record) == {(code, slow) for code in ("slow_memory", "slow_among_siblings", "slower_than_before")}
    assert {gpu["accepted_before"] for gpu in record["gpus"]} == {first["date"]}
    assert f"Node {NODE}, GPU {slow}: found memory read at" in words(run.output)
    assert node(host)["SchedulingEligibility"] == "ineligible"
    assert meta(host)[CLOSED].startswith("acceptance, which failed: slow_memory, ")


def test_wrong_results_no_context_and_a_hang_are_each_their_cards(host: Host, accept: Acceptance) -> None:
    def spoil(profile: faults.Profile) -> None:
        faults.recover_cuda(profile, 1)
        faults.compute_wrongly(profile, 0)
        faults.refuse_context(profile, 1)
        faults.hang_cuda(profile, 2)

    faults.apply_to_container(NODE, spoil)
    # The fourth has as long, on a machine that does much else.
    run = accept(timeout=90)
    assert run.code != 0, run.output
    record = accept.records()[-1]
    uuids = gpu_uuids(host)
    assert told(record) == {("wrong_results", uuids[0]), ("context_failed", uuids[1]), ("hung", uuids[2])}
    assert [gpu["verdict"] for gpu in record["gpus"]] == ["failed", "failed", "failed", "ok"]
    assert node(host)["SchedulingEligibility"] == "ineligible"


def test_mended_it_is_accepted_again(host: Host, accept: Acceptance) -> None:
    faults.apply_to_container(NODE, lambda profile: [faults.recover_cuda(profile, number) for number in range(4)])
    run = accept()
    assert run.code == 0, run.output
    assert [record["verdict"] for record in accept.records()] == ["accepted", "failed", "failed", "accepted"]
    assert {gpu["accepted_before"] for gpu in accept.records()[-1]["gpus"]} == {accept.records()[0]["date"]}
    assert node(host)["SchedulingEligibility"] == "eligible" and CLOSED not in meta(host)
