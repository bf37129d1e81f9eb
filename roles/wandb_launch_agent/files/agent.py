"""Runs W&B's launch agent so that its API key stays out of the process list.

For a run in a container the agent calls `docker run -e WANDB_API_KEY=...`, whose arguments everybody on the machine may
read. Docker takes the value from its caller's environment where none is named, and there the agent has it anyway.
"""

from __future__ import annotations

import importlib
import os
import sys

NAME = "WANDB_API_KEY"
# What follows the last of these in a log is of the agent that runs now.
STARTS = "gpufarm: the launch agent starts"


def without_key(words: list[str], key: str) -> list[str]:
    """The words of `docker run`, with the agent's key named only; a run that has its own brings it."""
    return [NAME if word == f"{NAME}={key}" else word for word in words]


def enter_home(home: str) -> None:
    """Leave the task's folder, below which only root looks, and keep a way to the socket that Nomad has put there."""
    folder = os.open("secrets", os.O_PATH)
    os.environ["NOMAD_ADDR"] = f"unix:///proc/{os.getpid()}/fd/{folder}/api.sock"
    os.chdir(home)


def main() -> None:
    sys.stderr.write(f"{STARTS}\n")
    sys.stderr.flush()
    if "NOMAD_SECRETS_DIR" in os.environ:
        enter_home(os.environ["HOME"])
    local_container = importlib.import_module("wandb.sdk.launch.runner.local_container")
    command = local_container.get_docker_command
    key = os.environ.get(NAME, "")

    def get_docker_command(*args, **named):  # type: ignore[no-untyped-def]
        return without_key(command(*args, **named), key)

    local_container.get_docker_command = get_docker_command
    importlib.import_module("wandb.cli.cli").cli(prog_name="wandb")


if __name__ == "__main__":
    main()
