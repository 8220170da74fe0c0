"""Constraints that are grammars, by llguidance: JSON Schema, regular expressions, choices and context-free grammars.

llguidance parses the output so far and finds the tokens that can come next, in some 50 us a token. It is Rust without
dependencies; xgrammar would bring torch.
"""

import collections
import functools
import json
import re
import threading
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from jaxkv.constraints.probe import TOO_MUCH, Probe, make_tokenizer
from jaxkv.core.errors import RequestError
from jaxkv.core.request import StructuredOutputs
from jaxkv.core.token_constraint import ConstraintError, mask_bytes
from jaxkv.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

# Grammars remembered, compiled: an application sends the same few schemas over and over.
_REMEMBERED = 64
# Of a whole grammar; of a text within it (a pattern, a choice): an expression of n parts may take n^2 steps to compile.
_MOST_CHARACTERS, _MOST_CHARACTERS_A_TEXT = 100_000, 10_000
# Seconds of CPU that a grammar may take to compile: at first, and in all. Most take milliseconds.
_SHORT_SECONDS, _LONG_SECONDS = 0.3, 3.0
STACK_BYTES = 64 * 2**20
"""What compiling may need: llguidance recurses along chains of rules, and overflowing a stack ends the process. The probe's is
8 MiB, so what it survives fits here. Only what is used takes memory."""
_LIMITS = {
    "step_lexer_fuel": 50_000,
    "step_max_items": 10_000,
    "max_items_in_row": 2_000,
    "max_grammar_size": 200_000,
    "max_lexer_states": 50_000,
    "verbose_errors": False,
}
# Masks are worked out in the engine's thread, where everybody waits: so many seconds of CPU in all, and so many more with
# each token. The usual mask takes 50 us.
_SECONDS, _SECONDS_A_TOKEN = 0.2, 0.005
# Between the parts of a JSON value: what json.dumps and pretty printers write. A small model that may write any amount of
# white space can go on with it for ever.
_JSON_OPTIONS = {"whitespace_pattern": r"[ \n]?[ ]{0,40}"}
# In Lark: strings, regular expressions and comments; and references to tokens, by name or <[id,first-last,...]>.
_LITERALS = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/')
_REFERENCE = re.compile(r"<[^<>\s]+>")
# What has a meaning in a regular expression.
_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$#&~/-]")


class GrammarConstraint:
    """A `TokenConstraint` over an llguidance matcher."""

    is_fixed = False

    def __init__(self, matcher: "llguidance.LLMatcher", num_bytes: int, first_mask: bytes | None = None):
        self._matcher, self._num_bytes, self._first_mask = matcher, num_bytes, first_mask
        self._seconds_left = _SECONDS

    def mask(self) -> bytes:
        if self._first_mask is not None:
            return self._first_mask
        begin = time.thread_time()
        mask = self._matcher.compute_bitmask()
        self._check(begin)
        return mask[: self._num_bytes].ljust(self._num_bytes, b"\0")

    def accept(self, token_ids: Iterable[int]) -> None:
        self._first_mask = None
        for token_id in token_ids:
            if self._matcher.is_stopped() and not self._matcher.is_error():
                return  # the text is complete, and the request goes on past its end
            begin = time.thread_time()
            self._matcher.consume_token(token_id)
            self._seconds_left += _SECONDS_A_TOKEN
            self._check(begin)

    def copy(self) -> "GrammarConstraint":
        return GrammarConstraint(self._matcher.deep_copy(), self._num_bytes, self._first_mask)

    def _check(self, begin: float) -> None:
        self._seconds_left -= time.thread_time() - begin
        if self._matcher.is_error():
            raise ConstraintError(f"structured_outputs cannot go on: {_first_line(self._matcher.get_error())}")
        if self._seconds_left < 0:
            raise ConstraintError("structured_outputs is too complex: working out its masks takes too long")


class GrammarCompiler:
    """Makes constraints of `StructuredOutputs`. One thread may compile what is `short`, one the rest, and any ask for what is
    `known`; all need stacks of STACK_BYTES."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]):
        self._tokenizer, self._vocab_size, self._eos_token_ids = tokenizer, vocab_size, eos_token_ids
        self._short, self._long = (
            Probe(lambda: self._vocabulary() | {"limits": _LIMITS}, seconds)
            for seconds in (_SHORT_SECONDS, _LONG_SECONDS)
        )
        self._known: collections.OrderedDict[str, GrammarConstraint | str] = collections.OrderedDict()
        """By grammar: what it was compiled to, or why it cannot be."""
        self._lock = threading.Lock()

    def known(self, wanted: StructuredOutputs) -> GrammarConstraint | None:
        """What is remembered; None when it must be compiled. Raises as `compile` does."""
        name, grammar = self._read(wanted)
        return self._remembered(name, grammar)

    def short(self, wanted: StructuredOutputs) -> GrammarConstraint | None:
        """`compile` for what takes no more than 0.3 s; None for what does."""
        return self._tried(wanted, self._short)

    def compile(self, wanted: StructuredOutputs) -> GrammarConstraint:
        """Raises RequestError for a schema, regex or grammar that does not compile."""
        return self._tried(wanted, self._long, otherwise=TOO_MUCH)

    def close(self) -> None:
        """End the other processes; a grammar that is being tried is refused."""
        self._short.close()
        self._long.close()

    def _tried(self, wanted: StructuredOutputs, probe: Probe, otherwise: str | None = None) -> GrammarConstraint | None:
        name, grammar = self._read(wanted)
        if (found := self._remembered(name, grammar)) is not None:
            return found
        refusal = probe.verdict(grammar)
        refusal = otherwise if refusal is None else refusal
        if refusal is None:
            return None
        verdict = refusal or self._compiled(grammar)
        with self._lock:
            self._known[grammar] = verdict
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return _accepted(name, verdict)

    def _remembered(self, name: str, grammar: str) -> GrammarConstraint | None:
        with self._lock:
            if grammar not in self._known:
                return None
            self._known.move_to_end(grammar)
            return _accepted(name, self._known[grammar])

    def _read(self, wanted: StructuredOutputs) -> tuple[str, str]:
        """The field that is set, and what it says in llguidance's form."""
        if not self._eos_token_ids:
            raise RequestError(
                "this model has no end-of-sequence id, and structured_outputs could not end", param="structured_outputs"
            )
        name = next(name for name, value in vars(wanted).items() if value is not None)
        try:
            grammar = _grammar(wanted)
            if wanted.grammar is not None:
                self._check_ends(grammar)
            return name, grammar
        except Exception as error:  # the converter of GBNF raises bare ones
            raise _refusal(name, "is not valid", error) from error

    def _check_ends(self, lark: str) -> None:
        """Refuse token references that may be an end token, which would end the output wherever it stands."""
        names = {self._tokenizer.token_bytes[i].decode("utf-8", "replace") for i in self._eos_token_ids}
        for reference in _REFERENCE.findall(_LITERALS.sub(" ", lark)):
            ranges = reference[2:-2].removeprefix("^") if reference.startswith("<[") else ""
            listed = any(_is_within(end, ranges) for end in self._eos_token_ids)
            if reference in names or ranges == "*" or (ranges and listed != reference.startswith("<[^")):
                raise ValueError(
                    f"{reference} is or includes a token that ends the output: leave it out, since the output ends by itself "
                    "where the grammar does"
                )

    def _compiled(self, grammar: str) -> GrammarConstraint | str:
        import llguidance

        limits = llguidance.LLParserLimits(**_LIMITS)
        matcher = llguidance.LLMatcher(self._ll_tokenizer, grammar, log_level=0, limits=limits)
        num_bytes = mask_bytes(self._vocab_size)
        try:
            return GrammarConstraint(matcher, num_bytes, GrammarConstraint(matcher, num_bytes).mask())
        except ConstraintError as error:
            return str(error)

    @functools.cached_property
    def _ll_tokenizer(self) -> "llguidance.LLTokenizer":
        return make_tokenizer(encode=self._tokenizer.encode_inside, **self._vocabulary())

    def _vocabulary(self) -> dict[str, Any]:
        tokenizer = self._tokenizer
        return {
            "tokens": [tokenizer.token_bytes[i] for i in range(tokenizer.vocab_size)],
            "special_token_ids": sorted(tokenizer.special_ids),
            "eos_token_ids": self._eos_token_ids,
            "bos_token_id": tokenizer.bos_token_id,
            "vocab_size": self._vocab_size,
        }


def _accepted(name: str, verdict: GrammarConstraint | str) -> GrammarConstraint:
    if isinstance(verdict, str):
        raise _refusal(name, "cannot be compiled", verdict)
    return verdict


def _refusal(name: str, verdict: str, error: object) -> RequestError:
    return RequestError(f"structured_outputs.{name} {verdict}: {_first_line(error)}", param="structured_outputs")


def _grammar(wanted: StructuredOutputs) -> str:
    """In llguidance's form. Raises ValueError."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    if wanted.json is not None or wanted.json_object:
        schema = {"type": "object"} if wanted.json is None else wanted.json
        schema = json.loads(schema) if isinstance(schema, str) else schema
        if schema is False:
            raise ValueError("no text follows the schema false")
        schema = {} if schema is True else schema
        if not isinstance(schema, Mapping):
            raise ValueError("a JSON Schema is an object, or true")
        _check_schema(schema)
        # As text: llguidance follows an object of Python's without looking how deep it is.
        return LLMatcher.grammar_from_json_schema(_checked(json.dumps(schema)), overrides=_JSON_OPTIONS)
    if wanted.regex is not None:
        return LLMatcher.grammar_from_regex(_checked(wanted.regex, _MOST_CHARACTERS_A_TEXT))
    if wanted.choice is not None:
        # As one expression: as alternatives of a grammar, 1,000 with a common beginning are too many at once.
        choices = [_SPECIAL.sub(r"\\\g<0>", _checked(text, _MOST_CHARACTERS_A_TEXT)) for text in wanted.choice]
        return LLMatcher.grammar_from_regex(_checked("|".join(choices)))
    return LLMatcher.grammar_from_lark(_checked(any_to_lark(_checked(wanted.grammar))))


def _checked(text: str, most: int = _MOST_CHARACTERS) -> str:
    if len(text) > most:
        raise ValueError(f"{len(text)} characters; at most {most} are allowed")
    return text


def _is_within(token_id: int, ranges: str) -> bool:
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        if first.strip().isdecimal() and int(first) <= token_id <= int(last if last.strip().isdecimal() else first):
            return True
    return False


def _check_schema(schema: Any) -> None:
    """Refuse long texts anywhere in a schema, such as patterns, and integers that would lose digits."""
    values = [schema]
    while values:
        value = values.pop()
        if isinstance(value, str):
            _checked(value, _MOST_CHARACTERS_A_TEXT)
        elif isinstance(value, int) and abs(value) > 2**53:
            raise ValueError(f"{value} has more digits than a number of llguidance's holds: at most 2**53 is possible")
        elif isinstance(value, Mapping):
            values += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            values += value


def _first_line(error: object) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:500]
