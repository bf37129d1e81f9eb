"""Proves every GPU by a job that computes, with a Nomad of its own, on a machine with real GPUs.

    python tests/hardware/jobs.py NOMAD PLUGIN [--level quick]

Needs Python, the driver, the programs nomad and nomad-device-nvidia, and root. Starts one agent that is server and
client, with raw_exec, in a folder of its own on 127.0.0.1, and ends it. Shows what each GPU did and how much memory the
program took. Ends with 1 when a GPU is not proven.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".collections"))

from ansible_collections.gpufarm.core.plugins.module_utils import gpu_proof, nomad, nomad_jobs
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_benchmark import measuring

PATIENCE_S = 120

# Where the agent is, and where a client asks by default.
ADDRESS = ("127.0.0.1", 4646)

CONFIG = """
data_dir   = "{folder}/data"
plugin_dir = "{folder}/plugins"
bind_addr  = "127.0.0.1"
advertise {{
  http = "127.0.0.1"
  rpc  = "127.0.0.1"
  serf = "127.0.0.1"
}}
server {{
  enabled          = true
  bootstrap_expect = 1
}}
client {{
  enabled           = true
  network_interface = "lo"
}}
plugin "nomad-device-nvidia" {{
  config {{
    enabled = true
  }}
}}
plugin "raw_exec" {{
  config {{
    enabled = true
  }}
}}
"""


@contextlib.contextmanager
def agent(program: Path, plugin: Path) -> Iterator[nomad.Client]:
    """A Nomad that has GPUs, and its client."""
    refuse_another(ADDRESS)
    folder = Path(tempfile.mkdtemp(prefix="gpufarm-jobs-"))
    (folder / "plugins").mkdir()
    shutil.copy(plugin, folder / "plugins/nomad-device-nvidia")
    (folder / "agent.hcl").write_text(CONFIG.format(folder=folder), encoding="utf-8")
    # The agent does not start where this is set.
    environment = {name: text for name, text in os.environ.items() if name != "AWS_CA_BUNDLE"}
    with (folder / "log").open("w", encoding="utf-8") as log:
        line = [str(program), "agent", "-config", str(folder / "agent.hcl")]
        process = subprocess.Popen(line, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            client = nomad.Client(nomad.Connection())
            until = time.monotonic() + PATIENCE_S
            while not ready(client):
                if process.poll() is not None or time.monotonic() > until:
                    raise SystemExit((folder / "log").read_text(encoding="utf-8")[-3000:])
                time.sleep(1)
            yield client
        finally:
            process.terminate()
            process.wait(timeout=PATIENCE_S)
            shutil.rmtree(folder, ignore_errors=True)


def refuse_another(address: tuple[str, int]) -> None:
    """An agent that is there already would be asked in place of ours, and its GPUs proven."""
    with contextlib.suppress(ConnectionRefusedError), socket.create_connection(address, timeout=PATIENCE_S):
        host, port = address
        raise SystemExit(
            f"{host}:{port} answers already. Expected: no agent there. Next step: stop it, or use another machine."
        )


def ready(client: nomad.Client) -> bool:
    try:
        nodes, _problems = nomad_jobs.select_nodes(client.items("/v1/nodes", {"resources": "true"}).items, None)
    except nomad.NomadError:
        return False
    return bool(nodes)


def proven(client: nomad.Client, settings: nomad_jobs.Settings) -> list[nomad_jobs.JobResult]:
    nodes, _problems = nomad_jobs.select_nodes(client.items("/v1/nodes", {"resources": "true"}).items, None)
    work = [(node, nomad_jobs.pins_of(node)) for node in nodes]
    run = nomad_jobs.Run(client, settings, secrets.token_hex(4), time.monotonic() + settings.timeout)
    return list(nomad_jobs.prove(run, work).values())


MEMORY = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, check=False)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024)
"""


def memory_mib(level: str, uuid: str) -> int:
    """The most that one process of the program had in memory, the driver's library included."""
    line = [sys.executable, "-I", measuring.__file__, "--level", level, "--devices", uuid]
    done = subprocess.run([sys.executable, "-c", MEMORY, *line], capture_output=True, text=True, check=True)
    return int(done.stdout)


def told(results: Sequence[nomad_jobs.JobResult]) -> Iterator[str]:
    """What is shown of each GPU."""
    for result in results:
        yield f"{result.uuid} {result.model}: {result.verdict} after {result.duration_s} s"
        for part in ("figures", "percent", "memory", "wrong_results") if result.benchmark else ():
            yield f"  {part} {json.dumps((result.benchmark or {})[part])}"
        if result.message:
            yield f"  {result.message}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nomad", type=Path)
    parser.add_argument("plugin", type=Path)
    parser.add_argument("--level", choices=gpu_proof.LEVELS, default="quick")
    given = parser.parse_args()
    settings = nomad_jobs.Settings(driver="raw_exec", level=given.level)
    with agent(given.nomad, given.plugin) as client:
        results = proven(client, settings)
    for line in told(results):
        sys.stdout.write(f"{line}\n")
    sys.stdout.write(f"{gpu_proof.table(results, gpu_proof.problems_of(results))}\n")
    if settings.computes and results:
        took, has = memory_mib(given.level, results[0].uuid), settings.memory_to_have_mib
        sys.stdout.write(f"a process of the program took {took} MiB; a task has {has} MiB\n")
    return 0 if results and all(result.verdict == "ok" for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
