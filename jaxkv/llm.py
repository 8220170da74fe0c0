"""LLM: offline generation from Python. Runs the engine's loop in the caller's thread."""

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxkv.core.config import EngineConfig
from jaxkv.core.errors import ConfigError, RequestError
from jaxkv.core.progress import Progress, SilentProgress
from jaxkv.core.request import FinishReason, Request, RequestOutput, SamplingParams, TokenLogprobs
from jaxkv.insight.request_log import RequestLog
from jaxkv.insight.traffic import Traffic
from jaxkv.tokenization.output_text import OutputText, TextDelta
from jaxkv.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxkv.startup import StartedEngine

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class SequenceOutput:
    """One continuation of a prompt.

    Attributes:
      text: the output's text; a stop string or stop token is not in it unless asked for.
      token_ids: the output's tokens, the stop token included.
      stop_reason: the stop string or the id out of stop_token_ids that ended it, or None.
      logprobs: one entry a token, if asked for.
      error: why it could not go on, where finish_reason is ERROR: a grammar that became too complex.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    logprobs: tuple[TokenLogprobs, ...] | None
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class GenerationOutput:
    """What became of one prompt. `text`, `token_ids` and so on are those of the first sequence.

    Attributes:
      prompt: its text; None when it was given as token ids.
      num_cached_tokens: prompt tokens whose K/V came out of the prefix cache (as found by the first sequence).
      prompt_logprobs: one entry a prompt token, if asked for; None for the first, which nothing predicts.
      outputs: its `SamplingParams.n` sequences.
    """

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    num_cached_tokens: int
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None
    outputs: tuple[SequenceOutput, ...]

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.outputs[0].finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        return self.outputs[0].stop_reason

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        return self.outputs[0].logprobs


@dataclasses.dataclass
class _Running:
    """One sequence; `request` is one of `Request.sequences`."""

    prompt: str | None
    request: Request
    output_text: OutputText
    pieces: list[str] = dataclasses.field(default_factory=list)
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    error: str | None = None

    def take(self, output: RequestOutput) -> TextDelta:
        delta = self.output_text.feed(output.token_ids, output.finish_reason, output.stop_token_id)
        self.pieces.append(delta.text)
        self.token_ids += output.token_ids[: delta.num_tokens]
        self.logprobs += (output.logprobs or ())[: delta.num_tokens]
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        return delta

    def output(self, delta: TextDelta) -> SequenceOutput:
        return SequenceOutput(
            text="".join(self.pieces),
            token_ids=tuple(self.token_ids),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            logprobs=tuple(self.logprobs) if self.request.sampling.logprobs is not None else None,
            error=self.error,
        )


class LLM:
    """A model ready to generate.

    Args:
      model: see EngineConfig.model; further keywords are its fields.
      progress: shows loading and warm-up; None shows nothing.

    Raises:
      ConfigError, CheckpointError: naming the setting or file at fault.
    """

    def __init__(self, model: str = "demo", *, progress: Progress | None = None, **settings: Any):
        known = {field.name for field in dataclasses.fields(EngineConfig)}
        if unknown := sorted(settings.keys() - known):
            raise ConfigError(f"LLM has no setting {', '.join(unknown)}; there are {', '.join(sorted(known))}")
        from jaxkv.startup import start_engine  # brings jax

        config = EngineConfig(model=model, **settings)
        self._attach(start_engine(config, progress=progress or SilentProgress()))

    @classmethod
    def from_started(cls, started: "StartedEngine") -> "LLM":
        """On an engine that runs already."""
        llm = cls.__new__(cls)
        llm._attach(started)
        return llm

    def _attach(self, started: "StartedEngine") -> None:
        self._started: StartedEngine | None = started
        self._request_log: RequestLog | None = None
        self._ids = itertools.count()
        self._running: dict[str, _Running] = {}
        self._unread: dict[str, list[TextDelta]] = collections.defaultdict(list)

    def close(self) -> None:
        """Give up the engine, and with it the model's memory."""
        self._started = None
        if self._request_log is not None:
            self._request_log.close()
            self._request_log = None

    def log_requests(self, path: str, *, token_ids: bool = False) -> None:
        """Append a line of JSON for each request that ends from now on, until `close`; see `RequestRecord`.

        Args:
          token_ids: those of prompts and outputs too, which can be turned back into texts.

        Raises:
          ConfigError: the file cannot be written, or requests are logged already.
        """
        if self._request_log is not None:
            raise ConfigError("this LLM logs its requests already")
        self._request_log = RequestLog(path, token_ids=token_ids)
        Traffic(self._request_log).attach(self.started.engine)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def started(self) -> "StartedEngine":
        """Engine, tokenizer and settled configuration."""
        if self._started is None:
            raise ConfigError("this LLM has been closed; make a new one")
        return self._started

    @property
    def tokenizer(self) -> Tokenizer:
        return self.started.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: Progress | None = None,
    ) -> list[GenerationOutput]:
        """Continue each prompt.

        Args:
          prompts: a text, token ids, or a list of either.
          sampling_params: one for all (None: the defaults), or one a prompt.

        Returns:
          One output a prompt, in the prompts' order; it holds the prompt's n sequences.

        Raises:
          RequestError: a prompt or parameter that cannot be served, before anything is generated.
        """
        if isinstance(prompts, str) or (prompts and all(isinstance(item, int) for item in prompts)):
            prompts = [prompts]
        return self._generate([self._encoded(prompt) for prompt in prompts], sampling_params, progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: Progress | None = None,
        **template_variables: Any,
    ) -> list[GenerationOutput]:
        """Answer each conversation; one conversation or a list of them. Arguments and errors as `generate`.

        Args:
          template_variables: for the model's chat template, e.g. `continue_final_message=True`.
        """
        if messages and isinstance(messages[0], Mapping):
            messages = [messages]
        encoded = [self._rendered(conversation, template_variables) for conversation in messages]
        return self._generate(encoded, sampling_params, progress)

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        **template_variables: Any,
    ) -> Iterator[TextDelta]:
        """Pieces of one output as they come. `prompt` is a text, token ids, or a conversation.

        Leaving the iterator early ends the request. Raises RequestError, also for more than one sequence.
        """
        sampling_params = sampling_params or SamplingParams()
        if sampling_params.n != 1:
            raise RequestError(f"n is {sampling_params.n}; a stream gives one sequence: set n to 1", param="n")
        is_chat = not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], Mapping)
        encoded = self._rendered(prompt, template_variables) if is_chat else self._encoded(prompt)
        running = self._add_all([encoded], [sampling_params])
        try:
            for _, delta in self._run(running):
                yield delta
        finally:
            self._abort(running)

    def _encoded(self, prompt: Prompt) -> tuple[str | None, tuple[int, ...]]:
        if isinstance(prompt, str):
            return prompt, tuple(self.tokenizer.encode(prompt))
        return None, tuple(prompt)

    def _rendered(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> tuple[str, tuple[int, ...]]:
        if variables.get("continue_final_message"):
            variables = {"add_generation_prompt": False} | dict(variables)
        text = self.tokenizer.apply_chat_template(messages, **variables)
        return text, tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def _generate(
        self,
        prompts: Sequence[tuple[str | None, tuple[int, ...]]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        progress: Progress | None,
    ) -> list[GenerationOutput]:
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts but {len(params)} sampling_params: give one a prompt, or one")
        progress = progress or SilentProgress()
        running = self._add_all(prompts, params)
        outputs: dict[str, SequenceOutput] = {}
        try:
            for request_id, delta in self._run(running):
                if delta.finish_reason is not None:
                    outputs[request_id] = running[request_id].output(delta)
                    progress.update("generate", len(outputs), len(running), "sequences")
        finally:
            self._abort(running)
        sequences = iter(running.items())
        results = []
        for sampling in params:
            (request_id, first), *others = itertools.islice(sequences, sampling.n)
            results.append(
                GenerationOutput(
                    prompt=first.prompt,
                    prompt_token_ids=first.request.prompt_token_ids,
                    num_cached_tokens=first.num_cached_tokens,
                    prompt_logprobs=first.prompt_logprobs,
                    outputs=(outputs[request_id], *[outputs[other] for other, _ in others]),
                )
            )
        return results

    def _add_all(
        self, prompts: Sequence[tuple[str | None, tuple[int, ...]]], params: Sequence[SamplingParams]
    ) -> dict[str, _Running]:
        """Queues all prompts, or none; returns their sequences, in order."""
        added: dict[str, _Running] = {}
        try:
            for (text, ids), sampling in zip(prompts, params, strict=True):
                constraint = self.started.constraints.compile(sampling)
                request = Request(f"offline-{next(self._ids)}", ids, sampling, constraint=constraint)
                self.started.engine.add(request)
                for sequence in request.sequences():
                    added[sequence.request_id] = _Running(text, sequence, OutputText(self.tokenizer, sampling, ids))
        except RequestError:
            self._running |= added
            self._abort(added)
            raise
        self._running |= added
        return added

    def _abort(self, running: Mapping[str, _Running]) -> None:
        for request_id in running:
            self._unread.pop(request_id, None)
            if self._running.pop(request_id, None) is not None:
                self.started.engine.abort(request_id)

    def _run(self, wanted: Mapping[str, _Running]) -> Iterator[tuple[str, TextDelta]]:
        """Steps the engine until the wanted requests have ended; yields their news.

        Other requests of this LLM (an open `stream`) are served by the same steps, and keep their news for later.
        """
        while True:
            ready = [request_id for request_id in self._unread if request_id in wanted]
            for request_id in ready:
                for delta in self._unread.pop(request_id):
                    yield request_id, delta
            if not ready:
                if not any(request_id in self._running for request_id in wanted):
                    return
                self._step()

    def _step(self) -> None:
        engine = self.started.engine
        if not engine.has_work():
            raise RuntimeError("the engine has nothing to do, yet requests have not finished")
        for output in engine.step():
            running = self._running.get(output.request_id)
            if running is None:  # aborted, or its text has reached a stop string
                continue
            if output.finish_reason is FinishReason.ERROR:
                if engine.failed is not None:
                    raise RuntimeError(f"the engine failed: {output.error}")
                running.error = output.error
            delta = running.take(output)
            self._unread[output.request_id].append(delta)
            if delta.finish_reason is not None:
                del self._running[output.request_id]
                if output.finish_reason is None:
                    engine.finish(output.request_id)
