"""``make demo``: a whole GPU farm on this machine, built by the collection's own playbooks."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.simulator import farm
from tests.simulator.cache import cache_dir
from tests.simulator.docker import ensure_docker, exists, running
from tests.simulator.farm import ansible, jobs, prepare
from tests.simulator.tools import BuildError

FARM = "gpufarm-demo"
PORT = 4646


class StepError(RuntimeError):
    """A step of the demo failed; the message holds the reason and where the log is."""


def say(text: str = "") -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


@contextmanager
def step(number: int, title: str) -> Iterator[None]:
    """Announce a step and, when it is done, how long it took."""
    say(f"[{number}/8] {title}")
    start = time.monotonic()
    yield
    say(f"      done in {time.monotonic() - start:.0f} s")


def log_folder() -> Path:
    folder = cache_dir() / "farms" / FARM / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def up() -> None:
    """Build the farm, converge and verify it twice, run both jobs and print the table."""
    began = time.monotonic()
    logs = log_folder()
    with step(1, "Docker"):
        say(f"      daemon: {ensure_docker()}")
        if not exists("container", f"{FARM}-server") and not farm.port_is_free(PORT):
            raise StepError(
                f"127.0.0.1:{PORT} is in use. Expected: free, for Nomad's UI. "
                "Next step: stop what listens there (`ss -ltnp`)."
            )
    with step(2, "Upstream's artefacts (built from source) and node images"):
        built = prepare.everything(say)
    with step(3, "Nodes"):
        nodes = farm.inventory_nodes(FARM, publish={"server": [f"127.0.0.1:{PORT}:4646"]})
        prepare.start(FARM, built, nodes, say)
    environment = farm.environment(FARM)
    report = logs / "verify.json"
    with step(4, "playbooks/site.yml"):
        ansible.playbook("playbooks/site.yml", environment, logs / "site.log", say)
    with step(5, "playbooks/site.yml again: nothing may change, every GPU must be there"):
        wanted = {"verify_report": str(report)}
        recap = ansible.playbook("playbooks/site.yml", environment, logs / "site-again.log", say, wanted)
        changed = {host: counts["changed"] for host, counts in recap.items() if counts["changed"]}
        if changed:
            raise StepError(f"the second run changed {changed}. Expected: 0 everywhere. Log: {logs / 'site-again.log'}")
    with step(6, "Job image"), ThreadPoolExecutor() as pool:
        list(pool.map(lambda node: jobs.load_image(FARM, node), farm.gpu_nodes()))
    with step(7, "Job gpu-docker: 2 of the 4 T4"):
        seen = jobs.run_gpu_docker(FARM, node="t4", count=2)
        say("\n".join(f"      {line}" for line in seen.describe()))
    with step(8, "Job gpu-python"):
        result = jobs.run_gpu_python(FARM)
        say(f"      {json.dumps(result)}")
    say()
    say(table(json.loads(report.read_text(encoding="utf-8"))))
    say()
    say(f"Nomad's UI   http://127.0.0.1:{PORT}/ui/")
    say(f"A node       docker exec -it {FARM}-h100 nvidia-smi")
    say("Stop         make demo-down")
    say(f"Logs         {logs}")
    say(f"Took         {time.monotonic() - began:.0f} s")


def table(report: dict[str, list[dict[str, Any]]]) -> str:
    """Return the report of playbooks/verify.yml as an aligned table."""
    nomad = {node["name"]: node for node in report["nodes"]}
    rows = [["NODE", "PLATFORM", "DRIVER", "MODEL", "NVIDIA-SMI", "NOMAD", "VERDICT"]]
    for entry in report["expected"]:
        seen = nomad.get(entry["node"], {"gpus_found": 0, "verdict": "failed"})
        rows.append(
            [
                entry["node"],
                entry["platform"],
                entry["driver_version"],
                ", ".join(entry["models"]),
                str(entry["gpus"]),
                str(seen["gpus_found"]),
                seen["verdict"],
            ]
        )
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def down() -> None:
    """Remove everything of the demo that runs; what was built stays in the cache."""
    names = farm.remove(FARM) if running() else []
    say(f"Removed {', '.join(names) or 'nothing: no demo was there'}. What was built stays in {cache_dir()}.")


def main() -> int:
    parser = argparse.ArgumentParser(prog="make demo")
    parser.add_argument("action", choices=["up", "down"])
    arguments = parser.parse_args()
    try:
        (up if arguments.action == "up" else down)()
    except (StepError, BuildError, ansible.PlaybookError, jobs.JobError) as error:
        say()
        say(f"FAILED: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
