# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What GPUs really do, by CUDA's driver API alone: Python's standard library and the driver's libcuda.so.1.

This file stands alone, so that it can be sent as the payload of a job too:

    python3 measuring.py --level quick --format json

Each GPU is worked on by a process of its own, which sees no other. One that gets no further is killed with all that it
started; the others go on. Nothing is left behind: no context, no file, no setting.

Kernels are PTX text that the driver compiles. Each answers for its result: what a pattern should be is worked out
again where it is read, and arithmetic is repeated here, bit by bit, before it is compared.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import json
import os
import select
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

LEVELS = ("start", "quick", "full")
# Of the free memory, where nothing else is said.
MEMORY_SHARES = {"start": 0.5, "quick": 0.5, "full": 0.95}
# At most, where it is the host's memory too, in which everything else runs.
INTEGRATED_SHARE = 0.5

MIB = 1024 * 1024

LIBRARIES = ("libcuda.so.1", "/usr/lib/wsl/lib/libcuda.so.1")

ERROR_SAMPLES = 16

# Calls of the driver API whose newer form has another name.
NAMES = {
    name: f"{name}_v2"
    for name in (
        "cuCtxCreate",
        "cuCtxDestroy",
        "cuCtxPushCurrent",
        "cuCtxPopCurrent",
        "cuMemAlloc",
        "cuMemFree",
        "cuMemGetInfo",
        "cuMemcpyDtoDAsync",
        "cuMemcpyDtoH",
        "cuMemcpyDtoHAsync",
        "cuMemcpyHtoDAsync",
    )
}

# CUdevice_attribute, as cuda.h numbers them.
ATTRIBUTES = {
    "sm_count": 16,
    "sm_clock_max_khz": 13,
    "memory_clock_max_khz": 36,
    "memory_bus_width_bits": 37,
    "l2_cache_bytes": 38,
    "ecc_enabled": 32,
    "pci_domain": 50,
    "pci_bus": 33,
    "pci_device": 34,
    "integrated": 18,
    "capability_major": 75,
    "capability_minor": 76,
}

PEER_NATIVE_ATOMICS = 3
CONTEXT_BLOCKING_SYNC = 4
OUT_OF_MEMORY = 2


class CudaError(Exception):
    """A call of the driver API that did not succeed."""

    def __init__(self, call: str, code: int, name: str, text: str, log: str = "") -> None:
        super().__init__(f"{call} ended with {code} ({name}: {text}){': ' + log if log else ''}")
        self.call, self.code, self.name = call, code, name


class Cuda:
    """libcuda.so.1, whose calls raise CudaError."""

    def __init__(self) -> None:
        failed: list[str] = []
        for library in LIBRARIES:
            try:
                self._library = ctypes.CDLL(library)
                break
            except OSError as error:
                failed.append(str(error))
        else:
            raise OSError(failed[0])
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: Any) -> None:
        code = self.code(name, *arguments)
        if code:
            raise CudaError(name, code, self._told("cuGetErrorName", code), self._told("cuGetErrorString", code))

    def code(self, name: str, *arguments: Any) -> int:
        try:
            function = getattr(self._library, NAMES.get(name, name))
        except AttributeError as error:
            raise OSError(f"the driver's library has no {name}: {error}") from None
        return int(function(*arguments))

    def _told(self, name: str, code: int) -> str:
        text = ctypes.c_char_p()
        getattr(self._library, name)(code, ctypes.byref(text))
        return (text.value or b"unknown").decode("ascii", "replace")

    def integer(self, name: str, *arguments: Any) -> int:
        value = ctypes.c_int()
        self.call(name, ctypes.byref(value), *arguments)
        return value.value

    def attribute(self, name: str, device: int) -> int | None:
        """An attribute of a device; None where the driver does not give it."""
        try:
            return self.integer("cuDeviceGetAttribute", ATTRIBUTES[name], device)
        except CudaError:
            return None

    def count(self) -> int:
        return self.integer("cuDeviceGetCount")

    def device(self, ordinal: int) -> int:
        return self.integer("cuDeviceGet", ordinal)

    def name(self, device: int) -> str:
        text = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", text, len(text), device)
        return text.value.decode("utf-8", "replace")

    def uuid(self, device: int) -> str:
        """The UUID as nvidia-smi writes it; the first form of the call names a MIG device's GPU instead of itself."""
        raw = (ctypes.c_ubyte * 16)()
        try:
            self.call("cuDeviceGetUuid_v2", raw, device)
        except OSError:
            self.call("cuDeviceGetUuid", raw, device)
        digits = bytes(raw).hex()
        kind = "MIG" if " MIG " in self.name(device) else "GPU"
        return "-".join((kind, digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


# -- kernels ----------------------------------------------------------------------------------------------------------

# What the word at an index is, from %x, the index, and %s, the seed, to %v; %t is free.
PATTERNS = {
    # Adds up to what can be told without reading it.
    "linear": "add.u32 %v, %x, %s;",
    # Each line of the bus in turn, and, with a negative seed, each line but one.
    "walking": """add.u32 %v, %x, %s; and.b32 %v, %v, 31; mov.u32 %t, 1; shl.b32 %v, %t, %v;
        shr.s32 %t, %s, 31; xor.b32 %v, %v, %t;""",
    "random": """mul.lo.u32 %v, %x, 0x9E3779B1; add.u32 %v, %v, %s; shr.u32 %t, %v, 15; xor.b32 %v, %v, %t;
        mul.lo.u32 %v, %v, 0x85EBCA77; shr.u32 %t, %v, 13; xor.b32 %v, %v, %t;""",
}

BLOCK = 512
BLOCKS_PER_SM = 64
VECTORS = 4

# %i goes over all vectors of 16 bytes, as many threads side by side as there are.
STRIDE = """
    .reg .pred %q, %d; .reg .b32 %a, %b, %c, %s, %x, %v, %t, %w<4>, %e<4>;
    .reg .b64 %p, %n, %i, %step, %o, %k, %r, %three;
    ld.param.u64 %p, [p]; ld.param.u64 %n, [n]; ld.param.u64 %r, [out]; ld.param.u32 %s, [seed];
    mov.u32 %a, %ctaid.x; mov.u32 %b, %ntid.x; mov.u32 %c, %tid.x;
    cvt.u64.u32 %k, %c; mad.wide.u32 %i, %a, %b, %k;
    mov.u32 %a, %nctaid.x; mul.wide.u32 %step, %a, %b;
"""

PARAMETERS = ".param .u64 p, .param .u64 n, .param .u64 out, .param .u32 seed"

# The index of the vector's first word, folded so that places 16 GiB apart differ.
INDEX = """    shl.b64 %k, %i, 2; cvt.u32.u64 %x, %k; shr.u64 %k, %k, 32; cvt.u32.u64 %t, %k;
    mad.lo.u32 %x, %t, 0x61C88647, %x;
"""


def _fill(name: str) -> str:
    words = "".join(f"    {PATTERNS[name]} mov.u32 %w{k}, %v; add.u32 %x, %x, 1;\n" for k in range(4))
    return f""".visible .entry fill_{name}({PARAMETERS})
{{{STRIDE}
L: setp.ge.u64 %q, %i, %n; @%q bra E;
{INDEX}{words}    shl.b64 %o, %i, 4; add.u64 %o, %o, %p; st.global.v4.u32 [%o], {{%w0, %w1, %w2, %w3}};
    add.u64 %i, %i, %step; bra L;
E: ret;
}}
"""


def _check(name: str) -> str:
    """Counts words that are not what they should be at out, and keeps index, expected and found of the first ones."""
    words = "".join(
        f"""    {PATTERNS[name]} setp.eq.u32 %d, %v, %w{k}; @%d bra S{k};
    atom.global.add.u32 %a, [%r], 1; setp.ge.u32 %d, %a, {ERROR_SAMPLES}; @%d bra S{k};
    mul.wide.u32 %k, %a, 16; add.u64 %k, %k, %r; shl.b64 %o, %i, 2; add.u64 %o, %o, {k};
    st.global.u64 [%k+16], %o; st.global.u32 [%k+24], %v; st.global.u32 [%k+28], %w{k};
S{k}: add.u32 %x, %x, 1;
"""
        for k in range(4)
    )
    return f""".visible .entry check_{name}({PARAMETERS})
{{{STRIDE}
L: setp.ge.u64 %q, %i, %n; @%q bra E;
    shl.b64 %o, %i, 4; add.u64 %o, %o, %p; ld.global.v4.u32 {{%w0, %w1, %w2, %w3}}, [%o];
{INDEX}{words}    add.u64 %i, %i, %step; bra L;
E: ret;
}}
"""


def _spread() -> str:
    """Where a block's own stretch of VECTORS vectors a thread begins and goes on."""
    return f"""    mul.lo.u32 %a, %b, {VECTORS}; mov.u32 %x, %ctaid.x; cvt.u64.u32 %k, %c; mad.wide.u32 %i, %x, %a, %k;
    mul.lo.u64 %step, %step, {VECTORS}; cvt.u64.u32 %three, %b; shl.b64 %three, %three, 4;
"""


def _read() -> str:
    """Adds all words up at out. Each block reads a stretch of its own, so memory must be a multiple of MIB."""
    names = [f"%l{number}_" for number in range(VECTORS)]
    registers = ", ".join(f"{name}<4>" for name in names)
    loads = " add.u64 %o, %o, %three;\n".join(
        f"    ld.global.v4.u32 {{{name}0, {name}1, {name}2, {name}3}}, [%o];" for name in names
    )
    adds = "".join(f" add.u32 %v, %v, {name}{k};" for name in names for k in range(4))
    return f""".visible .entry read_sum({PARAMETERS})
{{{STRIDE}    .reg .b32 {registers}; .shared .u32 sum;
    mov.u32 %v, 0; setp.ne.u32 %d, %c, 0; @%d bra Z; st.shared.u32 [sum], %v;
Z: bar.sync 0;
{_spread()}L: setp.ge.u64 %q, %i, %n; @%q bra E; shl.b64 %o, %i, 4; add.u64 %o, %o, %p;
{loads}
   {adds}
    add.u64 %i, %i, %step; bra L;
E: red.shared.add.u32 [sum], %v; bar.sync 0; @%d bra X;
    ld.shared.u32 %v, [sum]; red.global.add.u32 [%r], %v;
X: ret;
}}
"""


def _write() -> str:
    """Writes the linear pattern as read_sum reads it."""
    stores = " add.u64 %o, %o, %three; shl.b32 %t, %b, 2; add.u32 %x, %x, %t;\n".join(
        "    add.u32 %w0, %x, %s; add.u32 %w1, %w0, 1; add.u32 %w2, %w0, 2; add.u32 %w3, %w0, 3;"
        " st.global.v4.u32 [%o], {%w0, %w1, %w2, %w3};"
        for _number in range(VECTORS)
    )
    return f""".visible .entry write_linear({PARAMETERS})
{{{STRIDE}{_spread()}L: setp.ge.u64 %q, %i, %n; @%q bra E; shl.b64 %o, %i, 4; add.u64 %o, %o, %p;
{INDEX}{stores}
    add.u64 %i, %i, %step; bra L;
E: ret;
}}
"""


CLOCK_BEGIN = """    mov.u32 %e, %ctaid.x; mov.u32 %f, %tid.x; or.b32 %e, %e, %f; setp.ne.u32 %d, %e, 0;
    mov.u64 %c0, %clock64; mov.u64 %g0, %globaltimer;
"""
CLOCK_END = """    @%d bra X; mov.u64 %c1, %clock64; mov.u64 %g1, %globaltimer;
    sub.u64 %c1, %c1, %c0; sub.u64 %g1, %g1, %g0;
    st.global.u64 [%r+8], %c1; st.global.u64 [%r+16], %g1;
X: ret;
"""

CHAINS = 8
UNROLLED = 16
FMA_STEPS = 2048
# As many threads as every multiprocessor holds at once (Turing 1,024): there is no rest that runs behind the others.
FMA_BLOCKS_PER_SM = 2


def bits_of(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def single(value: float) -> float:
    """The nearest number of single precision."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


# Near -1, so that an error stays to the end; and of a size where a double holds each product and sum exactly.
FMA_FACTOR = single(-0.99998713)
FMA_ADDEND = single(2.7182818)
FMA_STARTS = tuple(single(1.0 + (k + 1) * 0.1031 + k * 1e-5) for k in range(CHAINS))


def fma_result() -> int:
    """The sum of the bits of what FMA_STEPS steps make of each start, worked out here."""
    total = 0
    for start in FMA_STARTS:
        value = start
        for _step in range(FMA_STEPS):
            value = single(value * FMA_FACTOR + FMA_ADDEND)
        total += bits_of(value)
    return total & 0xFFFFFFFF


def _fma() -> str:
    """Goes FMA_STEPS steps from the starts, as often as asked, and counts the threads that arrive elsewhere."""
    starts = "".join(f" mov.f32 %x{k}, 0f{bits_of(start):08X};" for k, start in enumerate(FMA_STARTS))
    steps = "\n   ".join("".join(f" fma.rn.f32 %x{k}, %x{k}, %m, %n;" for k in range(CHAINS)) for i in range(UNROLLED))
    ends = "".join(f" mov.b32 %e, %x{k}; add.u32 %a, %a, %e;" for k in range(CHAINS))
    return f""".visible .entry fp32_fma(.param .u64 out, .param .u32 rounds, .param .u32 expected)
.maxntid {BLOCK}, 1, 1
{{
    .reg .pred %q, %d; .reg .f32 %x<{CHAINS}>, %m, %n; .reg .b32 %a, %e, %f, %i, %j; .reg .b64 %r, %c0, %c1, %g0, %g1;
    ld.param.u64 %r, [out]; ld.param.u32 %j, [rounds];
    mov.f32 %m, 0f{bits_of(FMA_FACTOR):08X}; mov.f32 %n, 0f{bits_of(FMA_ADDEND):08X}; mov.u32 %a, 0;
{CLOCK_BEGIN}L:{starts} mov.u32 %i, {FMA_STEPS // UNROLLED};
K: .pragma "nounroll";
   {steps}
    sub.u32 %i, %i, 1; setp.ne.u32 %q, %i, 0; @%q bra K;
   {ends}
    sub.u32 %j, %j, 1; setp.ne.u32 %q, %j, 0; @%q bra L;
    ld.param.u32 %e, [expected]; setp.eq.u32 %q, %a, %e; @%q bra Y; red.global.add.u32 [%r], 1;
Y:
{CLOCK_END}}}
"""


ACCUMULATORS = 8
MMA_UNROLLED = 4
MMA_BLOCK = 256
MMA_BLOCKS_PER_SM = 4
MMA_ROUNDS_MAX = 16384


def _mma(kind: str, depth: int) -> str:
    """Multiplies two A with four B over and over; each sum is a whole number that single precision holds exactly."""
    a_words, b_words = depth // 4, depth // 8
    per_lane = 2 * a_words + 4 * b_words + 4 * ACCUMULATORS
    loads, products, checks = [], [], []
    for k in range(2 * a_words):
        loads.append(f"ld.global.u32 %a{k}, [%o+{4 * k}];")
    for k in range(4 * b_words):
        loads.append(f"ld.global.u32 %b{k}, [%o+{4 * (2 * a_words + k)}];")
    zeros = " ".join(f"mov.f32 %s{k}, 0f00000000;" for k in range(4 * ACCUMULATORS))
    for each in range(ACCUMULATORS):
        a, b = each % 2, each // 2
        sums = ", ".join(f"%s{4 * each + k}" for k in range(4))
        left = ", ".join(f"%a{a * a_words + k}" for k in range(a_words))
        right = ", ".join(f"%b{b * b_words + k}" for k in range(b_words))
        instruction = f"mma.sync.aligned.m16n8k{depth}.row.col.f32.{kind}.{kind}.f32"
        products.append(f"{instruction} {{{sums}}}, {{{left}}}, {{{right}}}, {{{sums}}};")
    for k in range(4 * ACCUMULATORS):
        checks.append(
            f"ld.global.f32 %x, [%o+{4 * (2 * a_words + 4 * b_words + k)}]; mul.rn.f32 %x, %x, %m; "
            f"setp.neu.f32 %q, %x, %s{k}; selp.u32 %f, 1, 0, %q; or.b32 %e, %e, %f;"
        )
    newline = "\n    "
    return f""".visible .entry tensor_{kind}(.param .u64 out, .param .u64 data, .param .u32 rounds)
.maxntid {MMA_BLOCK}, 1, 1
{{
    .reg .pred %q, %d; .reg .f32 %s<{4 * ACCUMULATORS}>, %x, %m; .reg .b64 %r, %o, %k, %c0, %c1, %g0, %g1;
    .reg .b32 %a<{2 * a_words}>, %b<{4 * b_words}>, %e, %f, %i;
    ld.param.u64 %r, [out]; ld.param.u64 %o, [data]; ld.param.u32 %i, [rounds];
    cvt.rn.f32.u32 %m, %i; mov.f32 %x, 0f{bits_of(MMA_UNROLLED):08X}; mul.rn.f32 %m, %m, %x;
    mov.u32 %f, %laneid; mul.wide.u32 %k, %f, {4 * per_lane}; add.u64 %o, %o, %k;
    {newline.join(loads)}
    {zeros}
{CLOCK_BEGIN}L:
    {newline.join(products * MMA_UNROLLED)}
    sub.u32 %i, %i, 1; setp.ne.u32 %q, %i, 0; @%q bra L;
    mov.u32 %e, 0;
    {newline.join(checks)}
    setp.eq.u32 %q, %e, 0; @%q bra Y; red.global.add.u32 [%r], 1;
Y:
{CLOCK_END}}}
"""


def mma_data(kind: str, depth: int) -> bytes:
    """Each lane's share of two A and four B, and of the eight products, as mma.m16n8k8 and k16 lay them out."""

    def pack(low: int, high: int) -> bytes:
        if kind == "f16":
            return struct.pack("<ee", low, high)
        return struct.pack("<HH", bits_of(low) >> 16, bits_of(high) >> 16)

    a = [
        [[(row * 3 + k * 5 + each * 7 + row * k) % 5 - 2 for k in range(depth)] for row in range(16)]
        for each in range(2)
    ]
    b = [
        [[(k * 7 + column * 3 + each * 5 + k * column) % 5 - 2 for column in range(8)] for k in range(depth)]
        for each in range(4)
    ]
    data = b""
    for lane in range(32):
        group, pair = lane >> 2, (lane & 3) * 2
        for left in a:
            for k in range(pair, depth, 8):
                for row in (group, group + 8):
                    data += pack(left[row][k], left[row][k + 1])
        for right in b:
            for k in range(pair, depth, 8):
                data += pack(right[k][group], right[k + 1][group])
        for each in range(ACCUMULATORS):
            left, right = a[each % 2], b[each // 2]
            for row in (group, group + 8):
                for column in (pair, pair + 1):
                    data += struct.pack("<f", sum(left[row][k] * right[k][column] for k in range(depth)))
    return data


def _base_ptx(kernels: str) -> str:
    return f".version 6.0\n.target sm_60\n.address_size 64\n{kernels}"


def memory_ptx() -> str:
    return _base_ptx("".join(make(name) for name in PATTERNS for make in (_fill, _check)))


def figures_ptx() -> str:
    return _base_ptx(_read() + _write() + _fma())


def tensor_kernels(capability: tuple[int, int]) -> dict[str, int]:
    """Number format and depth of the products that the architecture's tensor cores do; those of V100 are not tested."""
    if capability >= (8, 0):
        return {"f16": 16, "bf16": 16}
    return {"f16": 8} if capability >= (7, 5) else {}


def tensor_ptx(capability: tuple[int, int]) -> str:
    version, target = ("7.0", "sm_80") if capability >= (8, 0) else ("6.5", "sm_75")
    return f".version {version}\n.target {target}\n.address_size 64\n" + "".join(
        _mma(kind, depth) for kind, depth in tensor_kernels(capability).items()
    )


# -- one GPU ----------------------------------------------------------------------------------------------------------

if TYPE_CHECKING:
    Tell = Callable[[Mapping[str, Any]], None]
else:  # Python 3.8 reads it, too
    Tell = Callable


class Gpu:
    """A context on one device, its stream and its kernels."""

    def __init__(self, cuda: Cuda, ordinal: int) -> None:
        self.cuda = cuda
        self.device = cuda.device(ordinal)
        self.context = ctypes.c_void_p()
        cuda.call("cuCtxCreate", ctypes.byref(self.context), CONTEXT_BLOCKING_SYNC, self.device)
        self.stream = ctypes.c_void_p()
        cuda.call("cuStreamCreate", ctypes.byref(self.stream), 1)
        self.events = (ctypes.c_void_p(), ctypes.c_void_p())
        for event in self.events:
            cuda.call("cuEventCreate", ctypes.byref(event), 1)
        self.sm_count = cuda.attribute("sm_count", self.device) or 1
        self._kernels: dict[str, ctypes.c_void_p] = {}

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        self.cuda.call("cuCtxPushCurrent", self.context)
        try:
            yield
        finally:
            self.cuda.call("cuCtxPopCurrent", ctypes.byref(ctypes.c_void_p()))

    def load(self, ptx: str) -> None:
        module = ctypes.c_void_p()
        log = ctypes.create_string_buffer(4096)
        # CU_JIT_ERROR_LOG_BUFFER and its size.
        options = (ctypes.c_int * 2)(5, 6)
        values = (ctypes.c_void_p * 2)(ctypes.cast(log, ctypes.c_void_p), len(log))
        try:
            self.cuda.call("cuModuleLoadDataEx", ctypes.byref(module), ptx.encode(), 2, options, values)
        except CudaError as error:
            said = " ".join(log.value.decode("utf-8", "replace").split())[:500]
            raise CudaError(error.call, error.code, error.name, "the kernels were not compiled", said) from None
        for line in ptx.splitlines():
            if line.startswith(".visible .entry "):
                name = line.split()[2].partition("(")[0]
                function = ctypes.c_void_p()
                self.cuda.call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
                self._kernels[name] = function

    def launch(self, name: str, grid: int, block: int, *arguments: Any) -> None:
        pointers = (ctypes.c_void_p * len(arguments))(
            *(ctypes.cast(ctypes.pointer(argument), ctypes.c_void_p) for argument in arguments)
        )
        self.cuda.call("cuLaunchKernel", self._kernels[name], grid, 1, 1, block, 1, 1, 0, self.stream, pointers, None)

    def over(self, name: str, address: int, size: int, out: int, seed: int) -> None:
        """Launch a kernel that goes over memory."""
        self.launch(
            name,
            BLOCKS_PER_SM * self.sm_count,
            BLOCK,
            ctypes.c_uint64(address),
            ctypes.c_uint64(size // 16),
            ctypes.c_uint64(out),
            ctypes.c_uint32(seed & 0xFFFFFFFF),
        )

    def wait(self) -> None:
        self.cuda.call("cuStreamSynchronize", self.stream)

    def seconds(self, work: Callable[[], None]) -> float:
        """How long the GPU itself says that it took."""
        self.cuda.call("cuEventRecord", self.events[0], self.stream)
        work()
        self.cuda.call("cuEventRecord", self.events[1], self.stream)
        self.cuda.call("cuEventSynchronize", self.events[1])
        elapsed = ctypes.c_float()
        self.cuda.call("cuEventElapsedTime", ctypes.byref(elapsed), *self.events)
        return max(elapsed.value / 1000.0, 1e-9)

    def best(self, work: Callable[[], None], spend: float = 0.03, least: int = 3) -> float:
        """The shortest of several tries; the first wakes the clocks up and is not one of them.

        A try is as often as it takes to make the start of a kernel no matter.
        """
        times = max(min(int(0.005 / self.seconds(work)), 64), 1)

        def often() -> None:
            for _time in range(times):
                work()

        until, tries, best = time.monotonic() + spend, 0, float("inf")
        while tries < least or time.monotonic() < until:
            best, tries = min(best, self.seconds(often) / times), tries + 1
        return best

    def free_and_total(self) -> tuple[int, int]:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.cuda.call("cuMemGetInfo", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def allocate(self, size: int) -> int:
        address = ctypes.c_uint64()
        self.cuda.call("cuMemAlloc", ctypes.byref(address), ctypes.c_size_t(size))
        return address.value

    def release(self, address: int) -> None:
        self.cuda.call("cuMemFree", ctypes.c_uint64(address))

    @contextlib.contextmanager
    def memory(self, size: int) -> Iterator[int]:
        address = self.allocate(size)
        try:
            yield address
        finally:
            with contextlib.suppress(CudaError):
                self.release(address)

    def zero(self, address: int, size: int) -> None:
        # On the same stream as the kernels: the default one does not wait for it, nor it for the default one.
        self.cuda.call("cuMemsetD32Async", ctypes.c_uint64(address), 0, ctypes.c_size_t(size // 4), self.stream)

    def fetch(self, address: int, size: int) -> bytes:
        buffer = ctypes.create_string_buffer(size)
        self.wait()
        self.cuda.call("cuMemcpyDtoH", buffer, ctypes.c_uint64(address), ctypes.c_size_t(size))
        return buffer.raw

    def store(self, address: int, data: bytes) -> None:
        self.cuda.call("cuMemcpyHtoDAsync", ctypes.c_uint64(address), data, ctypes.c_size_t(len(data)), self.stream)
        self.wait()

    def close(self) -> None:
        self.cuda.call("cuCtxDestroy", self.context)


OUT_BYTES = 16 + 16 * ERROR_SAMPLES


def _mismatches(gpu: Gpu, out: int, pattern: str, first_word: int) -> tuple[int, list[dict[str, Any]]]:
    """How many words were wrong, and where the first were."""
    data = gpu.fetch(out, OUT_BYTES)
    count = struct.unpack_from("<I", data)[0]
    samples = []
    for number in range(min(count, ERROR_SAMPLES)):
        word, expected, found = struct.unpack_from("<QII", data, 16 + 16 * number)
        samples.append(
            {
                "offset_bytes": (first_word + word) * 4,
                "pattern": pattern,
                "expected": f"0x{expected:08x}",
                "found": f"0x{found:08x}",
            }
        )
    return count, samples


START_PATTERNS = (("random", 0x5EED),)
QUICK_PATTERNS = (("random", 0x5EED), ("walking", 0), ("walking", -1))
FULL_PATTERNS = (
    *(("walking", shift) for shift in (0, 11, 22)),
    *(("walking", -1 - shift) for shift in (0, 11, 22)),
    *(("random", 0x5EED + 977 * number) for number in range(4)),
    ("linear", 0),
)


PIECE_BYTES = 4096 * MIB
START_BYTES = 64 * MIB


def _seed_of(seed: int, number: int) -> int:
    """The seed for one of several pieces; its sign says which of two patterns it is, and stays."""
    return seed + (7919 if seed >= 0 else -7919) * number


def check_memory(gpu: Gpu, size: int, patterns: Sequence[tuple[str, int]]) -> dict[str, Any]:
    """Write patterns to so much memory and read them again: all of it written before any of it is read."""
    piece = PIECE_BYTES
    pieces: list[tuple[int, int]] = []
    samples: list[dict[str, Any]] = []
    errors, left = 0, size // MIB * MIB
    out = gpu.allocate(OUT_BYTES)
    try:
        while left > 0:
            wanted = min(left, piece)
            try:
                pieces.append((gpu.allocate(wanted), wanted))
            except CudaError as error:
                # Free memory need not be in one piece, and others may have taken some.
                if error.code != OUT_OF_MEMORY or wanted <= 16 * MIB:
                    if error.code != OUT_OF_MEMORY or not pieces:
                        raise
                    break
                piece = wanted // 2 // MIB * MIB
                continue
            left -= wanted
        for pattern, seed in patterns:
            for number, (address, length) in enumerate(pieces):
                gpu.over(f"fill_{pattern}", address, length, out, _seed_of(seed, number))
            begin = 0
            for number, (address, length) in enumerate(pieces):
                gpu.wait()
                gpu.zero(out, OUT_BYTES)
                gpu.over(f"check_{pattern}", address, length, out, _seed_of(seed, number))
                count, found = _mismatches(gpu, out, pattern, begin // 4)
                errors += count
                samples += found[: ERROR_SAMPLES - len(samples)]
                begin += length
    finally:
        for address in (out, *(address for address, _length in pieces)):
            with contextlib.suppress(CudaError):
                gpu.release(address)
    return {
        "tested_mib": sum(length for _address, length in pieces) // MIB,
        "patterns": sorted({pattern for pattern, _seed in patterns}),
        "errors": errors,
        "error_samples": samples,
    }


def linear_sum(size: int, seed: int) -> int:
    """What the words of the linear pattern add up to, of less than 16 GiB."""
    words = size // 4
    return (words * seed + words * (words - 1) // 2) & 0xFFFFFFFF


def measure_memory(gpu: Gpu, size: int) -> dict[str, Any]:
    """Bandwidth by kernels that read and write, and by the driver's copy, counted read and written."""
    cuda = gpu.cuda
    with gpu.memory(size) as source, gpu.memory(size) as target, gpu.memory(OUT_BYTES) as out:

        def copy() -> None:
            cuda.call(
                "cuMemcpyDtoDAsync",
                ctypes.c_uint64(target),
                ctypes.c_uint64(source),
                ctypes.c_size_t(size),
                gpu.stream,
            )

        write = gpu.best(lambda: gpu.over("write_linear", source, size, out, 77))
        copied = gpu.best(copy)
        read = gpu.best(lambda: gpu.over("read_sum", target, size, out, 0))
        gpu.zero(out, OUT_BYTES)
        gpu.over("read_sum", target, size, out, 0)
        total = struct.unpack_from("<I", gpu.fetch(out, 4))[0]
    return {
        "memory_read_gb_per_s": size / read / 1e9,
        "memory_write_gb_per_s": size / write / 1e9,
        "memory_copy_gb_per_s": 2 * size / copied / 1e9,
        "sum_wrong": total != linear_sum(size, 77),
    }


def measure_host(gpu: Gpu, size: int) -> dict[str, Any]:
    """Bandwidth from and to pinned memory of the host, and whether what went both ways is what it was."""
    cuda = gpu.cuda
    host = ctypes.c_void_p()
    cuda.call("cuMemHostAlloc", ctypes.byref(host), ctypes.c_size_t(size), 0)
    try:
        with gpu.memory(size) as there, gpu.memory(OUT_BYTES) as out:

            def send() -> None:
                cuda.call("cuMemcpyHtoDAsync", ctypes.c_uint64(there), host, ctypes.c_size_t(size), gpu.stream)

            def receive() -> None:
                cuda.call("cuMemcpyDtoHAsync", host, ctypes.c_uint64(there), ctypes.c_size_t(size), gpu.stream)

            gpu.over("fill_random", there, size, out, 4242)
            down = gpu.best(receive)
            gpu.zero(there, size)
            up = gpu.best(send)
            gpu.zero(out, OUT_BYTES)
            gpu.over("check_random", there, size, out, 4242)
            errors, _samples = _mismatches(gpu, out, "random", 0)
    finally:
        with contextlib.suppress(CudaError):
            cuda.call("cuMemFreeHost", host)
    return {
        "host_to_device_gb_per_s": size / up / 1e9,
        "device_to_host_gb_per_s": size / down / 1e9,
        "errors": errors,
    }


def _arithmetic(
    gpu: Gpu, launch: Callable[[int, int], None], operations: Callable[[int], float], spend: float, most: int
) -> dict[str, Any]:
    """The best rate of launches of some milliseconds each, the clock of the best, and what came out wrong."""
    with gpu.memory(OUT_BYTES) as out:
        gpu.zero(out, OUT_BYTES)
        launch(out, 1)
        gpu.wait()

        def took(rounds: int) -> float:
            return gpu.seconds(lambda: launch(out, rounds))

        rounds, trial = 1, took(1)
        while trial < 0.002 and rounds < most:
            rounds = min(most, rounds * 4)
            trial = took(rounds)
        rounds = max(min(most, int(rounds * 0.008 / trial)), 1)
        until, tries, best, worst, clock = time.monotonic() + spend, 0, float("inf"), 0.0, None
        while tries < 3 or time.monotonic() < until:
            spent, tries = took(rounds), tries + 1
            _count, cycles, nanoseconds = struct.unpack("<I4xQQ", gpu.fetch(out, 24))
            if spent < best:
                best, clock = spent, 1000.0 * cycles / nanoseconds if cycles and nanoseconds else None
            worst = max(worst, spent)
        errors = struct.unpack_from("<I", gpu.fetch(out, 4))[0]
    return {
        "tflop_per_s": operations(rounds) / best / 1e12,
        "tflop_per_s_min": operations(rounds) / worst / 1e12,
        "clock_mhz": clock,
        "errors": errors,
    }


def measure_fp32(gpu: Gpu, spend: float) -> dict[str, Any]:
    expected, grid = fma_result(), FMA_BLOCKS_PER_SM * gpu.sm_count

    def launch(out: int, rounds: int) -> None:
        gpu.launch(
            "fp32_fma",
            grid,
            BLOCK,
            ctypes.c_uint64(out),
            ctypes.c_uint32(rounds),
            ctypes.c_uint32(expected * rounds & 0xFFFFFFFF),
        )

    return _arithmetic(gpu, launch, lambda rounds: 2.0 * rounds * FMA_STEPS * CHAINS * BLOCK * grid, spend, 1 << 20)


def measure_tensor(gpu: Gpu, kind: str, depth: int, spend: float) -> dict[str, Any]:
    data, grid = mma_data(kind, depth), MMA_BLOCKS_PER_SM * gpu.sm_count
    with gpu.memory(len(data)) as there:
        gpu.store(there, data)

        def launch(out: int, rounds: int) -> None:
            gpu.launch(
                f"tensor_{kind}",
                grid,
                MMA_BLOCK,
                ctypes.c_uint64(out),
                ctypes.c_uint64(there),
                ctypes.c_uint32(rounds),
            )

        products = ACCUMULATORS * MMA_UNROLLED * (MMA_BLOCK // 32) * grid
        return _arithmetic(gpu, launch, lambda rounds: 2.0 * 16 * 8 * depth * products * rounds, spend, MMA_ROUNDS_MAX)


TENSOR_NAMES = {"f16": "fp16_tensor", "bf16": "bf16_tensor"}

BANDWIDTH_BYTES = 1024 * MIB
HOST_BYTES = 64 * MIB

FIGURES = (
    "memory_read_gb_per_s",
    "memory_write_gb_per_s",
    "memory_copy_gb_per_s",
    "host_to_device_gb_per_s",
    "device_to_host_gb_per_s",
    "fp32_tflop_per_s",
    "fp16_tensor_tflop_per_s",
    "bf16_tensor_tflop_per_s",
)


def empty_device(uuid: str) -> dict[str, Any]:
    """All that is told of a device, before anything is known."""
    return {
        "uuid": uuid,
        "name": None,
        "pci_bus_id": None,
        "compute_capability": None,
        "sm_count": None,
        "sm_clock_max_mhz": None,
        "memory_clock_max_mhz": None,
        "memory_bus_width_bits": None,
        "ecc_enabled": None,
        "integrated": None,
        "memory_total_mib": None,
        "memory_free_mib": None,
        "context_s": None,
        "compile_s": None,
        "duration_s": None,
        "memory": None,
        "figures": dict.fromkeys(FIGURES),
        "sm_clock_mhz": None,
        "sm_clock_tensor_mhz": None,
        "wrong_results": None,
        "soak": None,
        "error": None,
    }


def _rounded(value: float | None, digits: int = 1) -> float | None:
    return None if value is None else round(value, digits)


def describe(cuda: Cuda, device: int) -> dict[str, Any]:
    known = {name: cuda.attribute(name, device) for name in ATTRIBUTES}

    def mhz(name: str) -> int | None:
        khz = known[name]
        return khz // 1000 if khz else None

    def truth(name: str) -> bool | None:
        value = known[name]
        return None if value is None else bool(value)

    address = None
    if known["pci_bus"] is not None and known["pci_device"] is not None:
        address = f"{known['pci_domain'] or 0:08X}:{known['pci_bus']:02X}:{known['pci_device']:02X}.0"
    return {
        "name": cuda.name(device),
        "pci_bus_id": address,
        "compute_capability": None
        if None in (known["capability_major"], known["capability_minor"])
        else f"{known['capability_major']}.{known['capability_minor']}",
        "sm_count": known["sm_count"],
        "sm_clock_max_mhz": mhz("sm_clock_max_khz"),
        "memory_clock_max_mhz": mhz("memory_clock_max_khz"),
        "memory_bus_width_bits": known["memory_bus_width_bits"],
        "ecc_enabled": truth("ecc_enabled"),
        "integrated": truth("integrated"),
    }


def measure_device(options: Mapping[str, Any], tell: Teller) -> None:
    """All of one level on the one device that this process sees; each thing is told as soon as it is known."""
    level = options["level"]
    begun = time.monotonic()
    tell({"step": "driver"})
    cuda = Cuda()
    device = cuda.device(0)
    described = describe(cuda, device)
    tell({"device": described})
    capability = (cuda.attribute("capability_major", device) or 0, cuda.attribute("capability_minor", device) or 0)
    tensor = tensor_kernels(capability)
    tell({"step": "context"})
    before = time.monotonic()
    gpu = Gpu(cuda, 0)
    tell({"device": {"context_s": round(time.monotonic() - before, 3)}})
    tell({"step": "compile"})
    before = time.monotonic()
    gpu.load(memory_ptx())
    if level != "start":
        gpu.load(figures_ptx())
        if tensor:
            gpu.load(tensor_ptx(capability))
    tell({"device": {"compile_s": round(time.monotonic() - before, 3)}})
    free, total = gpu.free_and_total()
    tell({"device": {"memory_total_mib": total // MIB, "memory_free_mib": free // MIB}})
    share = int(free * min(options["memory_share"], INTEGRATED_SHARE if described["integrated"] else 1.0))
    # Whatever share is tested: less would fit into the cache.
    size = max(min(free // 4, BANDWIDTH_BYTES) // MIB, 1) * MIB
    if level != "start":
        # Before the patterns: the driver clears what was freed in the background, which costs bandwidth.
        measure_figures(gpu, size, tensor, 0.06 if level == "quick" else 0.5, tell)
    tell({"step": "memory"})
    patterns = {"start": START_PATTERNS, "quick": QUICK_PATTERNS, "full": FULL_PATTERNS}[level]
    if level == "start":
        # Less would stay in the cache.
        share = min(share, max(START_BYTES, 4 * (cuda.attribute("l2_cache_bytes", device) or 0)))
    tell({"device": {"memory": check_memory(gpu, max(share, MIB), patterns)}})
    if level == "full" and options["soak_s"]:
        soak(gpu, tensor, size, options["soak_s"], tell)
    tell({"step": "end"})
    gpu.close()
    tell({"device": {"duration_s": round(time.monotonic() - begun, 3)}})


def measure_figures(gpu: Gpu, size: int, tensor: Mapping[str, int], spend: float, tell: Teller) -> None:
    """How fast the memory, the arithmetic and the way to the host are."""
    figures: dict[str, float | None] = dict.fromkeys(FIGURES)
    tell({"step": "memory_bandwidth"})
    told = measure_memory(gpu, size)
    wrong = {"memory_read": int(told.pop("sum_wrong"))}
    figures.update(told)
    tell({"step": "arithmetic"})
    told = measure_fp32(gpu, spend)
    figures["fp32_tflop_per_s"], wrong["fp32"], clock = told["tflop_per_s"], told["errors"], told["clock_mhz"]
    tensor_best, tensor_clock = 0.0, None
    for kind, depth in tensor.items():
        told = measure_tensor(gpu, kind, depth, spend)
        if told["tflop_per_s"] > tensor_best:
            tensor_best, tensor_clock = told["tflop_per_s"], told["clock_mhz"]
        name = TENSOR_NAMES[kind]
        figures[f"{name}_tflop_per_s"], wrong[name] = told["tflop_per_s"], told["errors"]
    # Copies of several GPUs at once would share the host's memory and links.
    with tell.turn():
        tell({"step": "host_copies"})
        told = measure_host(gpu, min(size, HOST_BYTES))
    wrong["host_copies"] = told.pop("errors")
    figures.update(told)
    rounded = {name: _rounded(value) for name, value in figures.items()}
    clocks = {"sm_clock_mhz": _rounded(clock, 0), "sm_clock_tensor_mhz": _rounded(tensor_clock, 0)}
    tell({"device": {"figures": rounded, **clocks, "wrong_results": wrong}})


def soak(gpu: Gpu, tensor: Mapping[str, int], size: int, seconds: float, tell: Tell) -> None:
    """Work without a break for so long: arithmetic, tensor cores and memory in turn, each result checked."""
    until, rounds, errors, lowest, clocks = time.monotonic() + seconds, 0, 0, float("inf"), []
    while time.monotonic() < until or not rounds:
        tell({"step": "soak"})
        told = measure_fp32(gpu, 1.0)
        lowest = min(lowest, told["tflop_per_s_min"])
        if told["clock_mhz"]:
            clocks.append(told["clock_mhz"])
        errors += told["errors"]
        for kind, depth in tensor.items():
            errors += measure_tensor(gpu, kind, depth, 1.0)["errors"]
        errors += check_memory(gpu, size, (("random", rounds),))["errors"]
        rounds += 1
    tell(
        {
            "device": {
                "soak": {
                    "seconds": seconds,
                    "rounds": rounds,
                    "errors": errors,
                    "fp32_tflop_per_s_min": _rounded(lowest),
                    "sm_clock_mhz_min": _rounded(min(clocks), 0) if clocks else None,
                }
            }
        }
    )


# -- pairs of GPUs ----------------------------------------------------------------------------------------------------


PEER_BYTES = 128 * MIB


class End(NamedTuple):
    """One GPU of a pair, with memory to send from, to receive in and to count errors in."""

    gpu: Gpu
    uuid: str
    sends: int
    receives: int
    out: int


def measure_peers(tell: Tell) -> None:
    """Each ordered pair of the GPUs that this process sees, by way of the host and, where there is one, directly."""
    tell({"step": "peers"})
    cuda = Cuda()
    gpus = [Gpu(cuda, ordinal) for ordinal in range(cuda.count())]
    uuids = [cuda.uuid(gpu.device) for gpu in gpus]
    # All contexts are on the stack now; whose turn it is goes on top.
    ends = []
    for gpu, uuid in zip(gpus, uuids):
        with gpu.current():
            gpu.load(memory_ptx())
            ends.append(End(gpu, uuid, gpu.allocate(PEER_BYTES), gpu.allocate(PEER_BYTES), gpu.allocate(OUT_BYTES)))
    for source, target in itertools.permutations(ends, 2):
        tell({"step": f"peers {source.uuid} to {target.uuid}"})
        tell({"peer": _pair(source, target)})
    for gpu in gpus:
        gpu.close()


def _rate(source: End, target: End, length: int) -> tuple[float, int]:
    """GB/s of copies from one to the other, and how many words arrived wrong."""
    cuda, seed = source.gpu.cuda, struct.unpack("<I", os.urandom(4))[0]

    def copy() -> None:
        cuda.call(
            "cuMemcpyPeerAsync",
            ctypes.c_uint64(target.receives),
            target.gpu.context,
            ctypes.c_uint64(source.sends),
            source.gpu.context,
            ctypes.c_size_t(length),
            source.gpu.stream,
        )

    with target.gpu.current():
        target.gpu.zero(target.receives, length)
        target.gpu.zero(target.out, OUT_BYTES)
        target.gpu.wait()
    with source.gpu.current():
        source.gpu.over("fill_random", source.sends, length, source.out, seed)
        took = source.gpu.best(copy, spend=0.005)
        source.gpu.wait()
    with target.gpu.current():
        target.gpu.over("check_random", target.receives, length, target.out, seed)
        errors, _samples = _mismatches(target.gpu, target.out, "random", 0)
    return length / took / 1e9, errors


def _pair(source: End, target: End) -> dict[str, Any]:
    first, second = source.gpu, target.gpu
    cuda = first.cuda
    ways = ((first, second), (second, first))
    access = all(cuda.integer("cuDeviceCanAccessPeer", one.device, other.device) for one, other in ways)
    native = ctypes.c_int()
    code = cuda.code("cuDeviceGetP2PAttribute", ctypes.byref(native), PEER_NATIVE_ATOMICS, first.device, second.device)
    # Through memory of the host, which is slow: a part of it is enough.
    by_host, errors = _rate(source, target, PEER_BYTES // 4)
    direct = None
    if access:
        for one, other in ways:
            with one.current():
                cuda.call("cuCtxEnablePeerAccess", other.context, 0)
        direct, more = _rate(source, target, PEER_BYTES)
        errors += more
        for one, other in ways:
            with one.current():
                cuda.call("cuCtxDisablePeerAccess", other.context)
    return {
        "from": source.uuid,
        "to": target.uuid,
        "access": access,
        # Over PCI Express there are no atomic operations between GPUs.
        "nvlink": None if code else access and bool(native.value),
        "gb_per_s": _rounded(direct),
        "by_host_gb_per_s": _rounded(by_host),
        "errors": errors,
    }


def list_devices(tell: Tell) -> None:
    """The UUIDs of the devices that CUDA lets this process see."""
    tell({"step": "driver"})
    cuda = Cuda()
    tell({"devices": [cuda.uuid(cuda.device(ordinal)) for ordinal in range(cuda.count())]})


# -- processes --------------------------------------------------------------------------------------------------------

PR_SET_PDEATHSIG = 1
KILL_WAIT = 1.0


class Teller:
    """What a worker's process tells by, and is given its turn by."""

    def __init__(self, write: int, given: int) -> None:
        self._write, self._given = write, given

    def __call__(self, told: Mapping[str, Any]) -> None:
        data = json.dumps(told).encode() + b"\n"
        while data:
            data = data[os.write(self._write, data) :]

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """With what only one process should do at a time. Who started it gives the turn, and takes it from one that
        ended: a process that hangs in the driver gives nothing back, not even when it is killed.
        """
        self({"step": "turn"})
        os.read(self._given, 1)
        try:
            yield
        finally:
            self({"turn": "over"})


class Worker:
    """A forked process that does one thing and tells lines; it ends with whoever started it."""

    def __init__(
        self,
        key: str,
        work: Callable[[Teller], None],
        visible: str | None,
        timeout: float,
        until: float = float("inf"),
    ) -> None:
        self.key, self.timeout, self.until = key, timeout, until
        self.step: str | None = None
        self.done = self.ended = self.timed_out = self.over = self.waits = self.has_turn = False
        self.error: dict[str, Any] | None = None
        self.lines: list[dict[str, Any]] = []
        self._rest, self._how = b"", "ended before its work did"
        parent = os.getpid()
        self.pipe, write = os.pipe()
        given, self._give = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            _child(work, visible, Teller(write, given), parent)
        os.close(write)
        os.close(given)
        self.touch()

    def touch(self) -> None:
        # Who waits for its turn waits for others, who have a limit of their own.
        self._step_deadline = float("inf") if self.waits else time.monotonic() + self.timeout
        self.deadline = min(self._step_deadline, self.until)

    def give_turn(self) -> None:
        self.waits, self.has_turn = False, True
        self.touch()
        # One that has ended meanwhile is heard of by its own pipe.
        with contextlib.suppress(OSError):
            os.write(self._give, b".")

    def read(self) -> None:
        data = os.read(self.pipe, 1 << 16)
        if not data:
            self._end()
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            told = json.loads(line)
            if "step" in told:
                self.step = told["step"]
                self.waits = self.step == "turn"
            elif "error" in told:
                self.error = told["error"]
            elif "done" in told:
                self.done = True
            elif "turn" in told:
                self.has_turn = False
            else:
                self.lines.append(told)
        self.touch()

    def kill(self) -> None:
        # Otherwise it was ended with all the rest, and need not have hung.
        self.timed_out = time.monotonic() >= self._step_deadline
        self.over = not self.timed_out
        with contextlib.suppress(OSError):
            # What it runs leads groups of its own, which nobody but it can end.
            os.killpg(self.pid, signal.SIGTERM)
            self._has_ended()
            os.killpg(self.pid, signal.SIGKILL)
        self._end()

    def _end(self) -> None:
        self.ended = True
        os.close(self.pipe)
        os.close(self._give)
        # One that hangs in the driver is reached by no signal, and is not waited for.
        if self._has_ended():
            _pid, status = os.waitpid(self.pid, 0)
            self._how = (
                f"was ended by signal {os.WTERMSIG(status)}"
                if os.WIFSIGNALED(status)
                else f"ended with {os.WEXITSTATUS(status)} before its work did"
            )

    def _has_ended(self) -> bool:
        """Whether it comes to its end soon. Its number stays its own until somebody waits for it."""
        until = time.monotonic() + KILL_WAIT
        while time.monotonic() < until:
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                return True
            time.sleep(0.005)
        return False

    def failure(self) -> dict[str, Any] | None:
        """Why it did not get to its end, None where it did."""
        if self.timed_out:
            what = {"code": "timeout", "cuda_error": None, "message": f"no answer within {self.timeout:g} s"}
        elif self.over:
            what = {"code": "over", "cuda_error": None, "message": "all of it was over before"}
        elif self.error:
            what = self.error
        elif not self.done:
            what = {"code": "crashed", "cuda_error": None, "message": f"the process that measured {self._how}"}
        else:
            return None
        return {"step": self.step, **what}


def _child(work: Callable[[Teller], None], visible: str | None, tell: Teller, parent: int) -> None:
    """What the forked process does; it never returns to the caller's code."""
    code = 1
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nothing, descriptor)
        if visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
        # What the driver compiles is not kept in the home folder.
        os.environ["CUDA_CACHE_DISABLE"] = "1"

        try:
            work(tell)
            tell({"done": True})
            code = 0
        except CudaError as error:
            tell({"error": {"code": "cuda", "cuda_error": error.code, "message": str(error)}})
        except OSError as error:
            tell({"error": {"code": "library", "cuda_error": None, "message": str(error)}})
        except Exception:
            tell({"error": {"code": "internal", "cuda_error": None, "message": traceback.format_exc(limit=-3)}})
    finally:
        os._exit(code)


@contextlib.contextmanager
def ended(workers: Sequence[Worker]) -> Iterator[None]:
    """Whatever happens within, none of these goes on behind it."""
    try:
        yield
    finally:
        for worker in workers:
            if not worker.ended:
                worker.kill()


def attend(workers: Sequence[Worker], while_busy: Sequence[Worker] = ()) -> None:
    """Read what the workers tell until each came to its end or its limit; others are heard meanwhile."""
    with ended(workers):
        while True:
            busy = [worker for worker in workers if not worker.ended]
            if not busy:
                return
            waiting = [worker for worker in busy if worker.waits]
            if waiting and not any(worker.has_turn for worker in busy):
                waiting[0].give_turn()
            heard = busy + [worker for worker in while_busy if not worker.ended]
            left = max(min(worker.deadline for worker in heard) - time.monotonic(), 0)
            ready, _write, _error = select.select([worker.pipe for worker in heard], [], [], min(left, 3600.0))
            for worker in heard:
                if worker.pipe in ready:
                    worker.read()
                elif time.monotonic() >= worker.deadline:
                    worker.kill()


def visible_devices(timeout: float) -> tuple[list[str], dict[str, Any] | None]:
    """The devices that CUDA gives this process, or why it gives none.

    A task without a container sees all of the node's GPUs and is told which are its own by NVIDIA_VISIBLE_DEVICES.
    """
    for variable in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"):
        named = [item.strip() for item in os.environ.get(variable, "").split(",")]
        if all(item.startswith(("GPU-", "MIG-")) for item in named):
            return named, None
    worker = Worker("list", list_devices, None, timeout)
    attend([worker])
    devices = [uuid for line in worker.lines for uuid in line["devices"]]
    return devices, worker.failure()


def measure(
    devices: Sequence[str],
    level: str,
    *,
    memory_share: float | None = None,
    soak_s: float = 0.0,
    timeout: float = 60.0,
    peers: bool = True,
    sampler: Callable[[Tell], None] | None = None,
    shared: Mapping[str, Hashable] | None = None,
    limit_s: float = float("inf"),
) -> dict[str, Any]:
    """Measure these devices (UUIDs of GPUs or MIG devices), side by side; those that share what C(shared) says of them,
    one after another. After C(limit_s) all of it is over: what has begun is killed (code C(over)), and the rest is left
    out, as is what could not have C(timeout) for a step.

    :returns: C(devices), one for each as C(empty_device) has it; C(peers), one for each ordered pair of whole GPUs;
      C(peers_error), why there are fewer; C(samples), what C(sampler) told meanwhile.
    """
    until = time.monotonic() + limit_s
    share = MEMORY_SHARES[level] if memory_share is None else memory_share
    options = {"level": level, "memory_share": share, "soak_s": soak_s}
    results = {uuid: empty_device(uuid) for uuid in devices}
    watching = [Worker("samples", sampler, None, float("inf"))] if sampler else []
    answer: dict[str, Any] = {"level": level, "devices": list(results.values()), "peers": [], "peers_error": None}
    groups: dict[Hashable, list[str]] = {}
    for uuid in results:
        groups.setdefault((shared or {}).get(uuid, uuid), []).append(uuid)
    workers: list[Worker] = []
    with ended(watching):
        for number, together in enumerate(itertools.zip_longest(*groups.values())):
            if number and time.monotonic() + timeout > until:
                break
            begun = [
                Worker(uuid, lambda tell: measure_device(options, tell), uuid, timeout, until)
                for uuid in together
                if uuid
            ]
            attend(begun, watching)
            workers += begun
    for worker in workers:
        for line in worker.lines:
            results[worker.key].update(line["device"])
        results[worker.key]["error"] = worker.failure()
    well = [uuid for uuid in results if uuid.startswith("GPU-") and not results[uuid]["error"]]
    if peers and level != "start" and len(well) > 1 and time.monotonic() + timeout <= until:
        worker = Worker("peers", measure_peers, ",".join(well), timeout, until)
        attend([worker])
        answer["peers"] = [line["peer"] for line in worker.lines]
        answer["peers_error"] = worker.failure()
    answer["samples"] = [line for worker in watching for line in worker.lines]
    return answer


# -- as a program -----------------------------------------------------------------------------------------------------


def table(answer: Mapping[str, Any]) -> str:
    """The figures for people."""
    lines = []
    for device in answer["devices"]:
        lines.append(f"{device['uuid']} {device['name'] or ''}".rstrip())
        if device["error"]:
            lines.append(f"  {device['error']['step']}: {device['error']['message']}")
        for name in ("context_s", "compile_s", "duration_s", "sm_clock_mhz", "sm_clock_tensor_mhz"):
            if device[name] is not None:
                lines.append(f"  {name} {device[name]:g}")
        for name, value in device["figures"].items():
            if value is not None:
                lines.append(f"  {name} {value:g}")
        if device["memory"]:
            lines.append(f"  memory {device['memory']['tested_mib']} MiB tested, {device['memory']['errors']} errors")
        for name, count in (device["wrong_results"] or {}).items():
            if count:
                lines.append(f"  {name}: {count} wrong results")
    for pair in answer["peers"]:
        lines.append(f"{pair['from']} to {pair['to']}: {pair['gb_per_s']} GB/s, by the host {pair['by_host_gb_per_s']}")
    return "\n".join(lines)


def faulty(answer: Mapping[str, Any]) -> bool:
    """Whether anything failed or computed wrongly; how fast it was is for others to judge."""
    return (
        bool(answer["peers_error"])
        or any(
            device["error"]
            or (device["memory"] or {}).get("errors")
            or any((device["wrong_results"] or {}).values())
            or (device["soak"] or {}).get("errors")
            for device in answer["devices"]
        )
        or any(pair["errors"] for pair in answer["peers"])
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--level", choices=LEVELS, default="quick")
    parser.add_argument("--devices", default="", help="UUIDs with commas between; by default those that CUDA gives")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--memory-share", type=float, default=None, help="of free memory, to be tested")
    parser.add_argument("--soak", type=float, default=60.0, metavar="SECONDS", help="work so long at level full")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="for each step of each GPU")
    parser.add_argument("--no-peers", action="store_true", help="leave pairs of GPUs out")
    given = parser.parse_args(arguments)
    devices, failure = [uuid for uuid in given.devices.split(",") if uuid], None
    if not devices:
        devices, failure = visible_devices(given.timeout)
    if not devices:
        sys.stderr.write(f"{os.uname().nodename}: {failure['message'] if failure else 'CUDA gives no GPU'}\n")
        return 2
    answer = measure(
        devices,
        given.level,
        memory_share=given.memory_share or None,
        soak_s=given.soak,
        timeout=given.timeout,
        peers=not given.no_peers,
    )
    sys.stdout.write((json.dumps(answer) if given.format == "json" else table(answer)) + "\n")
    return 1 if faulty(answer) else 0


if __name__ == "__main__":
    raise SystemExit(main())
