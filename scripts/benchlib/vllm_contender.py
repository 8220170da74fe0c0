"""vLLM in a process of its own, possibly of another interpreter: it pins versions that are not jaxkv's."""

import collections
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import safetensors.numpy

from benchlib.contenders import Prompts, Timing
from benchlib.torch_contenders import hugging_face_config
from jaxkv.core.errors import ConfigError
from jaxkv.loading.resolve import ModelSource, resolve_model
from jaxkv.loading.weights import open_tensors
from jaxkv.measurement import AbsentError

_WORKER = Path(__file__).parent / "vllm_worker.py"


class VllmContender:
    """Speaks JSON lines with vllm_worker.py: vLLM's CPU build on all cores, its prefix cache off."""

    def __init__(self, model: str, dtype: str, *, python: str, eager: bool, max_num_seqs: int, max_model_len: int):
        """`python`: interpreter that has vLLM; empty takes this one's. `eager`: leave out its compilation."""
        if not python and importlib.util.find_spec("vllm") is None:
            raise AbsentError("vllm is not installed here; --vllm_python names an interpreter that has it")
        if python and not Path(python).is_file():
            raise ConfigError(f"vllm_python is {python!r}: no such file")
        self._folder = tempfile.TemporaryDirectory(prefix="jaxkv-vllm-")
        folder = Path(self._folder.name)
        _write_checkpoint(resolve_model(model), folder)
        self._log = (folder / "worker.log").open("w+", encoding="utf-8")
        settings = {
            "model": str(folder),
            "dtype": dtype,
            "enforce_eager": eager,
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max(2048, max_model_len),
        }
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
        }
        environment.pop("PYTHONPATH", None)  # another interpreter's packages
        self._process = subprocess.Popen(
            [python or sys.executable, str(_WORKER), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )
        self._read()

    def generate(self, prompts: Prompts, output_len: int) -> Timing:
        self._process.stdin.write(json.dumps({"prompts": prompts, "output_len": output_len}) + "\n")
        self._process.stdin.flush()
        return Timing(**self._read())

    def _read(self) -> dict[str, float]:
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        code = self._process.wait()
        self._log.seek(0)
        tail = "".join(collections.deque(self._log, maxlen=5)).strip()
        self.close()
        raise AbsentError(f"vLLM's process ended with {code}; it said last: {tail}")

    def close(self) -> None:
        self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()
        self._folder.cleanup()


def _write_checkpoint(source: ModelSource, folder: Path) -> None:
    """The weights that jaxkv loads, in float32, as a Hugging Face folder."""
    config = hugging_face_config(source)
    config.architectures = config.architectures or ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    tensors = open_tensors(source)
    weights = {name: tensors.read(name, np.dtype("float32")) for name in tensors.names()}
    safetensors.numpy.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
