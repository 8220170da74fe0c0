"""A stand-in for jaxkv.control.engine.Engine that plays scripted tokens; loaded by path (runpy), not imported."""

import dataclasses
import threading
import time
import types

from jaxkv.constraints.compiler import ConstraintCompiler
from jaxkv.control.prefix_sharing import PrefixExplanation
from jaxkv.control.validation import checked_request
from jaxkv.core.clock import MonotonicClock
from jaxkv.core.config import EngineConfig
from jaxkv.core.errors import RequestError
from jaxkv.core.metrics import EngineStats, MissReason
from jaxkv.core.request import FinishReason, RequestOutput, TokenLogprobs


class FakeEngine:
    """Continues each prompt with `script(request)` token ids, up to `tokens_per_step` a step.

    Attributes:
      added, aborted, finished: what the frontend asked for, in order (requests, ids, ids).
      step_seconds: how long a step takes. gate: steps wait while it is cleared.
      break_with: raised by the next step. dead_ends: requests with a constraint end with an error after so many tokens.
      limits: vocab_size, max_model_len and max_logprobs, by which requests are checked as the engine does; None: they are not.
    """

    limits = None

    def __init__(self, script, *, eos=(), tokens_per_step=1, step_seconds=0.0):
        self.script, self.eos, self.tokens_per_step, self.step_seconds = script, eos, tokens_per_step, step_seconds
        self.failed = None
        self.added, self.aborted, self.finished = [], [], []
        self.break_with = self.dead_ends = None
        self.gate = threading.Event()
        self.gate.set()
        self.clock = MonotonicClock()
        self.executor = types.SimpleNamespace(limits=types.SimpleNamespace(block_size=16))
        self.on_end = None  # never called: there are no states here
        self._live, self._news = {}, []
        self._owner = None

    def _check_thread(self):
        self._owner = self._owner or threading.get_ident()
        assert self._owner == threading.get_ident(), "the engine has one owner thread"

    def add(self, request):
        self._check_thread()
        if request.request_id in self._live:
            raise RequestError("request id in use")
        if self.limits is not None:
            request = checked_request(request, **self.limits)
        if request.cache_salt == "refuse":
            raise RequestError("refused by the engine: salt", param="cache_salt")
        for sequence in request.sequences():
            self.added.append(sequence)
            self._live[sequence.request_id] = (sequence, list(self.script(sequence)), 0)

    def abort(self, request_id, reason=FinishReason.ABORT):
        self._check_thread()
        if self._live.pop(request_id, None) is not None:
            self.aborted.append(request_id)
            self._news.append(RequestOutput(request_id, (), reason))

    def finish(self, request_id):
        self._check_thread()
        if self._live.pop(request_id, None) is not None:
            self.finished.append(request_id)
            self._news.append(RequestOutput(request_id, (), FinishReason.STOP))

    def has_work(self):
        return bool(self._live or self._news)

    def snapshot(self):
        return EngineStats().snapshot(num_running=len(self._live))

    def reset_prefix_cache(self, preempt_running=False):
        self._check_thread()
        return not self._live

    def explain_prefix(self, request):
        """As if the first half were cached, and others had the last token under another salt."""
        self._check_thread()
        count = len(request.prompt_token_ids)
        missed = {MissReason.SALT: 1, MissReason.FIRST_SEEN: count - count // 2 - 1}
        return PrefixExplanation(count, count // 2, count // 2, missed)

    def step(self):
        self._check_thread()
        time.sleep(self.step_seconds)
        self.gate.wait(20)
        if self.break_with is not None:
            raise self.break_with
        outputs, self._news = self._news, []
        for request_id, (request, tokens, done) in list(self._live.items()):
            sampling = request.sampling
            limit = len(tokens) if sampling.max_tokens is None else min(sampling.max_tokens, len(tokens))
            new, reason, stop_id = [], None, None
            while len(new) < self.tokens_per_step and reason is None:
                token = tokens[done]
                new.append(token)
                done += 1
                ends = (*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.eos))
                if token in ends and done > sampling.min_tokens:
                    reason, stop_id = FinishReason.STOP, token
                elif done >= limit:
                    reason = FinishReason.LENGTH
            count = sampling.logprobs
            logprobs = None
            if count is not None:
                logprobs = tuple(
                    TokenLogprobs(t, -0.5, 1, tuple([(t, -0.5), (t + 1, -1.5), (t + 2, float("-inf"))][:count]))
                    for t in new
                )
            of_prompt = None
            if sampling.prompt_logprobs is not None and done == len(new):
                of_prompt = (None, *(TokenLogprobs(t, -0.25, 1) for t in request.prompt_token_ids[1:]))
            self._live[request_id] = (request, tokens, done)
            if self.dead_ends is not None and request.constraint is not None and done >= self.dead_ends:
                del self._live[request_id]
                outputs.append(RequestOutput(request_id, (), FinishReason.ERROR, error="it became too complex"))
                continue
            if reason is not None:
                del self._live[request_id]
            outputs.append(
                RequestOutput(
                    request_id,
                    tuple(new),
                    reason,
                    stop_id,
                    logprobs,
                    num_prompt_tokens=len(request.prompt_token_ids),
                    num_cached_tokens=len(request.prompt_token_ids) // 2,
                    prompt_logprobs=of_prompt,
                )
            )
        return outputs


@dataclasses.dataclass
class FakeModelConfig:
    vocab_size: int


@dataclasses.dataclass
class FakeStarted:
    """What start_engine returns, as far as its users look."""

    engine: FakeEngine
    tokenizer: object
    constraints: ConstraintCompiler
    model_config: FakeModelConfig
    config: EngineConfig
    name: str = "fake"
    memory_report: tuple = ()


def fake_started(engine, tokenizer, max_model_len=256):
    config = EngineConfig(model="fake", max_model_len=max_model_len)
    engine.limits = {
        "vocab_size": tokenizer.vocab_size, "max_model_len": max_model_len, "max_logprobs": config.max_logprobs
    }  # fmt: skip
    constraints = ConstraintCompiler(tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=tokenizer.eos_token_ids)
    return FakeStarted(engine, tokenizer, constraints, FakeModelConfig(tokenizer.vocab_size), config)
