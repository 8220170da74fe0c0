"""The requests to diagnose, as sequences that can be compared: of token ids, or where a log has none, of block names.

tokens   1 token a symbol, 4 bytes: compared exactly
names    block_size tokens a symbol, 8 bytes: equal names mean equal tokens from the start, so that two sequences
         part somewhere within the first block whose names differ, and nothing can be said of what comes after
"""

import dataclasses
import gzip
import pathlib
from collections.abc import Iterable, Sequence

from jaxkv.control.prefix_index import TOKEN_BYTES, num_common, token_bytes
from jaxkv.core.errors import UserError
from jaxkv.core.request_record import NAME_DIGITS, RequestRecord
from jaxkv.core.request_record import read_records as records_of_lines

NAME_BYTES = NAME_DIGITS // 2


class LogError(UserError):
    """A log that cannot be read; names file, line and what was expected."""


@dataclasses.dataclass(frozen=True, slots=True)
class LoggedRequest:
    """One request.

    Attributes:
      prompt / output: symbols, packed. An output that is not known is empty.
      num_tokens: of the prompt; those of a last, partial block included, which names do not cover.
      record: what the server wrote; None for prompts that were not served.
    """

    request_id: str
    arrival: float
    num_tokens: int
    prompt: bytes
    output: bytes = b""
    caller: str | None = None
    salt: str | None = None
    record: RequestRecord | None = None

    @property
    def sequence(self) -> bytes:
        """All that it left in the cache."""
        return self.prompt + self.output


@dataclasses.dataclass(frozen=True)
class PromptLog:
    """Requests in the order of their arrival.

    Attributes:
      block_size: tokens a block, of the server that wrote the log or of the one to compare with.
      has_tokens: whether symbols are token ids.
    """

    requests: tuple[LoggedRequest, ...]
    block_size: int
    has_tokens: bool

    @property
    def symbol_tokens(self) -> int:
        return 1 if self.has_tokens else self.block_size

    @property
    def symbol_bytes(self) -> int:
        return TOKEN_BYTES if self.has_tokens else NAME_BYTES

    def num_common_tokens(self, a: bytes, b: bytes) -> int:
        """Tokens of the common head of two packed sequences."""
        return num_common(a, b) * TOKEN_BYTES // self.symbol_bytes * self.symbol_tokens

    def replaced(self, prompts: dict[int, bytes]) -> "PromptLog":
        """The same requests, some (by number) with other prompts, of the same length or not."""
        requests = list(self.requests)
        for number, prompt in prompts.items():
            length = len(prompt) // TOKEN_BYTES
            requests[number] = dataclasses.replace(requests[number], prompt=prompt, num_tokens=length)
        return dataclasses.replace(self, requests=tuple(requests))


def token_log(requests: Iterable[LoggedRequest], block_size: int) -> PromptLog:
    """A log of prompts in token ids."""
    return PromptLog(tuple(sorted(requests, key=lambda request: request.arrival)), block_size, has_tokens=True)


def log_of_records(records: Sequence[RequestRecord], block_size: int | None = None) -> PromptLog:
    """A log of served requests: in token ids when every record has them, else in block names.

    Args:
      block_size: to compare with, with token ids only; None takes the server's.

    Raises:
      LogError: neither token ids nor block names; names of several block sizes, or of another one than asked for.
    """
    has_tokens = all(record.prompt_token_ids is not None for record in records)
    sizes = {record.block_size for record in records}
    if not has_tokens:
        if len(sizes) > 1:
            raise LogError(f"the log has block names of {sorted(sizes)} tokens: diagnose one block size at a time")
        if 0 in sizes or not any(record.blocks for record in records if record.prompt_tokens >= record.block_size):
            raise LogError("the log has neither token ids nor block names: serve with --request_log_tokens")
        if block_size not in (None, *sizes):
            raise LogError(
                f"block_size is {block_size}, but the log has names of blocks of {sizes.pop()} tokens and no token ids: "
                "leave block_size unset, or serve with --request_log_tokens"
            )
    requests = tuple([_request(record, has_tokens) for record in sorted(records, key=lambda r: r.arrival)])
    return PromptLog(requests, block_size or max(sizes) or 16, has_tokens)


def read_records(path: str | pathlib.Path) -> list[RequestRecord]:
    """The lines of a request log, plain or gzipped. Raises LogError."""
    path = pathlib.Path(path)
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            return records_of_lines(file, str(path))
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise LogError(f"{path}: {error}") from error
    except ValueError as error:
        raise LogError(str(error)) from error


def _request(record: RequestRecord, has_tokens: bool) -> LoggedRequest:
    if has_tokens:
        prompt, output = token_bytes(record.prompt_token_ids), token_bytes(record.output_token_ids or ())
    else:
        num_full = record.prompt_tokens // record.block_size
        prompt, output = (bytes.fromhex("".join(part)) for part in (record.blocks[:num_full], record.blocks[num_full:]))
    return LoggedRequest(
        record.request_id, record.arrival, record.prompt_tokens, prompt, output, record.caller, record.salt, record
    )
