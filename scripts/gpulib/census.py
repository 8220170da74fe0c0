"""What a compiled kernel is made of: registers, spills, shared memory, and instructions of its inner loop."""

import collections
import dataclasses
import pathlib
import re
import subprocess
import tempfile

from gpulib.deviceless import find_tool
from gpulib.targets import TARGETS


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel launch of an executable: grid (x, y, z), threads a block, bytes of dynamic shared memory."""

    kernel: str
    grid: tuple[int, ...]
    threads: int
    shared_memory: int


def launches(dump: pathlib.Path) -> list[Launch]:
    """The launches in program order, out of XLA's thunk dump."""
    text = next(path for path in dump.glob("*.thunk_sequence.txt")).read_text()
    pattern = r"kCustomKernel .*\] (\S+) grid: \[([^\]]*)\] threads: \[(\d+),.*?shared_memory: (\d+)"
    return [
        Launch(name, tuple(int(x) for x in re.findall(r"\d+", grid)), int(threads), int(shared))
        for name, grid, threads, shared in re.findall(pattern, text)
    ]


@dataclasses.dataclass(frozen=True)
class Census:
    """One kernel's machine code.

    Attributes:
      registers: a thread. spilled: bytes of spill stores and loads. static_shared: bytes, beside the launch's dynamic ones.
      wgmma_serialized: ptxas could not keep warpgroup MMAs asynchronous, which costs most of their speed.
      instructions: how many of each SASS opcode in the whole kernel. loops: in each innermost loop, the largest first.
    """

    registers: int
    spilled: int
    static_shared: int
    wgmma_serialized: bool
    instructions: collections.Counter
    loops: tuple[collections.Counter, ...]

    @property
    def loop(self) -> collections.Counter:
        """Of the largest innermost loop; empty where there is none."""
        return self.loops[0] if self.loops else collections.Counter()

    def count(self, pattern: str, *, loop: bool = False) -> int:
        """Instructions whose opcode matches a regular expression from its start."""
        return sum(n for opcode, n in (self.loop if loop else self.instructions).items() if re.match(pattern, opcode))


def census(dump: pathlib.Path, kernel: str, target: str) -> Census:
    """Assemble and disassemble a kernel that `compile_for` dumped; KeyError if there is none of that name."""
    entry = re.compile(r"\.entry " + re.escape(kernel) + r"\b")
    source = next((path for path in sorted(dump.glob("*.ptx")) if entry.search(path.read_text())), None)
    if source is None:
        raise KeyError(f"no kernel {kernel} in {dump}")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        command = [find_tool("ptxas"), "-v", f"-arch={TARGETS[target].arch}", "-o", cubin.name, source]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        command = [find_tool("nvdisasm"), "-c", cubin.name]
        sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return parse(report, sass, kernel)


def parse(report: str, sass: str, kernel: str) -> Census:
    """Of ptxas' report and nvdisasm's listing of the PTX file that has the kernel; KeyError if it is not in both."""
    reports = {name: text for name, text in _sections(report, r"Compiling entry function '(\S+)'")}
    code = _listing({name: text for name, text in _sections(sass, r"(?m)^\.text\.(\S+):")}[kernel])
    shared = re.search(r"(\d+) bytes smem", reports[kernel])
    return Census(
        registers=int(re.search(r"Used (\d+) registers", reports[kernel])[1]),
        spilled=sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", reports[kernel])),
        static_shared=int(shared[1]) if shared else 0,
        wgmma_serialized="wgmma.mma_async instructions are serialized" in report,
        instructions=collections.Counter(opcode for opcode, _ in code),
        loops=_innermost_loops(code),
    )


def _sections(text: str, heading: str) -> list[tuple[str, str]]:
    """(name, text up to the next heading) by a heading whose only group is the name."""
    _, *parts = re.split(heading, text)
    return list(zip(parts[::2], parts[1::2], strict=True))


def _listing(sass: str) -> list[tuple[str, int | None]]:
    """(opcode, position of the branch's target or None) of each instruction."""
    labels, code, pending = {}, [], []
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            pending.append(label[1])
        elif match := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*)", line):
            labels |= dict.fromkeys(pending, len(code))
            pending.clear()
            target = re.search(r"`\((\.L_\w+)\)", match[2]) if match[1].startswith("BRA") else None
            code.append((match[1], target[1] if target else None))
    return [(opcode, labels.get(target)) for opcode, target in code]


def _innermost_loops(code: list[tuple[str, int | None]]) -> tuple[collections.Counter, ...]:
    """The loops (a branch back and all between) that hold no other; the one with most instructions first.

    A branch to itself is none: every kernel ends with one.
    """
    loops = {(target, i) for i, (_, target) in enumerate(code) if target is not None and target < i}
    inner = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    inner.sort(key=lambda loop: (loop[0] - loop[1], loop))
    return tuple(collections.Counter(opcode for opcode, _ in code[start : end + 1]) for start, end in inner)
