"""A spare ansible-playbook has imported, and read, what each run of it begins with, and forks for the next one.

That is most of what a short run costs. Its process has the files, folder, variables, mask and limits of the one that
was started, and gets its signals. What decides of what is imported, the configuration above all, is the same for both.
Where no such spare is, or a terminal, or a file of the collection has changed since, Ansible begins as ever. The second
run of a kind leaves a spare behind.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import zlib

import spare  # type: ignore[import-not-found] # in this folder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# What a process imports that a spare forks for it would otherwise not need.
# ruff: noqa: PLC0415, PTH100, PTH102, PTH106, PTH111, PTH115, PTH116, PTH119, PTH120, PTH123, PTH208
# What Ansible and Python look at when they begin.
AT_START = (
    "ANSIBLE_", "PYTHON", "HOME", "USER", "LOGNAME", "LANG", "LC_", "TZ", "TERM", "NO_COLOR", "TMP", "TEMP", "XDG_",
    "LD_", "GLIBC", "MALLOC", "OPENSSL_", "SSL_", "COLORTERM",
)  # fmt: skip
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
IDLE_MS = 180_000
BEGINS_S = 300
CHECKOUT = os.path.normpath(f"{os.path.dirname(os.path.abspath(__file__))}/../../..") + os.sep
# By the loader's name: plugins that most runs have. Those of templates are what the callback `quick` reads.
PLUGINS = {
    "action": (
        "add_host", "assert", "command", "copy", "debug", "fail", "file", "gather_facts", "group_by", "include_vars",
        "normal", "package", "pause", "set_fact", "set_stats", "shell", "template", "uri", "validate_argument_spec",
    ),
    "become": ("sudo",),
    "cache": ("memory",),
    "connection": ("local", "ssh", "community.docker.docker", "gpufarm.core.wsl"),
    "inventory": ("host_list", "script", "auto", "yaml", "ini", "toml", "constructed", "gpufarm.core.wsl"),
    "lookup": ("ansible.builtin.env", "ansible.builtin.file", "ansible.builtin.template", "ansible.builtin.vars"),
    "shell": ("sh",),
    "strategy": ("linear",),
}  # fmt: skip


def state(path: str) -> tuple[str, int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return path, found.st_mtime_ns, found.st_size, found.st_ino


def content(path: str) -> tuple[str, bytes] | None:
    try:
        with open(path, "rb", 0) as file:
            return path, file.read()
    except OSError:
        return None


def place(folder: str) -> str:
    """Return the path of the socket of the spare that is what this process would be."""
    given = os.environ.get("ANSIBLE_CONFIG")
    usual = ["ansible.cfg", os.path.expanduser("~/.ansible.cfg"), "/etc/ansible/ansible.cfg"]
    which = [
        sys.executable,
        sys.prefix,
        sys.orig_argv[1],
        *sorted(item for item in os.environ.items() if item[0].startswith(AT_START)),
        *(content(os.path.abspath(path)) for path in ([given] if given else usual)),
        os.stat("/").st_ino,
        *(os.readlink(f"/proc/self/ns/{name}") for name in spare.NAMESPACES),
    ]
    return f"{folder}/ansible-{zlib.crc32(repr(which).encode()):08x}"


def plain() -> bool:
    """Whether this process has root's rights, the three usual files and no terminal."""
    if os.geteuid() or any(os.isatty(number) for number in range(3)):
        return False
    # One of these is open for the listing alone.
    others = [int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2]
    return len(others) <= 1


def instead(folder: str) -> None:
    """Have the spare run what this process was started for, and end as that ends; return where this process has to."""
    words = sys.orig_argv[1:]
    # A program that is given this name as a word is another.
    if os.path.basename(words[0]) != "ansible-playbook" or not plain():
        return
    path = place(folder)
    if len(path) > spare.LONGEST:
        return
    ignored = [each for each in FORWARDED if signal.getsignal(each) == signal.SIG_IGN]

    def begun(process: int) -> None:
        for each in FORWARDED:
            if each not in ignored:
                signal.signal(each, lambda number, _frame: os.kill(process, number))

    ended = spare.ask(path, (words, [int(each) for each in ignored], os.nice(0)), begun)
    if ended is None:
        _leave_one(path)
        return
    for each in FORWARDED:
        if each not in ignored:
            signal.signal(each, signal.SIG_DFL)
    spare.end(ended)


def _leave_one(path: str) -> None:
    """Start a spare, if there was a run of the kind before and no spare begins."""
    import time

    try:
        os.mkdir(f"{path}.once")
    except FileExistsError:
        pass
    else:
        return
    begins = f"{path}.begins"
    try:
        os.mkdir(begins)
    except FileExistsError:
        begun = state(begins)
        if begun and begun[1] / 1e9 < time.time() - BEGINS_S:
            os.utime(begins)
        else:
            return
    # A child's child, for which Ansible does not wait at its end.
    program = "import os, sys; os.fork() and os._exit(0)\n"
    program += f"sys.path.insert(0, {os.path.dirname(__file__)!r}); import warm; exec(*warm.serve({path!r}))"
    spare.spawn(path, program)


def changing() -> list[str]:
    """Return each file that has been imported and is not Python's or of what is installed in its environment."""
    fixed = (sys.prefix, sys.base_prefix)
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    return [file for file in filter(None, files) if not os.path.realpath(file).startswith(fixed)]


class Texts:
    """Has each text that runs read as YAML from a file of this checkout parsed once.

    A run tells at its end which files were new to it, and the spare reads them for the next one.
    """

    def __init__(self) -> None:
        import socket

        from ansible.parsing import dataloader

        self._parse = dataloader.from_yaml
        self._known: dict[Any, Any] = {}
        self._new: list[tuple[str, bool, bool]] = []
        self.heard, self._say = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._say.setblocking(False)
        dataloader.from_yaml = self

    def __call__(self, data: Any, file_name: str | None = None, json_only: bool = False) -> Any:
        """Do what from_yaml does for who reads files."""
        import copies  # type: ignore[import-not-found]

        tags = {kind.__name__: tag for kind, tag in getattr(data, copies.TAGS, {}).items()}
        if not file_name or not file_name.startswith(CHECKOUT) or "SourceWasEncrypted" in tags:
            return self._parse(data=data, file_name=file_name, json_only=json_only)
        key = (str(data), file_name, json_only, repr(sorted(tags.items())))
        if key not in self._known:
            self._known[key] = self._parse(data=data, file_name=file_name, json_only=json_only)
            self._new.append((file_name, json_only, "TrustedAsTemplate" in tags))
        return copies.copied(self._known[key])

    def tell(self) -> None:
        """Tell the spare, in a run that ends, what was new to it."""
        import marshal

        try:
            for at in range(0, len(self._new), 500):
                self._say.send(marshal.dumps(self._new[at : at + 500]))
        except OSError:
            pass

    def listen(self) -> None:
        """Read, in the spare, what was new to a run."""
        import marshal

        from ansible.parsing.dataloader import DataLoader

        for path, json_only, trusted in marshal.loads(self.heard.recv(1 << 20)):  # noqa: S302 - our own process
            try:
                DataLoader().load_from_file(path, cache="none", json_only=json_only, trusted_as_template=trusted)
            except Exception:
                continue
        self._new.clear()


def serve(path: str) -> Any:
    """Fork for who asks; in the forked process return the code that it is to run."""
    sys.path[0] = os.path.dirname(sys.executable)  # a script's own folder
    sys.argv = ["ansible-playbook"]
    import copies
    from ansible import cli, constants
    from ansible.cli import playbook
    from ansible.plugins import loader
    from ansible.utils import path as paths
    from ansible.utils import vars as variables

    copies.share()
    loader.init_plugin_loader()
    for _each in loader.callback_loader.all(class_only=True):
        pass
    for kind, names in PLUGINS.items():
        for name in names:
            getattr(loader, f"{kind}_loader").get(name, class_only=True)
    if quick := loader.callback_loader.get("quick", class_only=True):
        quick.read_plugins()
    texts = Texts()
    files = [*changing(), f"{CHECKOUT}meta/runtime.yml"]
    known = [*map(state, files)]
    words, ignored, niceness = spare.fork(
        path, IDLE_MS, begins=lambda: os.rmdir(f"{path}.begins"), fresh=lambda: [*map(state, files)] == known,
        also=(texts.heard, texts.listen),
    )  # fmt: skip
    for each in ignored:
        signal.signal(each, signal.SIG_IGN)
    os.nice(niceness - os.nice(0))
    # What differs from run to run of that which Ansible has when it is imported.
    atexit.unregister(paths.cleanup_tmp_file)
    setting = "DEFAULT_LOCAL_TMP"
    constants.set_constant(setting, constants.config.get_config_value(setting, variables=vars(constants)))
    variables.random_int = os.urandom(4).hex()
    cli.display._set_column_width()
    for said in (cli.display._deprecations, cli.display._warns, cli.display._errors):
        said.clear()
    cli.init_plugin_loader = lambda *_paths: None
    atexit.register(texts.tell)
    sys.argv, sys.orig_argv = list(words), [sys.executable, *words]
    return compile("sys.exit(main())", words[0], "exec"), {"sys": sys, "main": playbook.main, "__name__": "__main__"}
