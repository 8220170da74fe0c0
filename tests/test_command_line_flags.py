"""Flags: vLLM's spellings, sizes, help, and refusals in one line."""

import dataclasses

import pytest
from absl import flags as absl_flags

from jaxkv import flags
from jaxkv.console import ConsoleProgress, format_amount
from jaxkv.core.config import EngineConfig


@pytest.fixture
def values():
    values = absl_flags.FlagValues()
    flags.define_engine_flags(values)
    absl_flags.DEFINE_integer("port", 8000, "Port.", flag_values=values)
    return values


def parse(values, *arguments):
    """(EngineConfig, words that are not flags)"""
    rest = []

    def main(words):
        rest.append((flags.engine_config(values), words))
        return 0

    assert flags.run(main, ["prog", *arguments], "usage", flags.GROUPS, values) == 0
    return rest[0]


def test_defaults_are_engine_configs_own(values):
    assert parse(values) == (EngineConfig(), [])


@pytest.mark.parametrize(
    "arguments",
    [
        ["--max-num-seqs", "8", "--enable-prefix-caching", "--kv-cache-dtype", "float16", "--seed", "-1"],
        ["--max_num_seqs=8", "--enable_prefix_caching=true", "--kv_cache_dtype=float16", "--seed=-1"],
        ["-max-num-seqs=8", "--kv_cache-dtype", "float16", "--seed", "-1", "--tensor-parallel-size=1"],
        ["-tp", "1", "--max-num-seqs", "8", "--kv-cache-dtype", "float16", "--seed=-1"],
    ],
)
def test_spellings(values, arguments):
    config, rest = parse(values, *arguments)
    assert config == EngineConfig(max_num_seqs=8, kv_cache_dtype="float16", seed=-1) and rest == []


@pytest.mark.parametrize(
    "argument",
    [
        "--no-enable-prefix-caching",
        "--no_enable_prefix_caching",
        "--noenable_prefix_caching",
        "--enable-prefix-caching=false",
    ],
)
def test_turning_a_boolean_off(values, argument):
    assert parse(values, argument)[0] == EngineConfig(enable_prefix_caching=False)


def test_words_and_the_double_dash(values):
    assert parse(values, "some/model", "--enforce-eager", "--", "--x")[1] == ["some/model", "--x"]


def test_aliases_of_dtypes(values):
    assert parse(values, "--dtype", "half")[0].dtype == "float16"


@pytest.mark.parametrize(
    "text, size",
    [
        ("500M", 500_000_000),
        ("2GiB", 2**31),
        ("1.5g", 1_500_000_000),
        ("4096", 4096),
        ("8 KiB", 8192),
        ("1TiB", 2**40),
        ("3B", 3),
    ],
)
def test_sizes(values, text, size):
    assert parse(values, "--kv-cache-memory-bytes", text)[0].kv_cache_memory_bytes == size


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--swap-space", "4"], "jaxkv has no flag --swap-space; --help lists those it has"),
        (["--no-swap-space"], "jaxkv has no flag --no-swap-space"),
        (["-O3"], "jaxkv has no flag --O3"),
        (["--tensor-parallel-size", "2"], "--tensor_parallel_size=2 is not supported yet"),
        (["--kv-cache-dtype", "int3"], "--kv_cache_dtype=int3 is not supported; supported: auto"),
        (["--kv-cache-dtype", "int8,int3"], "--kv_cache_dtype=int8,int3 is not supported; supported: auto"),
        (["--kv-cache-dtype", "int8,auto"], "or two of them for keys and values, as in int8,int4"),
        (["--kv-cache-dtype", "int8,int8,int8"], "--kv_cache_dtype=int8,int8,int8 is not supported"),
        (["--dtype", "int8"], "--dtype=int8 is not supported; supported: auto"),
        (["--max-num-seqs", "many"], "--max_num_seqs=many"),
        (["--max-num-seqs"], "--max-num-seqs needs a value"),
        (["--kv-cache-memory-bytes=2 pounds"], "write bytes, or a number with a unit"),
        (["--scheduling-policy=lifo"], "fcfs|priority"),
        (["--no-enforce-eager=1"], "takes no value"),
    ],
)
def test_refusals_are_one_line_and_exit_code_2(values, capsys, arguments, message):
    code = flags.run(lambda _: flags.engine_config(values) and 0, ["prog", *arguments], "usage", flags.GROUPS, values)
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1 and message in captured.err


def test_help_is_grouped_and_complete(values, capsys):
    assert flags.run(lambda _: 1, ["prog", "--seed=x", "--help"], "usage: prog", flags.GROUPS, values) == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: prog\n\nmodel:\n  --model=TEXT\n")
    for field in dataclasses.fields(EngineConfig):
        assert f"  --{field.name}=" in text or f"  --[no-]{field.name}\n" in text
    assert "Share of the GPU's memory for weights, temporaries and KV together. (default: 0.9)" in text
    assert max(map(len, text.split("\n"))) <= 120


def test_every_field_has_a_help_text():
    assert flags.field_help(EngineConfig).keys() == {field.name for field in dataclasses.fields(EngineConfig)}


def test_amounts():
    assert [format_amount(n, "B") for n in (5, 2048, 3 * 2**20, 5 * 2**30)] == ["5 B", "2.0 KiB", "3.0 MiB", "5.00 GiB"]
    assert (format_amount(7, "requests"), format_amount(7, "")) == ("7 requests", "7")


def test_progress_without_a_terminal_is_a_line_a_stage(capsys):
    with ConsoleProgress() as progress:
        for done in (0, 1, 2, 2):
            progress.update("load", done, 2)
    assert capsys.readouterr().err == "load: 2 done\n"
