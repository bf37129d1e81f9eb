# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import copy
import dataclasses
import os
import pwd
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpufarm.core.plugins.module_utils import gate, maintenance, nomad, nomad_programs, problem
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils.gate_helper import Farm

DRIVER = maintenance.Plan(
    "driver branch 580", owner="gpufarm.core", policy=maintenance.REFUSE, deadline_s=3600, check_mode=False
)
DRAINED = dataclasses.replace(DRIVER, policy=maintenance.DRAIN, deadline_s=600)
OURS = DRIVER.owner
NOW = "2026-11-22T12:00:00Z"


class Site:
    """A farm, the programs on its first node, and a clock that goes on while the maintenance waits."""

    def __init__(self) -> None:
        self.farm = Farm(2)
        self.node = self.farm.nodes["id-0"]
        self.programs: dict[str, str] = {}
        self.agent = True
        self.foreign: list[str] = []
        self.now = 0.0
        self.alone = False
        self.address = self.farm.agent.url

    @property
    def maintenance(self) -> maintenance.Maintenance:
        # What Nomad answers with 500 is not asked again by the client here.
        client = nomad.Client(nomad.Connection(address=self.address), frozenset())
        return maintenance.Maintenance(
            client,
            running=lambda: self.programs,
            agent=lambda: self.agent,
            foreign=lambda: self.foreign,
            clock=lambda: self.now,
            # A test may give another meanwhile.
            pause=lambda seconds: self.wait(seconds),  # noqa: PLW0108
            gone=lambda: self.alone,
        )

    def wait(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds

    def has_what_does_not_end(self, job: str) -> None:
        """Have an allocation that was told to stop and goes on all the same."""
        stuck = self.farm.run_job("id-0", job)
        stuck["DesiredStatus"] = "stop"
        wait = self.wait

        def on(seconds: float) -> None:
            stuck["ClientStatus"] = "running"
            wait(seconds)

        self.wait = on  # type: ignore[method-assign]

    @property
    def meta(self) -> dict[str, str]:
        return self.farm.clients["id-0"]

    @property
    def writes(self) -> list[str]:
        return [path for path, _body in self.farm.agent.writes]

    def back(self) -> maintenance.Result:
        node = self.maintenance.marked_node(OURS, 1)
        assert node is not None
        return self.maintenance.put_back(node.id)

    def gate(self, healthy: bool, closed_by: str = gate.FARM) -> gate.Decision:
        client = nomad.Client(nomad.Connection(address=self.address))
        node = gate.read_node(client, "id-0")
        wish = gate.Wish(healthy, None if healthy else "gpu_lost", closed_by=closed_by)
        decision = gate.decide(node, wish, NOW)
        gate.carry_out(client, node, decision, wish)
        return decision


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()
    yield made
    made.farm.agent.close()


def test_an_empty_node_is_closed_and_opened(site: Site) -> None:
    out = site.maintenance.take_out(DRIVER)
    assert (out.action, out.maintenance, out.work) == ("out", "driver branch 580", ())
    assert site.node["SchedulingEligibility"] == "ineligible" and site.node["LastDrain"] is None
    assert site.meta["gpufarm_maintenance"] == "driver branch 580" and site.meta["gpufarm_maintenance_since"]
    # A node is marked before it is closed.
    assert site.writes == ["/v1/client/metadata", "/v1/node/id-0/eligibility"]

    again = site.maintenance.take_out(dataclasses.replace(DRIVER, change="a reboot"))
    assert (again.action, again.maintenance) == ("none", "driver branch 580")
    assert len(site.writes) == 2

    back = site.back()
    assert back.action == "in" and "open again, after driver branch 580" in back.message
    assert site.node["SchedulingEligibility"] == "eligible" and site.meta == {}
    # It is opened before its mark goes.
    assert site.writes[2:] == ["/v1/node/id-0/eligibility", "/v1/client/metadata"]
    assert site.maintenance.marked_node(OURS, 1) is None


def test_running_allocations_are_named_and_nothing_is_changed(site: Site) -> None:
    for number in range(7):
        site.farm.run_job("id-0", f"train{number}")
    site.farm.run_job("id-0", "over")["ClientStatus"] = "complete"
    site.farm.run_job("id-1", "elsewhere")
    with pytest.raises(nomad.NomadError) as raised:
        site.maintenance.take_out(DRIVER)
    names = ", ".join(f"train{number}.group[0] (train{number}-0)" for number in range(5))
    assert str(raised.value) == (
        f"7 running allocations, which driver branch 580 would end: {names} and 2 more. Expected: a node on which none "
        "runs; they go on. Next step: wait for their end, or set policy (node_maintenance_policy of the roles) to "
        "drain, which moves services away and gives batch jobs time to end."
    )
    assert site.writes == []


@pytest.mark.parametrize("status", ["running", "pending", "unknown"])
def test_what_has_not_ended_counts(site: Site, status: str) -> None:
    site.farm.run_job("id-0", "train")["ClientStatus"] = status
    with pytest.raises(nomad.NomadError, match="1 running allocation, which"):
        site.maintenance.take_out(DRIVER)


def test_with_consent_they_are_moved_away_and_the_last_program_has_ended(site: Site) -> None:
    site.farm.run_job("id-0", "train")
    out = site.maintenance.take_out(DRAINED)
    assert [work.name for work in out.work] == ["train.group[0]"]
    assert "after it was drained of train.group[0]" in out.message
    (drain,) = [body for path, body in site.farm.agent.writes if path.endswith("/drain")]
    assert drain["DrainSpec"] == {"Deadline": 600 * 10**9, "IgnoreSystemJobs": False}
    assert site.node["SchedulingEligibility"] == "ineligible"
    # It ends when the task has ended.
    assert site.now > 0 and site.node["DrainStrategy"] is None
    site.back()
    assert site.node["SchedulingEligibility"] == "eligible"


def test_drain_waits_no_longer_than_it_may(site: Site) -> None:
    site.farm.run_job("id-0", "train")
    site.programs["train-0000-1111"] = "python"
    with pytest.raises(nomad.NomadError) as raised:
        site.maintenance.take_out(DRAINED)
    assert str(raised.value) == (
        "python (train-00), 900 s after the node was closed for driver branch 580. Expected: a node that is empty by "
        "then; it stays closed. Next step: end them (`nomad alloc stop`, or the processes that Nomad no longer knows) "
        "and run this again, or give them more time."
    )
    assert 900 < site.now < 910
    assert site.node["SchedulingEligibility"] == "ineligible" and "gpufarm_maintenance" in site.meta
    # Where every node is drained at once, they must not keep the leader busy.
    asked = [path for path in site.farm.asked if path.startswith("/v1/node/")]
    assert len(asked) < 200 and len([path for path in asked if not path.endswith(" stale")]) < 10


def test_what_somebody_has_stopped_is_waited_for(site: Site) -> None:
    """It ends without the change, so that it refuses nothing."""
    site.farm.run_job("id-0", "agent")["DesiredStatus"] = "stop"
    out = site.maintenance.take_out(DRIVER)
    assert (out.action, out.message, out.work) == ("out", "out for driver branch 580", ())
    assert site.farm.allocations["id-0"][0]["ClientStatus"] == "complete" and site.now > 0
    assert site.writes == ["/v1/client/metadata", "/v1/node/id-0/eligibility"]

    site.farm.run_job("id-0", "train")
    with pytest.raises(nomad.NomadError, match=r"1 running allocation, .* train\.group\[0\] \(train-00\)\. Expected"):
        site.maintenance.take_out(DRIVER)


def test_a_drain_ends_with_who_waits_for_it(site: Site) -> None:
    """As when somebody interrupts Ansible, and puts the node back meanwhile."""
    site.farm.run_job("id-0", "train")
    site.programs["train-0000-1111"] = "python"
    wait = site.wait

    def interrupted(seconds: float) -> None:
        wait(seconds)
        if site.now > 20:
            site.alone = True
            site.node.update(SchedulingEligibility="eligible", DrainStrategy=None)

    site.wait = interrupted  # type: ignore[method-assign]
    work = site.maintenance
    with pytest.raises(problem.FoundError) as raised:
        work.take_out(DRAINED)
    assert str(raised.value) == (
        "nobody waits for the answer of this run any more. Expected: the Ansible that began it; the node is left as it "
        "is, with its mark. Next step: run it again, which goes on from there, or put the node back."
    )
    assert site.now < 40 and site.node["SchedulingEligibility"] == "eligible"
    assert work.closed and site.meta["gpufarm_maintenance"] == "driver branch 580"


@pytest.mark.parametrize("owner", [None, OURS, "Firmware"])
def test_a_drain_ends_where_another_run_has_put_the_node_back(site: Site, owner: str | None) -> None:
    """Or has taken it out anew since."""
    site.farm.run_job("id-0", "train")
    site.programs["train-0000-1111"] = "python"
    wait = site.wait

    def another_run(seconds: float) -> None:
        wait(seconds)
        if site.now > 20 and site.meta.get("gpufarm_maintenance_since") != NOW:
            site.back()
            if owner:
                site.meta.update(gpufarm_maintenance_since=NOW, gpufarm_maintenance_by=owner)

    site.wait = another_run  # type: ignore[method-assign]
    work = site.maintenance
    with pytest.raises(problem.FoundError) as raised:
        work.take_out(DRAINED)
    found = f"was taken out anew by {owner} at {NOW}" if owner else "was put back"
    assert str(raised.value) == (
        f"a node that {found} while this run waited to have it empty for driver branch 580. Expected: one that nobody "
        "else works on; it is left as it is. Next step: let the other run end, and run this again if it is still to be "
        "done."
    )
    assert site.node["SchedulingEligibility"] == "eligible" and site.now < 60
    assert work.closed is (owner == OURS)


@pytest.mark.parametrize("owner", [None, OURS, "Firmware"])
@pytest.mark.parametrize("plan", [DRIVER, DRAINED])
def test_what_another_run_has_put_back_before_it_could_be_closed_stays_open(
    site: Site, plan: maintenance.Plan, owner: str | None
) -> None:
    """As while the servers have no leader; or has taken it out anew since."""
    if plan is DRAINED:
        site.farm.run_job("id-0", "train")
    site.farm.hiccups = ["/drain" if plan is DRAINED else "/eligibility"]
    wait = site.wait

    def another_run(seconds: float) -> None:
        wait(seconds)
        site.meta.clear()
        if owner:
            site.meta.update(gpufarm_maintenance_since=NOW, gpufarm_maintenance_by=owner)

    site.wait = another_run  # type: ignore[method-assign]
    work = site.maintenance
    found = f"taken out anew by {owner} at {NOW}" if owner else "put back"
    with pytest.raises(problem.FoundError, match=f"a node that was {found} while this run waited"):
        work.take_out(plan)
    assert site.farm.hiccups == [] and site.node["SchedulingEligibility"] == "eligible" and site.farm.drains == 0
    assert work.closed is (owner == OURS)


@pytest.mark.parametrize("opens", [True, False])
@pytest.mark.parametrize(("plan", "drained"), [(DRIVER, False), (DRAINED, False), (DRAINED, True)])
def test_what_was_stopped_and_does_not_end_is_waited_for_no_longer_than_it_may_be(
    site: Site, plan: maintenance.Plan, drained: bool, opens: bool
) -> None:
    """A node that was not drained is then what it was before, as nobody has lost anything by it."""
    site.node["SchedulingEligibility"] = before = "eligible" if opens else "ineligible"
    site.has_what_does_not_end("agent")
    if drained:
        site.farm.run_job("id-0", "train")
    work = site.maintenance
    patience = 300 if plan is DRIVER else 900
    with pytest.raises(nomad.NomadError) as raised:
        work.take_out(plan)
    assert patience < site.now < patience + 10
    left = "it stays closed" if drained else "it is what it was before"
    assert str(raised.value) == (
        f"agent.group[0] (agent-00), {patience} s after the node was closed for driver branch 580. Expected: a node "
        f"that is empty by then; {left}. Next step: end them (`nomad alloc stop`, or the processes that Nomad no "
        "longer knows) and run this again, or give them more time."
    )
    assert work.closed is drained and ("gpufarm_maintenance" in site.meta) is drained
    assert site.node["SchedulingEligibility"] == ("ineligible" if drained else before)


def test_a_node_that_was_taken_out_before_stays_closed_where_it_does_not_get_empty(site: Site) -> None:
    site.maintenance.take_out(DRIVER)
    site.has_what_does_not_end("agent")
    work = site.maintenance
    with pytest.raises(nomad.NomadError, match="by then; it stays closed"):
        work.take_out(DRIVER)
    assert work.closed and site.meta["gpufarm_maintenance"] == "driver branch 580"
    assert site.node["SchedulingEligibility"] == "ineligible"


def test_jobs_that_are_taken_away_next_are_no_work_and_what_they_dispatched_is(site: Site) -> None:
    kept = {"Meta": {"gpufarm_owner": "an agent"}}
    site.farm.run_job("id-0", "agent")["Job"] = kept
    site.programs["agent-0000-1111"] = "python3"
    leaves = dataclasses.replace(DRIVER, without_jobs_of="an agent")
    for other in ("somebody", ""):
        with pytest.raises(nomad.NomadError, match=r"1 running allocation, .* agent\.group"):
            site.maintenance.take_out(dataclasses.replace(DRIVER, without_jobs_of=other))
    run = site.farm.run_job("id-0", "run")
    run["Job"] = {**kept, "ParentID": "agent-gpus-1"}
    with pytest.raises(nomad.NomadError, match=r"1 running allocation, .* end: run\.group\[0\] \(run-0000\)\."):
        site.maintenance.take_out(leaves)
    assert site.writes == []
    run["ClientStatus"] = "complete"
    assert site.maintenance.take_out(leaves).work == ()
    assert site.farm.allocations["id-0"][0]["ClientStatus"] == "running"
    with pytest.raises(nomad.NomadError, match=r"agent\.group"):
        site.maintenance.take_out(DRIVER)


def test_programs_that_nomad_does_not_list_count(site: Site) -> None:
    """As of a namespace that the token may not read."""
    site.programs["5ec2e700-0"] = "python3"
    with pytest.raises(nomad.NomadError, match=r"1 running allocation, .* python3 \(5ec2e700\)"):
        site.maintenance.take_out(DRIVER)
    assert site.writes == []


def test_allocation_placed_while_the_node_was_closed(site: Site) -> None:
    close = site.farm.set_eligibility

    def late(node: dict[str, Any], wanted: str) -> None:
        if wanted == "ineligible":
            site.farm.run_job("id-0", "late")
        close(node, wanted)

    site.farm.set_eligibility = late  # type: ignore[method-assign]
    work = site.maintenance
    with pytest.raises(nomad.NomadError, match=r"580 would end: late.* none runs; they go on\."):
        work.take_out(DRIVER)
    assert not work.closed
    assert site.node["SchedulingEligibility"] == "eligible" and site.meta == {}

    site.farm.allocations.clear()
    out = site.maintenance.take_out(DRAINED)
    assert out.action == "out"
    assert {each["ClientStatus"] for each in site.farm.allocations["id-0"]} == {"complete"}


def test_node_that_somebody_opened_meanwhile_is_closed_again(site: Site) -> None:
    site.maintenance.take_out(DRIVER)
    site.node["SchedulingEligibility"] = "eligible"
    since = site.meta["gpufarm_maintenance_since"]
    assert site.maintenance.take_out(DRIVER).action == "out"
    assert site.node["SchedulingEligibility"] == "ineligible"
    assert site.meta["gpufarm_maintenance_since"] == since
    site.back()
    assert site.node["SchedulingEligibility"] == "eligible"


def test_node_that_is_opened_while_it_is_looked_at_is_closed_again(site: Site) -> None:
    wait = site.wait

    def opened(seconds: float) -> None:
        if site.now == 0:
            site.node["SchedulingEligibility"] = "eligible"
        wait(seconds)

    site.wait = opened  # type: ignore[method-assign]
    site.maintenance.take_out(DRIVER)
    assert site.node["SchedulingEligibility"] == "ineligible"
    # It was found closed and empty twice after that.
    assert site.now >= 3


@pytest.mark.parametrize("plan", [DRIVER, DRAINED])
def test_who_opens_the_node_without_end_ends_the_maintenance(site: Site, plan: maintenance.Plan) -> None:
    wait = site.wait

    def opened(seconds: float) -> None:
        assert site.now < 1000
        site.node["SchedulingEligibility"] = "eligible"
        wait(seconds + 49)

    site.wait = opened  # type: ignore[method-assign]
    work = site.maintenance
    patience = 300 if plan is DRIVER else 900
    with pytest.raises(nomad.NomadError) as raised:
        work.take_out(plan)
    assert str(raised.value) == (
        f"a node that somebody opens, {patience} s after it was closed for driver branch 580. Expected: a node that is "
        "empty and closed by then; it keeps its mark. Next step: end what opens it, and run this again."
    )
    assert patience < site.now < patience + 60
    assert work.closed and site.meta["gpufarm_maintenance"] == "driver branch 580"


def test_marked_node_with_work_is_emptied_again(site: Site) -> None:
    site.maintenance.take_out(DRIVER)
    site.farm.run_job("id-0", "train")
    with pytest.raises(nomad.NomadError, match=r"a node on which none runs; they go on\. Next"):
        site.maintenance.take_out(DRIVER)
    assert site.meta["gpufarm_maintenance"] == "driver branch 580"
    again = site.maintenance.take_out(DRAINED)
    assert again.action == "out"
    assert again.warning == (
        f"a node that gpufarm.core has taken out of work for driver branch 580 at "
        f"{site.meta['gpufarm_maintenance_since']}, and that is not empty and closed. Expected: one run at a time. "
        "Next step: where that one still goes on, let it end before anything is changed here."
    )
    assert site.maintenance.take_out(DRAINED).warning is None
    assert site.farm.allocations["id-0"][0]["ClientStatus"] == "complete"
    site.back()
    assert site.node["SchedulingEligibility"] == "eligible"


def test_what_others_took_out_is_theirs(site: Site) -> None:
    firmware = dataclasses.replace(DRIVER, change="new firmware", owner="Firmware")
    site.maintenance.take_out(firmware)
    with pytest.raises(nomad.NomadError) as raised:
        site.maintenance.take_out(DRIVER)
    assert str(raised.value) == (
        "a node that Firmware took out of work for new firmware. Expected: one that nobody else works on. Next step: "
        "let that end, or put the node back with owner set to theirs."
    )
    assert site.maintenance.marked_node(OURS, 1) is None
    assert site.maintenance.marked_node("Firmware", 1) is not None


def test_marks_on_nodes_keep_their_names() -> None:
    """Nodes of farms bear them: another release has to find what this one wrote."""
    assert maintenance.KEYS == (
        "gpufarm_maintenance", "gpufarm_maintenance_by", "gpufarm_maintenance_since", "gpufarm_maintenance_opens",
        "gpufarm_maintenance_drain",
    )  # fmt: skip
    assert gate.KEYS == (
        "gpufarm_gate", "gpufarm_gate_reason", "gpufarm_gate_since", "gpufarm_gate_closed_by", "gpufarm_gate_memory",
    )  # fmt: skip


@pytest.mark.parametrize("opens", [True, False])
def test_somebody_elses_drain_goes_on(site: Site, opens: bool) -> None:
    if not opens:
        site.node["SchedulingEligibility"] = "ineligible"
    site.maintenance.take_out(DRIVER)
    site.node["LastDrain"] = {"StartedAt": "2026-11-22T13:00:00Z", "Meta": None}
    site.node["DrainStrategy"] = {"Deadline": 1}
    assert "still closed, because somebody else drains it" in site.back().message
    assert site.node["DrainStrategy"] and site.node["SchedulingEligibility"] == "ineligible" and site.meta == {}


@pytest.mark.parametrize("change", ["zone", "unwritten"])
def test_own_drain_is_known_whoever_tells_of_it_and_if_its_time_was_not_written(site: Site, change: str) -> None:
    """A leader in another zone writes the same time in its own; a run can end before it has written it at all."""
    site.farm.run_job("id-0", "train")["DesiredStatus"] = "stop"
    site.maintenance.take_out(DRAINED)
    if change == "zone":
        site.node["LastDrain"] = {"StartedAt": "2026-11-22T14:00:00+01:00", "Meta": None}
        site.meta["gpufarm_maintenance_drain"] = "2026-11-22T08:00:00-05:00"
    else:
        site.node["LastDrain"] = {"StartedAt": "2026-11-22T13:00:00Z", "Meta": dict(site.meta)}
        site.meta.pop("gpufarm_maintenance_drain")
    assert site.back().message.startswith("open again")
    assert site.node["SchedulingEligibility"] == "eligible"


def test_drain_that_was_there_before_goes_on(site: Site) -> None:
    site.farm.run_job("id-0", "train")["DesiredStatus"] = "stop"
    site.node.update(
        SchedulingEligibility="ineligible", DrainStrategy={"Deadline": 1}, LastDrain={"StartedAt": "x", "Meta": None}
    )
    site.maintenance.take_out(DRAINED)
    assert [path for path in site.writes if path.endswith("/drain")] == []
    site.node["DrainStrategy"] = {"Deadline": 1}
    site.back()
    assert site.node["DrainStrategy"] and site.node["SchedulingEligibility"] == "ineligible"


def test_gates_marks_in_a_drain_outlive_another_drain(site: Site) -> None:
    """As of a node that was down when the gate closed it."""
    site.farm.set_status("id-0", "down")
    assert site.gate(False).action == "close"
    site.farm.set_status("id-0", "ready")
    site.farm.run_job("id-0", "train")
    site.maintenance.take_out(DRAINED)
    site.back()
    assert site.node["SchedulingEligibility"] == "ineligible"
    assert site.gate(True).action == "open"


def test_stale_view_of_the_servers_does_not_count(site: Site) -> None:
    site.farm.slow_registration = True
    site.maintenance.take_out(DRIVER)
    site.farm.nodes["id-0"]["Status"] = "initializing"
    assert site.maintenance.take_out(DRIVER).action == "none"
    assert site.meta["gpufarm_maintenance_opens"] == "yes"


def test_what_is_acted_on_is_what_the_leader_knows(site: Site) -> None:
    """A server that is behind tells of a node that is open and has no work, as before the drain."""
    site.farm.behind = copy.deepcopy(site.farm.nodes)
    site.farm.run_job("id-0", "train")
    site.programs["train-0000-1111"] = "python"
    wait = site.wait

    def ends(seconds: float) -> None:
        wait(seconds)
        if site.now > 20:
            site.programs.clear()

    site.wait = ends  # type: ignore[method-assign]
    assert site.maintenance.take_out(DRAINED).action == "out"
    assert any(path.endswith(" stale") for path in site.farm.asked)
    assert len([path for path in site.writes if path.endswith(("/drain", "/eligibility"))]) == 1
    # Empty twice, by the leader's word.
    assert not [path for path in site.farm.asked if path.startswith("/v1/node/")][-1].endswith(" stale")


def test_hiccup_of_the_servers_ends_no_drain(site: Site) -> None:
    site.farm.run_job("id-0", "train")
    wait = site.wait

    def hiccup(seconds: float) -> None:
        if site.now < 3:
            site.farm.hiccups = ["/allocations"]
        wait(seconds)

    site.wait = hiccup  # type: ignore[method-assign]
    assert site.maintenance.take_out(DRAINED).action == "out"
    assert site.now > 3


def test_what_somebody_else_has_closed_is_emptied_and_stays_closed(site: Site) -> None:
    site.node["SchedulingEligibility"] = "ineligible"
    site.farm.run_job("id-0", "train")
    assert site.maintenance.take_out(DRAINED).action == "out"
    assert "still closed, as it was before" in site.back().message
    assert site.node["SchedulingEligibility"] == "ineligible" and site.meta == {}


@pytest.mark.parametrize("closed_by", [gate.FARM, gate.NODE])
def test_no_gate_opens_a_node_in_maintenance(site: Site, closed_by: str) -> None:
    site.maintenance.take_out(DRIVER)
    for healthy in (True, False):
        decision = site.gate(healthy, closed_by)
        assert decision.action == "none" and "in maintenance (driver branch 580)" in decision.message
    site.node["SchedulingEligibility"] = "eligible"
    assert site.gate(False, closed_by).action == "close", "somebody has opened it"
    site.node["SchedulingEligibility"] = "eligible"
    site.gate(True, closed_by)
    site.maintenance.take_out(DRIVER)
    site.back()
    assert site.gate(False, closed_by).action == "close"


@pytest.mark.parametrize("drained", [False, True])
def test_gate_goes_on_where_the_maintenance_has_ended(site: Site, drained: bool) -> None:
    """Also after a drain, which is nobody else's to it."""
    assert site.gate(False).action == "close"
    if drained:
        site.farm.run_job("id-0", "train")
    site.maintenance.take_out(DRAINED)
    assert site.gate(True).action == "none"
    site.back()
    assert site.node["SchedulingEligibility"] == "ineligible"
    assert site.meta["gpufarm_gate_reason"] == "gpu_lost"
    assert site.gate(True).action == "open"


def test_own_drain_is_ended_by_putting_back(site: Site) -> None:
    site.farm.run_job("id-0", "train")
    site.maintenance.take_out(DRAINED)
    site.node["DrainStrategy"] = {"Deadline": 1}
    site.back()
    assert site.node["DrainStrategy"] is None and site.node["SchedulingEligibility"] == "eligible"


def test_check_mode_says_the_same_and_changes_nothing(site: Site) -> None:
    looked = dataclasses.replace(DRAINED, check_mode=True)
    site.farm.run_job("id-0", "train")
    assert site.maintenance.take_out(looked).action == "out"
    with pytest.raises(nomad.NomadError):
        site.maintenance.take_out(dataclasses.replace(DRIVER, check_mode=True))
    assert site.writes == []


def test_without_an_agent_the_programs_tell(site: Site) -> None:
    site.address = "http://127.0.0.1:1"
    site.agent = False
    out = site.maintenance.take_out(DRIVER)
    assert (out.action, out.node, out.maintenance) == ("none", None, None)
    assert site.maintenance.marked_node(OURS, 1) is None
    site.programs["5ec2e700-0"] = "python3"
    with pytest.raises(nomad.NomadError) as raised:
        site.maintenance.take_out(DRAINED)
    assert str(raised.value) == (
        "python3 (5ec2e700) of Nomad's, which driver branch 580 would end, while no Nomad agent runs here. Expected: "
        "an agent that can move them away, or nothing that runs. Next step: start Nomad on this host (`systemctl "
        "start nomad`), or end them."
    )


@pytest.mark.parametrize("agent", [True, False])
def test_gpu_work_of_no_scheduler_is_refused_where_the_change_would_end_it(site: Site, agent: bool) -> None:
    if not agent:
        site.address, site.agent = "http://127.0.0.1:1", False
    site.foreign = ["python3 (process 7 of ada)"]
    reboot = dataclasses.replace(DRIVER, change="a reboot", ends_gpu_work=True)
    for plan in (reboot, dataclasses.replace(reboot, check_mode=True)):
        with pytest.raises(problem.FoundError) as raised:
            site.maintenance.take_out(plan)
        assert str(raised.value) == (
            "GPU work that no scheduler has started, which a reboot would end: python3 (process 7 of ada). Expected: "
            "nothing that computes there; it goes on. Next step: wait for its end or have its owner end it, or set "
            "policy (node_maintenance_policy of the roles) to drain, which gives it as much time as batch jobs."
        )
    assert site.writes == []
    assert site.maintenance.take_out(DRIVER).warning is None
    # Nor on a node that is out already.
    with pytest.raises(problem.FoundError, match="no scheduler has started, which a reboot would end"):
        site.maintenance.take_out(reboot)


@pytest.mark.parametrize("agent", [True, False])
def test_with_consent_gpu_work_of_no_scheduler_has_the_time_of_batch_jobs(site: Site, agent: bool) -> None:
    if not agent:
        site.address, site.agent = "http://127.0.0.1:1", False
    plan = dataclasses.replace(DRAINED, ends_gpu_work=True)
    site.foreign = ["python3 (process 7 of ada)"]
    looked = site.maintenance.take_out(dataclasses.replace(plan, check_mode=True))
    assert (looked.warning, site.now, site.writes) == (None, 0, [])

    out = site.maintenance.take_out(plan)
    assert out.warning == (
        "python3 (process 7 of ada), which no scheduler has started, did not end in 600 s and end with driver branch "
        "580"
    )
    assert 600 < site.now < 640
    site.now = 0
    # On a node that is out already, too.
    again = site.maintenance.take_out(plan)
    assert again.warning == out.warning and site.now > 600 and again.action == "none"

    site.now, wait = 0, site.wait

    def end(seconds: float) -> None:
        wait(seconds)
        if site.now > 60:
            site.foreign = []

    site.wait = end  # type: ignore[method-assign]
    assert site.maintenance.take_out(plan).warning is None and 60 < site.now < 100


COMPUTES = "python3 (process 7 of ada)"


@pytest.mark.parametrize("begins", [0, 60])
def test_gpu_work_of_no_scheduler_that_begins_while_a_node_is_emptied_has_its_time_too(
    site: Site, begins: float
) -> None:
    train, wait = site.farm.run_job("id-0", "train", "batch"), site.wait

    def on(seconds: float) -> None:
        wait(seconds)
        site.foreign = [COMPUTES] if begins <= site.now < 500 else []
        if site.now > 200:
            train["ClientStatus"] = "complete"

    site.wait = on  # type: ignore[method-assign]
    out = site.maintenance.take_out(dataclasses.replace(DRAINED, ends_gpu_work=True))
    assert (out.action, out.warning) == ("out", None) and 500 < site.now < 560


@pytest.mark.parametrize("marked", [False, True])
def test_gpu_work_of_no_scheduler_that_begins_while_an_end_is_waited_for_is_refused(site: Site, marked: bool) -> None:
    plan = dataclasses.replace(DRIVER, ends_gpu_work=True)
    if marked:
        site.maintenance.take_out(plan)
    before = site.node["SchedulingEligibility"]
    site.farm.run_job("id-0", "agent")["DesiredStatus"] = "stop"
    wait = site.wait

    def on(seconds: float) -> None:
        wait(seconds)
        site.foreign = [COMPUTES]

    site.wait = on  # type: ignore[method-assign]
    work = site.maintenance
    with pytest.raises(problem.FoundError, match="no scheduler has started, which driver branch 580 would end"):
        work.take_out(plan)
    assert site.node["SchedulingEligibility"] == before and bool(site.meta) is marked is work.closed


@pytest.mark.parametrize("by_a_run", [False, True])
def test_a_node_that_is_opened_while_gpu_work_of_no_scheduler_is_waited_for(site: Site, by_a_run: bool) -> None:
    site.foreign = [COMPUTES]
    wait, begun = site.wait, []

    def on(seconds: float) -> None:
        wait(seconds)
        if site.now > 100 and not begun:
            if by_a_run:
                site.back()
            else:
                site.node["SchedulingEligibility"] = "eligible"
            begun.append(site.farm.run_job("id-0", "train"))
        if site.now > 400:
            site.foreign = []

    site.wait = on  # type: ignore[method-assign]
    plan = dataclasses.replace(DRAINED, ends_gpu_work=True)
    if by_a_run:
        with pytest.raises(problem.FoundError, match="put back while this run waited"):
            site.maintenance.take_out(plan)
        assert begun[0]["ClientStatus"] == "running" and not site.meta
    else:
        assert site.maintenance.take_out(plan).action == "out" and site.now > 400
        assert begun[0]["ClientStatus"] == "complete" and site.node["SchedulingEligibility"] == "ineligible"


@pytest.mark.parametrize("opens", [True, False])
def test_a_drain_that_was_interrupted_is_told_where_a_later_run_refuses(site: Site, opens: bool) -> None:
    """It ends at its deadline what runs there, whoever has consented to that, and may be of a run that lives."""
    train, wait = site.farm.run_job("id-0", "train", "batch"), site.wait
    if not opens:
        site.node["SchedulingEligibility"] = "ineligible"

    def interrupted(seconds: float) -> None:
        wait(seconds)
        site.alone = site.now > 20

    site.wait = interrupted  # type: ignore[method-assign]
    with pytest.raises(problem.FoundError, match="nobody waits"):
        site.maintenance.take_out(DRAINED)
    site.alone, site.wait = False, wait  # type: ignore[method-assign]
    for check in (True, False):
        with pytest.raises(problem.FoundError) as raised:
            site.maintenance.take_out(dataclasses.replace(DRIVER, check_mode=check))
        assert str(raised.value) == (
            "1 running allocation, which driver branch 580 would end: train.group[0] (train-00); Nomad drains the node "
            "for driver branch 580 of another run, which may have ended early. Expected: a node on which none runs; "
            "that drain goes on, and ends batch jobs at its deadline. Next step: let both end and run this again, or "
            "keep them by `nomad node drain -disable`."
        )
        assert site.node["DrainStrategy"] and site.meta
    # Who puts the node back ends it.
    site.back()
    assert not site.node["DrainStrategy"] and not site.meta and train["DesiredStatus"] == "run"
    assert site.node["SchedulingEligibility"] == ("eligible" if opens else "ineligible")


@pytest.mark.parametrize("how", ["a run", "a person", "the deadline"])
def test_a_drain_of_this_that_is_over_is_not_begun_again(site: Site, how: str) -> None:
    site.farm.run_job("id-0", "train", "batch")
    wait, write = site.wait, site.farm.write

    def over(seconds: float) -> None:
        wait(seconds)
        if site.now > (600 if how == "the deadline" else 30) and site.node["DrainStrategy"]:
            site.node["DrainStrategy"] = None
            if how == "a run":
                # Its mark goes after that.
                site.node["SchedulingEligibility"] = "eligible"

    def then(path: str, body: Any) -> Any:
        assert not path.endswith("/drain") or not site.farm.drains, "drained again"
        return write(path, body)

    def gone(seconds: float) -> None:
        over(seconds)
        if site.node["SchedulingEligibility"] == "eligible" and seen.append(site.now) is None and len(seen) > 1:
            site.meta.clear()

    seen: list[float] = []
    site.wait, site.farm.write = gone, then  # type: ignore[method-assign]
    with pytest.raises(problem.FoundError, match="put back" if how == "a run" else "900 s after the node was closed"):
        site.maintenance.take_out(DRAINED)
    assert site.node["SchedulingEligibility"] == ("eligible" if how == "a run" else "ineligible")
    assert site.farm.drains == 1 and not site.node["DrainStrategy"]


def test_a_drain_of_the_gate_leaves_system_jobs_for_one_of_this(site: Site) -> None:
    train, wait = site.farm.run_job("id-0", "train", "batch"), site.wait
    site.farm.run_job("id-0", "exporter", "system")
    client = nomad.Client(nomad.Connection(address=site.address))
    node = gate.read_node(client, "id-0")
    wish = gate.Wish(False, "gpu_lost", drain=True, closed_by=gate.FARM)
    gate.carry_out(client, node, gate.decide(node, wish, NOW), wish)
    assert site.node["DrainStrategy"]["IgnoreSystemJobs"]

    def on(seconds: float) -> None:
        wait(seconds)
        if site.now > 60:
            train["ClientStatus"] = "complete"

    site.wait = on  # type: ignore[method-assign]
    assert site.maintenance.take_out(DRAINED).action == "out"
    assert 60 < site.now < 150 and site.farm.drains == 2


def test_agent_that_does_not_answer_yet_is_waited_for(site: Site) -> None:
    starting = site.maintenance
    starting.client = nomad.Client(nomad.Connection(address="http://127.0.0.1:1"))
    with pytest.raises(nomad.NomadError, match="cannot be reached"):
        starting.take_out(DRIVER)
    assert site.now > 60
    wait = site.wait

    def started(seconds: float) -> None:
        starting.client = site.maintenance.client
        wait(seconds)

    site.wait = started  # type: ignore[method-assign]
    assert starting.take_out(DRIVER).action == "out"


def test_agent_that_is_no_client_has_nothing_to_end(site: Site) -> None:
    site.farm.own = None
    assert site.maintenance.take_out(DRIVER).action == "none"
    assert site.maintenance.marked_node(OURS, 1) is None
    site.programs["5ec2e700-0"] = "python3"
    with pytest.raises(nomad.NomadError, match="while the agent of this host is no client"):
        site.maintenance.take_out(DRIVER)


def test_servers_that_cannot_tell_stop_the_change(site: Site) -> None:
    site.farm.leader = False
    with pytest.raises(nomad.NomadError, match="No cluster leader"):
        site.maintenance.take_out(DRIVER)
    assert site.writes == [] and 180 < site.now < 190


def test_servers_that_elect_a_leader_are_waited_for_at_each_step(site: Site) -> None:
    wait = site.wait

    def elected(seconds: float) -> None:
        wait(seconds)
        site.farm.leader = site.farm.leader or site.now > 60

    site.wait = elected  # type: ignore[method-assign]
    site.farm.leader = False
    site.farm.run_job("id-0", "train")
    site.farm.hiccups = ["/metadata", "/metadata", "/drain"]
    assert site.maintenance.take_out(DRAINED).action == "out"
    assert site.farm.hiccups == [] and site.now > 60 and site.node["SchedulingEligibility"] == "ineligible"
    site.farm.hiccups = ["/eligibility"]
    assert site.back().action == "in"
    assert site.farm.hiccups == [] and site.node["SchedulingEligibility"] == "eligible" and site.meta == {}


def test_agent_that_has_just_started_is_waited_for(site: Site) -> None:
    site.maintenance.take_out(DRIVER)
    site.farm.nodes["id-0"]["Status"] = "initializing"
    site.farm.hiccups = ["/v1/node/id-0", "/v1/client/metadata"]
    site.now = 0.0
    waits = []
    wait = site.wait

    def until_ready(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 5:
            site.farm.set_status("id-0", "ready")
        wait(seconds)

    site.wait = until_ready  # type: ignore[method-assign]
    node = site.maintenance.marked_node(OURS, 60)
    assert node is not None and node.status == "ready" and len(waits) == 5
    site.farm.nodes["id-0"]["Status"] = "initializing"
    site.now = 0.0
    assert site.maintenance.marked_node(OURS, 60) is not None and 60 < site.now < 63
    site.farm.refuse = "/v1/node/id-0"
    site.now = 0.0
    with pytest.raises(nomad.NomadError, match="no path"):
        site.maintenance.marked_node(OURS, 60)


def made_up_processes(folder: Path, **files: tuple[bytes, bytes]) -> Path:
    for number, (environment, line) in files.items():
        process = folder / number.removeprefix("p")
        process.mkdir()
        (process / "environ").write_bytes(environment)
        (process / "cmdline").write_bytes(line)
        (process / "comm").write_text("python3\n")
    (folder / "99").mkdir()
    (folder / "self").mkdir()
    return folder


def test_programs_are_found_by_their_environment(tmp_path: Path) -> None:
    proc = made_up_processes(
        tmp_path, p1=(b"PATH=/bin\0", b"init\0"), p2=(b"A=1\0NOMAD_ALLOC_ID=5ec2e700-0\0B=2\0", b"python3\0"),
        p3=(b"", b""), p4=(b"OLD_NOMAD_ALLOC_ID=1\0X=NOMAD_ALLOC_ID=2\0", b"x\0"),
    )  # fmt: skip
    assert maintenance.programs(proc) == {"5ec2e700-0": "python3 (process 2)"}


def test_who_computes_and_has_no_scheduler_is_known_by_its_memory(tmp_path: Path) -> None:
    """As a context of CUDA's has it on H200 with driver 580; who asks NVML maps the first of these alone."""
    asks = b"7f41c0-7f41c1 rw-s 00044000 00:06 281 /dev/nvidiactl\n7f41d0-7f41d1 r-xp 0 00:20 9 /lib/libcuda.so.580\n"
    tools = b"7f41c0-7f41c1 rw-s 00000000 00:06 284 /dev/nvidia-uvm-tools\n"
    computes = (
        b"200000000-200200000 ---p 00000000 00:00 0\n204600000-204800000 rw-s 204600000 00:06 283 /dev/nvidia-uvm\n"
    )
    deleted = computes.replace(b"-uvm", b"-uvm (deleted)")
    own, container = pwd.getpwuid(os.getuid()).pw_name, 64 * "c"
    nomad_job = b"NOMAD_ALLOC_ID=5ec2e700-0\0"
    for pid, name, environment, maps, cgroup in (
        (1, "systemd", b"", b"", "/init.scope"),
        (2, "telegraf", b"", asks + tools, "/system.slice/telegraf.service"),
        (3, "python3", b"A=1\0", asks + computes, "/user.slice/user-1000.slice/session-3.scope"),
        (4, "python3", nomad_job, computes, "/user.slice"),
        (5, "vllm", b"NVIDIA_VISIBLE_DEVICES=all\0", deleted, f"/system.slice/docker-{container}.scope"),
        (6, "train", b"", computes, f"/kubepods.slice/kubepods-pod4f.slice/cri-containerd-{container}.scope"),
        (7, "clears", b"", computes, "/nomad.slice/share.slice/5ec2e700.task.scope"),
        (8, "nvidia-cuda-mps", b"", computes, "/system.slice/mps.service"),
        (9, "python3", b"", computes, "/system.slice/gpufarm-health.service"),
        # It had GPUs given, and does not compute yet.
        (10, "sleep", b"NVIDIA_VISIBLE_DEVICES=0\0", asks, "/user.slice"),
    ):
        folder = tmp_path / str(pid)
        folder.mkdir()
        (folder / "environ").write_bytes(environment)
        (folder / "maps").write_bytes(maps)
        (folder / "comm").write_text(f"{name}\n")
        (folder / "cgroup").write_text(f"0::{cgroup}\n")
    assert sorted(nomad_programs.strangers(tmp_path)) == [
        f"python3 (process 3 of {own})", f"vllm (process 5 of {own}, container cccccccccccc)",
    ]  # fmt: skip


def test_programs_that_nobody_may_look_at_are_no_empty_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proc = made_up_processes(tmp_path, p1=(b"", b"x\0"))

    def denied(_path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", denied)
    monkeypatch.setattr(nomad_programs.os, "geteuid", lambda: 1000)
    with pytest.raises(PermissionError):
        maintenance.programs(proc)
    monkeypatch.setattr(nomad_programs.os, "geteuid", lambda: 0)
    assert maintenance.programs(proc) == {}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (b"/usr/local/bin/nomad\0agent\0-config=/etc/nomad.d\0", True),
        (b"nomad\0agent\0", True),
        (b"/usr/local/bin/nomad\0executor\0", False),
        (b"/usr/local/bin/nomad\0", False),
        (b"vim\0nomad\0agent\0", False),
        (b"", False),
    ],
)
def test_agent_is_known_by_its_command_line(tmp_path: Path, line: bytes, found: bool) -> None:
    assert maintenance.has_agent(made_up_processes(tmp_path, p1=(b"", line))) is found
