"""Command-line flags of the engine, under vLLM's names, and how programs read a command line.

A command line written for vLLM can be pasted: dashes and underscores are the same, `--no-enable-prefix-caching` works,
and a flag that does not exist here is refused by name.
"""

import ast
import dataclasses
import inspect
import re
import textwrap
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import flags

from jaxkv.core.config import DTYPES, EngineConfig, is_kv_cache_dtype, told_kv_cache_dtypes
from jaxkv.core.errors import ConfigError, UserError

GROUPS: dict[str, tuple[str, ...]] = {
    "model": ("model", "tokenizer", "revision", "download_dir", "chat_template", "dtype", "seed", "max_model_len"),
    "memory": ("gpu_memory_utilization", "kv_cache_memory_bytes", "kv_cache_dtype", "kv_rotation", "block_size",
               "num_gpu_blocks_override", "kv_window", "kv_sinks"),
    "scheduling": ("max_num_seqs", "max_num_batched_tokens", "scheduling_policy", "decode_steps", "max_logprobs"),
    "prefix cache": ("enable_prefix_caching", "share_partial_blocks", "eviction_policy", "eviction_lookahead",
                     "ghost_blocks", "max_pinned_blocks"),
    "execution": ("enforce_eager", "attention_implementation", "cascade", "tensor_parallel_size",
                  "compilation_cache_dir", "fail_on_recompile"),
}  # fmt: skip
"""Fields of EngineConfig by the heading they have in --help."""

_ALIASES = {
    "dtype": {"half": "float16", "float": "float32"},
    "kv_cache_dtype": {"fp8": "fp8_e4m3"},
}
_SHORT = {"tp": "tensor_parallel_size"}
_SIZE = re.compile(r"([0-9]*\.?[0-9]+)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


def field_help(cls: type) -> dict[str, str]:
    """The string under each field of a dataclass: one text for the code and for --help."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in zip(body, body[1:])
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def parse_size(text: str) -> int:
    """Bytes of "2GiB", "500M", "1.5g" or "1048576"; K, M, G, T are powers of 1000, with an i of 1024.

    Raises:
      ValueError: anything else.
    """
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise ValueError(f"{text!r} is not a size: write bytes, or a number with a unit, such as 2GiB or 500M")
    number, prefix, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " kmgt".index(prefix.lower() or " "))


class _SizeParser(flags.ArgumentParser):
    syntactic_help = "bytes, or a number with K, M, G, KiB, MiB, GiB"

    def parse(self, argument: Any) -> int:
        return argument if isinstance(argument, int) else parse_size(argument)


def define_size(
    name: str, default: int | None, help_text: str, values: flags.FlagValues = flags.FLAGS
) -> flags.FlagHolder:
    """A flag in bytes; see parse_size."""
    return flags.DEFINE(_SizeParser(), name, default, help_text, flag_values=values)


def define_engine_flags(values: flags.FlagValues = flags.FLAGS, **defaults: Any) -> None:
    """One flag a field of EngineConfig. `defaults` replace the fields' own."""
    hints, helps = typing.get_type_hints(EngineConfig), field_help(EngineConfig)
    grouped = {name for names in GROUPS.values() for name in names}
    fields = {field.name: field for field in dataclasses.fields(EngineConfig)}
    assert grouped == fields.keys(), f"flags.GROUPS and EngineConfig differ in {sorted(grouped ^ fields.keys())}"
    for name, field in fields.items():
        default, help_text = defaults.get(name, field.default), helps[name]
        kinds = {kind for kind in typing.get_args(hints[name]) or (hints[name],) if kind is not type(None)}
        if name == "kv_cache_memory_bytes":
            define_size(name, default, help_text, values)
        elif typing.get_origin(hints[name]) is typing.Literal:
            flags.DEFINE_enum(name, default, typing.get_args(hints[name]), help_text, flag_values=values)
        elif kinds == {bool}:
            flags.DEFINE_boolean(name, default, help_text, flag_values=values)
        elif kinds == {int}:
            flags.DEFINE_integer(name, default, help_text, flag_values=values)
        elif kinds == {float}:
            flags.DEFINE_float(name, default, help_text, flag_values=values)
        else:
            flags.DEFINE_string(name, default, help_text, flag_values=values)


def engine_config(values: flags.FlagValues = flags.FLAGS) -> EngineConfig:
    """The EngineConfig that the command line asks for.

    Raises:
      ConfigError: a value that is not supported, with those that are.
    """
    settings = {field.name: values[field.name].value for field in dataclasses.fields(EngineConfig)}
    for name, is_supported, told in (
        ("dtype", DTYPES.__contains__, ", ".join(DTYPES)),
        ("kv_cache_dtype", is_kv_cache_dtype, told_kv_cache_dtypes()),
    ):
        given = settings[name]
        settings[name] = ",".join([_ALIASES[name].get(one, one) for one in given.split(",")])
        if not is_supported(settings[name]):
            raise ConfigError(f"--{name}={given} is not supported; supported: {told}")
    if settings["tensor_parallel_size"] != 1:
        raise ConfigError(
            f"--tensor_parallel_size={settings['tensor_parallel_size']} is not supported yet: set it to 1"
        )
    return EngineConfig(**settings)


def normalized(argv: Sequence[str], values: flags.FlagValues = flags.FLAGS) -> list[str]:
    """The command line as absl wants it: underscores, `--nofoo` for `--no-foo`, long names for vLLM's short ones.

    Raises:
      ConfigError: a flag that does not exist, by name.
    """
    result = []
    rest = iter(argv)
    for argument in rest:
        if argument == "--":
            return [*result, argument, *rest]
        if not argument.startswith("-") or argument == "-" or re.fullmatch(r"-\.?[0-9].*", argument):
            result.append(argument)
            continue
        name, equals, value = argument.lstrip("-").partition("=")
        known = _SHORT.get(name, name.replace("-", "_"))
        off = re.sub(r"^no_?", "", known)
        if known not in values and off != known and off in values and values[off].boolean:
            if equals:
                raise ConfigError(f"--{name} takes no value")
            result.append(f"--no{off}")
        elif known in values:
            result.append(f"--{known}{equals}{value}")
            if not equals and not values[known].boolean:
                # The next word is the value, also one that starts with a dash: `--seed -1`.
                if (value := next(rest, None)) is None:
                    raise ConfigError(f"--{name} needs a value")
                result[-1] += f"={value}"
        else:
            raise ConfigError(f"jaxkv has no flag --{name}; --help lists those it has")
    return result


def help_text(usage: str, groups: Mapping[str, Sequence[str]], values: flags.FlagValues = flags.FLAGS) -> str:
    """All flags by group, with their defaults."""
    lines = [usage.strip()]
    for heading, names in groups.items():
        lines.append(f"\n{heading}:")
        for name in names:
            flag = values[name]
            syntax = f"--[no-]{name}" if flag.boolean else f"--{name}={_placeholder(flag)}"
            value = ",".join(flag.default) if isinstance(flag.default, list) else flag.default
            default = "" if value in (None, "") else f" (default: {value})"
            lines.append(f"  {syntax}")
            lines.append(textwrap.fill(f"{flag.help}{default}", 100, initial_indent=" " * 6, subsequent_indent=" " * 6))
    return "\n".join(lines)


def _placeholder(flag: flags.Flag) -> str:
    if isinstance(flag.parser, flags.EnumParser):
        return "|".join(flag.parser.enum_values)
    kind = flag.flag_type()
    return {"int": "N", "float": "X"}.get(kind, "SIZE" if isinstance(flag.parser, _SizeParser) else "TEXT")


def run(
    main: Callable[[list[str]], int],
    argv: Sequence[str],
    usage: str,
    groups: Mapping[str, Sequence[str]],
    values: flags.FlagValues = flags.FLAGS,
) -> int:
    """Parses the command line and runs `main` on what is left of it (without the program's name).

    Returns the exit code: main's own; 0 after --help; 2 after a user's error, which is one line on stderr.
    """
    import sys

    if any(argument in ("-h", "--help", "--helpfull", "--help-all") for argument in argv[1:]):
        sys.stdout.write(help_text(usage, groups, values) + "\n")
        return 0
    try:
        try:
            rest = values([argv[0], *normalized(argv[1:], values)])[1:]
        except flags.Error as error:
            raise ConfigError(str(error)) from error
        return main(rest)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
