"""Times the WSL inventory for many machines, and the connection beside that of community.docker.

    make demo && python tests/bench/wsl.py

Each of 100 machines takes 0.5 s to answer; a real one takes longer, and what is timed is what the plugin adds. A cached
second run asks nobody. Both connections run the same command in the same container of the demo: `wsl.exe` is a script
there that does nothing but call docker as community.docker does, so that what differs is the plugins' own.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ansible.inventory.data import InventoryData
from ansible.parsing.dataloader import DataLoader
from ansible.playbook.play_context import PlayContext
from ansible.plugins.loader import connection_loader, init_plugin_loader, inventory_loader

from tests.simulator.cache import ROOT
from tests.simulator.docker import docker_binary, exists

MACHINES = 100
ANSWER_S = 0.5
# Above the slowest machine, with a worker for each.
LIMIT_S = 1.5
ROUNDS = 20
CONTAINER = "gpufarm-demo-t4"
SSH = """\
#!/bin/sh
case " $* " in *" -G "*) exit 0 ;; esac
echo x >>"{folder}/asked"
sleep {seconds}
cat "{folder}/answer"
"""
# -d NAME --exec PROGRAM ...
WSL = '#!/bin/sh\nname=$2; shift 3; exec {docker} exec -i "$name" "$@"\n'


def program(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


def inventory(folder: Path) -> bool:
    """Print how long the inventory takes, and return whether that is within the limit."""
    from tests.simulator.windows import powershell  # noqa: PLC0415 # after the plugin loader, which loads the collection
    from tests.simulator.windows.host import Distribution, Machine, Windows  # noqa: PLC0415

    config = folder / "bench.wsl.yml"
    config.write_text(
        json.dumps(
            {
                "plugin": "gpufarm.core.wsl",
                "windows_hosts": [{"name": f"pc{number}"} for number in range(MACHINES)],
                "cache": True,
                "cache_plugin": "ansible.builtin.jsonfile",
                "cache_connection": str(folder / "cache"),
            }
        ),
        encoding="utf-8",
    )
    plugin = inventory_loader.get("gpufarm.core.wsl")
    asking = sys.modules[type(plugin).__module__].wsl
    distributions = [Distribution("Debian", default=True), Distribution("Ubuntu", "Stopped")]
    windows = Windows.create(folder / "windows", Machine("PC", distributions))
    answer = powershell.run(windows, asking.script(asking.Host("pc"), asking.Question()))
    (folder / "answer").write_text(answer, encoding="utf-8")
    program(folder / "ssh", SSH.format(folder=folder, seconds=ANSWER_S))
    os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
    for name in ("first run", "cached run"):
        plugin = inventory_loader.get("gpufarm.core.wsl")
        data = InventoryData()
        begun = time.monotonic()
        plugin.parse(data, DataLoader(), str(config))
        plugin.update_cache_if_changed()
        taken = time.monotonic() - begun
        asked = len((folder / "asked").read_text(encoding="ascii").split())
        over = ""
        if name == "first run":
            within = taken - ANSWER_S <= LIMIT_S
            over = f", {taken - ANSWER_S:.2f} s over the slowest (limit {LIMIT_S})"
        sys.stdout.write(
            f"{name:12} {taken:6.2f} s for {len(data.groups['wsl_instances'].get_hosts())} distributions on {MACHINES} "
            f"machines{over}; {asked} connections so far\n"
        )
    return within


def connections(folder: Path) -> None:
    if not (shutil.which(docker_binary()) and exists("container", CONTAINER)):
        sys.stdout.write(f"left out: the connections, for there is no container {CONTAINER}. Next step: make demo\n")
        return
    program(folder / "wsl.exe", WSL.format(docker=docker_binary()))

    def run(name: str, variables: dict[str, Any]) -> Callable[[], None]:
        def one() -> None:
            context = PlayContext()
            connection = connection_loader.get(name, context, "/dev/null")
            connection.set_options(var_options={"inventory_hostname": CONTAINER, **variables})
            code, stdout, stderr = connection.exec_command("echo done", sudoable=False)
            assert (code, stdout) == (0, b"done\n"), stderr

        return one

    actions = {
        "gpufarm.core.wsl": run("gpufarm.core.wsl", {"ansible_wsl_exe": str(folder / "wsl.exe")}),
        "community.docker.docker": run("community.docker.docker", {}),
    }
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for _round in range(ROUNDS):
        for name, action in actions.items():
            begun = time.monotonic()
            action()
            seconds[name].append(time.monotonic() - begun)
    for name, values in seconds.items():
        sys.stdout.write(f"{name:24} {statistics.median(values) * 1000:8.1f} ms a command\n")


def main() -> int:
    init_plugin_loader([str(ROOT / ".collections")])
    with tempfile.TemporaryDirectory(prefix="bench-wsl-") as name:
        within = inventory(Path(name))
        connections(Path(name))
    return int(not within)


if __name__ == "__main__":
    sys.exit(main())
