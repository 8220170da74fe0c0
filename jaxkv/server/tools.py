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
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
# Where llguidance finds a mistake in a grammar: each function has two lines in ours.
_LINE = re.compile(r"at (\d+)\(\d+\): ")


@dataclasses.dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes calls.

    Attributes:
      opening / closing: around a call; without an opening, only an output that starts with a call has any.
      arguments: the name of a call's arguments.
      as_list: all calls are one JSON list behind one opening; or each has its own, then its name, then its arguments. Both
        are read, whichever the template shows.
      behind_name: tags between a name and its arguments, where the template shows that form; a forced call follows it.
      control_ids: ids of all tags that are control tokens, which texts leave out unless told.
    """

    opening: str
    closing: str
    arguments: str = "arguments"
    as_list: bool = False
    behind_name: tuple[str, ...] = ()
    control_ids: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def call_id(self) -> str:
        """A new one. Mistral's templates raise for any that is not of 9 letters and digits, when it comes back."""
        return uuid.uuid4().hex[:9] if self.as_list else f"call_{uuid.uuid4().hex[:24]}"

    def literal(self, tag: str) -> str:
        """In Lark's notation; a control token by its id, since its text is another thing."""
        return f"<[{self.control_ids[tag]}]>" if tag in self.control_ids else json.dumps(tag)


_CALL_ID, _ARGS = "[CALL_ID]", "[ARGS]"
_MISTRAL = ToolFormat("[TOOL_CALLS]", "", as_list=True)
# What a template that shows the format contains, and the format; the first that fits.
_FORMATS = (
    (("<tool_call>",), ToolFormat("<tool_call>", "</tool_call>")),  # Hermes, Qwen2.5, Qwen3
    # Mistral: with an id behind the name; with arguments alone, as Ministral 3 and Devstral 2; as a list, up to Small 3.1
    (("[TOOL_CALLS]", _CALL_ID, _ARGS), dataclasses.replace(_MISTRAL, behind_name=(_CALL_ID, _ARGS))),
    (("[TOOL_CALLS]", _ARGS), dataclasses.replace(_MISTRAL, behind_name=(_ARGS,))),
    (("[TOOL_CALLS]",), _MISTRAL),
    (('"parameters":',), ToolFormat("", "", arguments="parameters")),  # Llama 3.1 to 3.3
)


def tool_format(tokenizer: Tokenizer) -> ToolFormat | None:
    """The format that the chat template teaches; None for one that takes no tools, or in no form that is known."""
    if not tokenizer.takes_tools:
        return None
    form = next((form for signs, form in _FORMATS if all(sign in tokenizer.chat_template for sign in signs)), None)
    if form is None:
        return None
    ids = {tag: tokenizer.fast.token_to_id(tag) for tag in (form.opening, form.closing, *form.behind_name) if tag}
    control_ids = {tag: token_id for tag, token_id in ids.items() if token_id in tokenizer.special_ids}
    return dataclasses.replace(form, control_ids=control_ids)


@dataclasses.dataclass(frozen=True)
class ToolUse:
    """What one request asks for.

    Attributes:
      tools: as the client sent them, for the template.
      forced: names of the functions of which one must be called; empty where the model decides.
      parallel: more than one call may come; never where one function was named, which is called once.
    """

    format: ToolFormat
    tools: Sequence[Mapping[str, Any]]
    forced: tuple[str, ...]
    parallel: bool

    @property
    def names(self) -> list[str]:
        return [tool["function"]["name"] for tool in self.tools]

    def grammar(self) -> str | None:
        """Lark's notation for calls of the forced functions in the model's own form; None where none is forced."""
        if not self.forced:
            return None
        form, lines = self.format, []
        opening, closing = form.literal(form.opening), form.literal(form.closing)
        parameters = {tool["function"]["name"]: tool["function"].get("parameters") for tool in self.tools}
        for i, name in enumerate(self.forced):
            begin, end = json.dumps(f'{{"name": {json.dumps(name)}, "{form.arguments}": '), '"}"'
            if form.behind_name:
                tags = [form.literal(tag) + (" call_id" if tag == _CALL_ID else "") for tag in form.behind_name]
                begin, end = " ".join((opening, json.dumps(name), *tags)), ""
            # Without parameters it takes none. Others may leave it to anyOf or $ref that they are an object.
            schema = {**parameters[name], "type": "object"} if parameters[name] else None
            arguments = '"{}"' if schema is None else f"%json {json.dumps(schema)}"
            lines += [f"tool{i}: {begin} arguments{i} {end}", f"arguments{i}: {arguments}"]
        lines.append("body: " + " | ".join(f"tool{i}" for i in range(len(self.forced))))
        if form.behind_name:
            lines += ["call_id: /[A-Za-z0-9]{9}/", "start: body+" if self.parallel else "start: body"]
        elif form.as_list:
            more = ' (", " body)*' if self.parallel else ""
            lines.append(f'start: {opening} "[" body{more} "]"')
        elif form.opening:
            lines.append(f'call: {opening} "\\n" body "\\n" {closing}')
            lines.append('start: call ("\\n" call)*' if self.parallel else "start: call")
        else:
            lines.append("start: body")
        return "\n".join(lines)

    def in_its_words(self, error: RequestError) -> RequestError:
        """An error about `grammar`, which clients do not know of, told of the tools that it was made of."""
        found = _LINE.search(str(error))
        i = 0 if len(self.forced) == 1 else (int(found[1]) - 1) // 2 if found else len(self.forced)
        place = "tools"
        if i < len(self.forced):
            place += f"[{self.names.index(self.forced[i])}].function.parameters"
        message = re.sub(r"\bstructured_outputs(\.grammar)?\b", place, _LINE.sub("", str(error), count=1))
        return RequestError(message, param=place, status=error.status)


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
    names = checked_names(tools)
    if choice == "none":
        return None
    if format is None:
        raise RequestError(
            'the chat template of this model takes no tools: set tool_choice to "none", or chat_template to one that does',
            param="tools",
        )
    return ToolUse(format, tools, _forced(choice, names), parallel and not isinstance(choice, Mapping))


def checked_names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of the functions. Raises RequestError for what describes none."""
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools has {len(tools)} entries; at most {MAX_TOOLS} are allowed", param="tools")
    names = [_checked_name(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    if len(set(names)) < len(names):
        raise RequestError("tools has two functions of one name", param="tools")
    return names


def _checked_name(tool: Mapping[str, Any], place: str) -> str:
    function = tool.get("function")
    if tool.get("type") != "function":
        raise RequestError(f'{place}.type must be "function"; no other tools are supported', param=f"{place}.type")
    place = f"{place}.function"
    if not isinstance(function, Mapping):
        raise RequestError(f"{place} must be an object with a name", param=place)
    name, description, parameters = (function.get(field) for field in ("name", "description", "parameters"))
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise RequestError(
            f"{place}.name is {str(name)[:80]!r}; a name has 1 to 64 letters, digits, _, . or -", param=f"{place}.name"
        )
    if not isinstance(description, str | None):
        raise RequestError(f"{place}.description must be a string", param=f"{place}.description")
    if not isinstance(parameters, Mapping | None):
        raise RequestError(f"{place}.parameters must be a JSON Schema, an object", param=f"{place}.parameters")
    kinds = (parameters or {}).get("type", "object")
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        raise RequestError(
            f"{place}.parameters has the type {str(kinds)[:80]!r}; arguments are an object", param=f"{place}.parameters"
        )
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


def plain_calls(calls: Any, place: str) -> list[dict[str, Any]]:
    """tool_calls of an earlier message as templates want them: arguments as an object, not as its JSON text.

    Args:
      place: where they stand in the request, for messages.
    """
    if not isinstance(calls, list):
        raise RequestError(f"{place} must be a list of calls", param=place)
    return [_plain_call(call, f"{place}[{i}]") for i, call in enumerate(calls)]


def _plain_call(call: Any, place: str) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise RequestError(f"{place} must be an object with id, type and function", param=place)
    if not isinstance(call.get("id"), str):
        raise RequestError(f"{place}.id must be a string", param=f"{place}.id")
    if call.get("type") != "function":
        raise RequestError(f'{place}.type must be "function"', param=f"{place}.type")
    place, function = f"{place}.function", call.get("function")
    if not isinstance(function, Mapping):
        raise RequestError(f"{place} must be an object with name and arguments", param=place)
    if not isinstance(function.get("name"), str):
        raise RequestError(f"{place}.name must be a string", param=f"{place}.name")
    place, arguments = f"{place}.arguments", function.get("arguments")
    if not isinstance(arguments, str | Mapping):
        raise RequestError(f"{place} must be a string of JSON", param=place)
    try:
        if isinstance(arguments, str):
            arguments = json.loads(arguments or "{}", parse_constant=refuse_constant)
        else:
            json.dumps(arguments, allow_nan=False)  # the body's decoder lets NaN pass
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{place} is not JSON: {str(error)[:100]}", param=place) from error
    return {**call, "function": {**function, "arguments": arguments}}


def refuse_constant(name: str) -> Any:
    """For the JSON decoder, which takes what JavaScript has and JSON has not."""
    raise ValueError(f"{name} is not JSON")
