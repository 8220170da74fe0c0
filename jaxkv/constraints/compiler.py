"""From what a request's sampling parameters ask of its tokens to the constraint that sees to it."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Iterable, Iterator, Sequence

from jaxkv.constraints.grammar import STACK_BYTES, GrammarCompiler
from jaxkv.constraints.token_lists import TokenLists
from jaxkv.control.validation import check_token_limits
from jaxkv.core.request import SamplingParams
from jaxkv.core.token_constraint import ConstraintError, TokenConstraint, is_empty
from jaxkv.tokenization.tokenizer import Tokenizer


class BothOf:
    """A `TokenConstraint`: what two others both allow."""

    def __init__(self, first: TokenConstraint, second: TokenConstraint):
        self._first, self._second = first, second
        self.is_fixed = first.is_fixed and second.is_fixed

    def mask(self) -> bytes:
        first, second = self._first.mask(), self._second.mask()
        both = (int.from_bytes(first, "little") & int.from_bytes(second, "little")).to_bytes(len(first), "little")
        if is_empty(both):
            raise ConstraintError("structured_outputs, allowed_token_ids and bad_words leave no token between them")
        return both

    def accept(self, token_ids: Iterable[int]) -> None:
        self._first.accept(token_ids)
        self._second.accept(token_ids)

    def copy(self) -> "BothOf":
        return BothOf(self._first.copy(), self._second.copy())


class ConstraintCompiler:
    """Makes `Request.constraint` of sampling parameters. Safe to use from several threads.

    Three threads, each doing one thing after another. What takes no time, token lists and grammars that were seen before,
    waits for no other. A new grammar is given 0.3 s of CPU, and most need from 1 ms to some 0.1 s; what is not done by then
    goes behind those that need more, up to 3 s. So of hostile grammars, which take all they get, each costs others 0.3 s.

    Args:
      vocab_size: ids the model has, which may be more than the tokenizer knows.
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Sequence[int]):
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._grammars = GrammarCompiler(tokenizer, vocab_size, tuple(eos_token_ids) or tokenizer.eos_token_ids)
        self._stages = [
            (concurrent.futures.ThreadPoolExecutor(1, f"jaxkv-{name}"), work)
            for name, work in (
                ("constraints", self._known), ("grammars", self._short), ("long-grammars", self._long)
            )
        ]  # fmt: skip
        """Each makes the constraint, or leaves it to the next with None."""
        usual = threading.stack_size(STACK_BYTES)
        try:
            for pool, _ in self._stages:
                pool.submit(int).result()  # its thread begins here
        finally:
            threading.stack_size(usual)

    def compile(self, sampling: SamplingParams) -> TokenConstraint | None:
        """In its first state; None where any token may come.

        Raises:
          RequestError: naming the parameter that no constraint can be made of.
        """
        if not sampling.has_constraint:
            return None
        made = (pool.submit(work, sampling).result() for pool, work in self._stages)
        return next(constraint for constraint in made if constraint is not None)

    async def compile_async(self, sampling: SamplingParams) -> TokenConstraint | None:
        """`compile` for an event loop. What is cancelled before its turn is not compiled."""
        if not sampling.has_constraint:
            return None
        for pool, work in self._stages:
            constraint = await asyncio.wrap_future(pool.submit(work, sampling))
            if constraint is not None:
                return constraint
        raise AssertionError("the last stage left it to another")

    def close(self) -> None:
        """For the end of the program: nothing is compiled any more, and what is being compiled is refused."""
        for pool, _ in self._stages:
            pool.shutdown(wait=False, cancel_futures=True)
        self._grammars.close()

    def _known(self, sampling: SamplingParams) -> TokenConstraint | None:
        """None for a grammar that must be compiled."""
        check_token_limits(sampling, self._vocab_size)
        wanted = sampling.structured_outputs
        if wanted is None:
            return self._with_lists(sampling, None)
        grammar = self._grammars.known(wanted)
        return grammar and self._with_lists(sampling, grammar)

    def _short(self, sampling: SamplingParams) -> TokenConstraint | None:
        grammar = self._grammars.short(sampling.structured_outputs)
        return grammar and self._with_lists(sampling, grammar)

    def _long(self, sampling: SamplingParams) -> TokenConstraint:
        return self._with_lists(sampling, self._grammars.compile(sampling.structured_outputs))

    def _with_lists(self, sampling: SamplingParams, grammar: TokenConstraint | None) -> TokenConstraint:
        lists = None
        if sampling.allowed_token_ids is not None or sampling.bad_words:
            bad = [ids for word in sampling.bad_words for ids in self._encodings(word)]
            lists = TokenLists(sampling.allowed_token_ids, bad, self._vocab_size)
        return BothOf(grammar, lists) if lists and grammar else lists or grammar

    def _encodings(self, word: str) -> Iterator[list[int]]:
        """As it stands inside a text: alone, and after a space where that is not the space and then the same."""
        word = word.lstrip()
        alone, spaced = (self._tokenizer.encode_inside(text) for text in (word, f" {word}"))
        yield alone
        if spaced[-len(alone) :] != alone:
            yield spaced
