"""Tool calls: a model writes them as text, in the form that its chat template shows it; clients get OpenAI's objects."""

import dataclasses
import json
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from jaxkv.core.errors import RequestError
from jaxkv.tokenization.tokenizer import Tokenizer

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_BETWEEN_CALLS = re.compile(r"[\s;,]*")


@dataclasses.dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes calls.

    Attributes:
      opening / closing: around a call; without an opening, an output that starts with a brace is a call. Without a closing
        a call lasts to the output's end.
      arguments: the name of a call's arguments.
      as_list: all calls are one JSON list behind one opening.
      control_ids: ids of opening and closing where these are control tokens, which texts leave out unless told.
    """

    opening: str
    closing: str
    arguments: str = "arguments"
    as_list: bool = False
    control_ids: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def literal(self, tag: str) -> str:
        """In Lark's notation; a control token by its id, since its text is another thing."""
        return f"<[{self.control_ids[tag]}]>" if tag in self.control_ids else json.dumps(tag)


# What a template that shows the format contains, and the format.
_FORMATS = (
    ("<tool_call>", ToolFormat("<tool_call>", "</tool_call>")),  # Hermes, Qwen2.5, Qwen3
    ("[TOOL_CALLS]", ToolFormat("[TOOL_CALLS]", "", as_list=True)),  # Mistral
    ('"parameters":', ToolFormat("", "", arguments="parameters")),  # Llama 3.1 to 3.3
)


def tool_format(tokenizer: Tokenizer) -> ToolFormat | None:
    """The format that the chat template teaches; None for one that takes no tools, or in no form that is known."""
    if not tokenizer.takes_tools:
        return None
    form = next((form for sign, form in _FORMATS if sign in tokenizer.chat_template), None)
    if form is None:
        return None
    ids = {tag: tokenizer.fast.token_to_id(tag) for tag in (form.opening, form.closing) if tag}
    control_ids = {tag: token_id for tag, token_id in ids.items() if token_id in tokenizer.special_ids}
    return dataclasses.replace(form, control_ids=control_ids)


@dataclasses.dataclass(frozen=True)
class ToolUse:
    """What one request asks for.

    Attributes:
      tools: as the client sent them, for the template.
      forced: names of the functions of which one must be called; empty where the model decides.
      parallel: more than one call may come.
    """

    format: ToolFormat
    tools: Sequence[Mapping[str, Any]]
    forced: tuple[str, ...]
    parallel: bool

    def grammar(self) -> str | None:
        """Lark's notation for calls of the forced functions in the model's own form; None where none is forced."""
        if not self.forced:
            return None
        form, lines = self.format, []
        parameters = {tool["function"]["name"]: tool["function"].get("parameters") for tool in self.tools}
        for i, name in enumerate(self.forced):
            schema = {"type": "object"} if parameters[name] is None else parameters[name]
            begin = json.dumps(f'{{"name": {json.dumps(name)}, "{form.arguments}": ')
            lines += [f'tool{i}: {begin} arguments{i} "}}"', f"arguments{i}: %json {json.dumps(schema)}"]
        lines.append("body: " + " | ".join(f"tool{i}" for i in range(len(self.forced))))
        opening, closing = form.literal(form.opening), form.literal(form.closing)
        if form.as_list:
            more = ' (", " body)*' if self.parallel else ""
            lines.append(f'start: {opening} "[" body{more} "]"')
        elif form.opening:
            lines.append(f'call: {opening} "\\n" body "\\n" {closing}')
            lines.append('start: call ("\\n" call)*' if self.parallel else "start: call")
        else:
            lines.append("start: body")
        return "\n".join(lines)


def checked_tools(
    tools: Sequence[Mapping[str, Any]] | None,
    choice: str | Mapping[str, Any] | None,
    parallel: bool,
    format: ToolFormat | None,
) -> ToolUse | None:
    """None where no tool is to be used. Raises RequestError for what cannot be done."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise RequestError("tool_choice needs tools", param="tool_choice")
        return None
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools has {len(tools)} entries; at most {MAX_TOOLS} are allowed", param="tools")
    names = [_checked_name(tool) for tool in tools]
    if len(set(names)) < len(names):
        raise RequestError("tools has two functions of one name", param="tools")
    if choice == "none":
        return None
    if format is None:
        raise RequestError(
            'the chat template of this model takes no tools: set tool_choice to "none", or chat_template to one that does',
            param="tools",
        )
    return ToolUse(format, tools, _forced(choice, names), parallel)


def _checked_name(tool: Mapping[str, Any]) -> str:
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, Mapping):
        raise RequestError('a tool must be {"type": "function", "function": {...}}', param="tools")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            f"a function is named {str(name)[:80]!r}; a name has 1 to 64 letters, digits, _, . or -", param="tools"
        )
    if not isinstance(parameters, Mapping | None):
        raise RequestError(f"the parameters of {name} must be a JSON Schema, an object", param="tools")
    return name


def _forced(choice: str | Mapping[str, Any] | None, names: Sequence[str]) -> tuple[str, ...]:
    if choice in (None, "auto"):
        return ()
    if choice == "required":
        return tuple(names)
    function = choice.get("function") if isinstance(choice, Mapping) else None
    if not isinstance(function, Mapping):
        raise RequestError(
            'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}',
            param="tool_choice",
        )
    if function.get("name") not in names:
        raise RequestError(
            f"tool_choice names {str(function.get('name'))[:80]!r}; tools has {', '.join(names)}"[:500],
            param="tool_choice",
        )
    return (function["name"],)


def plain_calls(calls: Any) -> Any:
    """tool_calls of an earlier message as templates want them: arguments as an object, not as its JSON text."""
    if not isinstance(calls, list):
        return calls
    plain = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
            try:
                arguments = json.loads(function["arguments"] or "{}")
            except (ValueError, RecursionError) as error:
                raise RequestError(
                    f"the arguments of an earlier call of {function.get('name')!r} are not JSON", param="messages"
                ) from error
            call = {**call, "function": {**function, "arguments": arguments}}
        plain.append(call)
    return plain


class ToolCallParser:
    """Takes the output's text as it comes apart: what is said to the user, and calls.

    What may begin a call is held back until it is decided; what turns out to be none is given back as text. Each call is
    given whole.

    Attributes:
      num_calls: found so far.
    """

    def __init__(self, use: ToolUse):
        self._format, self._parallel = use.format, use.parallel
        self._held = ""
        self._in_call = False
        self._has_begun = False  # any text but white space
        self.num_calls = 0

    def feed(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Text for the user, and calls as OpenAI's objects."""
        self._held += text
        said, calls = "", []
        while self._step(more := [], found := []):
            said, calls = said + "".join(more), calls + found
        return said + "".join(more), calls + found

    def end(self) -> tuple[str, list[dict[str, Any]]]:
        """What is still held back."""
        held, self._held = self._held, ""
        calls = self._calls(held) if self._in_call else None
        if calls is None:
            return ("" if self._is_between_calls(held) else held), []
        return "", calls

    def _step(self, said: list[str], found: list[dict[str, Any]]) -> bool:
        """Decide on the beginning of what is held; False when more text is needed for that."""
        form = self._format
        if self._in_call:
            end = self._held.find(form.closing) if form.closing else -1
            if end < 0:
                return False
            end += len(form.closing)
            call, self._held, self._in_call = self._held[:end], self._held[end:], False
            calls = self._calls(call)
            if calls is None:
                said.append(call)
            else:
                found += calls
            return True
        if not form.opening:
            begun = self._held.lstrip()
            if not self._has_begun and not begun:
                return False
            self._in_call, self._has_begun = not self._has_begun and begun[0] == "{", True
            if not self._in_call:
                said.append(self._held)
                self._held = ""
            return False
        start = self._held.find(form.opening)
        if start < 0:
            certain = len(self._held) - _beginning_at_the_end(self._held, form.opening)
            if not self._is_between_calls(self._held[:certain]):
                said.append(self._held[:certain])
                self._held = self._held[certain:]
            return False
        if not self._is_between_calls(self._held[:start]):
            said.append(self._held[:start])
        self._held, self._in_call = self._held[start:], True
        return True

    def _is_between_calls(self, text: str) -> bool:
        return self.num_calls > 0 and not text.strip()

    def _calls(self, text: str) -> list[dict[str, Any]] | None:
        """The calls in a text; None when it holds something else."""
        body = text.removeprefix(self._format.opening).strip().removesuffix(self._format.closing).strip()
        try:
            values = json.loads(body) if body.startswith("[") else _json_values(body)
        except (ValueError, RecursionError):
            return None
        calls = [self._call(value) for value in values]
        if not calls or None in calls:
            return None
        calls = calls if self._parallel else calls[: max(0, 1 - self.num_calls)]
        for call in calls:
            call["index"] = self.num_calls
            self.num_calls += 1
        return calls

    @staticmethod
    def _call(value: Any) -> dict[str, Any] | None:
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        function = {"name": value["name"], "arguments": text}
        return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _beginning_at_the_end(text: str, wanted: str) -> int:
    """Characters at the end of `text` that may begin `wanted`."""
    longest = min(len(text), len(wanted) - 1)
    return next((n for n in range(longest, 0, -1) if wanted.startswith(text[-n:])), 0)


def _json_values(text: str) -> list[Any]:
    """JSON values one after the other. Raises ValueError."""
    values, place = [], 0
    while place < len(text):
        value, place = json.JSONDecoder().raw_decode(text, place)
        values.append(value)
        place = _BETWEEN_CALLS.match(text, place).end()
    return values
