"""The HTTP server over an engine that computes nothing: run as a program, by bench_http.py.

Its one argument is a JSON object with ScriptedEngine's; it prints its address, and serves until it is terminated.
"""

import json
import socket
import sys
import time
from collections.abc import Sequence

import tokenizers
import uvicorn

from benchlib.random_model import byte_tokenizer
from jaxkv.async_engine import AsyncEngine
from jaxkv.constraints.compiler import ConstraintCompiler
from jaxkv.core.metrics import EngineSnapshot, EngineStats
from jaxkv.core.request import FinishReason, Request, RequestOutput
from jaxkv.server.app import create_app
from jaxkv.server.http_protocol import BoundedHead
from jaxkv.server.limits import guard
from jaxkv.server.serving import Serving
from jaxkv.tokenization.tokenizer import Tokenizer

_LETTER_A = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()).index("A")
_CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


class ScriptedEngine:
    """Gives each request its max_tokens: letters, `tokens_per_step` a step. Steps are so long that `max_num_seqs` rows
    together get `tokens_per_second`."""

    failed = None

    def __init__(self, tokens_per_second: float, tokens_per_step: int, max_num_seqs: int):
        self._step_seconds = max_num_seqs * tokens_per_step / tokens_per_second
        self._rows, self._tokens_per_step = max_num_seqs, tokens_per_step
        self._live: dict[str, tuple[Request, int]] = {}
        self._next_step = 0.0

    def add(self, request: Request) -> None:
        self._live |= {sequence.request_id: (sequence, 0) for sequence in request.sequences()}

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        self._live.pop(request_id, None)

    finish = abort

    def snapshot(self) -> EngineSnapshot:
        return EngineStats().snapshot(num_running=len(self._live))

    def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        return True

    def has_work(self) -> bool:
        return bool(self._live)

    def step(self) -> Sequence[RequestOutput]:
        now = time.monotonic()
        time.sleep(max(0.0, self._next_step - now))
        self._next_step = max(now, self._next_step + self._step_seconds)
        outputs = []
        for request_id, (request, done) in list(self._live.items())[: self._rows]:
            count = min(self._tokens_per_step, request.sampling.max_tokens - done)
            ends = done + count == request.sampling.max_tokens
            outputs.append(
                RequestOutput(
                    request_id,
                    tuple([_LETTER_A + i % 26 for i in range(done, done + count)]),
                    FinishReason.LENGTH if ends else None,
                    num_prompt_tokens=len(request.prompt_token_ids),
                )
            )
            if ends:
                del self._live[request_id]
            else:
                self._live[request_id] = (request, done + count)
        return outputs


def main(settings: dict) -> None:
    tokenizer = Tokenizer(byte_tokenizer(), special_tokens={}, chat_template=_CHAT_TEMPLATE)
    engine = AsyncEngine(ScriptedEngine(**settings), tokenizer, max_num_queued_reqs=1024)
    engine.start()
    serving = Serving(
        engine, tokenizer, ("scripted",), tokenizer.vocab_size, max_model_len=100_000, max_logprobs=20,
        constraints=ConstraintCompiler(tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=(0,)),
    )  # fmt: skip
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        config = uvicorn.Config(
            guard(create_app(serving)),
            http=BoundedHead,
            log_level="warning",
            access_log=False,
            ws="none",
            lifespan="off",
        )
        uvicorn.Server(config).run(sockets=[listener])
    engine.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
