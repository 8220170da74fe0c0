"""`scripts/serve.py` on the demo model, as a user starts it."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Small buckets: four large executables instead of eight.
FLAGS = ("--port=0", "--max-model-len=512", "--max-num-seqs=2", "--max-num-batched-tokens=128")


@contextlib.contextmanager
def demo_server() -> Iterator[tuple[str, str]]:
    """(base URL, everything printed until it was ready); ends with SIGTERM and exit code 0."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "scripts/serve.py", "--model=demo", *FLAGS]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    printed = []
    try:
        for line in process.stdout:
            printed.append(line)
            if match := re.search(r"jaxkv is ready: (http://\S+) \(model demo\)", line):
                yield match[1], "".join(printed)
                break
        else:
            raise AssertionError("the server ended before it was ready:\n" + "".join(printed))
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.wait()
