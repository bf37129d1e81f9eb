"""The probe before a node works again, after test_device.py, which counts starts of the agent."""

from __future__ import annotations

import re

from testinfra.host import Host

from tests.simulator.gpu import faults
from tests.testinfra.helpers import nomad_api
from tests.testinfra.playbooks import Run, enter, words

testinfra_hosts = ["device-t4"]


def put_back(host: Host) -> tuple[Run, str, str | None]:
    """Return what it said, and whether the node is open and what its mark says."""
    run = enter("node_maintenance/put_back", limit="device-t4")
    (node,) = [each for each in nomad_api(host, "/v1/nodes") if each["Name"] == "device-t4"]
    mark = nomad_api(host, "/v1/client/metadata")["Meta"].get("gpufarm_maintenance")
    return run, node["SchedulingEligibility"], mark


def test_node_with_a_sick_gpu_stays_out_of_work(host: Host) -> None:
    out = enter("node_maintenance/take_out", limit="device-t4", node_maintenance_change="a new riser")
    assert out.code == 0, out.output
    faults.apply_to_container("device-t4", lambda profile: faults.ecc_errors(profile, 1))
    run, eligibility, mark = put_back(host)
    faults.apply_to_container("device-t4", lambda profile: faults.reset_gpu(profile, 1))
    assert (run.code != 0, eligibility, mark) == (True, "ineligible", "a new riser"), run.output
    told = words(run.output)
    assert re.search(
        r"device-t4: [^.]*ecc_uncorrected GPU-\w+ after a new riser\. .* found 1 uncorrected memory error", told
    )
    assert "Expected: healthy GPUs that Nomad has; the node stays out of work. Next step: mend what is named" in told
    run, eligibility, mark = put_back(host)
    assert (run.code, eligibility, mark) == (0, "eligible", None), run.output
