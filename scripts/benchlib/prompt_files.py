"""Prompts as texts, for diagnosis: JSON lines with `prompt` (text or token ids) or `messages` (and `tools`)."""

import json
import pathlib
from typing import Any

from jaxkv.control.prefix_index import token_bytes
from jaxkv.core.errors import UserError
from jaxkv.core.request_record import salt_name
from jaxkv.insight.prompt_log import LogError, LoggedRequest
from jaxkv.tokenization.tokenizer import Tokenizer


def read_prompts(path: str | pathlib.Path, tokenizer: Tokenizer) -> list[LoggedRequest]:
    """One request a line. Beside its prompt a line may have `request_id`, `caller` (or `user`), `arrival` in seconds and
    `cache_salt`; lines without an arrival come a second apart. Raises LogError."""
    path = pathlib.Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LogError(f"{path}: {error}") from error
    requests = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            requests.append(_request(json.loads(line), number, tokenizer))
        except (ValueError, TypeError, AttributeError, UserError) as error:
            raise LogError(f"{path}, line {number}: {error}") from error
    if not requests:
        raise LogError(f"{path}: there are no prompts in it")
    return requests


def _request(row: dict[str, Any], number: int, tokenizer: Tokenizer) -> LoggedRequest:
    if not isinstance(row, dict) or ("prompt" in row) == ("messages" in row):
        raise ValueError("expected a JSON object with either prompt or messages")
    if "messages" in row:
        text = tokenizer.apply_chat_template(row["messages"], **({"tools": row["tools"]} if row.get("tools") else {}))
        tokens = tokenizer.encode(text, add_special_tokens=False)
    elif isinstance(row["prompt"], str):
        tokens = tokenizer.encode(row["prompt"])
    else:
        tokens = [int(token) for token in row["prompt"]]
    if not tokens or not all(0 <= token < tokenizer.vocab_size for token in tokens):
        raise ValueError(f"the prompt must have tokens, each from 0 to {tokenizer.vocab_size - 1}")
    caller = row.get("caller", row.get("user"))
    return LoggedRequest(
        request_id=str(row.get("request_id", f"line {number}")),
        arrival=float(row.get("arrival", number)),
        num_tokens=len(tokens),
        prompt=token_bytes(tokens),
        caller=None if caller is None else str(caller),
        salt=salt_name(row.get("cache_salt")),
    )
