"""What a smaller cache and a window cost in quality, on a trained model: B10 and A4, B12's second half."""

import dataclasses
import importlib.util
from typing import Any

from benchlib import kv_generation
from benchlib.quality_sequences import task_windows
from benchlib.task_texts import KINDS

from articlelib.driver import at_once
from articlelib.lab import Lab
from articlelib.worlds import RealWorld, Setting
from jaxkv.core.progress import SilentProgress
from jaxkv.kv_quality import KVVariant, summarize, token_figures, with_key_bias_folded, with_rotation
from jaxkv.loading.resolve import resolve_model
from jaxkv.loading.weights import load_config, load_weights
from jaxkv.models.llama import Llama
from jaxkv.tokenization.tokenizer import Tokenizer, load_tokenizer

FORMATS = (("int8", "hadamard"), ("fp8_e4m3", "none"))
"""With the rotation that kv_rotation=auto gives them."""

# How often each kind of task is gone through; summaries for ROUGE-L.
_WINDOWS, _WINDOW_TOKENS, _SUMMARIES = 2, 1024, 16


def eight_bits(lab: Lab) -> dict[str, Any]:
    """Next-token distributions on the answers of maths, questions and summaries; ROUGE-L of written summaries."""
    source = resolve_model(lab.model)
    config = load_config(source)
    tokenizer = load_tokenizer(source)
    model = load_weights(source, config, dtype="float32")
    found: dict[str, Any] = {"tasks": _tasks(lab, model, tokenizer)}
    if importlib.util.find_spec("rouge_score") is not None:
        found["rouge_l"] = _summaries(lab, model, tokenizer)
    return found


def _tasks(lab: Lab, model: Llama, tokenizer: Tokenizer) -> dict[str, dict[str, dict[str, float]]]:
    rotated = with_rotation(with_key_bias_folded(model))
    variants = [KVVariant(name, rotated if rotation == "hadamard" else model, name) for name, rotation in FORMATS]
    base, figures = KVVariant("float32", model, "float32"), {}
    for kind in KINDS:
        parts: dict[str, list] = {}
        for sequence in task_windows(kind, tokenizer, _WINDOW_TOKENS, _WINDOWS):
            compared = token_figures(base, variants, sequence.token_ids, room=_WINDOW_TOKENS)
            for variant, one in zip(variants, compared, strict=True):
                parts.setdefault(variant.name, []).append(sequence.select(one))
        for name, selected in parts.items():
            quality = summarize(selected)
            figures.setdefault(name, {})[kind] = {
                "kl": quality.kl_mean,
                "agreement": quality.top1_agreement,
                "perplexity_change": quality.perplexity_change,
            }
        lab.tick()
    return figures


def _summaries(lab: Lab, model: Llama, tokenizer: Tokenizer) -> dict[str, Any]:
    assignment = kv_generation.assign([tokenizer.encode("The sky is")], 8, _SUMMARIES, tokenizer)
    written = {}
    for name, rotation in (("float32", "none"), *FORMATS):
        written[name] = kv_generation.generate(model, name, rotation, assignment, tokenizer, SilentProgress())
        lab.tick()
    scores = {name: kv_generation.rouge_l(assignment.references, texts.summaries) for name, texts in written.items()}
    found: dict[str, Any] = {"summaries": _SUMMARIES, "mean": {k: sum(v) / len(v) for k, v in scores.items()}}
    for name, _ in FORMATS:
        figures = kv_generation.compare(written["float32"], written[name], assignment.references)
        found[name] = {"loss": figures["rouge_l_loss"], "error": figures["rouge_l_loss_error"]}
    return found


@dataclasses.dataclass(frozen=True)
class Needle:
    """A number told near the start, and asked for at the end of so many tokens.

    Attributes:
      window: tokens that the other engine sees back.
    """

    lengths: tuple[int, ...] = (256, 512, 768)
    window: int = 128
    number_of: int = 5


_FILLER = (
    "The harbour was quiet that morning. Two boats lay at the quay, and gulls walked about on the wet stones. "
    "A man in a blue coat mended a net and did not look up. "
)


def needle(lab: Lab, world: RealWorld, asked: Needle = Needle()) -> dict[str, Any]:
    """B12: how often a greedy answer holds the number, with all of the context and with a window that ends behind it."""
    tokenizer = world.started().tokenizer
    found: dict[str, dict[str, float]] = {"full": {}, "window": {}}
    for name, window in (("full", None), ("window", asked.window)):
        for length in asked.lengths:
            prompts, answers = [], []
            for i in range(asked.number_of):
                number = str(10007 + 7919 * i + length)
                prompts.append(_prompt(tokenizer, number, length))
                answers.append(number)
            served = world.serve(at_once(prompts, 8), Setting(kv_window=window, decode_steps=0))
            texts = [tokenizer.decode(served.outputs[f"{i}.0"]) for i in range(asked.number_of)]
            right = sum(answer in text for answer, text in zip(answers, texts, strict=True))
            found[name][str(length)] = right / asked.number_of
            lab.tick()
    return {"window": asked.window, "retrieved": found}


def _prompt(tokenizer: Tokenizer, number: str, length: int) -> tuple[int, ...]:
    """Tokens: the number, filler up to `length` in all, the question."""
    told = tokenizer.encode(f"The pass key is {number}. Remember it: the pass key is {number}.\n")
    question = tokenizer.encode(
        "\nWhat is the pass key that was told at the start? The pass key is", add_special_tokens=False
    )
    filler = tokenizer.encode(_FILLER * (length // 20 + 1), add_special_tokens=False)
    return tuple(told + filler[: max(0, length - len(told) - len(question))] + question)
