"""What a caller asks for and what it gets back."""

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxkv.core.token_constraint import TokenConstraint
from jaxkv.core.unseen_tokens import UnseenTokens

# Room for them is kept on the device in every row; OpenAI's limit.
MAX_LOGIT_BIASES = 300


@dataclasses.dataclass(frozen=True)
class StructuredOutputs:
    """What the output's text must be; exactly one of these is set. Names are vLLM's.

    Attributes:
      json: a JSON value that follows this JSON Schema, given as text or as an object.
      json_object: any JSON object.
      regex: a full match of this regular expression (Rust's syntax: no lookaround, no back references).
      choice: one of these texts.
      grammar: a sentence of this grammar, in Lark's notation or GBNF's.
    """

    json: str | Mapping[str, Any] | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    A token's logits are changed in vLLM's order: min_tokens forbids, logit_bias, repetition, frequency and presence
    penalty; greedy takes the best of these. Sampling goes on with temperature, top_k, top_p and min_p.
    Log-probabilities are reported of the logits before all of it.

    Attributes:
      n: sequences that continue the prompt, each on its own; they share the prompt's K/V, which is computed once.
      max_tokens: most new tokens; None means up to max_model_len.
      temperature: 0 is greedy.
      top_k: keep the k likeliest tokens; 0 or -1 keeps all.
      top_p: keep the smallest set whose probability reaches top_p.
      min_p: drop tokens less likely than min_p times the likeliest.
      repetition_penalty: tokens of the prompt and the output so far have positive logits divided by it, negative ones
        multiplied; above 1 discourages, 1 changes nothing.
      presence_penalty: subtracted from the logits of every token that the output has already.
      frequency_penalty: subtracted as often as the token occurs in the output.
      logit_bias: added to the logits of some tokens: {token id: bias}, or pairs of these; -100 all but forbids.
      seed: same seed, same prompt, same tokens, whatever else runs; None draws one. Sequence i has seed + i.
      stop: texts that end the output (not included in it unless include_stop_str_in_output).
      stop_token_ids: ids that end the output, beside the model's own end-of-sequence ids.
      ignore_eos: go on past the model's end-of-sequence ids (stop_token_ids still stop).
      min_tokens: end-of-sequence and stop ids can't be chosen before this many new tokens, unless structured_outputs
        leave nothing else.
      logprobs: None, or how many alternatives to report a token (0: the chosen token only).
      prompt_logprobs: the same for the prompt's tokens, all but the first. Such a request computes its whole prompt; of
        n sequences the first brings them.
      allowed_token_ids: no other id can be chosen.
      bad_words: texts that the output must not contain as the tokens that they are encoded as, alone or after a space.
      structured_outputs: what the output's text must be.
    """

    n: int = 1
    max_tokens: int | None = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    structured_outputs: StructuredOutputs | None = None

    @property
    def token_limits(self) -> tuple[Any, ...]:
        """What a `TokenConstraint` is made from."""
        return self.allowed_token_ids, tuple(self.bad_words), self.structured_outputs

    @property
    def has_constraint(self) -> bool:
        """Whether the request needs a `TokenConstraint`."""
        return self.token_limits != (None, (), None)

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens so far change the logits of the next."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


class FinishReason(enum.Enum):
    STOP = "stop"  # an end-of-sequence or stop id, or a stop string
    LENGTH = "length"  # max_tokens or max_model_len
    ABORT = "abort"  # the caller went away
    ERROR = "error"  # the engine failed


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities (natural log, of the raw model distribution before temperature and filters) of one token."""

    token_id: int
    logprob: float
    rank: int
    """1 for the likeliest token."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob), likeliest first; as many as asked for."""


class RequestOutput(NamedTuple):
    """News of one request: tokens since the last news, and the end if it came.

    Attributes:
      token_ids: new tokens, in order. The stop id that ended a request is included.
      num_prompt_tokens / num_cached_tokens: length of the prompt, and how much of it came from the prefix cache.
      stop_token_id: the id that stopped the request, when an id did.
      error: message when finish_reason is ERROR.
      prompt_logprobs: with the first tokens, if asked for: one entry a prompt token, None for the first.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    error: str | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt to continue.

    Attributes:
      request_id: unique among the requests in the engine.
      prompt_token_ids: at least one token. `UnseenTokens` where only their number is known, in a simulation; no engine
        with a device takes such a request.
      arrival_time: seconds on the engine's clock; None is stamped when it is added.
      priority: lower is served first under the priority policy.
      cache_salt: only requests with the same salt share prefix blocks.
      constraint: what the sampling parameters allow (`jaxkv.constraints`), in its first state; each sequence moves a copy.
      block_names: of unseen tokens: what stands for the hashes of the leading full blocks, those of the prompt and maybe
        of the output. Equal names mean equal tokens from the start up to there. Blocks behind them are like no others.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...] | UnseenTokens
    sampling: SamplingParams
    arrival_time: float | None = None
    priority: int = 0
    cache_salt: str | None = None
    constraint: TokenConstraint | None = None
    block_names: Sequence[bytes] = ()

    @property
    def is_unseen(self) -> bool:
        return isinstance(self.prompt_token_ids, UnseenTokens)

    def names(self, start: int, stop: int) -> list[bytes]:
        """Of the blocks of unseen tokens at these places; a name of the request's own where none was given."""
        given = list(self.block_names[start:stop])
        own = self.request_id.encode("utf-8", "surrogatepass")
        return given + [b"%b/%d" % (own, place) for place in range(start + len(given), stop)]

    def sequences(self) -> tuple["Request", ...]:
        """The `sampling.n` requests that this one stands for: its own id, then that with #1, #2 ...; n is 1 in each."""
        if self.sampling.n == 1:
            return (self,)
        return tuple([self._sequence(i) for i in range(self.sampling.n)])

    def _sequence(self, i: int) -> "Request":
        sampling = dataclasses.replace(self.sampling, n=1)
        if i:
            seed = None if sampling.seed is None else (sampling.seed + i) % 2**31
            sampling = dataclasses.replace(sampling, seed=seed, prompt_logprobs=None)  # they come with the first
        request_id = f"{self.request_id}#{i}" if i else self.request_id
        return dataclasses.replace(self, request_id=request_id, sampling=sampling)
