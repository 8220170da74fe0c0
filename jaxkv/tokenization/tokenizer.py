"""Tokenizer: text to ids and back, and conversations to text. Finds its files for each kind of model source."""

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from jaxkv.core.errors import CheckpointError, RequestError
from jaxkv.tokenization.byte_tokens import ByteTokens
from jaxkv.tokenization.chat_template import ChatTemplate

if TYPE_CHECKING:
    from jaxkv.loading.resolve import ModelSource


class Tokenizer:
    """Text and token ids of one model. Safe to use from several threads.

    Args:
      fast: the tokenizer itself; truncation and padding are switched off.
      special_tokens: `bos_token`, `eos_token`, ... to their texts.
      chat_template: Jinja text or None.
      add_bos: whether encoding with special tokens starts with bos_token; None leaves it to `fast`.
      origin: file it came from, for messages.
    """

    def __init__(
        self,
        fast: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        chat_template: str | None = None,
        add_bos: bool | None = None,
        origin: str = "tokenizer",
    ):
        fast.no_truncation()
        fast.no_padding()
        self.fast = fast
        self.origin = origin
        self.special_tokens = dict(special_tokens)
        self.token_bytes = ByteTokens(fast, origin)
        """Indexed by token id: its bytes."""
        self.longest_token = max(len(self.token_bytes[i]) for i in range(fast.get_vocab_size(with_added_tokens=True)))
        """Bytes of the longest token; a text of n characters has at least n / longest_token tokens."""
        self.special_ids = frozenset(i for i, t in fast.get_added_tokens_decoder().items() if t.special)
        """Ids of control tokens, which skip_special_tokens leaves out."""
        self.bos_token_id = self._id("bos_token")
        self.eos_token_id = self._id("eos_token")
        self.vocab_size = fast.get_vocab_size(with_added_tokens=True)
        """Ids the tokenizer knows; the model's own vocabulary may be padded beyond it."""
        self._fast_adds_bos = self.bos_token_id is not None and fast.encode("").ids[:1] == [self.bos_token_id]
        self.adds_bos = self._fast_adds_bos if add_bos is None else add_bos and self.bos_token_id is not None
        """Whether encoding with special tokens starts with bos_token."""
        self._template = ChatTemplate(chat_template, special_tokens, origin) if chat_template else None

    def _id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.fast.token_to_id(text)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return () if self.eos_token_id is None else (self.eos_token_id,)

    @property
    def chat_template(self) -> str | None:
        return self._template.source if self._template else None

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template shows tools to the model."""
        return self._template is not None and "tools" in self._template.variables

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text. Special tokens written in the text become themselves.

        Args:
          add_special_tokens: start with bos_token where the model wants it, also when the text already does: never two.

        Raises:
          RequestError: the text is not valid Unicode (a lone surrogate).
        """
        try:
            ids = self.fast.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(f"the prompt is not valid Unicode text: {error}", param="prompt") from error
        if add_special_tokens:
            bos = [self.bos_token_id]
            if self._fast_adds_bos and (not self.adds_bos or ids[1:2] == bos):
                del ids[0]
            elif self.adds_bos and not self._fast_adds_bos and ids[:1] != bos:
                ids = bos + ids
        return ids

    def encode_inside(self, text: str) -> list[int]:
        """Ids of a text that continues another: no special tokens, even where it reads like one, no space put in front;
        byte for byte the text."""
        ids = self._inner.encode(text, add_special_tokens=False).ids
        if self.special_ids.isdisjoint(ids) and b"".join([self.token_bytes[i] for i in ids]) == text.encode():
            return ids
        ids, rest = [], text.encode()  # the longest tokens, one after the other
        while rest:
            length = next(n for n in range(min(len(rest), self.longest_token), 0, -1) if rest[:n] in self._id_of)
            ids.append(self._id_of[rest[:length]])
            rest = rest[length:]
        return ids

    @functools.cached_property
    def _inner(self) -> tokenizers.Tokenizer:
        """`fast`, less what puts a space in front of texts."""
        if b"".join([self.token_bytes[i] for i in self.fast.encode("a", add_special_tokens=False).ids]) == b"a":
            return self.fast
        state = json.loads(self.fast.to_str())
        for part in ("normalizer", "pre_tokenizer"):
            state[part] = _without_prefix(state[part])
        return tokenizers.Tokenizer.from_str(json.dumps(state))

    @functools.cached_property
    def _id_of(self) -> dict[bytes, int]:
        """Of ordinary tokens, by their bytes; every byte is one."""
        return {self.token_bytes[i]: i for i in reversed(range(self.vocab_size)) if i not in self.special_ids}

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of ids; bytes that are not UTF-8 become U+FFFD. Unknown ids are empty."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        data = b"".join(self.token_bytes[i] for i in ids if i not in skipped)
        if self.token_bytes.strips_leading_space and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", "replace")

    def token_text(self, token_id: int) -> str:
        """One token alone, special ones included, as log-probabilities show it."""
        return self.token_bytes[token_id].decode("utf-8", "replace")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,  # a client may name a variable "self" or "messages"
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Prompt text of a conversation; encode it with add_special_tokens=False. See ChatTemplate.render.

        Raises:
          RequestError: the model has no chat template, or it refuses the conversation.
        """
        if self._template is None:
            raise RequestError(
                f"{self.origin} has no chat template: set chat_template to a Jinja file, or use plain completions",
                param="messages",
            )
        return self._template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **variables,
        )


def load_tokenizer(source: "ModelSource", tokenizer: str | None = None, chat_template: str | None = None) -> Tokenizer:
    """The tokenizer of a model, or another one that the user named.

    Args:
      tokenizer: folder or repo id that replaces the model's own.
      chat_template: path of a Jinja file that replaces the model's own.

    Raises:
      CheckpointError: files missing, damaged or of an unsupported kind.
    """
    from jaxkv.tokenization.gguf_tokenizer import gguf_tokenizer

    if tokenizer is not None and not Path(tokenizer).exists():
        from jaxkv.core.progress import SilentProgress
        from jaxkv.loading.resolve import resolve_model

        tokenizer = str(resolve_model(tokenizer, progress=SilentProgress()).path)
    path = Path(source.path if tokenizer is None else tokenizer)
    template = _read_text(Path(chat_template)) if chat_template is not None else None
    if path.is_file() and path.suffix == ".gguf":
        return gguf_tokenizer(path, template)
    return _folder_tokenizer(path, template)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read as text: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path}: damaged JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _token_text(value: Any) -> str | None:
    """tokenizer_config.json writes a special token as text, or as an object with `content`."""
    return value.get("content") if isinstance(value, dict) else value


def _template_of(folder: Path, config: Mapping[str, Any]) -> str | None:
    if (folder / "chat_template.jinja").exists():
        return _read_text(folder / "chat_template.jinja")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _without_prefix(step: dict[str, Any] | None) -> dict[str, Any] | None:
    """A step of a tokenizer's JSON, less what puts a space in front; None when nothing is left of it."""
    if step is None or step["type"] == "Prepend":
        return None
    if step["type"] == "Sequence":
        name = next(name for name in step if name != "type")
        return step | {name: [left for part in step[name] if (left := _without_prefix(part)) is not None]}
    return step | {"Metaspace": {"prepend_scheme": "never"}, "ByteLevel": {"add_prefix_space": False}}.get(
        step["type"], {}
    )


def _folder_tokenizer(folder: Path, chat_template: str | None) -> Tokenizer:
    from jaxkv.tokenization.sentencepiece_bpe import sentencepiece_tokenizer

    config_path = folder / "tokenizer_config.json"
    config = _read_json(config_path) if config_path.exists() else {}
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    special = {name: text for name in names if (text := _token_text(config.get(name)))}
    add_bos = config.get("add_bos_token")
    if (folder / "tokenizer.json").exists():
        origin = folder / "tokenizer.json"
        try:
            fast = tokenizers.Tokenizer.from_file(str(origin))
        except Exception as error:  # the library raises bare Exception for whatever it cannot parse
            raise CheckpointError(f"{origin}: cannot be loaded by the tokenizers library: {error}") from error
    elif (folder / "tokenizer.model").exists():
        origin = folder / "tokenizer.model"
        fast, found = sentencepiece_tokenizer(origin)
        special = found | special
        add_bos = True if add_bos is None else add_bos
    else:
        raise CheckpointError(
            f"{folder}: no tokenizer.json or tokenizer.model found; set tokenizer to a folder or repo id that has one"
        )
    return Tokenizer(
        fast,
        special_tokens=special,
        chat_template=chat_template or _template_of(folder, config),
        add_bos=add_bos,
        origin=str(origin),
    )
