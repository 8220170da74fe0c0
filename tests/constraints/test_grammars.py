"""Grammars on real tokenizers of both families: what the masks let through, at random, is what was asked for."""

import asyncio
import json
import os
import pathlib
import random
import re
import runpy
import signal
import threading
import time

import pytest

from jaxkv.constraints.compiler import ConstraintCompiler
from jaxkv.constraints.probe import Probe
from jaxkv.core.errors import RequestError
from jaxkv.core.request import SamplingParams, StructuredOutputs
from jaxkv.core.token_constraint import ConstraintError, allows, is_empty

SMALL = runpy.run_path(pathlib.Path(__file__).parents[1] / "small_tokenizers.py")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bé", "👋"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=["byte level", "sentencepiece"])
def tokenizer(request):
    return SMALL["byte_level"]() if request.param == "byte level" else SMALL["sentencepiece"]()


PADDING = 7  # ids of the model that the tokenizer does not know


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return ConstraintCompiler(
        tokenizer, vocab_size=tokenizer.vocab_size + PADDING, eos_token_ids=tokenizer.eos_token_ids
    )


def compiled(compiler, **wanted):
    return compiler.compile(SamplingParams(structured_outputs=StructuredOutputs(**wanted)))


def walk(constraint, tokenizer, seed, most=400):
    """A random text that the constraint lets through to its end."""
    rng, constraint, ids = random.Random(seed), constraint.copy(), []
    for _ in range(most):
        mask = constraint.mask()
        allowed = [i for i in range(tokenizer.vocab_size + PADDING) if allows(mask, i)]
        assert allowed and max(allowed) < tokenizer.vocab_size, "an id that the tokenizer does not know"
        token = rng.choice(allowed)
        constraint.accept((token,))
        if token == tokenizer.eos_token_id:
            return b"".join(tokenizer.token_bytes[i] for i in ids).decode()
        ids.append(token)
    raise AssertionError(f"no end after {most} tokens: {tokenizer.decode(ids)!r}")


@pytest.mark.parametrize("seed", range(5))
def test_json_schema(compiler, tokenizer, seed):
    value = json.loads(walk(compiled(compiler, json=SCHEMA), tokenizer, seed))
    assert value.keys() == {"name", "age", "tags"} and 0 <= value["age"] <= 150 and len(value["name"]) <= 5
    assert set(value["tags"]) <= {"a", "bé", "👋"} and len(value["tags"]) <= 2


def test_a_schema_as_text_is_the_same(compiler):
    assert compiled(compiler, json=json.dumps(SCHEMA)).mask() == compiled(compiler, json=SCHEMA).mask()


@pytest.mark.parametrize("seed", range(3))
def test_choice(compiler, tokenizer, seed):
    choices = ('yes "quoted"', "no\nline", "naïve 👋")
    assert walk(compiled(compiler, choice=choices), tokenizer, seed) in choices


@pytest.mark.parametrize("seed", range(3))
def test_regex(compiler, tokenizer, seed):
    pattern = r"[0-9]{4}-(0[1-9]|1[0-2])( é+x)?"
    assert re.fullmatch(pattern, walk(compiled(compiler, regex=pattern), tokenizer, seed))


@pytest.mark.parametrize(
    "grammar", ['start: NUMBER (" plus " NUMBER)*\nNUMBER: /[0-9]{1,3}/', 'root ::= [0-9] (" plus " [0-9])*']
)
def test_grammar_in_both_notations(compiler, tokenizer, grammar):
    assert re.fullmatch(r"\d{1,3}( plus \d{1,3})*", walk(compiled(compiler, grammar=grammar), tokenizer, 1, most=4000))


def test_json_object(compiler, tokenizer):
    """Random walks in free JSON hardly end; the beginning is enough: an object it is."""
    constraint = compiled(compiler, json_object=True).copy()
    constraint.accept(tokenizer.encode("{", add_special_tokens=False)[-1:])
    assert not is_empty(constraint.mask())
    with pytest.raises(ConstraintError, match="structured_outputs cannot go on"):
        constraint.accept(tokenizer.encode("7", add_special_tokens=False)[-1:])


def test_white_space_in_json_is_bounded(compiler, tokenizer):
    """A small model that may write any amount of it can go on with it for ever."""
    constraint = compiled(compiler, json=SCHEMA).copy()
    constraint.accept(tokenizer.encode("{", add_special_tokens=False)[-1:])
    space = tokenizer.encode("a  b", add_special_tokens=False)
    space = next(i for i in space if set(tokenizer.token_bytes[i]) == {0x20})
    for _ in range(100):
        if not allows(constraint.mask(), space):
            return
        constraint.accept((space,))
    raise AssertionError("100 tokens of white space were allowed")


def test_only_the_end_may_follow_a_complete_text(compiler, tokenizer):
    constraint = compiled(compiler, choice=("yes",)).copy()
    for token in tokenizer.encode("yes", add_special_tokens=False):
        if tokenizer.token_bytes[token].strip():
            constraint.accept((token,))
    mask = constraint.mask()
    assert [i for i in range(tokenizer.vocab_size) if allows(mask, i)] == [tokenizer.eos_token_id]
    constraint.accept((tokenizer.eos_token_id,))
    constraint.accept((5, 6))  # past the end, where a request ignores it
    assert not is_empty(constraint.mask())


def test_a_copy_goes_its_own_way(compiler, tokenizer):
    constraint = compiled(compiler, choice=("yes", "no")).copy()
    first = tokenizer.encode("y", add_special_tokens=False)[-1:]
    other = constraint.copy()
    before = other.mask()
    constraint.accept(first)
    assert other.mask() == before != constraint.mask()


def test_restrictions_hold_together(compiler, tokenizer):
    y = tokenizer.encode("y", add_special_tokens=False)[-1]
    both = compiler.compile(
        SamplingParams(structured_outputs=StructuredOutputs(choice=("y", "n")), allowed_token_ids=(y, 1, 2))
    )
    assert [i for i in range(tokenizer.vocab_size) if allows(both.mask(), i)] == [y] and not both.is_fixed
    neither = compiler.compile(
        SamplingParams(structured_outputs=StructuredOutputs(choice=("y",)), allowed_token_ids=(1,))
    )
    with pytest.raises(ConstraintError, match="leave no token"):
        neither.mask()


def test_bad_words_are_forbidden_alone_and_after_a_space(tokenizer, compiler):
    constraint = compiler.compile(SamplingParams(bad_words=("hello",)))
    for text in ("hello", " hello"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        now = constraint.copy()
        now.accept(ids[:-1])
        if text == "hello" or len(ids) == len(tokenizer.encode("hello", add_special_tokens=False)):
            assert not allows(now.mask(), ids[-1]), text


@pytest.mark.parametrize(
    "wanted, message",
    [
        ({"json": "{"}, "structured_outputs.json is not valid"),
        ({"json": "[1]"}, "a JSON Schema is an object"),
        ({"json": {"type": "strange"}}, "structured_outputs.json cannot be compiled"),
        ({"json": {"$ref": "http://example.com/schema"}}, "structured_outputs.json cannot be compiled"),
        ({"regex": "(a"}, "structured_outputs.regex cannot be compiled"),
        ({"regex": r"(?=a)b"}, "structured_outputs.regex cannot be compiled"),
        ({"grammar": "start: nothing"}, "structured_outputs.grammar cannot be compiled"),
        ({"grammar": "root ::= ("}, "structured_outputs.grammar"),
        ({"grammar": ""}, "structured_outputs.grammar"),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_name(compiler, wanted, message):
    with pytest.raises(RequestError, match=re.escape(message)) as caught:
        compiled(compiler, **wanted)
    assert caught.value.param == "structured_outputs" and len(str(caught.value)) < 700


HOSTILE = {
    "no end of time and memory": {"json": {"type": "integer", "multipleOf": 99_999_989}},
    "the same in parts": {"json": {"allOf": [{"type": "integer", "multipleOf": m} for m in (9973, 9967)]}},
    "a stack of rules": {"grammar": "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(7000)) + '\nr7000: "a"'},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_would_end_or_hold_up_the_process_is_refused(compiler, tokenizer, name):
    begin = time.monotonic()
    with pytest.raises(RequestError, match="too much time or memory"):
        compiled(compiler, **HOSTILE[name])
    assert time.monotonic() - begin < 30  # 3 seconds on a machine that has nothing else to do
    begin = time.monotonic()
    with pytest.raises(RequestError, match="too much time or memory"):
        compiled(compiler, **HOSTILE[name])
    assert time.monotonic() - begin < 1, "it was tried again"
    assert walk(compiled(compiler, regex=f"{len(name)}"), tokenizer, 1) == str(len(name))


def test_many_choices_with_a_common_beginning(compiler, tokenizer):
    choices = tuple(f"choice {i} (a.b)*" for i in range(4000))
    assert walk(compiled(compiler, choice=choices), tokenizer, 3) in choices


def test_schemas_that_are_booleans(compiler):
    assert compiled(compiler, json=True).mask() == compiled(compiler, json={}).mask()
    assert compiled(compiler, json="true").mask() == compiled(compiler, json={}).mask()
    for wanted in (False, "false"):
        with pytest.raises(RequestError, match="no text follows the schema false"):
            compiled(compiler, json=wanted)


def test_a_deep_schema_is_refused_not_fatal(compiler):
    deep = {"type": "object"}
    for _ in range(5000):
        deep = {"properties": {"a": deep}}
    with pytest.raises(RequestError, match="structured_outputs.json"):
        compiled(compiler, json=deep)


def test_grammars_are_remembered(compiler):
    first = compiled(compiler, regex="[ab]{3}")
    assert compiled(compiler, regex="[ab]{3}") is first
    for i in range(70):
        compiled(compiler, regex=f"x{i}")
    assert compiled(compiler, regex="[ab]{3}") is not first


@pytest.mark.parametrize("form", ["choice", "regex", "grammar", "json"])
def test_a_literal_that_reads_like_a_special_token_is_text(compiler, tokenizer, form):
    special = tokenizer.fast.id_to_token(min(compiler._grammars._eos_token_ids))
    text = f"ab{special}cd"
    wanted = {
        "choice": {"choice": (text, f"x{special}")},
        "regex": {"regex": re.escape(text)},
        "grammar": {"grammar": f'start: "{text}"'},
        "json": {"json": {"enum": [text]}},
    }[form]
    texts = {walk(compiled(compiler, **wanted), tokenizer, seed) for seed in range(5)}
    assert texts and texts <= {text, f"x{special}", json.dumps(text, ensure_ascii=False)}


@pytest.mark.parametrize("reference", ["NAME", "<[ID]>", "<[1-9999]>", "<[*]>", "<[^1]>"])
def test_an_end_token_in_a_grammar_is_refused(compiler, tokenizer, reference):
    (end,) = compiler._grammars._eos_token_ids[:1]
    reference = reference.replace("NAME", tokenizer.fast.id_to_token(end)).replace("ID", str(end))
    reference = reference.replace("^1", f"^{end + 1}")
    with pytest.raises(RequestError, match="ends the output"):
        compiled(compiler, grammar=f'start: "ab" {reference} "cd"')


def test_integers_that_would_lose_digits_are_refused(compiler):
    with pytest.raises(RequestError, match="more digits"):
        compiled(compiler, json={"const": 123456789012345678901234567890})


def test_what_is_known_does_not_wait_for_what_takes_long(compiler, monkeypatch):
    known = compiled(compiler, choice=("yes", "no"))
    refused = StructuredOutputs(regex="[")
    with pytest.raises(RequestError):
        compiler.compile(SamplingParams(structured_outputs=refused))
    may_end = threading.Event()
    monkeypatch.setattr(compiler._grammars._short, "verdict", lambda grammar: "" if may_end.wait(60) else "never")
    slow = threading.Thread(target=compiled, args=(compiler,), kwargs={"regex": "slow one"})
    slow.start()
    try:
        assert compiled(compiler, choice=("yes", "no")) is known
        assert compiler.compile(SamplingParams(allowed_token_ids=(1, 2))).is_fixed
        assert asyncio.run(compiler.compile_async(SamplingParams(bad_words=("yes",)))) is not None
        with pytest.raises(RequestError):
            compiler.compile(SamplingParams(structured_outputs=refused))
        assert slow.is_alive()
    finally:
        may_end.set()
        slow.join()


def test_many_threads_compile_at_once(compiler, tokenizer):
    results, errors = {}, []

    def work(i):
        try:
            results[i] = walk(compiled(compiler, regex=f"[0-9]{{{i + 1}}}"), tokenizer, i)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and all(re.fullmatch(rf"\d{{{i + 1}}}", results[i]) for i in range(8))


def test_new_grammars_pass_hostile_ones(compiler):
    """Of which two, each its three seconds long, were asked for before."""
    answered = []

    async def ask(name, **wanted):
        try:
            await compiler.compile_async(SamplingParams(structured_outputs=StructuredOutputs(**wanted)))
            answered.append(name)
        except RequestError:
            answered.append("refused")

    async def main():
        hostile = [{"type": "integer", "multipleOf": 99_999_971 - 2 * i} for i in range(2)]
        tasks = [asyncio.create_task(ask("hostile", json=schema)) for schema in hostile]
        await asyncio.sleep(0.1)
        await asyncio.gather(*tasks, ask("honest", regex="[a-f]{5}"))

    asyncio.run(main())
    assert answered == ["honest"] + ["refused"] * 2


def test_what_takes_longer_than_most_is_still_compiled(compiler, monkeypatch):
    monkeypatch.setattr(compiler._grammars._short, "verdict", lambda grammar: None)
    assert compiled(compiler, regex="[0-9]{1,41}x").mask()
    with pytest.raises(RequestError, match="structured_outputs.regex cannot be compiled"):
        compiled(compiler, regex="(a")


def test_a_busy_machine_does_not_decide_what_is_refused(tokenizer):
    """The bound is on CPU time: one that waits for its turn is not held up by itself."""
    compiler = ConstraintCompiler(tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=tokenizer.eos_token_ids)
    assert compiled(compiler, regex="begin")
    probe = compiler._grammars._short._process
    os.kill(probe.pid, signal.SIGSTOP)
    threading.Timer(1.0, os.kill, (probe.pid, signal.SIGCONT)).start()
    begin = time.monotonic()
    assert compiled(compiler, regex="[0-9]{1,40}x").mask()
    assert time.monotonic() - begin > 0.9 and compiler._grammars._long._process is None
    compiler.close()


def test_one_process_tries_all_grammars_and_what_they_do_not_survive_says_nothing(tokenizer, capfd):
    compiler = ConstraintCompiler(tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=tokenizer.eos_token_ids)
    assert compiled(compiler, regex="begin")
    probe = compiler._grammars._short._process
    for name in ("no end of time and memory", "a stack of rules"):
        with pytest.raises(RequestError, match="too much time or memory"):
            compiled(compiler, **HOSTILE[name])
    assert compiler._grammars._short._process is probe and probe.poll() is None
    compiler.close()
    assert probe.returncode == -signal.SIGKILL and capfd.readouterr() == ("", "")


def test_closing_ends_what_is_being_tried(tokenizer):
    compiler = ConstraintCompiler(tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=tokenizer.eos_token_ids)
    hostile = SamplingParams(structured_outputs=StructuredOutputs(**HOSTILE["no end of time and memory"]))
    ended = []

    def ask():
        with pytest.raises(RequestError, match="too much time or memory"):
            compiler.compile(hostile)
        ended.append(time.monotonic())

    thread = threading.Thread(target=ask)
    thread.start()
    while compiler._grammars._long._process is None:
        time.sleep(0.01)
    time.sleep(0.5)
    begin = time.monotonic()
    compiler.close()
    thread.join(20)
    assert ended[0] - begin < 1


def test_a_probe_that_cannot_begin_is_an_error_and_leaves_nothing(monkeypatch):
    probe = Probe(lambda: {"limits": {"no such limit": 1}}, seconds=3)
    with pytest.raises(RuntimeError, match="did not begin"):
        probe.verdict("anything")
    assert probe._process is None
