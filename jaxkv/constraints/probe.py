"""Tries a grammar in another process, with bounds on its time and memory, before this one compiles it.

llguidance cannot be interrupted, and a few bytes can keep it busy for ever while its memory grows ({"multipleOf": 99999989}),
or overflow its stack, which ends the process. So another process goes first: what it does not survive is refused.
"""

import concurrent.futures
import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psutil

# Seconds of CPU for a grammar, of which most take milliseconds, and by the clock where the machine is busy: a verdict is
# remembered, and must not hang on who else was working. And for the other process to begin.
_SECONDS, _CLOCK_SECONDS, _START_SECONDS = 3.0, 30.0, 60.0
# Of address space: llguidance with a vocabulary of 128k needs some 0.3 GiB.
_MEMORY_BYTES = 2 * 2**30

_READY, _TOO_MUCH = b"ready\n", "it takes too much time or memory to compile"


class Probe:
    """The other process, which begins with the first grammar and again after one that it did not survive. For one thread."""

    def __init__(self, vocabulary: Callable[[], Mapping[str, Any]]):
        """`vocabulary`: keywords of `make_tokenizer`."""
        self._vocabulary = vocabulary
        self._process: subprocess.Popen | None = None
        self._reader = concurrent.futures.ThreadPoolExecutor(1, "jaxkv-probe")

    def verdict(self, grammar: str) -> str:
        """Why a grammar, in llguidance's form, cannot be used; empty when it can."""
        process = self._started()
        try:
            pickle.dump(grammar, process.stdin)
            process.stdin.flush()
            told = self._answer(process)
        except (BrokenPipeError, TimeoutError):
            told = b""
        if told:
            return told.decode().strip()
        self.close()
        return _TOO_MUCH

    def _answer(self, process: subprocess.Popen) -> bytes:
        """The line that it says of a grammar; empty when it has ended. Raises TimeoutError."""
        begin, used = time.monotonic(), _cpu_seconds(process)
        line = self._reader.submit(process.stdout.readline)
        while True:
            try:
                return line.result(_SECONDS)
            except TimeoutError:
                if _cpu_seconds(process) - used >= _SECONDS or time.monotonic() - begin >= _CLOCK_SECONDS:
                    raise

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            with contextlib.suppress(BrokenPipeError):  # what it never read
                self._process.stdin.close()
            self._process.stdout.close()
            self._process = None

    def _started(self) -> subprocess.Popen:
        if self._process is None:
            paths = os.pathsep.join(path for path in sys.path if path)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "jaxkv.constraints.probe"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": paths},
            )
            try:
                pickle.dump(dict(self._vocabulary()), self._process.stdin)
                self._process.stdin.flush()
                begun = self._reader.submit(self._process.stdout.readline).result(_START_SECONDS) == _READY
            except (BrokenPipeError, TimeoutError):
                begun = False
            if not begun:
                self.close()
                raise RuntimeError("the process that tries grammars did not begin")
        return self._process


def _cpu_seconds(process: subprocess.Popen) -> float:
    try:
        times = psutil.Process(process.pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system


def make_tokenizer(
    tokens: Sequence[bytes], special_token_ids: Sequence[int], eos_token_ids: Sequence[int], bos_token_id: int | None,
    vocab_size: int, encode: Callable[[str], list[int]],
) -> Any:  # fmt: skip
    """llguidance's view of a tokenizer; takes 0.2 s for 49,152 tokens.

    Args:
      tokens: bytes of each id; `vocab_size` may be more. encode: ids of a text that continues another.
    """
    import llguidance

    class View:
        def __call__(self, text: str | bytes) -> list[int]:
            return encode(text.decode("utf-8", "replace") if isinstance(text, bytes) else text)

    view = View()
    view.tokens, view.special_token_ids = list(tokens), list(special_token_ids)
    view.eos_token_id, view.bos_token_id = eos_token_ids[0], bos_token_id
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(view), n_vocab=vocab_size, eos_token=list(eos_token_ids))


def _main() -> None:
    """The other process: a vocabulary, then grammars, each answered by a line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with the one that it serves
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (ImportError, ValueError, OSError):  # not on every system
        pass
    import llguidance

    source, answers = sys.stdin.buffer, os.dup(1)
    os.dup2(2, 1)  # nobody else writes there
    vocabulary = pickle.load(source)
    limits = llguidance.LLParserLimits(**vocabulary.pop("limits"))
    id_of = {token: i for i, token in reversed(list(enumerate(vocabulary["tokens"]))) if len(token) == 1}
    tokenizer = make_tokenizer(encode=lambda text: [id_of[b"%c" % byte] for byte in text.encode()], **vocabulary)
    os.write(answers, _READY)
    while True:
        try:
            grammar = pickle.load(source)
        except EOFError:
            return
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        error = (matcher.get_error().strip().splitlines() or [""])[0]
        os.write(answers, error[:500].encode("utf-8", "replace") + b"\n")


if __name__ == "__main__":
    _main()
