"""The client by which `make test` runs commands in nodes gives them what Docker's own gives."""

from __future__ import annotations

import subprocess

from tests.simulator.docker import docker_client
from tests.simulator.exec import quick_docker

NODE = "common-node"
# What a process is allowed, where it is and what it is given.
WORLD = """
exec 2>&1 # Docker brings two streams in any order
id; pwd; umask; ulimit -a
env | sort
grep -E 'Cap|NoNewPrivs|Seccomp|Groups' /proc/self/status
cat /proc/self/cgroup /proc/self/oom_score_adj
for each in /proc/self/ns/*; do readlink $each; done
for each in /proc/$$/fd/*; do echo ${each##*/}; done
head -c 0 /dev/random && echo may read; head -c 0 /dev/kmsg && echo may read
ps -o pid=,ppid=,pgid=,sid= $$ | awk '{ print $1 == $3, $1 == $4, $2 }'
cat
exit 3
"""


def answers(*arguments: str) -> list[tuple[int, str]]:
    """Return how a command ended and what it said by Docker's own client, and the same by the quick one."""
    found = []
    for client in (docker_client(), str(quick_docker())):
        ended = subprocess.run(
            [client, *arguments], input=b"typed", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
        found.append((ended.returncode, ended.stdout.decode()))
    return found


def test_a_process_has_what_docker_gives_it() -> None:
    by_docker, quick = answers("exec", NODE, "sh", "-c", WORLD)
    assert by_docker == quick
    assert by_docker[0] == 3
    assert "typed" not in by_docker[1]
    given = ("-i", "-w", "/tmp", "-e", "A=b c", "--env", "B=", "-e", "HOME=/srv", "-e", "A=b c", "-u", "root")
    by_docker, quick = answers("exec", *given, NODE, "sh", "-c", WORLD)
    assert by_docker == quick
    assert by_docker[1].endswith("typed")
    assert "\nA=b c\nB=\n" in by_docker[1]


def test_a_device_that_the_node_may_not_use_stays_refused() -> None:
    script = "exec 2>&1; mknod /root/memory c 1 1; head -c 1 /root/memory; rm /root/memory"
    by_docker, quick = answers("exec", NODE, "sh", "-c", script)
    assert by_docker == quick
    assert "Operation not permitted" in quick[1]


def test_ends_are_told_alike() -> None:
    for arguments in (
        ("exec", NODE, "sh", "-c", "kill -9 $$"),
        ("exec", "nobody-has-this-name", "true"),
        ("exec", "--user", "nobody", NODE, "id"),
        ("exec", "--nonsense", NODE, "id"),
        ("inspect", "--format", "{{.State.Pid}}", NODE),
    ):
        by_docker, quick = answers(*arguments)
        assert by_docker == quick, arguments
    assert [code in (126, 127) for code, _said in answers("exec", NODE, "no-such-command")] == [True, True]
