"""Finding calls in what a model writes: in every form, however it is cut, and nothing else."""

import json
import time

import hypothesis
import pytest
from hypothesis import strategies

from jaxkv.server.tool_parser import ToolCallParser
from jaxkv.server.tools import ToolUse
from tests.support.tool_formats import CALL, FORMATS, MARKED, TOOLS, written


def parsed_parts(name, parts, parallel=True):
    """What is said, and calls: their places, names and arguments as written."""
    parser = ToolCallParser(ToolUse(FORMATS[name], TOOLS, (), parallel))
    said, calls = "", []
    for more, found in [*map(parser.feed, parts), parser.end()]:
        said, calls = said + more, calls + found
    assert parser.num_calls == len(calls)
    return said, [(c["index"], c["function"]["name"], c["function"]["arguments"]) for c in calls]


def parsed(name, text, size, parallel=True):
    said, calls = parsed_parts(name, [text[i : i + size] for i in range(0, len(text), size)], parallel)
    return said, [(index, function, json.loads(arguments)) for index, function, arguments in calls]


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_found_however_the_text_is_cut(name, size):
    other = {"name": "now", "arguments": {}}
    assert parsed(name, written(name, CALL, other), size) == (
        "", [(0, "get_weather", CALL["arguments"]), (1, "now", {})],
    )  # fmt: skip
    assert parsed(name, written(name, CALL, other), size, parallel=False)[1] == [(0, "get_weather", CALL["arguments"])]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("name", MARKED)
def test_text_before_a_call_is_said(name, size):
    assert parsed(name, f"I look. {written(name, CALL)}", size) == ("I look. ", [(0, "get_weather", CALL["arguments"])])


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    "name, text",
    [
        ("hermes", "a < b and <tool_cal"), ("hermes", "<tool_call>\nnot JSON\n</tool_call> and on"),
        ("hermes", '<tool_call>\n{"name": 7}\n</tool_call>'), ("hermes", '<tool_call>\n{"name": "now"'), ("hermes", ""),
        ("hermes", '<tool_call>\n{"name": "now"}\n</tool_call>'), ("mistral", '[TOOL_CALLS] [{"name": "now"}]'),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"x": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": {}} and on'), ("hermes", "<tool_call>" + "[ " * 300),
        ("hermes", '<tool_call>{"name": "n\\ud800", "arguments": {}}</tool_call>'),
        *[("hermes", f'<tool_call>{{"name": "now", "arguments": {value}}}</tool_call>') for value in ("[]", '"a"', "null")],
        ("mistral", "[TOOL_CALLS]now"), ("mistral", "[TOOL_CALLS]now[ARGS]"), ("mistral", "[TOOL_CALLS]now[ARGS]{a}"),
        ("mistral", "[TOOL_CALLS]not now{}"), ("mistral", "[TOOL_CALLS]" + "a" * 300 + "{}"),
        ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": 1'),
        ("llama", '{"name": "Bob", "age": 5}'), ("llama", '{"name": "now", "age": 5}'), ("llama", '{"name": "now"}'),
        ("llama", '{"name": "other", "parameters": {}}'), ("llama", '{"name": "now", "parameters": "x"}'),
        ("llama", '{"a": 1} {"name": "now", "parameters": {}}'), ("llama", '{"name": "now", "parameters": {}'),
        ("mistral", "[TOOL_CALLS] what"), ("mistral", "[TOOL_CALLS"), ("mistral", "[TOOL_CALLS] []"),
        ("llama", '{"city": "Bern"}'), ("llama", "{"), ("llama", ' said {"name": "now"}'), ("llama", "\n\n"),
        ("hermes", "<tool_call>" + "[" * 5000 + "</tool_call>"),
    ],
)  # fmt: skip
def test_what_is_no_call_is_text_and_none_of_it_is_lost(name, text, size):
    assert parsed(name, text, size) == (text, [])


@pytest.mark.parametrize("size", [1, 2, 1000])
@pytest.mark.parametrize("name", MARKED)
def test_marked_calls_of_other_functions_are_passed_on(name, size):
    other = {"name": "not_among_them", "arguments": {"a": [1]}}
    assert parsed(name, written(name, other), size) == ("", [(0, "not_among_them", {"a": [1]})])


@pytest.mark.parametrize("size", [1, 2, 1000])
@pytest.mark.parametrize(
    "name, text, said",
    [
        ("hermes", "one <tool_call>{call}</tool_call> two  <tool_call>{call}</tool_call>  three", "one  two    three"),
        ("hermes", "<tool_call>{call}</tool_call> \n <tool_call> {call} </tool_call> \n", ""),
        ("hermes", "<tool_call>{call}</tool_call><tool_call>{call}</tool_call> <tool_call>{", " <tool_call>{"),
        ("hermes", "<tool_call>{call}</tool_call> <tool_call>\n{call}\n", ""),
        ("hermes", "<tool_call>{call}</tool_call> <tool_call>\n{call}\n</tool", ""),
        ("hermes", "<tool_call>\n{call}\n{call}\n</tool_call>", ""),
        ("hermes", "<tool_call>[{call}, {call}]</tool_call> so", " so"),
        ("hermes", "<tool_call>{call}</tool_call></tool_call><tool_call>{call}</tool_call>", "</tool_call>"),
        ("mistral", "[TOOL_CALLS] [{call}, {call}] so", " so"),
        ("mistral", "[TOOL_CALLS] [{call}, {call}, ", ""),
        ("mistral", '[TOOL_CALLS] [{call}, {call}, {"name": "no', ', {"name": "no'),
        ("mistral", "a [TOOL_CALLS][{call}] b [TOOL_CALLS][{call}] c", "a  b  c"),
        ("mistral", "[TOOL_CALLS]now[ARGS]{ARGUMENTS}[TOOL_CALLS]now{ARGUMENTS} c", " c"),
        ("mistral", "[TOOL_CALLS]now[CALL_ID]a1B2c3D4e[ARGS]{ARGUMENTS}\n[TOOL_CALLS] now {ARGUMENTS}", ""),
        ("mistral", "[TOOL_CALLS] {call}; {call}", ""),
        ("llama", '{call}; {call}\n{"name": "now", "par', '\n{"name": "now", "par'),
        ("llama", "\n{call}, {call} and so", " and so"),
    ],
)  # fmt: skip
def test_calls_text_and_torn_calls_between_each_other(name, text, said, size):
    arguments = '{ "of" :0.10,"é\\u00e9":"</tool_call> [TOOL_CALLS] }\\"\\\\" , "x":[1e400]}'
    call = '{"name": "now" , "arguments" : ' + arguments + ' ,"more":{}}'
    text = text.replace("{call}", call).replace("{ARGUMENTS}", arguments)
    parts = [text[i : i + size] for i in range(0, len(text), size)]
    assert parsed_parts(name, parts) == (said, [(0, "now", arguments), (1, "now", arguments)])
    assert parsed_parts(name, parts, parallel=False) == (said, [(0, "now", arguments)])


PIECES = strategies.sampled_from(
    [
        *[written(name, *calls) for name in FORMATS for calls in ([CALL], [CALL, CALL])],
        *[
            "<tool_call>",
            "</tool_call>",
            "[TOOL_CALLS]",
            "now",
            "[ARGS]",
            "[CALL_ID]a1",
            "[",
            "]",
            "{",
            "}",
            "{}",
            '"',
            "\\",
        ],
        *['{"name": "now", "arguments": {}}', '{"name": "Bob"}', '{"name": "now"', "<tool", "one", ",", ";", "é", "7"],
        *[" ", "  ", "\n"] * 3,
    ]
)


@hypothesis.settings(max_examples=1000, deadline=None)
@hypothesis.given(name=strategies.sampled_from(list(FORMATS)), pieces=strategies.lists(PIECES, max_size=12),
                  parallel=strategies.booleans(), data=strategies.data())  # fmt: skip
def test_a_stream_says_and_calls_what_the_whole_does(name, pieces, parallel, data):
    text = "".join(pieces)
    cuts = sorted(data.draw(strategies.lists(strategies.integers(0, len(text)), max_size=20)))
    whole = parsed_parts(name, [text], parallel)
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parsed_parts(name, parts, parallel) == whole == parsed_parts(name, text, parallel)


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(name=strategies.sampled_from(MARKED), data=strategies.data(),
                  texts=strategies.lists(strategies.text("a <\n,", max_size=4), max_size=6))  # fmt: skip
def test_all_is_said_but_white_space_that_only_parts_calls(name, texts, data):
    calls = data.draw(strategies.integers(0, len(texts)))
    text = "".join(said + (written(name, CALL) if i < calls else "") for i, said in enumerate(texts))
    last = "".join(texts[calls:])
    parts = texts[:1] + [said for said in texts[1:calls] if said.strip()] + ([last] if last.strip() else [])
    said, found = parsed_parts(name, [text])
    assert (said, len(found)) == ("".join(parts) if calls else last, calls)


@pytest.mark.parametrize("name", FORMATS)
def test_the_time_to_find_calls_grows_as_the_text_does(name):
    long = {"name": "now", "arguments": {"x": "a{" * 20_000}}
    begin = time.process_time()
    assert len(parsed(name, written(name, long), 4)[1]) == 1
    for text in (
        "<tool_call>" * 5_000,
        '<tool_call>{"' * 5_000,
        '[TOOL_CALLS][{"name' * 5_000,
        "[TOOL_CALLS]a" * 5_000,
    ):
        assert parsed(name, text, 4) == (text, [])
    assert time.process_time() - begin < 5
