"""A real agent of W&B Launch, asked by a double of W&B: Nomad hands its runs GPUs, and nobody sees its key."""

from __future__ import annotations

import base64
import json
import os
import re
import urllib.parse
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.simulator.docker import docker
from tests.simulator.farm import jobs
from tests.testinfra.helpers import UUID, wait_for
from tests.testinfra.playbooks import Run, changed_tasks, run_in_scenario, words

NODE = "launch-t4"
SCENARIO = Path(os.environ["MOLECULE_SCENARIO_DIRECTORY"])
TOKEN = Path(os.environ["MOLECULE_EPHEMERAL_DIRECTORY"]) / "inventory-secrets/nomad-management-token.txt"
GIVEN = yaml.safe_load((SCENARIO / "hosts.yml").read_text(encoding="utf-8"))["farm"]["hosts"][NODE]
KEY = GIVEN["wandb_launch_agent_api_key"]
TLS = "/etc/nomad.d/tls"
IMAGE = "gpufarm-wandb:1"
SITE = "/usr/local/lib/gpufarm-wandb/venv/lib/python3.11/site-packages"
UNIT = "gpufarm-wandb-launch"
LOOK = "import subprocess, wandb; run = wandb.init(); print(subprocess.check_output(['nvidia-smi', '-L'], text=True)); "


def sh(script: str) -> str:
    return docker("exec", NODE, "sh", "-c", script)


def nomad(path: str, method: str = "GET") -> Any:
    """Return what Nomad answers to somebody who may see everything; None for nothing."""
    names = {
        "NOMAD_ADDR": "https://127.0.0.1:4646", "NOMAD_TOKEN": TOKEN.read_text(encoding="ascii"),
        "NOMAD_CACERT": f"{TLS}/ca.pem", "NOMAD_CLIENT_CERT": f"{TLS}/agent.pem",
        "NOMAD_CLIENT_KEY": f"{TLS}/agent-key.pem",
    }  # fmt: skip
    flags = [word for name, value in names.items() for word in ("--env", f"{name}={value}")]
    answer = docker("exec", *flags, NODE, "nomad", "operator", "api", "-X", method, path)
    return json.loads(answer) if answer.strip() else None


def wandb(path: str, body: Any = None) -> Any:
    """Return what the double answers to the agent's key."""
    login = base64.b64encode(f"api:{KEY}".encode()).decode()
    program = (
        "import sys, urllib.request as u; "
        "print(u.urlopen(u.Request('http://127.0.0.1:8080' + sys.argv[1], sys.argv[2].encode() or None, "
        "{'Authorization': 'Basic ' + sys.argv[3]})).read().decode())"
    )
    text = "" if body is None else json.dumps(body)
    return json.loads(docker("exec", NODE, "python3", "-c", program, path, text, login))


def push(program: str, **resources: int) -> str:
    """Put a job into the queue, as `wandb launch` does, and return the item's ID."""
    spec = {
        "docker": {"docker_image": IMAGE}, "resource": "local-container", "entity": "lab", "project": "trial",
        "resource_args": {"local-container": resources}, "overrides": {"args": ["python3", "-c", program]},
    }  # fmt: skip
    variables = {
        "entityName": "lab", "projectName": "model-registry", "queueName": "gpus", "runSpec": json.dumps(spec),
    }  # fmt: skip
    answer = wandb("/graphql", {"query": "mutation pushToRunQueueByName { }", "variables": variables})
    return str(answer["data"]["pushToRunQueueByName"]["runQueueItemId"])


def run_of(item: str) -> dict[str, Any]:
    """Return the run of an item as W&B knows it, with its name; nothing as long as it has not begun."""
    told = wandb("/double")
    (found,) = [each for each in told["items"] if each["id"] == item]
    assert found["state"] != "FAILED", found
    return {**told["runs"][found["run"]], "name": found["run"]} if found["run"] in told["runs"] else {}


def lines(run: dict[str, Any], file: str) -> list[str]:
    """Return the lines that a run has sent of one of its files."""
    found: list[str] = run["files"].get(file, [])
    return found


def dispatched() -> list[dict[str, Any]]:
    """Return the runs' jobs in Nomad, the newest last."""
    found = [each for each in nomad("/v1/jobs") if each["ParentID"]]
    return sorted(found, key=lambda each: int(each["SubmitTime"]))


def allocation(job: str) -> dict[str, Any]:
    (found,) = nomad(f"/v1/job/{urllib.parse.quote(job, safe='')}/allocations")
    whole: dict[str, Any] = nomad(f"/v1/allocation/{found['ID']}")
    return whole


def devices(whole: dict[str, Any]) -> list[str]:
    """Return the UUIDs that Nomad gave to a run."""
    given = whole["AllocatedResources"]["Tasks"]["run"]["Devices"]
    return sorted(uuid for device in given or [] for uuid in device["DeviceIDs"])


def owned() -> list[str]:
    return sorted(each["ID"] for each in nomad("/v1/jobs") if not each["ParentID"])


def converge(*options: str, **extra: object) -> Run:
    return run_in_scenario(SCENARIO / "converge.yml", *options, "--extra-vars", json.dumps(extra))


def last_agent() -> dict[str, Any]:
    found: dict[str, Any] = wandb("/double")["agents"][-1]
    return found


@pytest.fixture(scope="module", autouse=True)
def _image() -> None:
    """Have an image of Python and wandb, with which runs tell W&B of themselves."""
    parent = jobs.python_image()
    jobs.load_image("launch", "t4", parent)
    sh(f"docker create --name of-wandb {parent} true")
    sh(f"docker cp {SITE} of-wandb:/root/site")
    sh("docker cp --follow-link /lib/x86_64-linux-gnu/libgcc_s.so.1 of-wandb:/lib/x86_64-linux-gnu/")
    sh(f"docker commit --change 'ENV PYTHONPATH=/root/site HOME=/tmp USER=run' of-wandb {IMAGE} && docker rm of-wandb")


def test_the_agent_is_a_user_of_its_own_without_a_gpu() -> None:
    assert owned() == ["wandb-launch", "wandb-launch-gpus-1", "wandb-launch-gpus-2"]
    pid = sh("pgrep -u gpufarm-wandb -f 'agent.py launch-agent'").strip()
    status = sh(f"cat /proc/{pid}/status")
    user = sh("id -u gpufarm-wandb").strip()
    assert re.search(rf"^Uid:\s+{user}\s+{user}\s+{user}\s+{user}$", status, re.MULTILINE)
    assert re.search(r"^Groups:\s*$", status, re.MULTILINE)
    assert last_agent()["polls"] > 0


def test_a_run_gets_gpus_that_nomad_handed_out_and_its_result_is_told() -> None:
    item = push(LOOK + "run.log({'loss': 0.75}); run.log({'loss': 0.5}); run.finish()", gpus=2)
    wait_for("a run that has ended", lambda: run_of(item).get("state") == "finished")
    run = run_of(item)
    whole = allocation(dispatched()[-1]["ID"])
    assert len(devices(whole)) == 2
    assert sorted(UUID.findall("\n".join(lines(run, "output.log")))) == devices(whole)
    assert (run["exit_code"], run["project"]) == (0, "trial")
    assert [json.loads(line)["loss"] for line in lines(run, "wandb-history.jsonl")] == [0.75, 0.5]
    assert json.loads(lines(run, "wandb-summary.json")[-1])["loss"] == 0.5
    wait_for("an allocation that is complete", lambda: allocation(whole["JobID"])["ClientStatus"] == "complete")
    wait_for("an agent that polls again", lambda: last_agent()["status"] == "POLLING")
    assert whole["Job"]["ParentID"] == "wandb-launch-gpus-2"
    # Nothing begins it anew while its node may only be cut off.
    assert whole["Job"]["TaskGroups"][0]["Disconnect"]["Replace"] is False


def test_runs_go_on_getting_gpus_after_a_restart_of_nomad() -> None:
    """The socket by which the agent asks Nomad is another one then."""
    sh("systemctl restart nomad")
    item = push(LOOK + "run.finish()", gpus=1)
    wait_for("a run that has ended", lambda: run_of(item).get("state") == "finished")
    assert len(UUID.findall("\n".join(lines(run_of(item), "output.log")))) == 1


def test_runs_wait_in_nomad_and_end_when_w_and_b_asks_for_it() -> None:
    """Three of two GPUs each on a node of four; one that is stopped makes room for the last."""
    before = len(dispatched())
    items = [push(LOOK + "import time; time.sleep(86400)", gpus=2) for _ in range(3)]
    wait_for("three jobs", lambda: len(dispatched()) == before + 3)
    wait_for("two runs", lambda: sum(bool(run_of(item)) for item in items) == 2)
    waits = [each for each in dispatched() if each["Status"] == "pending"]
    assert len(waits) == 1
    stopped = next(run_of(item)["name"] for item in items if run_of(item))
    # While runs go on, everybody may look at processes.
    assert KEY not in sh("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    assert "docker run --rm" in sh("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    wandb(f"/double/runs/{stopped}/stop", {})
    wait_for("the third run", lambda: all(run_of(item) for item in items))
    ended = [each for each in dispatched() if each["Stop"]]
    assert len(ended) == 1
    meta = nomad(f"/v1/job/{urllib.parse.quote(ended[0]['ID'], safe='')}")["Meta"]
    assert json.loads(meta["env"])["WANDB_RUN_ID"] == stopped


def test_runs_go_on_without_the_agent() -> None:
    alive = [each["ID"] for each in dispatched() if each["Status"] == "running"]
    assert len(alive) == 2
    run = converge(wandb_launch_agent_queues=["spare"])
    assert run.code == 0, run.output
    assert last_agent()["queues"] == ["queue-spare"]
    assert [allocation(job)["ClientStatus"] for job in alive] == ["running", "running"]
    for job in alive:
        nomad(f"/v1/job/{urllib.parse.quote(job, safe='')}", "DELETE")


def test_nobody_sees_the_key() -> None:
    told = [nomad(f"/v1/job/{urllib.parse.quote(each['ID'], safe='')}") for each in nomad("/v1/jobs")]
    assert len(told) > 4
    assert KEY not in json.dumps(told)
    logs = "cat /opt/nomad/data/alloc/*/alloc/logs/*.std* && journalctl --no-pager --output=cat --unit=nomad"
    assert "polling on queues" in sh(logs) and KEY not in sh(logs)
    assert sh(f"grep -rl {KEY} /etc /usr/local /var/lib/gpufarm-wandb || true") == ""
    run = converge("--diff", "-vvv", wandb_launch_agent_api_key="z" * 32 + KEY[-8:])
    assert run.code != 0
    assert KEY[-8:] not in run.output


@pytest.mark.parametrize(
    ("wrong", "found", "expected"),
    [
        ({"wandb_launch_agent_api_key": "x" * 40}, "user is not logged in", "correct wandb_launch_agent_api_key"),
        ({"wandb_launch_agent_queues": ["none"]}, "Not all of requested queues (none) found", "make the queue in W&B"),
    ],
)
@pytest.mark.parametrize("way", ["nomad", "systemd"])
def test_an_agent_that_does_not_poll_says_why(way: str, wrong: dict[str, Any], found: str, expected: str) -> None:
    run = converge(wandb_launch_agent_way=way, **wrong)
    assert run.code != 0
    told = words(run.output)
    queue = wrong.get("wandb_launch_agent_queues", ["gpus"])[0]
    assert re.search(rf"{NODE}: the launch agent has ended [^.]*\(.*{re.escape(found)}", told), told
    assert f"Expected: one that polls {queue} of lab at http://localhost:8080. Next step: {expected}" in told, told


def test_by_systemd_nothing_is_left_in_nomad() -> None:
    checked = converge("--check", wandb_launch_agent_way="systemd")
    run = converge(wandb_launch_agent_way="systemd")
    assert (checked.code, run.code) == (0, 0), checked.output + run.output
    assert owned() == []
    assert [each["Path"] for each in nomad("/v1/vars")] == []
    assert [each["Name"] for each in nomad("/v1/acl/policies") if each["Name"].startswith("gpufarm-job-")] == []
    assert sh(f"systemctl is-active {UNIT}").strip() == "active"
    assert sh("stat -c '%a %U' /etc/gpufarm-wandb/key.env").strip() == "600 root"
    assert KEY not in sh(f"cat /proc/[0-9]*/cmdline; journalctl --no-pager -u {UNIT}; systemctl show {UNIT}")
    again = converge(wandb_launch_agent_way="systemd")
    assert (again.code, again.changed) == (0, {NODE: 0}), changed_tasks(again.output)
    # As after a run that was cut off between the key and the start of the agent.
    sh("touch /etc/gpufarm-wandb/key.env")
    mended = converge(wandb_launch_agent_way="systemd")
    assert (mended.code, changed_tasks(mended.output)) == (0, ["Have the agent running"]), mended.output


def test_by_systemd_a_run_is_a_container_of_this_host_and_the_key_is_in_no_process_list() -> None:
    sh("printf '#!/bin/sh\\necho \"$*\" >>/tmp/asked\\nexec /usr/bin/docker.real \"$@\"\\n' >/tmp/docker && "
       "chmod +x /tmp/docker && mv /usr/bin/docker /usr/bin/docker.real && mv /tmp/docker /usr/bin/docker")  # fmt: skip
    try:
        item = push("import wandb; wandb.init().finish()")
        wait_for("a run that has ended", lambda: run_of(item).get("state") == "finished")
    finally:
        sh("mv /usr/bin/docker.real /usr/bin/docker")
    asked = sh("cat /tmp/asked")
    assert "run --rm" in asked and "-e WANDB_API_KEY -e" in asked and KEY not in asked, asked


def test_another_name_takes_the_former_away() -> None:
    for name in ("one", "two"):
        run = converge(wandb_launch_agent_name=name, wandb_launch_agent_gpus=[1])
        assert run.code == 0, run.output
        assert owned() == [name, f"{name}-gpus-1"]
    refused = converge(wandb_launch_agent_name="three", wandb_launch_agent_run_node_pool="nosuch")
    assert refused.code != 0 and "Expected: a job that Nomad takes" in words(refused.output), refused.output
    assert sh(f"systemctl list-unit-files --no-legend '{UNIT}*' || true") == ""
    assert sorted(each["Path"] for each in nomad("/v1/vars")) == ["nomad/jobs/two", "nomad/jobs/two-gpus-1"]


def test_zz_absent_leaves_nothing() -> None:
    checked = converge("--check", wandb_launch_agent_state="absent")
    assert checked.code == 0 and owned() == ["two", "two-gpus-1"], checked.output
    run = converge(wandb_launch_agent_state="absent")
    assert run.code == 0, run.output
    assert owned() == [] and nomad("/v1/vars") == []
    assert sh("ls -d /etc/gpufarm-wandb /usr/local/lib/gpufarm-wandb /var/lib/gpufarm-wandb 2>/dev/null || true") == ""
    assert sh("getent passwd gpufarm-wandb || true") == ""
    again = converge(wandb_launch_agent_state="absent")
    assert (again.code, again.changed) == (0, {NODE: 0}), changed_tasks(again.output)
