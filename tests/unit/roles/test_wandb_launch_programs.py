# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the launch agent takes for Docker, asked as the agent asks, and what starts the agent."""

from __future__ import annotations

import http.server
import importlib.util
import json
import os
import queue
import signal
import socketserver
import subprocess
import sys
import threading
import urllib.parse
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpufarm.core.tests.unit.patience import PATIENCE_S

FILES = Path(__file__).resolve().parents[3] / "roles/wandb_launch_agent/files"
DOCKER = FILES / "docker.py"
KEY = "k" * 40
# As wandb 0.31.0 asks: the key by its name, which agent.py sees to.
RUN = ["run", "--rm", "-e", "WANDB_PROJECT=a b", "-e", "WANDB_API_KEY", "-e", 'WANDB_CONFIG={"a": "$x"}']
JOBS = {"1": "launch-gpus-1", "4": "launch-gpus-4"}
CHILD = "launch-gpus-4/dispatch-1"


def load(name: str) -> Any:
    specification = importlib.util.spec_from_file_location(name, FILES / f"{name}.py")
    assert specification and specification.loader
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


docker, agent = load("docker"), load("agent")


class Nomad(socketserver.ThreadingUnixStreamServer):
    """The API on a socket, as a task with an identity has it; what it says of a run comes from ``states``, in turn."""

    daemon_threads = True

    def __init__(self, path: Path) -> None:
        self.asked: list[tuple[str, str, Any]] = []
        self.states: list[Any] = []
        self.stopped = False
        self.headers: list[str | None] = []
        # What a dispatch is answered at first, None where its answer is lost.
        self.troubles: list[tuple[int, str] | None] = []
        self.tokens: list[str | None] = []
        self.dispatched: Callable[[], None] = lambda: None
        super().__init__(str(path), Handler)

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        self.asked.append((method, path, body))
        if path.endswith("/dispatch"):
            self.dispatched()
            return 200, {"DispatchedJobID": CHILD}
        if method == "DELETE":
            self.stopped = True
            return 200, {}
        if "/fs/logs/" in path:
            return 200, "what it printed"
        if path.endswith("/allocations"):
            state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
            return (500, "No cluster leader") if state == "away" else (200, state)
        return 200, {"Stop": self.stopped}


class Handler(http.server.BaseHTTPRequestHandler):
    def address_string(self) -> str:
        return "socket"

    def log_message(self, *_unused: Any) -> None:
        """Nobody reads it."""

    def do(self) -> None:
        server: Any = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path, _mark, query = self.path.partition("?")
        assert "namespace=research" in query
        server.headers.append(self.headers.get("Authorization"))
        trouble: Any = ()
        if path.endswith("/dispatch"):
            server.tokens += urllib.parse.parse_qs(query).get("idempotency_token", [None])
            trouble = server.troubles.pop(0) if server.troubles else ()
            if trouble is None:
                return
        status, answer = trouble or server.answer(self.command, path, json.loads(body) if body else None)
        text = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = do_DELETE = do


@pytest.fixture
def nomad(tmp_path: Path) -> Iterator[Nomad]:
    with Nomad(tmp_path / "api.sock") as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.shutdown()


def start(nomad: Nomad, *words: str) -> subprocess.Popen[str]:
    environment = {
        "PATH": os.environ["PATH"], "NOMAD_ADDR": f"unix://{nomad.server_address}", "NOMAD_TOKEN": "identity",
        "NOMAD_NAMESPACE": "research", "GPUFARM_RUN_JOBS": json.dumps(JOBS), "WANDB_API_KEY": KEY,
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, str(DOCKER), *words],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def ended(nomad: Nomad, *words: str) -> tuple[int, str]:
    with start(nomad, *words) as process:
        output, _none = process.communicate(timeout=PATIENCE_S)
    return process.returncode, output


def dispatched(nomad: Nomad) -> Any:
    run = docker.Run(docker.Nomad(f"unix://{nomad.server_address}", "identity", "research"))
    run.dispatch("launch-gpus-4", {})
    return run


def allocation(status: str, code: int = 0) -> list[dict[str, Any]]:
    events = [{"DisplayMessage": f"Exit Code: {code}", "Details": {"exit_code": str(code)}}, {"DisplayMessage": "end"}]
    states = {"run": {"Events": events}}
    return [{"ID": "a1", "CreateIndex": 7, "ClientStatus": status, "NodeName": "gpu01", "TaskStates": states}]


def test_a_run_becomes_a_job_and_ends_as_that(nomad: Nomad) -> None:
    nomad.states = [[], "away", allocation("running"), allocation("failed", 3)]
    code, output = ended(
        nomad, *RUN, "--gpus", "4", "--entrypoint", "python", "img:1", "train.py", "--gpus", "a b", "${x}"
    )
    assert code == 3, output
    for words in ("waits in Nomad", "No cluster leader", "running on gpu01", "what it printed", "failed on gpu01"):
        assert words in output
    method, path, body = nomad.asked[0]
    assert (method, path) == ("POST", "/v1/job/launch-gpus-4/dispatch")
    assert set(nomad.headers) == {"Bearer identity"}
    meta = body["Meta"]
    assert (meta["image"], json.loads(meta["entrypoint"])) == ("img:1", ["python"])
    assert json.loads(meta["words"]) == ["train.py", "--gpus", "a b", "${x}"]
    assert json.loads(meta["env"]) == {"WANDB_PROJECT": "a b", "WANDB_CONFIG": '{"a": "$x"}'}
    assert nomad.asked[1][1] == "/v1/job/launch-gpus-4%2Fdispatch-1/allocations"
    assert KEY not in json.dumps(nomad.asked) + output


def test_a_dispatch_waits_for_nomad_and_is_made_once(nomad: Nomad) -> None:
    """While servers restart it is refused, or its answer is lost: of one token Nomad makes one job."""
    nomad.states = [allocation("complete")]
    nomad.troubles = [(500, "No cluster leader"), (429, "Too Many Requests"), None]
    code, output = ended(nomad, *RUN, "img:1")
    assert (code, len(nomad.tokens), len(set(nomad.tokens))) == (0, 4, 1), output
    assert nomad.tokens[0] and "No cluster leader" in output
    assert ended(nomad, *RUN, "img:1")[0] == 0 and len(set(nomad.tokens)) == 2


def test_a_dispatch_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker, "PATIENCE_S", 0)
    monkeypatch.setattr(docker, "PAUSE_S", 0)
    away = docker.Nomad(f"unix://{tmp_path}/none.sock", "identity", "research")
    with pytest.raises(docker.Gone, match="No such file"):
        docker.Run(away).dispatch("launch-gpus-1", {})


@pytest.mark.parametrize(
    "told",
    [
        "parameterized job not found",
        'Specified job "launch-gpus-4" is stopped',
        'Specified job "launch-gpus-4" is not a parameterized job',
        "Dispatch did not provide required meta keys: [image]",
        "Dispatch request included unpermitted metadata keys: [words]",
    ],
)
def test_what_no_other_try_mends_is_told_at_once(nomad: Nomad, told: str) -> None:
    """Nomad answers 500 to these, too."""
    nomad.troubles = [(500, told)]
    code, output = ended(nomad, *RUN, "img:1")
    assert (code, len(nomad.tokens)) == (125, 1), output
    assert f"Nomad answered 500 to POST /v1/job/launch-gpus-1/dispatch: {told}. Expected: a job" in output


def test_an_end_while_nomad_is_asked_leaves_no_job(nomad: Nomad) -> None:
    """Nomad has the job, and its answer is not read yet."""
    nomad.states = [allocation("running")]
    started: queue.Queue[subprocess.Popen[str]] = queue.Queue()
    nomad.dispatched = lambda: started.get(timeout=PATIENCE_S).send_signal(signal.SIGTERM)
    with start(nomad, *RUN, "img:1") as process:
        started.put(process)
        output, _none = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, nomad.stopped) == (143, True), output


def test_a_run_that_ends_well_and_asks_for_nothing_gets_the_first_count(nomad: Nomad) -> None:
    nomad.states = [allocation("complete")]
    # As the agent asks where W&B is on this machine.
    code, output = ended(
        nomad, *RUN, "--network", "host", "--add-host", "host.docker.internal:host-gateway", "img:1", "--rm"
    )
    assert code == 0, output
    assert nomad.asked[0][1] == "/v1/job/launch-gpus-1/dispatch"
    meta = nomad.asked[0][2]["Meta"]
    assert (meta["words"], meta["entrypoint"]) == ('["--rm"]', "[]")


@pytest.mark.parametrize("stopped", [False, True])
def test_one_that_nomad_has_ended_is_not_called_finished(nomad: Nomad, stopped: bool) -> None:
    nomad.states = [[{**allocation("complete")[0], "DesiredStatus": "run" if stopped else "stop"}]]
    nomad.stopped = stopped
    assert ended(nomad, *RUN, "img:1")[0] == 143
    # Otherwise Nomad would begin it once more when there is room.
    assert nomad.stopped


def test_a_node_that_does_not_answer_may_come_back(nomad: Nomad) -> None:
    nomad.states = [allocation("unknown"), allocation("running"), allocation("complete")]
    code, output = ended(nomad, *RUN, "img:1")
    assert (code, nomad.stopped) == (0, False), output
    assert "unknown on gpu01" in output


def test_a_run_on_a_node_that_stays_away_is_given_up(nomad: Nomad, monkeypatch: pytest.MonkeyPatch) -> None:
    nomad.states = [allocation("unknown")]
    monkeypatch.setattr(docker, "LOST_S", 0)
    monkeypatch.setattr(docker, "PAUSE_S", 0)
    said: list[str] = []
    monkeypatch.setattr(docker, "say", said.append)
    assert dispatched(nomad).wait() == 143
    assert nomad.stopped and said[-1] == "gpu01 has not answered for 0 s; the job is stopped"


def test_a_run_with_a_key_of_its_own_is_refused(nomad: Nomad) -> None:
    code, output = ended(nomad, "run", "-e", "WANDB_API_KEY=another", "img:1")
    assert (code, nomad.asked) == (125, []) and "a WANDB_API_KEY of its own. Expected: none" in output
    assert "another" not in output


def test_whoever_ends_it_ends_the_job(nomad: Nomad) -> None:
    nomad.states = [allocation("running")]
    with start(nomad, *RUN, "img:1") as process:
        assert process.stdout
        while "running on gpu01" not in process.stdout.readline():
            pass
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 143
    assert ("DELETE", "/v1/job/launch-gpus-4%2Fdispatch-1", None) in nomad.asked


def test_a_key_with_a_value_does_not_get_into_the_job(nomad: Nomad) -> None:
    nomad.states = [allocation("complete")]
    assert ended(nomad, "run", "-e", f"WANDB_API_KEY={KEY}", "img:1")[0] == 0
    assert KEY not in json.dumps(nomad.asked)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--gpus", "all", "img:1"], "a run asks for gpus all. Expected: one of 1, 4, as a number"),
        (["--gpus", "2", "img:1"], "a run asks for gpus 2. Expected: one of 1, 4"),
        (["--gpus", '"device=0"', "img:1"], 'gpus "device=0". Expected'),
        (["--shm-size", "1g", "img:1"], "docker run has --shm-size. Expected: gpus, env, name and a command alone"),
        (["--volume=/:/host", "img:1"], "docker run has --volume=/:/host. Expected"),
        ([], "docker run: "),
    ],
)
def test_what_no_job_can_give_is_refused(nomad: Nomad, words: list[str], told: str) -> None:
    code, output = ended(nomad, "run", *words)
    assert (code, nomad.asked) == (125, [])
    assert told in output and "Next step: " in output


def test_of_docker_there_is_no_more(nomad: Nomad) -> None:
    assert ended(nomad, "pull", "img:1") == ended(nomad, "image", "inspect", "img:1") == (0, "")
    code, output = ended(nomad, "build", ".")
    assert code == 125 and "docker build . was asked for. Expected: run, pull or image inspect" in output


def test_a_name_of_a_count_is_one() -> None:
    assert docker.count_of("count=4", [1, 4]) == docker.count_of('"4"', [1, 4]) == 4
    assert docker.count_of(None, [4, 1]) == 4


def test_nomad_that_stays_away_ends_the_wait(nomad: Nomad, monkeypatch: pytest.MonkeyPatch) -> None:
    nomad.states = ["away"]
    monkeypatch.setattr(docker, "PATIENCE_S", 0)
    monkeypatch.setattr(docker, "PAUSE_S", 0)
    with pytest.raises(docker.Gone, match="No cluster leader"):
        dispatched(nomad).wait()


def test_the_key_of_the_agent_is_named_only() -> None:
    words = ["docker", "run", "-e", "WANDB_API_KEY=abc", "-e", "WANDB_API_KEY=other", "-e", "X=WANDB_API_KEY=abc"]
    wanted = ["docker", "run", "-e", "WANDB_API_KEY", "-e", "WANDB_API_KEY=other", "-e", "X=WANDB_API_KEY=abc"]
    assert agent.without_key(words, "abc") == wanted


def test_the_agent_leaves_the_tasks_folder_and_keeps_its_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets/api.sock").write_text("here", encoding="ascii")
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NOMAD_ADDR", "http://127.0.0.1:4646")
    agent.enter_home(str(tmp_path / "home"))
    assert Path.cwd() == tmp_path / "home"
    assert Path(os.environ["NOMAD_ADDR"].removeprefix("unix://")).read_text(encoding="ascii") == "here"


FAKE = {
    "wandb/sdk/launch/runner/local_container.py": "def get_docker_command(image):\n"
    '    return ["docker", "run", "-e", "WANDB_API_KEY=" + "k" * 40, image]\n',
    "wandb/cli/cli.py": "import sys\nfrom wandb.sdk.launch.runner import local_container as l\n"
    "def cli(prog_name):\n    print(prog_name, sys.argv[1:], l.get_docker_command('img'))\n",
}


def test_the_agent_is_wandbs_own_with_another_command(tmp_path: Path) -> None:
    for name, text in FAKE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="ascii")
    result = subprocess.run(
        [sys.executable, str(FILES / "agent.py"), "launch-agent", "-c", "x"],
        capture_output=True, text=True, check=True,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path), "WANDB_API_KEY": KEY}, timeout=PATIENCE_S,
    )  # fmt: skip
    assert result.stdout == "wandb ['launch-agent', '-c', 'x'] ['docker', 'run', '-e', 'WANDB_API_KEY', 'img']\n"
    assert result.stderr == f"{agent.STARTS}\n"


# --- what ends the agent that Nomad has left behind -----------------------------------------


def test_what_nomad_started_with_the_program_ends_and_nothing_else(tmp_path: Path) -> None:
    program = tmp_path / "agent.py"
    program.write_text(
        "import subprocess\nchild = subprocess.Popen(['sleep', '600'])\nprint('up', flush=True)\nchild.wait()\n"
    )
    ours, other = str(uuid.uuid4()), str(uuid.uuid4())

    def start(allocation: str | None, *words: str) -> subprocess.Popen[bytes]:
        environment = {"PATH": os.environ["PATH"]} | ({"NOMAD_ALLOC_ID": allocation} if allocation else {})
        return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, start_new_session=True)

    agent_of_job = start(ours, sys.executable, str(program), "launch-agent")
    agent_of_systemd = start(None, sys.executable, str(program), "launch-agent")
    others = [start(other, "sleep", "600"), start(other, "sh", "-c", "sleep 600; :", f"{program}.old")]
    try:
        for each in (agent_of_job, agent_of_systemd):
            assert each.stdout and each.stdout.readline() == b"up\n"
        told = [
            subprocess.run(["sh", FILES / "end.sh"], input=f"{program}\n", text=True, capture_output=True, check=True)
            for _time in range(2)
        ]
        assert [each.stdout.split() for each in told] == [[ours], []]
        # What it had started has it open as well.
        assert agent_of_job.communicate(timeout=PATIENCE_S)[0] == b""
        assert agent_of_job.returncode == -signal.SIGKILL
        assert [each.poll() for each in (agent_of_systemd, *others)] == [None] * 3
    finally:
        for each in (agent_of_job, agent_of_systemd, *others):
            if each.poll() is None:
                os.killpg(each.pid, signal.SIGKILL)
