"""Greedy texts under each KV format, by the engine itself: when they leave the float32 texts, and what that costs.

A small model's free-running text leaves under any change, and what follows is another text, not a worse one. So there are
two comparisons: with the float32 texts (tokens until the first difference, ROUGE-L), and, of summaries whose right words are
known, with these (ROUGE-L, and how much of it is lost against float32).
"""

import dataclasses
import gc
import statistics
from collections.abc import Sequence

from flax import nnx

from benchlib.engine_runs import greedy_request, run_requests
from benchlib.task_texts import make_tasks
from jaxkv.core.config import EngineConfig
from jaxkv.core.progress import Progress
from jaxkv.models.llama import Llama
from jaxkv.startup import build_engine
from jaxkv.tokenization.tokenizer import Tokenizer

_SHOTS = 3
_ROWS = 8
# One prefill bucket: each takes as long to compile as a hundred tokens to generate.
_STEP_TOKENS = 64


@dataclasses.dataclass(frozen=True)
class Assignment:
    """What every format generates: continuations of `prompts`, `max_tokens` each, and summaries beside references."""

    prompts: Sequence[Sequence[int]]
    max_tokens: int
    summary_prompts: Sequence[Sequence[int]]
    summary_max_tokens: int
    references: Sequence[str]

    @property
    def longest(self) -> int:
        texts = max(map(len, self.prompts)) + self.max_tokens
        return max(texts, *(len(prompt) + self.summary_max_tokens for prompt in self.summary_prompts), 0)


@dataclasses.dataclass(frozen=True)
class Generated:
    """Token ids of the continuations, texts of both."""

    token_ids: list[tuple[int, ...]]
    texts: list[str]
    summaries: list[str]


def assign(prompts: Sequence[Sequence[int]], max_tokens: int, num_summaries: int, tokenizer: Tokenizer) -> Assignment:
    """Each summary is asked for after three others, which show what one looks like."""
    tasks = make_tasks("summaries", _SHOTS + num_summaries, seed=1000)
    shots = "".join(task.prompt + task.answer for task in tasks[:_SHOTS])
    asked = tasks[_SHOTS:]
    lengths = [len(tokenizer.encode(task.answer, add_special_tokens=False)) for task in asked]
    return Assignment(
        prompts,
        max_tokens,
        [tokenizer.encode(shots + task.prompt) for task in asked],
        max(lengths, default=0) + 8,
        [task.answer.strip() for task in asked],
    )


def generate(
    model: Llama,
    kv_cache_dtype: str,
    kv_rotation: str,
    assignment: Assignment,
    tokenizer: Tokenizer,
    progress: Progress,
) -> Generated:
    """By an engine of its own, float32 but for the cache. `model` stays as it is."""
    config = EngineConfig(
        dtype="float32",
        kv_cache_dtype=kv_cache_dtype,
        kv_rotation=kv_rotation,
        max_num_seqs=_ROWS,
        max_num_batched_tokens=_STEP_TOKENS,
        max_model_len=assignment.longest,
        num_gpu_blocks_override=_ROWS * (assignment.longest // 16 + 2),
    )
    name = f"{kv_cache_dtype} {kv_rotation}"
    engine = build_engine(config, model.config, lambda dtype: nnx.clone(model), origin=name, progress=progress).engine
    requests = [
        greedy_request(f"{kind}{i}", prompt, length)
        for kind, prompts, length in (
            ("text", assignment.prompts, assignment.max_tokens),
            ("summary", assignment.summary_prompts, assignment.summary_max_tokens),
        )
        for i, prompt in enumerate(prompts)
    ]
    tokens = run_requests(engine, requests).tokens
    del engine
    gc.collect()  # the pool, before the next engine makes its own
    continued = [tokens[f"text{i}"] for i in range(len(assignment.prompts))]
    summaries = [tokenizer.decode(tokens[f"summary{i}"]) for i in range(len(assignment.summary_prompts))]
    return Generated(
        continued,
        [tokenizer.decode(ids) for ids in continued],
        [text.strip().split("\n")[0] for text in summaries],
    )


def agreement_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens until the first difference."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def rouge_l(references: Sequence[str], texts: Sequence[str]) -> list[float]:
    """F-measure of each text's longest common subsequence of words with its reference.

    The library's words are ASCII letters and digits; equal texts count as 1 also where it finds none.
    """
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"])
    return [
        1.0 if reference == text else scorer.score(reference, text)["rougeL"].fmeasure
        for reference, text in zip(references, texts, strict=True)
    ]


def compare(base: Generated, found: Generated, references: Sequence[str]) -> dict:
    """Figures of one format. `rouge_l_loss_error` is the standard error of the mean loss, over the summaries."""
    lengths = [agreement_length(*pair) for pair in zip(base.token_ids, found.token_ids, strict=True)]
    figures = {
        "agreement_lengths": lengths,
        "agreement_mean": statistics.fmean(lengths),
        "identical": sum(one == other for one, other in zip(base.token_ids, found.token_ids, strict=True)),
        "rouge_l_to_float32": statistics.fmean(rouge_l(base.texts, found.texts)),
    }
    if references:
        before, after = (rouge_l(references, generated.summaries) for generated in (base, found))
        losses = [a - b for a, b in zip(before, after, strict=True)]
        figures |= {
            "rouge_l_to_references": statistics.fmean(after),
            "rouge_l_loss": statistics.fmean(losses),
            "rouge_l_loss_error": statistics.stdev(losses) / len(losses) ** 0.5 if len(losses) > 1 else None,
        }
    return figures
