"""The README's commands for a real farm, as they are printed, with the collection that they install.

Only addresses are lent: a server that stands for Galaxy, the test farm's inventory as my-lab.yml, the address of its
server, an image that is on the nodes. How a farm that is secure is asked, the scenario `secure` tries.
The first run of site.yml is the farm's test of idempotence, too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import pytest

from tests.simulator import farm
from tests.simulator.cache import ROOT
from tests.simulator.farm import jobs
from tests.simulator.mirror import build
from tests.testinfra import printed
from tests.testinfra.helpers import wait_for
from tests.testinfra.user import Shell, user_shell

FARM = os.environ["GPUFARM_FARM"]
README = ROOT / "README.md"


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    # A folder, because it has two sources.
    lent = {"NOMAD_VAR_image": jobs.job_image()}
    with user_shell(tmp_path_factory.mktemp("home"), farm.INVENTORY, build.nomad(), **lent) as run:
        yield run


def test_collection_is_installed(shell: Shell) -> None:
    said = shell(printed.block(README, "ansible-galaxy"))
    assert re.search(r"gpufarm\.core:\S+ was installed successfully", said)


def test_playbooks_run_and_change_nothing_where_nothing_has_to(shell: Shell) -> None:
    lines = printed.commands(printed.block(README, "ansible-playbook -i my-lab.yml gpufarm.core.site "))
    assert len(lines) == 4
    for line in lines:
        said = shell(line)
        if line.endswith(".site"):
            counts = re.findall(r"^(\S+) +: ok=\d+ +changed=(\d+) ", said, re.MULTILINE)
            assert dict(counts) == dict.fromkeys(farm.nodes(), "0"), said
            # On a farm of a thousand nodes each task costs minutes.
            tasks = re.findall(r"^ok: \[t4\]", said, re.MULTILINE)
            assert 0 < len(tasks) <= 55, said
    assert "html" in shell("ls")


def test_job_runs_from_the_collections_folder(shell: Shell) -> None:
    for node in farm.gpu_nodes():
        jobs.load_image(FARM, node)
    script = printed.block(README, "cd ~/.ansible/collections")
    # This farm is open.
    assert "finished with status" in shell(f"export NOMAD_ADDR=http://{jobs.address(FARM)}:4646\n{script}")

    def statuses() -> set[str]:
        return {each["ClientStatus"] for each in jobs.api(FARM, "/v1/job/gpu-docker/allocations")}

    wait_for("the printed job has ended", lambda: bool(statuses() & {"complete", "failed", "lost"}))
    assert statuses() == {"complete"}
    jobs.nomad(FARM, "job", "stop", "-purge", "gpu-docker")
