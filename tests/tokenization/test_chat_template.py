"""Chat templates: the same text as transformers, inert content, and templates that misbehave."""

import time

import pytest

from jaxkv.core.errors import CheckpointError, RequestError
from jaxkv.tokenization import chat_template
from jaxkv.tokenization.chat_template import ChatTemplate

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
LLAMA2 = """{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}\
{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}\
{% set system_message = false %}{% endif %}
{% for message in loop_messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('roles must alternate') }}
    {% endif %}
    {% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content']
       if loop.first and system_message else message['content'] %}
    {%- if message['role'] == 'user' -%}
        {{ bos_token + '[INST] ' + content | trim + ' [/INST]' }}
    {%- else -%}
        {{ ' ' ~ content | trim ~ ' ' ~ eos_token }}
    {%- endif -%}
{% endfor %}"""
FANCY = """{%- set ns = namespace(last=-1, seen='') -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' %}{% set ns.last = loop.index0 %}{% continue %}{% endif -%}
{%- set ns.seen = ns.seen ~ m.role ~ loop.length ~ loop.last -%}
{% generation %}{{ m | tojson(indent=1) }}{% endgeneration %}
{%- if loop.index > 3 %}{% break %}{% endif %}
{%- endfor -%}
{{ ns.seen }}|{{ ns.last }}|{{ strftime_now('%Y') | length }}|{{ (tools or []) | length }}|{{ dict(a=1).items() | list }}
{%- for key, value in {'x': 1}.items() %}{{ key }}{{ value * 3 }}{% endfor -%}
{% macro shout(x) %}{{ x | upper }}!{% endmacro %}{{ shout('hey') }}
{%- if add_generation_prompt %}[go]{% endif %}"""
CHAT = [
    {"role": "system", "content": "Be <b>brief</b> & 'kind'"},
    {"role": "user", "content": "  hi  \n"},
    {"role": "assistant", "content": "héllo 你好"},
    {"role": "user", "content": "bye"},
]


def render(source, messages=CHAT, **kwargs):
    return ChatTemplate(source, SPECIAL, "test").render(messages, **kwargs)


@pytest.mark.parametrize("source", [LLAMA2, FANCY])
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_same_text_as_transformers(source, add_generation_prompt):
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    [expected], _ = utils.render_jinja_template(
        [CHAT], chat_template=source, add_generation_prompt=add_generation_prompt, **SPECIAL
    )
    assert len(expected) > 50
    assert render(source, add_generation_prompt=add_generation_prompt) == expected


def test_what_users_write_is_never_a_template():
    evil = "{{ 7 * 7 }}{% for x in range(10) %}x{% endfor %}{{ ''.__class__ }}{# gone? #}"
    assert render("{{ messages[0].content }}", [{"role": "user", "content": evil}]) == evil


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% set _ = messages.append(1) %}",
        "{{ messages[0].clear() }}",
    ],
)
def test_templates_cannot_reach_python_or_change_the_conversation(source):
    messages = [{"role": "user", "content": "x"}]
    try:
        assert render(source, messages) == ""
    except RequestError as error:
        assert "chat template" in str(error)
    assert messages == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    "source, reason",
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "loop rounds"),
        ("{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}", "longer"),
        ("{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}", "longer"),
        ("{% set x = messages[0].content * 9999999999 %}", "longer"),
        ("{{ range(9999999999) | list }}", "Range too big"),
        ("{{ 9 ** 9999999999 }}{{ messages[0].n ** 99999999 }}", "out of bounds|overflow"),
        ("{% for i in range(99999) %}{{ messages[0].content * 9999 }}{% endfor %}", "longer"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "recursion"),
        ("{% for i in range(5) recursive %}{{ loop(range(5)) }}{% endfor %}", "recursion|loop rounds"),
    ],
)
def test_endless_and_huge_templates_end_soon_with_the_users_error(source, reason):
    begin = time.monotonic()
    with pytest.raises(RequestError, match=reason):
        render(source, [{"role": "user", "content": "x", "n": 9}])
    assert time.monotonic() - begin < 10


def test_the_round_budget_is_a_renderings_own(monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_LOOP_ROUNDS", 100)
    template = ChatTemplate("{% for i in range(90) %}{% endfor %}ok", {}, "test")
    assert [template.render(CHAT) for _ in range(5)] == ["ok"] * 5


@pytest.mark.parametrize(
    "source, messages, text",
    [
        ("{{ raise_exception('no system role') }}", CHAT, "no system role"),
        ("{{ messages[0]['content'] + 1 }}", CHAT, "cannot render"),
        ("{{ messages[9].content.x }}", CHAT, "cannot render"),
        ("{{ 1 / 0 }}{{ messages[0].content | int // 0 }}", CHAT, "cannot render"),
        ("x", [], "messages is empty"),
    ],
)
def test_failures_are_request_errors_about_messages(source, messages, text):
    with pytest.raises(RequestError, match=text) as error:
        render(source, messages)
    assert (error.value.param, error.value.status) == ("messages", 400)


def test_a_template_that_does_not_parse_is_the_checkpoints_fault():
    with pytest.raises(CheckpointError, match="test: the chat template does not parse"):
        ChatTemplate("{% for %}", {}, "test")


def test_continue_final_message_ends_inside_the_last_message():
    chat = [*CHAT, {"role": "assistant", "content": "Well, "}]
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    text = render(source, chat, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<assistant>Well, ")
    assert chat[-1]["content"] == "Well, "


@pytest.mark.parametrize(
    "source, messages, kwargs, text",
    [
        ("x", CHAT, {"add_generation_prompt": True}, "cannot both be true"),
        ("x", CHAT, {"add_generation_prompt": False}, "drops the end"),
        ("x", [{"role": "assistant", "content": None}], {"add_generation_prompt": False}, "needs a text"),
    ],
)
def test_continue_final_message_refusals(source, messages, kwargs, text):
    with pytest.raises(RequestError, match=text):
        render(source, messages, continue_final_message=True, **kwargs)


def test_a_model_without_template_says_so(small):
    with pytest.raises(RequestError, match="has no chat template"):
        small["byte_level"](chat_template=None).apply_chat_template(CHAT)
