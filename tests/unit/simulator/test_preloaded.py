"""What lets user-mode Linux run on processors whose state is larger than it knows."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

from tests.simulator.preloaded import XSTATE, preloaded

# Gives a process that stands still the first 576 bytes of its state back, which every processor has more than.
PROGRAM = """
import ctypes, os, signal, sys

class Part(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]

TRACEME, PEEKUSER, CONT, GETREGSET, SETREGSET, XSTATE = 0, 3, 7, 0x4204, 0x4205, 0x202
ORIG_RAX, KILL = 15 * 8, 62
ptrace = ctypes.CDLL(None, use_errno=True).ptrace
ptrace.restype, ptrace.argtypes = ctypes.c_long, [ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
child = os.fork()
if not child:
    ptrace(TRACEME, 0, None, None)
    os.kill(os.getpid(), signal.SIGSTOP)
    os._exit(7)
os.waitpid(child, 0)
kept = ctypes.create_string_buffer(576)
part = Part(ctypes.addressof(kept), 576)
assert ptrace(GETREGSET, child, XSTATE, ctypes.addressof(part)) == 0
assert ptrace(PEEKUSER, child, ORIG_RAX, None) == KILL
given = ptrace(SETREGSET, child, XSTATE, ctypes.addressof(part))
code = ctypes.get_errno() if given else 0
ptrace(CONT, child, None, None)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
sys.exit(code)
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="AMX is of x86_64 alone")
def test_a_part_of_a_state_is_taken_back() -> None:
    def code(environment: dict[str, str]) -> int:
        return subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=False).returncode

    assert code({**os.environ}) == errno.EFAULT
    assert code({**os.environ, "LD_PRELOAD": str(preloaded(XSTATE))}) == 0
