"""A run of ansible-playbook that a spare forks for is what it is without one."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from ansible._internal._datatag._tags import Origin, TrustedAsTemplate
from ansible.parsing import dataloader
from ansible_collections.gpufarm.core.tests.unit.patience import PATIENCE_S, wait_for

from tests.simulator.cache import ROOT

# What a run says of itself: whose process Ansible is, and what that has of who was started.
PLAY = """
- hosts: localhost
  gather_facts: false
  tasks:
    - name: Tell
      ansible.builtin.debug:
        msg: >-
          said {{ lookup('env', 'TOLD') }} {{ lookup('pipe', 'pwd') }} {{ lookup('pipe', 'umask') }}
          {{ lookup('pipe', 'ulimit -n') }} {{ lookup('pipe', 'nice') }} {{ given | default('-') }}
    - name: Whose
      ansible.builtin.copy:
        content: "{{ lookup('pipe', 'tr \\\\\\\\0 \\\\\\\\n </proc/$PPID/cmdline') }}"
        dest: "{{ playbook_dir }}/whose"
      changed_when: false
    - name: Wait
      ansible.builtin.shell: touch waits; sleep {{ seconds | default(0) }}
      args:
        chdir: "{{ playbook_dir }}"
    - name: End
      ansible.builtin.fail:
      when: fails | default(false) | bool
"""
LONG_S = 10 * PATIENCE_S


@dataclass
class Ansible:
    """Runs of one kind."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    def start(self, *options: str, **more: str) -> subprocess.Popen[str]:
        (self.folder / "waits").unlink(missing_ok=True)
        program = Path(sys.executable).with_name("ansible-playbook")
        variables = {
            **os.environ, "ANSIBLE_HOME": str(self.folder / "home"), "ANSIBLE_LOCALHOST_WARNING": "False",
            "ANSIBLE_INVENTORY_UNPARSED_WARNING": "False", "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".collections"),
            **self.environment, **more,
        }  # fmt: skip
        return subprocess.Popen(
            ["nice", "-n", "1", program, "play.yml", *options], cwd=self.folder, env=variables, text=True,
            stdin=subprocess.DEVNULL, stdout=(self.folder / "out").open("w"),
            stderr=(self.folder / "error").open("w"), umask=0o27,
        )  # fmt: skip

    def run(self, *options: str, **more: str) -> tuple[int, str, str]:
        return self.end(self.start(*options, **more))

    def end(self, process: subprocess.Popen[str]) -> tuple[int, str, str]:
        code = process.wait(timeout=LONG_S)
        return code, *((self.folder / name).read_text(encoding="utf-8") for name in ("out", "error"))

    def whose(self) -> str:
        return (self.folder / "whose").read_text(encoding="utf-8")

    def waits(self) -> bool:
        """Whether the task goes on that takes its time."""
        return (self.folder / "waits").exists()

    def spares(self) -> list[int]:
        """Return processes of this kind's Ansible that are nobody's who runs a playbook."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                of_this = str(self.folder / "home").encode() in (process / "environ").read_bytes()
                if of_this and b"warm.serve" in (process / "cmdline").read_bytes():
                    found.append(int(process.name))
        return found

    def warm(self) -> None:
        """Run until a spare is there for the next run."""
        for _twice in range(2):
            code, out, error = self.run()
            assert code == 0, out + error
        wait_for(lambda: self.run()[0] == 0 and "warm.serve" in self.whose())


@pytest.fixture
def ansible(tmp_path: Path) -> Iterator[Ansible]:
    (tmp_path / "play.yml").write_text(PLAY, encoding="utf-8")
    runs = Ansible(tmp_path)
    yield runs
    for process in runs.spares():
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def test_it_says_and_ends_as_without(ansible: Ansible) -> None:
    options = ("-e", "given=it", "-e", "fails=true")
    cold = ansible.run(*options, TOLD="something")
    assert cold[0] == 2 and f"said something {ansible.folder} 0027 " in cold[1]
    assert "warm.serve" not in ansible.whose() and "ansible-playbook\nplay.yml" in ansible.whose()
    ansible.warm()
    (ansible.folder / "whose").unlink()
    warm = ansible.run(*options, TOLD="something")
    assert "warm.serve" in ansible.whose()
    assert warm == cold
    # Files of its own are where any run has them, and go with it; the spare has some, too.
    said = ansible.run("-e", "{fails: false}", "-e", "given={{ lookup('config', 'DEFAULT_LOCAL_TMP') | dirname }}")[1]
    assert "warm.serve" in ansible.whose() and f" {ansible.folder}/home/tmp" in said
    assert {path.name for path in ansible.folder.iterdir()} == {"error", "home", "out", "play.yml", "waits", "whose"}
    assert len([path for path in (ansible.folder / "home/tmp").iterdir() if "-local-" in path.name]) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_it(ansible: Ansible, number: signal.Signals) -> None:
    def interrupted() -> tuple[int, str, str]:
        process = ansible.start("-e", "seconds=60")
        wait_for(ansible.waits)
        process.send_signal(number)
        return ansible.end(process)

    cold = interrupted()
    ansible.warm()
    warm = interrupted()
    assert "warm.serve" in ansible.whose()
    assert warm == cold


@pytest.mark.parametrize(("words", "asks"), [(["bin/ansible-playbook"], 1), (["other.py", "ansible-playbook"], 0)])
def test_a_program_that_is_given_its_name_is_another(
    words: list[str], asks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests/simulator/quick"))
    warm = importlib.import_module("warm")
    asked: list[str] = []
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, *words])
    monkeypatch.setattr(warm, "plain", lambda: True)
    monkeypatch.setattr(warm.spare, "LONGEST", 1000)
    monkeypatch.setattr(warm.spare, "ask", lambda path, *_given: asked.append(path))
    warm.instead(str(tmp_path))
    assert len(asked) == asks


def test_it_ends_with_who_is_killed(ansible: Ansible) -> None:
    ansible.warm()
    (spare,) = ansible.spares()
    process = ansible.start("-e", "seconds=60")
    wait_for(ansible.waits)
    assert len(ansible.spares()) > 1
    process.kill()
    process.wait()
    children = Path(f"/proc/{spare}/task/{spare}/children")
    wait_for(lambda: not children.read_text(encoding="utf-8"))


def test_another_configuration_or_a_changed_plugin_is_not_its(ansible: Ansible) -> None:
    plugins = ansible.folder / "callbacks"
    plugins.mkdir()
    plugin = plugins / "told.py"
    plugin.write_text("from ansible.plugins.callback import CallbackBase as CallbackModule\n", encoding="utf-8")
    ansible.environment = {"ANSIBLE_CALLBACK_PLUGINS": f"{ROOT / 'tests/simulator/callbacks'}:{plugins}"}
    ansible.warm()
    assert ansible.run(ANSIBLE_FORKS="3")[0] == 0
    assert "warm.serve" not in ansible.whose()
    (old,) = ansible.spares()
    plugin.write_text(plugin.read_text(encoding="utf-8") + "# changed\n", encoding="utf-8")
    assert ansible.run()[0] == 0
    assert "warm.serve" not in ansible.whose()
    # Else who waits for the end of what that said would wait for the spare's.
    assert not {str(ansible.folder / "out")} & {str(file.readlink()) for file in Path(f"/proc/{old}/fd").iterdir()}


def test_a_text_is_parsed_once_and_each_reader_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests/simulator/quick"))
    monkeypatch.setattr(dataloader, "from_yaml", dataloader.from_yaml)
    warm = importlib.import_module("warm")
    path = str(ROOT / "playbooks/site.yml")
    plain = dataloader.DataLoader().load_from_file(path, trusted_as_template=True)
    texts = warm.Texts()
    read = [dataloader.DataLoader().load_from_file(path, unsafe=True, trusted_as_template=True) for _twice in range(2)]
    assert read[0] == read[1] == plain and read[0] is not read[1] and read[0][0] is not read[1][0]
    assert Origin.get_tag(read[1][0]["name"]) == Origin.get_tag(plain[0]["name"])
    assert TrustedAsTemplate.is_tagged_on(read[1][0]["name"])
    assert texts._new == [(path, False, True)]
    # Trusted or not is another text.
    untrusted = dataloader.DataLoader().load_from_file(path)
    assert not TrustedAsTemplate.is_tagged_on(untrusted[0]["name"])
    # What a run has told, the spare reads.
    texts.tell()
    texts._known.clear()
    texts.listen()
    assert len(texts._known) == 2 and not texts._new
