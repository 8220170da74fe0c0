"""Constraints that need no tokenizer: what may come next is a function of the output so far."""

import zlib

from jaxkv.constraints.token_lists import TokenLists
from jaxkv.core.token_constraint import ConstraintError, allows, mask_of


class OutputDependent:
    """Forbids a third of the ids or so, others after every output; a dead end after `longest` tokens."""

    is_fixed = False

    def __init__(self, vocab_size, longest=None, output=()):
        self.vocab_size, self.longest, self.output = vocab_size, longest, tuple(output)

    def mask(self):
        if self.longest is not None and len(self.output) >= self.longest:
            raise ConstraintError("nowhere to go")
        begun = zlib.crc32(repr(self.output).encode())
        allowed = [i for i in range(self.vocab_size) if zlib.crc32(b"%d" % i, begun) % 3]
        return mask_of(allowed or [begun % self.vocab_size], self.vocab_size)

    def accept(self, token_ids):
        for token_id in token_ids:
            assert allows(self.mask(), token_id), "a token was chosen that was not allowed"
            self.output += (token_id,)

    def copy(self):
        return OutputDependent(self.vocab_size, self.longest, self.output)


def constraint_for(sampling, vocab_size):
    """Any bad word stands for OutputDependent."""
    if sampling.bad_words:
        return OutputDependent(vocab_size)
    if sampling.allowed_token_ids is not None:
        return TokenLists(sampling.allowed_token_ids, (), vocab_size)
    return None
