"""The README's commands for a real farm, as they are printed, with the collection that they install.

Only addresses are lent: a server that stands for Galaxy, the test farm's inventory as my-lab.yml, the address of its
server, an image that is on the nodes. How a farm that is secure is asked, the scenario `secure` tries.
The first run of site.yml is the farm's test of idempotence, too.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.simulator import farm
from tests.simulator.cache import ROOT, cache_dir
from tests.simulator.docker import docker
from tests.simulator.farm import jobs
from tests.simulator.galaxy import archive_of, galaxy
from tests.simulator.mirror import build
from tests.testinfra import printed
from tests.testinfra.helpers import wait_for

FARM = os.environ["GPUFARM_FARM"]
README = ROOT / "README.md"
BIN = Path(sys.executable).parent

Shell = Callable[[str], str]


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """A user's shell in an empty home, on a machine with Ansible and Nomad's client."""
    home = tmp_path_factory.mktemp("home")
    # A folder, because it has two sources.
    shutil.copytree(farm.INVENTORY, home / "my-lab.yml")
    subprocess.run(
        [str(BIN / "ansible-galaxy"), "collection", "build", str(ROOT), "--output-path", str(home)],
        check=True, capture_output=True,
    )  # fmt: skip
    (archive,) = home.glob("gpufarm-core-*.tar.gz")
    ours = ("ANSIBLE_", "MOLECULE_", "PYTEST_", "PYTHONPATH")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    path = os.pathsep.join([str(BIN), str(build.nomad()), os.environ["PATH"]])
    with galaxy(archive, archive_of("community.crypto", home)) as server:
        lent = {
            "HOME": str(home), "PATH": path, "GPUFARM_CACHE": str(cache_dir()), "ANSIBLE_GALAXY_SERVER": server,
            "NOMAD_VAR_image": jobs.job_image(),
        }  # fmt: skip

        def run(script: str) -> str:
            result = subprocess.run(
                ["sh", "-eu", "-c", script], cwd=home, env={**kept, **lent},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True, check=False,
            )  # fmt: skip
            assert result.returncode == 0, f"{script}\n{result.stdout}"
            return result.stdout

        yield run


def test_collection_is_installed(shell: Shell) -> None:
    said = shell(printed.block(README, "ansible-galaxy"))
    assert re.search(r"gpufarm\.core:\S+ was installed successfully", said)


def test_playbooks_run_and_change_nothing_where_nothing_has_to(shell: Shell) -> None:
    lines = printed.commands(printed.block(README, "ansible-playbook"))
    assert len(lines) == 4
    for line in lines:
        said = shell(line)
        if line.endswith(".site"):
            counts = re.findall(r"^(\S+) +: ok=\d+ +changed=(\d+) ", said, re.MULTILINE)
            assert dict(counts) == dict.fromkeys(farm.nodes(), "0"), said
    assert "html" in shell("ls")


def test_job_runs_from_the_collections_folder(shell: Shell) -> None:
    for node in farm.gpu_nodes():
        jobs.load_image(FARM, node)
    address = docker(
        "inspect", "--format", "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}", f"{FARM}-server"
    )
    script = printed.block(README, "cd ~/.ansible/collections")
    # This farm is open.
    assert "finished with status" in shell(f"export NOMAD_ADDR=http://{address.strip()}:4646\n{script}")

    def statuses() -> set[str]:
        return {each["ClientStatus"] for each in jobs.api(FARM, "/v1/job/gpu-docker/allocations")}

    wait_for("the printed job has ended", lambda: bool(statuses() & {"complete", "failed", "lost"}))
    assert statuses() == {"complete"}
    jobs.nomad(FARM, "job", "stop", "-purge", "gpu-docker")
