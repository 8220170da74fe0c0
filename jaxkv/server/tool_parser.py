"""Finds calls of tools in what a model writes, while it is being written."""

import json
import re
from typing import Any

from jaxkv.server.tools import NAME, ToolUse, refuse_constant

_SPACE, _SEPARATORS = re.compile(r"\s*"), re.compile(r"[\s;,]*")
# Between a call's opening and its first brace; Mistral's newer models write a name there, and only arguments behind.
_HEAD = re.compile(r"\s*(?P<list>\[\s*)?")
_NAMED_HEAD = re.compile(_HEAD.pattern + rf"|\s*(?P<name>{NAME.pattern})\s*(\[CALL_ID\]\w*)?(\[ARGS\]\s*)?", re.ASCII)
# What such a head may begin with, and how long it may be: anything else need not be held back.
_HEAD_SO_FAR, _NAMED_HEAD_SO_FAR, _LONGEST_HEAD = re.compile(r"[\s\[]*"), re.compile(r"[\s\w.\-\[\]]*"), 200
# Runs of what JSON can have outside of strings, braces and brackets, and in strings.
_JSON_OUTSIDE, _JSON_IN_STRING = re.compile(r"[ \t\r\n\d+\-.,:eEtrufalsn]*", re.ASCII), re.compile(r'[^"\\\x00-\x1f]*')
_JSON_BETWEEN = re.compile(r"[ \t\r\n,:]*")


class ToolCallParser:
    """Takes the output's text as it comes apart: what is said to the user, and calls.

    What may begin a call is held back until it is decided; what turns out to be none is given back as text. Each call
    is given whole. No decision hangs on how the text was cut.

    Attributes:
      num_calls: found so far.
    """

    def __init__(self, use: ToolUse):
        self._format, self._parallel = use.format, use.parallel
        # Where nothing marks a call, any JSON object with a name and parameters would be one.
        self._names = None if use.format.opening else frozenset(use.names)
        self._said: list[str] = []
        self._found: list[dict[str, Any]] = []
        self._held = ""
        """Not decided on: a call begins with its opening, or with what separates it from the one before."""
        self._gap: str | None = None
        """White space behind a call, which is said when text follows and not when a call does; None behind text."""
        self._takes_more = not use.format.opening
        """The next value, if one begins here, is a call without an opening of its own."""
        self._opened = self._in_list = False
        self._value: _JsonObject | None = None
        self._name: str | None = None
        """Of the call in work, where it stands in front of the arguments."""
        self.num_calls = 0

    def feed(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Text for the user, and calls as OpenAI's objects."""
        return self._work(text, ended=False)

    def end(self) -> tuple[str, list[dict[str, Any]]]:
        """What is still held back."""
        return self._work("", ended=True)

    def _work(self, text: str, ended: bool) -> tuple[str, list[dict[str, Any]]]:
        self._held += text
        while self._step(ended):
            pass
        said, found = "".join(self._said), self._found
        self._said, self._found = [], []
        return said, found

    def _step(self, ended: bool) -> bool:
        """Decide on the beginning of what is held; False when more text is needed for that, or none is left."""
        if self._value is not None:
            return self._step_in_value(ended)
        if self._opened:
            return self._step_in_head(ended)
        if self._takes_more:
            return self._step_between_values(ended)
        return self._step_in_text(ended)

    def _step_in_text(self, ended: bool) -> bool:
        opening = self._format.opening
        if not opening:
            self._say(len(self._held))
            return False
        start = self._held.find(opening)
        if start < 0:
            self._say(len(self._held) - (0 if ended else _beginning_at_the_end(self._held, opening)))
            return False
        self._say(start)
        self._opened = True
        return True

    def _step_in_head(self, ended: bool) -> bool:
        """Behind an opening, in front of a brace."""
        named = self._format.as_list
        begin = len(self._format.opening)
        brace = self._held.find("{", begin, begin + _LONGEST_HEAD + 1)
        if brace < 0:
            so_far = _NAMED_HEAD_SO_FAR if named else _HEAD_SO_FAR
            if not ended and len(self._held) - begin <= _LONGEST_HEAD and so_far.fullmatch(self._held, begin):
                return False
            return self._is_no_call()
        head = (_NAMED_HEAD if named else _HEAD).fullmatch(self._held, begin, brace)
        if head is None:
            return self._is_no_call()
        self._in_list = head["list"] is not None
        self._name = head["name"] if named else None
        self._value = _JsonObject(brace)
        return True

    def _step_between_values(self, ended: bool) -> bool:
        """Where another call may stand without an opening of its own."""
        place = (_SPACE if self._gap is None else _SEPARATORS).match(self._held).end()
        if place == len(self._held) and not ended:
            return False
        if self._held.startswith("{", place):
            self._name, self._value = None, _JsonObject(place)
            return True
        if self._gap is not None and (place == len(self._held) or self._in_list and self._held[place] == "]"):
            self._held = self._held[place + 1 :]
        self._takes_more = self._in_list = False
        return True

    def _step_in_value(self, ended: bool) -> bool:
        value = self._value
        if value.end is None and not value.goes_on(self._held):
            return self._is_no_call()
        if value.end is None:
            return ended and self._is_no_call()
        if value.call is None:
            value.call = self._call(self._held[value.start : value.end])
            if value.call is None:
                return self._is_no_call()
        end, takes_more = value.end, self._name is None
        if self._format.closing:
            end, takes_more = self._behind_closing(value.end)
            if end is None:
                return self._is_no_call()
            if end == len(self._held) and takes_more and not ended:
                return False
        self._held, self._gap = self._held[end:], ""
        self._value, self._opened, self._takes_more = None, False, takes_more
        self._in_list &= takes_more
        if self._parallel or self.num_calls == 0:
            self._found.append(value.call | {"index": self.num_calls})
            self.num_calls += 1
        return True

    def _behind_closing(self, place: int) -> tuple[int | None, bool]:
        """Where a call ends whose value ends at `place`, and whether more of this opening's is to come. None when what
        follows is neither its closing nor another value."""
        held, closing = self._held, self._format.closing
        end = _SPACE.match(held, place).end()
        if self._in_list and held.startswith("]", end):
            end = _SPACE.match(held, end + 1).end()
        if held.startswith(closing, end):
            return end + len(closing), False
        if closing.startswith(held[end:]):
            return len(held), True
        end = _SEPARATORS.match(held, place).end()
        if end == len(held):
            return end, True
        return (place, True) if held[end] == "{" else (None, False)

    def _is_no_call(self) -> bool:
        """What is held does not begin with a call: its opening is said, and what comes behind is looked at as text."""
        length = len(self._format.opening) if self._opened else self._value.start + 1
        self._value, self._opened, self._takes_more, self._in_list = None, False, False, False
        self._say(length)
        return True

    def _say(self, length: int) -> None:
        text, self._held = self._held[:length], self._held[length:]
        if self._gap is not None and not text.strip():
            self._gap += text
        else:
            self._said.append((self._gap or "") + text)
            self._gap = None

    def _call(self, text: str) -> dict[str, Any] | None:
        """A call out of its JSON; None when it is something else."""
        try:
            members = _members(text)
        except (ValueError, RecursionError):
            return None
        name, arguments = self._name, text
        if name is None:
            absent = None, ""
            name, _ = members.get("name", absent)
            value, arguments = members.get("arguments") or members.get("parameters", absent)
            if not isinstance(name, str) or not NAME.fullmatch(name) or not isinstance(value, dict):
                return None
        if self._names is not None and name not in self._names:
            return None
        function = {"name": name, "arguments": arguments}
        return {"id": self._format.call_id(), "type": "function", "function": function}


class _JsonObject:
    """Finds where a JSON object ends, in a text that grows; each character is looked at once.

    Attributes:
      start / end: in the text; the end is None until it is found. call: what it was found to say.
    """

    def __init__(self, start: int):
        self.start, self.end = start, None
        self.call: dict[str, Any] | None = None
        self._place, self._depth, self._in_string = start, 0, False

    def goes_on(self, text: str) -> bool:
        """False for what is no JSON; what passes need not be any either, as only strings and brackets are looked at."""
        while self.end is None:
            run = _JSON_IN_STRING if self._in_string else _JSON_OUTSIDE
            self._place = run.match(text, self._place).end()
            if self._place == len(text):
                return True
            sign = text[self._place]
            if self._in_string and sign == "\\":
                if self._place + 1 == len(text):
                    return True
                self._place += 2
                continue
            self._place += 1
            if sign == '"':
                self._in_string = not self._in_string
            elif self._in_string or sign not in "{}[]":
                return False
            else:
                self._depth += 1 if sign in "{[" else -1
                self.end = self._place if self._depth == 0 else None
        return True


def _beginning_at_the_end(text: str, wanted: str) -> int:
    """Characters at the end of `text` that may begin `wanted`."""
    longest = min(len(text), len(wanted) - 1)
    return next((n for n in range(longest, 0, -1) if wanted.startswith(text[-n:])), 0)


# Of numbers only the text is used: as floats they may have any length.
_DECODER = json.JSONDecoder(parse_int=float, parse_constant=refuse_constant)


def _members(text: str) -> dict[str, tuple[Any, str]]:
    """The members of a JSON object, each value with its own text. Raises ValueError."""
    if not isinstance(_DECODER.decode(text), dict):
        raise ValueError("no object")
    members = {}
    place = _JSON_BETWEEN.match(text, 1).end()
    while text[place] == '"':
        key, place = _DECODER.raw_decode(text, place)
        place = _JSON_BETWEEN.match(text, place).end()
        value, end = _DECODER.raw_decode(text, place)
        members[key] = value, text[place:end]
        place = _JSON_BETWEEN.match(text, end).end()
    return members
