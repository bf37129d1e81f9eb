"""A spare interpreter runs what Ansible sends to a node's Python: it has imported what each of its modules begins with.

That is three quarters of what a task costs a node here. A process of the spare has the files, folder, variables, mask,
limits and namespaces of the one that was started, in a session of its own. What it has imported is what the sent
archive has, by name, size and checksum; otherwise, and where anything fails, Python goes on as ever. The first task of
a node leaves a spare behind.
"""

from __future__ import annotations

import atexit
import os
import sys
import zipimport
import zlib

TYPE_CHECKING = False  # typing would be imported by each Python that starts
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

ModuleSpec: Any = type(zipimport.__spec__)

# What a task's process imports for this alone it would otherwise not need.
# ruff: noqa: PLC0415, PLR0912, PLR0915, PTH104, PTH108, PTH115, PTH116, PTH120, PTH123
NEEDED = ("ansible.module_utils.basic", "ansible.module_utils._internal._ansiballz._loader")
# Python's own, which most of this collection's modules import.
USUAL = ("dataclasses", "http.client", "importlib.metadata", "pathlib", "platform", "shlex", "ssl", "urllib.request")
# What Python reads of its variables when it starts.
AT_START = ("HOME", "PYTHON", "LANG", "LC_", "TZ", "MALLOC", "LD_", "GLIBC")
# What a process is in and does not leave: each has its own spare.
NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
IDLE_MS = 120_000
LONGEST = 90  # of 107 that the address of a socket may have
RIGHTS = 1  # SCM_RIGHTS


def place(folder: str, spares: int) -> str:
    """Return the path of the socket of one of this Python's spares.

    Sets have their order from when a Python starts: with several, what hangs on it changes from task to task.
    """
    chance = os.urandom(1)[0] % spares
    which = [
        sys.executable,
        sys.prefix,
        *sorted(item for item in os.environ.items() if item[0].startswith(AT_START)),
        os.stat("/").st_ino,
        *(os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES),
    ]
    return f"{folder}/{sys.implementation.cache_tag}-{zlib.crc32(repr(which).encode()):08x}-{chance}"


def instead(folder: str, spares: int = 2) -> None:
    """Have the spare run what stands on standard input, and end as that ends; return where this process has to."""
    # Before 3.10, where there is no orig_argv, Python does its work itself.
    if len(getattr(sys, "orig_argv", ("", ""))) != 1 or os.geteuid() or os.isatty(0):
        return
    path = place(folder, spares)
    if len(path) > LONGEST:
        return
    ended = ask(path)
    if ended is None:
        _leave_one(path)
    else:
        end(ended)


def end(status: int) -> None:
    """End as a process has ended that has this status by ``waitpid``."""
    if os.WIFSIGNALED(status):
        os.kill(os.getpid(), os.WTERMSIG(status))
    else:
        os._exit(os.WEXITSTATUS(status))


def ask(path: str, more: Any = None, begun: Any = None) -> int | None:
    """Return the status that ``waitpid`` has of the spare's process, or None where it has not begun.

    It is given what is in ``more``; once it has begun, ``begun`` is called with its id.
    """
    import _socket
    import array
    import marshal
    import resource

    kinds = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
    limits = {kind: resource.getrlimit(kind) for kind in kinds}
    mask = os.umask(0)
    os.umask(mask)
    said = marshal.dumps((dict(os.environ), mask, limits, more))
    spare = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    try:
        spare.connect(path)
        spare.setsockopt(_socket.SOL_SOCKET, _socket.SO_SNDBUF, len(said) * 2)
        here = os.open(".", os.O_RDONLY)
        spare.sendmsg([said], [(_socket.SOL_SOCKET, RIGHTS, array.array("i", [0, 1, 2, here]))])
        os.close(here)
        # What has ended before it has begun has a status alone.
        said, _word, process = spare.recv(16).partition(b"begun ")
    except OSError:
        return None
    if said or not process:
        return None
    if begun:
        begun(int(process))
    status = spare.recv(8)
    if not status:
        words = ""
        try:
            with open(f"{path}.said", errors="replace") as file:
                words = file.read()[-4000:]
        except OSError:
            pass
        os.write(2, f"{path}: it or what it ran was killed. It said: {words or 'nothing'}\n".encode())
    return int(status or 256)


def _leave_one(path: str) -> None:
    """Start a spare when this process ends, if it has had an archive of Ansible's."""
    compile_source = zipimport._compile_source  # type: ignore[attr-defined]
    archive = f"{path}.zip"  # while a spare begins, and where none could

    def seen(of: str, source: bytes) -> Any:
        sent, found, _member = of.partition(".zip/")
        if found:
            import shutil

            zipimport._compile_source = compile_source  # type: ignore[attr-defined]
            try:
                kept = os.open(archive, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            except FileExistsError:
                atexit.unregister(start)
            else:
                with open(f"{sent}.zip", "rb") as source_file, open(kept, "wb") as kept_file:
                    shutil.copyfileobj(source_file, kept_file)
        return compile_source(of, source)

    def start() -> None:
        if zipimport._compile_source is seen:  # type: ignore[attr-defined]
            return
        program = f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r}); import spare"
        spawn(path, f"{program}; del sys.path[0]; exec(spare.serve({path!r}, {archive!r}))")

    zipimport._compile_source = seen  # type: ignore[attr-defined]
    atexit.register(start)


def spawn(path: str, program: str) -> None:
    """Start the spare of a socket, whose words, if it has any, are kept beside it."""
    said = os.O_CREAT | os.O_APPEND | os.O_WRONLY
    files = [
        *((os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in range(2)),
        (os.POSIX_SPAWN_OPEN, 2, f"{path}.said", said, 0o600),
    ]
    os.posix_spawn(sys.executable, [sys.executable, "-c", program], os.environ, file_actions=files, setsid=True)


def members(archive: str) -> dict[str, tuple[int, int]]:
    """Return size and checksum of each file of an archive."""
    importer: Any = zipimport.zipimporter(archive)
    files = importer._get_files() if hasattr(importer, "_get_files") else importer._files
    return {path: (entry[3], entry[7]) for path, entry in files.items()}


class Imported:
    """Gives what the spare has imported of Ansible to a process whose archive has the same."""

    def __init__(self, modules: dict[str, ModuleType], archive: str) -> None:
        # One gives way to the distribution's own, if there is one, and one is made as it is imported.
        files = {name: getattr(module, "__file__", None) or "/" for name, module in modules.items()}
        own = {name: path.removeprefix(f"{archive}/") for name, path in files.items()}
        self._path = {name: path for name, path in own.items() if path[0] != "/"}
        self._modules = modules
        known = members(archive)
        self._known = {path: known[path] for path in self._path.values()}

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> Any:
        """Return where the package ansible is, if what is here is what is there, and leave the rest to others."""
        if name != "ansible":
            return None
        sys.meta_path.remove(self)
        sent = next(entry for entry in sys.path if entry.endswith(".zip"))
        there = members(sent)
        if any(there.get(path) != said for path, said in self._known.items()):
            return None
        for each, path in self._path.items():
            module: Any = self._modules[each]
            sys.modules[each] = module
            module.__file__ = f"{sent}/{path}"
            module.__loader__ = self if each == name else zipimport.zipimporter(sent)
            package = path.endswith("/__init__.py")
            module.__spec__ = ModuleSpec(each, module.__loader__, origin=module.__file__, is_package=package)
            if package:
                module.__path__ = [module.__file__.removesuffix("/__init__.py")]
                module.__spec__.submodule_search_locations = module.__path__
        return self._modules[name].__spec__

    def create_module(self, spec: Any) -> ModuleType:
        return self._modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """It has been, in the spare."""


def serve(path: str, archive: str) -> Any:
    """Fork for who asks, until nobody has for long; in the forked process return the code that it is to run."""
    import importlib

    sys.path.insert(0, archive)
    for name in (*USUAL, *NEEDED):
        importlib.import_module(name)
    sys.path.remove(archive)
    modules = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "ansible"}
    imported = Imported(modules, archive)
    fork(path, IDLE_MS, begins=lambda: os.unlink(archive))
    sys.argv, sys.orig_argv = [""], sys.orig_argv[:1]
    sys.meta_path.insert(0, imported)
    return compile(sys.stdin.buffer.read(), "<stdin>", "exec")


def fork(path: str, idle_ms: int, begins: Any, fresh: Any = None, also: Any = None) -> Any:
    """Fork for who asks at a socket, until nobody has for long; return, in the forked process, what it was given.

    ``begins`` is called when the socket is there. Where ``fresh`` is no longer true, nobody is forked for any more.
    ``also`` is a file and what is to be done when something is to be read from it.
    """
    import gc
    import select
    import signal
    import socket
    from contextlib import suppress

    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"{path}.{os.getpid()}")
    listener.listen(64)
    mine = os.stat(f"{path}.{os.getpid()}").st_ino

    def leave() -> None:
        with suppress(OSError):
            if os.stat(path).st_ino == mine:
                os.unlink(path)

    os.rename(f"{path}.{os.getpid()}", path)
    begins()
    gc.freeze()
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    if also:
        poll.register(also[0], select.POLLIN)
    # By the file of a process and by that of who asks.
    asked_by: dict[int, tuple[socket.socket, int, int]] = {}
    while ready := poll.poll(None if asked_by else idle_ms):
        for number, _event in ready:
            if number in asked_by:
                who, child, process = asked_by.pop(number)
                if number == process:
                    with suppress(OSError):
                        who.send(b"%d" % os.waitpid(child, 0)[1])
                    poll.unregister(process)
                    os.close(process)
                else:  # who asked is gone, and where no spare is, that would be the one that runs
                    with suppress(ProcessLookupError):
                        signal.pidfd_send_signal(process, signal.SIGKILL)
                if asked_by.pop(who.fileno(), None) or number == who.fileno():
                    poll.unregister(who)
                    who.close()
            elif number == listener.fileno():
                who = listener.accept()[0]
                said, files, _flags, _from = who.recvmsg(1 << 20, socket.CMSG_SPACE(16))
                if not files:  # gone before it asked
                    who.close()
                    continue
                given = [int.from_bytes(files[0][2][at : at + 4], sys.byteorder) for at in range(0, 16, 4)]
                if fresh and not fresh():
                    leave()
                    poll.unregister(listener)
                    listener.close()
                    who.close()
                    for each in given:
                        os.close(each)
                    break
                child = os.fork()
                if not child:
                    listener.close()
                    for other, _child, process in asked_by.values():
                        other.close()
                        with suppress(OSError):
                            os.close(process)
                    more = _become(said, given)
                    who.send(b"begun %d" % os.getpid())
                    who.close()
                    return more
                for each in given:
                    os.close(each)
                process = os.pidfd_open(child)
                asked_by[process] = asked_by[who.fileno()] = (who, child, process)
                poll.register(process, select.POLLIN)
                poll.register(who, 0)
            elif also and number == also[0].fileno():
                also[1]()
    leave()
    atexit._run_exitfuncs()
    os._exit(0)


def _become(said: bytes, files: list[int]) -> Any:
    """Take over what the process that asks has: its files, folder, mask, limits and variables; return what it gives."""
    import importlib
    import marshal
    import resource
    import time

    os.setsid()
    folder = files.pop()
    os.fchdir(folder)
    os.close(folder)
    for there, each in enumerate(files):
        os.dup2(each, there)
        os.close(each)
    environment, mask, limits, more = marshal.loads(said)  # noqa: S302 - from root
    os.umask(mask)
    for kind, limit in limits.items():
        if resource.getrlimit(kind) != limit:
            resource.setrlimit(kind, limit)
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    importlib.invalidate_caches()
    return more
