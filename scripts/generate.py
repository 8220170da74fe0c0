"""Generates text in the terminal: one prompt (`--prompt` or standard input), or a chat when there is neither."""

import dataclasses
import json
import sys
from collections.abc import Sequence

from absl import flags

from jaxkv import flags as jaxkv_flags
from jaxkv.console import ConsoleProgress, set_up_logging
from jaxkv.core.errors import ConfigError, RequestError
from jaxkv.core.request import SamplingParams
from jaxkv.llm import LLM

jaxkv_flags.define_engine_flags()
_PROMPT = flags.DEFINE_string("prompt", None, "Text to answer or continue. Unset: standard input, or a chat.")
_SYSTEM = flags.DEFINE_string("system", None, "System message of the chat.")
_RAW = flags.DEFINE_boolean("raw", False, "Continue the prompt as it is, without the model's chat template.")
_JSON = flags.DEFINE_boolean("json", False, "Write one JSON object (text, finish_reason, token counts) at the end.")
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", None, "Most new tokens. Unset: what max_model_len leaves.")
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 always takes the likeliest token.")
_TOP_P = flags.DEFINE_float("top_p", 1.0, "Keep the smallest set of tokens whose probability reaches this.")
_TOP_K = flags.DEFINE_integer("top_k", 0, "Keep this many tokens; 0 keeps all.")
_MIN_P = flags.DEFINE_float("min_p", 0.0, "Drop tokens less likely than this times the likeliest.")
_SAMPLING_SEED = flags.DEFINE_integer("sampling_seed", None, "Same seed, same text.")
_STOP = flags.DEFINE_multi_string("stop", [], "Text that ends the output; may be given several times.")
_LOG_LEVEL = flags.DEFINE_enum(
    "log_level", "warning", ["debug", "info", "warning", "error"], "Least important log lines to show."
)

USAGE = """
usage: generate.py [MODEL] [flags]

  generate.py --prompt="What is the capital of France?"     answer once
  echo "Once upon a time" | generate.py --raw               continue text
  generate.py                                               chat: an empty line or Ctrl-D ends it
"""
GROUPS = jaxkv_flags.GROUPS | {
    "text": ("prompt", "system", "raw", "json", "log_level"),
    "sampling": ("max_tokens", "temperature", "top_p", "top_k", "min_p", "sampling_seed", "stop"),
}


def main(rest: list[str]) -> int:
    if rest:
        if len(rest) > 1:
            raise ConfigError(f"one model can be used, but the command line names {', '.join(rest)}")
        flags.FLAGS.model = rest[0]
    config = jaxkv_flags.engine_config()
    set_up_logging(_LOG_LEVEL.value)
    prompt = _PROMPT.value
    if prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read()
    if prompt is not None and not prompt.strip():
        raise ConfigError("the prompt is empty: give --prompt, or text on standard input")
    params = SamplingParams(
        max_tokens=_MAX_TOKENS.value,
        temperature=_TEMPERATURE.value,
        top_p=_TOP_P.value,
        top_k=_TOP_K.value,
        min_p=_MIN_P.value,
        seed=_SAMPLING_SEED.value,
        stop=tuple(_STOP.value),
    )
    with ConsoleProgress() as progress:
        llm = LLM(progress=progress, **dataclasses.asdict(config))
    with llm:
        try:
            if prompt is None:
                _chat(llm, params)
            else:
                _once(llm, prompt, params)
        except KeyboardInterrupt:
            sys.stdout.write("\n")
    return 0


def _messages(prompt: str) -> list[dict[str, str]]:
    system = [] if _SYSTEM.value is None else [{"role": "system", "content": _SYSTEM.value}]
    return [*system, {"role": "user", "content": prompt}]


def _once(llm: LLM, prompt: str, params: SamplingParams) -> None:
    request = prompt if _RAW.value or llm.tokenizer.chat_template is None else _messages(prompt)
    if not _JSON.value:
        _show(llm, request, params)
        return
    [output] = llm.generate(request, params) if isinstance(request, str) else llm.chat(request, params)
    result = {
        "text": output.text,
        "finish_reason": output.finish_reason.value,
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": len(output.token_ids),
        "cached_tokens": output.num_cached_tokens,
    }
    sys.stdout.write(json.dumps(result, ensure_ascii=False) + "\n")


def _show(llm: LLM, request: str | Sequence[dict[str, str]], params: SamplingParams) -> str:
    pieces = []
    for delta in llm.stream(request, params):
        sys.stdout.write(delta.text)
        sys.stdout.flush()
        pieces.append(delta.text)
    sys.stdout.write("\n")
    return "".join(pieces)


def _chat(llm: LLM, params: SamplingParams) -> None:
    messages = _messages("")[:-1]
    while True:
        try:
            text = input("> ")
        except EOFError:
            sys.stdout.write("\n")
            return
        if not text.strip():
            return
        messages.append({"role": "user", "content": text})
        try:
            answer = _show(llm, messages, params)
        except RequestError as error:  # e.g. the conversation has become too long: the user can go on
            sys.stderr.write(f"error: {error}\n")
            messages.pop()
        else:
            messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    sys.exit(jaxkv_flags.run(main, sys.argv, USAGE, GROUPS))
