"""Renders a conversation with the model's own Jinja template, in a sandbox with limits.

The template is data from a checkpoint, so it may neither reach Python nor run for ever; what users write is only ever a
value in it and is never parsed as a template. The environment offers what transformers offers, so that templates
written for it render the same.
"""

import datetime
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxkv.core.errors import CheckpointError, RequestError

# Loop rounds a rendering may take: a conversation of 1,000 messages takes some thousands, and a million empty rounds
# are about 0.2 s of CPU time.
MAX_LOOP_ROUNDS = 1_000_000
# Characters of any string that a template builds, and of the rendered prompt.
MAX_CHARACTERS = 16_000_000

_rounds_left: ContextVar[list[int]] = ContextVar("rounds_left")
_CONTINUE_MARK = "\ue000continue\ue000"  # private-use characters: no tokenizer's template contains them


class _LimitError(jinja2.TemplateError):
    """A template went over one of this module's limits."""


def _counted(iterable: Iterable[Any]) -> Iterator[Any]:
    budget = _rounds_left.get()
    for item in iterable:
        budget[0] -= 1
        if budget[0] < 0:
            raise _LimitError(f"more than {MAX_LOOP_ROUNDS} loop rounds")
        yield item


def _checked(value: Any) -> Any:
    if isinstance(value, str | Sequence) and len(value) > MAX_CHARACTERS:
        raise _LimitError(f"a value longer than {MAX_CHARACTERS}")
    return value


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (abs(left) <= 1_000_000 and abs(right) <= 64):
            raise _LimitError(f"{left} ** {right} is out of bounds")
        if operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if isinstance(sequence, str | Sequence) and isinstance(count, int):
                    if len(sequence) * count > MAX_CHARACTERS:
                        raise _LimitError(f"a value longer than {MAX_CHARACTERS}")
        return _checked(super().call_binop(context, operator, left, right))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parses, then puts a counter in each loop and a length check around each `~`."""
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "counted", [], [], None, None, lineno=loop.lineno)
        for concat in list(tree.find_all(nodes.Concat)):
            joined = nodes.Concat(concat.nodes, lineno=concat.lineno)
            concat.nodes = [nodes.Filter(joined, "checked", [], [], None, None, lineno=concat.lineno)]
        return tree


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks trainable text in some templates; for inference it is transparent."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    # Jinja's own filter escapes HTML characters, which no prompt wants.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
    )
    environment.filters.update(tojson=_tojson, counted=_counted, checked=_checked)
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    environment.globals.pop("lipsum")
    return environment


class ChatTemplate:
    """A compiled template. Safe to render from several threads.

    Args:
      source: the Jinja text. special_tokens: variables such as `bos_token` that templates read.
      origin: file it came from, for messages.

    Raises:
      CheckpointError: the template does not parse.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], origin: str):
        self.source = source
        self._special_tokens = dict(special_tokens)
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self.variables = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))
            """What it takes from outside."""
        except jinja2.TemplateError as error:
            raise CheckpointError(
                f"{origin}: the chat template does not parse: {error}; set chat_template to another one"
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt text for a conversation.

        Args:
          messages: mappings with `role` and `content` (text); further keys are the template's business.
          add_generation_prompt: end with the header of the assistant's turn.
          continue_final_message: end inside the last message, so that the model goes on with it.
          variables: further template variables (`tools`, `enable_thinking`, ...).

        Raises:
          RequestError: nothing to render, or the template refuses or fails on this conversation.
        """
        messages = [dict(message) for message in messages]
        if not messages:
            raise RequestError("messages is empty: at least one message is needed", param="messages")
        if continue_final_message:
            if add_generation_prompt:
                raise RequestError(
                    "add_generation_prompt and continue_final_message cannot both be true: set one to false",
                    param="continue_final_message",
                )
            if not isinstance(messages[-1].get("content"), str):
                raise RequestError(
                    "continue_final_message needs a text to continue in the last message's content", param="messages"
                )
            messages[-1]["content"] += _CONTINUE_MARK
        text = self._render(messages, add_generation_prompt, variables)
        if not continue_final_message:
            return text
        head, mark, _ = text.rpartition(_CONTINUE_MARK)
        if not mark:
            raise RequestError(
                "continue_final_message: the chat template drops the end of the last message",
                param="continue_final_message",
            )
        return head

    def _render(self, messages: list[dict[str, Any]], add_generation_prompt: bool, variables: dict[str, Any]) -> str:
        token = _rounds_left.set([MAX_LOOP_ROUNDS])
        pieces, length = [], 0
        values = {"tools": None, "documents": None} | self._special_tokens | variables
        values |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            for piece in self._template.generate(values):
                length += len(piece)
                if length > MAX_CHARACTERS:
                    raise _LimitError(f"a prompt longer than {MAX_CHARACTERS} characters")
                pieces.append(piece)
        # A template is a program: on an unforeseen conversation it can fail with about any built-in error.
        except (
            jinja2.TemplateError,
            ArithmeticError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
            AttributeError,
            MemoryError,
        ) as error:
            raise RequestError(
                f"the model's chat template cannot render this conversation: {error}", param="messages"
            ) from error
        finally:
            _rounds_left.reset(token)
        return "".join(pieces)
