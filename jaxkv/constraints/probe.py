"""Tries a grammar in another process, with bounds on its time and memory, before this one compiles it.

llguidance cannot be interrupted, and a few bytes can keep it busy for ever while its memory grows ({"multipleOf": 99999989}),
or overflow its stack, which ends the process. So another process goes first: what it does not survive is refused.

    this process  grammar ->  | the other: holds the vocabulary |  fork ->  | one for each grammar, which may die of it |
"""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Seconds by the clock for a grammar where the machine is busy, and for the other process to begin. Else CPU time counts: a
# verdict is remembered, and must not hang on who else was working.
_CLOCK_SECONDS, _START_SECONDS = 30, 60
# Of address space: llguidance with a vocabulary of 128k needs some 0.3 GiB.
_MEMORY_BYTES = 2 * 2**30

_READY, _LONGER, TOO_MUCH = b"ready\n", b"longer\n", "it takes too much time or memory to compile"


class Probe:
    """The other process, which begins with the first grammar. For one thread, but for `close`."""

    def __init__(self, vocabulary: Callable[[], Mapping[str, Any]], seconds: float):
        """`vocabulary`: keywords of `make_tokenizer`. `seconds`: of CPU for a grammar, of which most take milliseconds."""
        self._vocabulary, self._seconds = vocabulary, seconds
        self._process: subprocess.Popen | None = None

    def verdict(self, grammar: str) -> str | None:
        """Why a grammar, in llguidance's form, cannot be used; empty when it can; None when it takes more than `seconds`."""
        process = self._started()
        try:
            pickle.dump(grammar, process.stdin)
            process.stdin.flush()
            told = process.stdout.readline()
        except BrokenPipeError:
            told = b""
        if not told:  # whatever ended it
            self.close()
            return TOO_MUCH
        return None if told == _LONGER else told.decode().strip()

    def close(self) -> None:
        """End the process, and with it a verdict that another thread waits for. It begins again when it is needed."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended already
                os.killpg(process.pid, signal.SIGKILL)  # its fork too, which holds the pipe
            process.wait()
            with contextlib.suppress(BrokenPipeError):  # what it never read
                process.stdin.close()

    def _started(self) -> subprocess.Popen:
        if self._process is None:
            paths = os.pathsep.join(path for path in sys.path if path)
            self._process = process = subprocess.Popen(
                [sys.executable, "-m", "jaxkv.constraints.probe"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": paths},
                start_new_session=True,  # a Ctrl-C is not for it: it ends with the one that it serves
            )
            with contextlib.suppress(BrokenPipeError):
                pickle.dump(dict(self._vocabulary()) | {"seconds": self._seconds}, process.stdin)
                process.stdin.flush()
            if process.stdout.readline() != _READY:
                self.close()
                raise RuntimeError("the process that tries grammars did not begin")
        return self._process


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
    """The other process: a vocabulary, then grammars, each tried in a fork and answered by a line."""
    signal.alarm(_START_SECONDS)
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
    seconds = vocabulary.pop("seconds")
    limits = llguidance.LLParserLimits(**vocabulary.pop("limits"))
    id_of = {token: i for i, token in reversed(list(enumerate(vocabulary["tokens"]))) if len(token) == 1}
    tokenizer = make_tokenizer(encode=lambda text: [id_of[b"%c" % byte] for byte in text.encode()], **vocabulary)
    signal.alarm(0)
    os.write(answers, _READY)

    def try_it(grammar: str) -> None:
        # Both end the process, wherever it is.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, _CLOCK_SECONDS)
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        error = (matcher.get_error().strip().splitlines() or [""])[0]
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.write(answers, error[:500].encode("utf-8", "replace") + b"\n")

    while True:
        try:
            grammar = pickle.load(source)
        except EOFError:
            return
        fork = os.fork()  # 1 ms; to begin anew after each that did not end would take 1 to 2 s
        if fork == 0:
            try:
                try_it(grammar)
                os._exit(0)
            finally:
                os._exit(1)
        status = os.waitpid(fork, 0)[1]
        if status != 0:
            took_long = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
            os.write(answers, _LONGER if took_long else TOO_MUCH.encode() + b"\n")


if __name__ == "__main__":
    _main()
