"""LLM: outputs in the prompts' order, stop strings, streaming, errors before anything runs."""

import os
import pathlib
import runpy
import subprocess
import sys

import pytest

from jaxkv.core.errors import ConfigError, RequestError
from jaxkv.core.request import FinishReason, SamplingParams, StructuredOutputs
from jaxkv.llm import LLM

FAKE = runpy.run_path(str(pathlib.Path(__file__).parent / "fake_engine.py"))
SMALL = runpy.run_path(str(pathlib.Path(__file__).parent / "small_tokenizers.py"))
TOKENIZER = SMALL["byte_level"]()


def make(tokens_per_step=3, suffix=" done"):
    """An LLM whose model repeats the prompt, then says ' done'."""

    def script(request):
        text = TOKENIZER.decode(request.prompt_token_ids, skip_special_tokens=False)
        return [*TOKENIZER.encode(text + suffix, add_special_tokens=False)[:200], TOKENIZER.eos_token_id]

    engine = FAKE["FakeEngine"](script, eos=(TOKENIZER.eos_token_id,), tokens_per_step=tokens_per_step)
    return LLM.from_started(FAKE["fake_started"](engine, TOKENIZER))


LONG = SamplingParams(max_tokens=200)


def numbered(request):
    """A script: the prompt, and which of n sequences it is."""
    number = request.request_id.partition("#")[2] or "0"
    text = TOKENIZER.decode(request.prompt_token_ids, skip_special_tokens=False) + f" {number}"
    return [*TOKENIZER.encode(text, add_special_tokens=False), TOKENIZER.eos_token_id]


def test_one_prompt_of_each_kind():
    llm = make()
    [output] = llm.generate("héllo 👋", LONG)
    assert (output.prompt, output.text) == ("héllo 👋", "héllo 👋 done")
    assert output.prompt_token_ids == tuple(TOKENIZER.encode("héllo 👋"))
    assert (output.finish_reason, output.stop_reason, output.logprobs) == (FinishReason.STOP, None, None)
    assert output.token_ids[-1] == TOKENIZER.eos_token_id
    assert output.num_cached_tokens == len(output.prompt_token_ids) // 2
    [output] = llm.generate(TOKENIZER.encode("ab"), LONG)
    assert (output.prompt, output.text) == (None, "ab done")


def test_outputs_come_in_the_order_of_prompts_however_long_they_run():
    prompts = ["x" * n for n in (30, 1, 20, 2, 10)]
    outputs = make().generate([*prompts, TOKENIZER.encode("ids")], LONG)
    assert [output.text for output in outputs] == [f"{prompt} done" for prompt in (*prompts, "ids")]


def test_what_the_output_must_be_becomes_a_constraint():
    llm = make()
    wanted = SamplingParams(max_tokens=5, structured_outputs=StructuredOutputs(choice=("yes", "no")))
    llm.generate(["a", "b"], [wanted, SamplingParams(max_tokens=5)])
    limited, free = llm.started.engine.added
    assert limited.constraint is not None and free.constraint is None
    with pytest.raises(RequestError, match="structured_outputs.regex cannot be compiled"):
        llm.generate("a", SamplingParams(structured_outputs=StructuredOutputs(regex="(")))


def test_one_that_cannot_go_on_says_so_and_the_others_end_well():
    llm = make()
    llm.started.engine.dead_ends = 3
    wanted = SamplingParams(max_tokens=50, structured_outputs=StructuredOutputs(regex="[a-z]+"))
    ended, well = llm.generate(["a", "b"], [wanted, LONG])
    assert (ended.finish_reason, ended.outputs[0].error) == (FinishReason.ERROR, "it became too complex")
    assert (well.text, well.outputs[0].error) == ("b done", None)


def test_a_params_for_each_prompt_and_default_ones():
    llm = make()
    outputs = llm.generate(["abc", "abc"], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=2, logprobs=1)])
    assert [len(output.token_ids) for output in outputs] == [1, 2]
    assert [entry.token_id for entry in outputs[1].logprobs] == list(outputs[1].token_ids)
    assert outputs[0].finish_reason is FinishReason.LENGTH
    [output] = llm.generate("x" * 50)
    assert len(output.token_ids) == 16


def test_a_prompts_n_sequences_stand_in_its_output():
    llm = make()
    llm.started.engine.script = numbered
    params = [SamplingParams(n=3, seed=7, max_tokens=99, logprobs=0), LONG, SamplingParams(n=2, seed=2**31 - 1)]
    first, second, third = llm.generate(["abcd", "xyz", "uv"], params)
    assert [output.text for output in first.outputs] == ["abcd 0", "abcd 1", "abcd 2"]
    assert [len(output.logprobs) for output in first.outputs] == [len(output.token_ids) for output in first.outputs]
    assert first.text == "abcd 0" and first.finish_reason is FinishReason.STOP and first.stop_reason is None
    assert (first.token_ids, first.logprobs) == (first.outputs[0].token_ids, first.outputs[0].logprobs)
    assert [output.text for output in second.outputs] == ["xyz 0"] and second.prompt == "xyz"
    assert [output.text for output in third.outputs] == ["uv 0", "uv 1"]
    added = llm.started.engine.added
    assert [request.request_id for request in added] == [
        "offline-0", "offline-0#1", "offline-0#2", "offline-1", "offline-2", "offline-2#1",
    ]  # fmt: skip
    assert [request.sampling.seed for request in added] == [7, 8, 9, None, 2**31 - 1, 0]
    assert {request.sampling.n for request in added} == {1}


def test_a_stop_string_ends_its_own_sequence_only():
    llm = make(tokens_per_step=1)
    llm.started.engine.script = numbered
    [output] = llm.generate("x", SamplingParams(n=2, max_tokens=100, stop=("0",)))
    assert [(one.text, one.stop_reason) for one in output.outputs] == [("x ", "0"), ("x 1", None)]
    assert llm.started.engine.finished == ["offline-0"]


def test_a_stream_is_one_sequence():
    llm = make()
    with pytest.raises(RequestError, match="n is 2; a stream gives one sequence"):
        next(llm.stream("abc", SamplingParams(n=2)))
    assert llm.started.engine.added == []


def test_prompt_logprobs_come_with_the_output():
    llm = make(tokens_per_step=1)
    params = [SamplingParams(max_tokens=1, prompt_logprobs=0), SamplingParams(max_tokens=4, prompt_logprobs=0), LONG]
    first, second, silent = llm.generate(["abc"] * 3, params)
    for output in (first, second):
        assert output.prompt_logprobs[0] is None
        assert tuple(entry.token_id for entry in output.prompt_logprobs[1:]) == output.prompt_token_ids[1:]
    assert silent.prompt_logprobs is None
    llm.generate("abc", SamplingParams(logit_bias={5: 1.5}, presence_penalty=1))
    assert llm.started.engine.added[-1].sampling.logit_bias == ((5, 1.5),)


def test_stop_strings_end_the_engines_request_and_cut_the_tokens():
    llm = make(tokens_per_step=64)
    [output] = llm.generate("a b c d", SamplingParams(max_tokens=100, stop=("c",), logprobs=0))
    assert (output.text, output.finish_reason, output.stop_reason) == ("a b ", FinishReason.STOP, "c")
    assert TOKENIZER.decode(output.token_ids).endswith("c") and len(output.logprobs) == len(output.token_ids)
    # That step ended the request by itself too; in steps of one token it is the engine that must be told.
    llm = make(tokens_per_step=1)
    assert llm.generate("a b c d", SamplingParams(max_tokens=100, stop=("c",)))[0].text == "a b "
    assert llm.started.engine.finished == ["offline-0"]


def test_chat_with_one_conversation_or_several():
    llm = make()
    hi, bye = ([{"role": "user", "content": text}] for text in ("hi", "bye"))
    rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    [output] = llm.chat(hi, SamplingParams(max_tokens=200, skip_special_tokens=False, ignore_eos=True))
    assert output.prompt == rendered and output.text.startswith(rendered)
    assert [output.prompt for output in llm.chat([hi, bye], LONG)] == [rendered, rendered.replace("hi", "bye")]
    [output] = llm.chat([*hi, {"role": "assistant", "content": "Well"}], LONG, continue_final_message=True)
    assert output.prompt.endswith("assistant\nWell")


def test_stream_joins_to_generate_and_can_be_left():
    llm = make(tokens_per_step=1)
    whole = llm.generate("héllo 👋", LONG)[0].text
    deltas = list(llm.stream("héllo 👋", LONG))
    assert "".join(delta.text for delta in deltas) == whole and len(deltas) > 5
    assert deltas[-1].finish_reason is FinishReason.STOP
    stream = llm.stream([{"role": "user", "content": "hi"}], LONG)
    next(stream)
    stream.close()
    assert llm.started.engine.aborted == ["offline-2"]


def test_an_open_stream_and_generate_share_the_engine():
    llm = make(tokens_per_step=1)
    stream = llm.stream("abc", LONG)
    first = next(stream)
    assert llm.generate("xyz", LONG)[0].text == "xyz done"
    assert first.text + "".join(delta.text for delta in stream) == "abc done"


@pytest.mark.parametrize(
    "prompts, params, text",
    [
        (["ok", []], None, "empty"),
        (["ok", [10**6]], None, "1000000"),
        (["ok", [5] * 256], None, "maximum context length is 256"),
        (["ok", "b"], SamplingParams(temperature=-1), "temperature is -1"),
        (["ok", "b"], SamplingParams(temperature=float("nan")), "temperature is nan"),
        (["ok", "b"], SamplingParams(logprobs=21), "0 to 20"),
        (["ok", "b"], [SamplingParams()], "2 prompts but 1 sampling_params"),
    ],
)
def test_bad_requests_leave_nothing_behind(prompts, params, text):
    llm = make()
    with pytest.raises(RequestError, match=text):
        llm.generate(prompts, params)
    assert llm.generate("fine", LONG)[0].text == "fine done"
    assert len(llm.started.engine.added) - len(llm.started.engine.aborted) == 1


def test_max_tokens_beyond_the_context_is_cut_not_refused():
    llm = make()
    assert llm.generate([5] * 250, SamplingParams(max_tokens=10**6))[0].text
    assert llm.started.engine.added[-1].sampling.max_tokens == 10**6


def test_an_engine_error_is_raised():
    llm = make()
    llm.started.engine.break_with = ValueError("broken")
    with pytest.raises(ValueError, match="broken"):
        llm.generate("x")


def test_progress_counts_sequences():
    seen = []

    class Recorder:
        def update(self, stage, done, total, unit=""):
            seen.append((stage, done, total, unit))

    make().generate(["a", "b", "c"], LONG, progress=Recorder())
    assert seen == [("generate", n, 3, "sequences") for n in (1, 2, 3)]


def test_closing():
    with make() as llm:
        llm.generate("x", LONG)
    with pytest.raises(ConfigError, match="closed"):
        llm.generate("x")


def test_unknown_settings_are_named():
    with pytest.raises(ConfigError, match="no setting max_seqs; there are .*max_num_seqs"):
        LLM("demo", max_seqs=3)


def test_importing_the_package_brings_no_jax():
    code = (
        "import sys, jaxkv\n"
        "from jaxkv import LLM, EngineConfig, SamplingParams\n"
        "assert EngineConfig().model == 'demo' and SamplingParams().max_tokens == 16\n"
        "assert LLM.__module__ == 'jaxkv.llm'\n"
        "assert isinstance(jaxkv.__version__, str) and 'LLM' in dir(jaxkv)\n"
        "import jaxkv.server.app\n"
        "print([m for m in ('jax', 'torch', 'transformers') if m in sys.modules])\n"
        "jaxkv.nothing"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=env)
    assert done.stdout.strip() == "[]" and "has no attribute 'nothing'" in done.stderr
