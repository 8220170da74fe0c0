"""What a compiled kernel is made of: registers, spills, shared memory, and instructions of its inner loop."""

import collections
import dataclasses
import pathlib
import re
import subprocess

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
      instructions: how many of each SASS opcode in the whole kernel. loop: in its largest innermost loop.
    """

    registers: int
    spilled: int
    static_shared: int
    instructions: collections.Counter
    loop: collections.Counter

    def count(self, pattern: str, *, loop: bool = False) -> int:
        """Instructions whose opcode matches a regular expression from its start."""
        return sum(n for opcode, n in (self.loop if loop else self.instructions).items() if re.match(pattern, opcode))


def census(dump: pathlib.Path, kernel: str, target: str) -> Census:
    """Assemble and disassemble a kernel that `compile_for` dumped; KeyError if there is none of that name."""
    entry = re.compile(r"\.entry " + re.escape(kernel) + r"\b")
    source = next((path for path in dump.glob("*.ptx") if entry.search(path.read_text())), None)
    if source is None:
        raise KeyError(f"no kernel {kernel} in {dump}")
    cubin = source.with_suffix(".cubin")
    command = [find_tool("ptxas"), "-v", f"-arch={TARGETS[target].arch}", "-o", cubin, source]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    sass = subprocess.run([find_tool("nvdisasm"), "-c", cubin], capture_output=True, text=True, check=True).stdout
    return parse(report, sass)


def parse(report: str, sass: str) -> Census:
    """Of ptxas' report and nvdisasm's listing of one kernel."""
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", report))
    shared = re.search(r"(\d+) bytes smem", report)
    return Census(
        registers=int(re.search(r"Used (\d+) registers", report)[1]),
        spilled=spilled,
        static_shared=int(shared[1]) if shared else 0,
        instructions=collections.Counter(opcode for _, opcode, _ in _listing(sass)),
        loop=_largest_innermost_loop(_listing(sass)),
    )


def _listing(sass: str) -> list[tuple[int, str, int | None]]:
    """(position, opcode, position of the branch's target or None) of each instruction."""
    labels, code, pending = {}, [], []
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_x?_?\w+):", line):
            pending.append(label[1])
        elif match := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*)", line):
            for name in pending:
                labels[name] = len(code)
            pending.clear()
            target = re.search(r"`\((\.L_x?_?\w+)\)", match[2]) if match[1].startswith("BRA") else None
            code.append((match[1], target[1] if target else None))
    return [(i, opcode, labels.get(target)) for i, (opcode, target) in enumerate(code)]


def _largest_innermost_loop(code: list[tuple[int, str, int | None]]) -> collections.Counter:
    """The loop (a branch back and all between) that holds no other, and has the most instructions."""
    loops = [(target, i) for i, _, target in code if target is not None and target <= i]
    inner = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    # A branch to itself ends every kernel.
    start, end = max((loop for loop in inner if loop[0] < loop[1]), key=lambda loop: loop[1] - loop[0], default=(0, -1))
    return collections.Counter(opcode for _, opcode, _ in code[start : end + 1])
