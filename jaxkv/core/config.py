"""EngineConfig: every setting of the engine, under the names people know from vLLM."""

import dataclasses
from typing import Literal

DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("auto", "float32", "bfloat16", "float16", "int8", "int4", "fp8_e4m3", "fp8_e5m2")


def is_kv_cache_dtype(name: str) -> bool:
    """One of KV_CACHE_DTYPES, or two for keys and values: "int8,int4"."""
    names = name.split(",")
    return name in KV_CACHE_DTYPES or (len(names) == 2 and all(one in KV_CACHE_DTYPES[1:] for one in names))


def told_kv_cache_dtypes() -> str:
    return f"{', '.join(KV_CACHE_DTYPES)}, or two of them for keys and values, as in int8,int4"


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Settings of one engine; `None` means "choose for this model and device", and the choice is logged at start."""

    model: str = "demo"
    """`demo`, a Hugging Face repo id, a folder of safetensors, a `.gguf` file, or an Orbax checkpoint folder."""
    tokenizer: str | None = None
    """Folder or repo id of another tokenizer; None takes the model's own."""
    revision: str | None = None
    """Branch, tag or commit of a Hugging Face repo."""
    download_dir: str | None = None
    """Where downloads are cached; None is each library's own cache."""
    chat_template: str | None = None
    """Path of a Jinja chat template that replaces the model's own."""
    dtype: str = "auto"
    """Weights and activations: auto is float32 on CPU, bfloat16 on GPU."""
    seed: int = 0
    """Seeds the requests that bring no seed of their own."""
    max_model_len: int | None = None
    """Longest prompt plus output; None takes the model's own limit, lowered to what the KV pool can hold."""
    block_size: int | None = None
    """Tokens a KV block: 16 on CPU, 64 on GPU unless set. 8 works on the XLA path only."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory for weights, temporaries and KV together."""
    kv_cache_memory_bytes: int | None = None
    """Bytes for the KV pool. Unset: on GPU what gpu_memory_utilization leaves; on CPU a quarter of the free memory, at most 1 GiB."""
    num_gpu_blocks_override: int | None = None
    """Exact number of usable KV blocks, whatever the memory; the null block comes on top."""
    kv_cache_dtype: str = "auto"
    """Stored KV format, or two for keys and values (int8,int4); auto is the weights' dtype."""
    kv_rotation: Literal["auto", "none", "hadamard"] = "auto"
    """Rotate keys and values before they are stored, which makes their numbers alike; auto does where keys are int8 or int4."""
    kv_window: int | None = None
    """Tokens that every layer sees back and a request keeps in the cache, beside its kv_sinks first ones: endless
    generation in bounded memory, which forgets what is further back. None: as far as the model sees."""
    kv_sinks: int = 4
    """With kv_window: so many of a request's first tokens stay."""
    max_num_seqs: int | None = None
    """Most requests that decode together: 16 on CPU, 256 on GPU unless set."""
    max_num_batched_tokens: int | None = None
    """Token budget of a step: 512 on CPU, 8192 on GPU unless set."""
    enable_prefix_caching: bool = True
    """Share the KV blocks of equal prompt prefixes."""
    eviction_policy: Literal["lru", "lfu", "fifo", "fifo_leaves", "return_rate"] = "lru"
    """Which cached block is overwritten first; see control/eviction.py, return_rate.py for how each decides."""
    eviction_lookahead: int = 64
    """So many requests at the head of the queue keep the cached blocks that they will ask for; 0 turns it off."""
    share_partial_blocks: bool = True
    """Where a prompt agrees only with the head of a cached block, copy that head and compute the rest."""
    ghost_blocks: int | None = None
    """Evicted blocks that the counters remember, to tell evicted from first seen; None is the size of the pool."""
    max_pinned_blocks: int = 0
    """Most blocks that pinned prefixes may keep from eviction; a request may use what the pool has beside these."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """Order of waiting requests: arrival, or the request's own priority (lower first), then arrival."""
    decode_steps: int = 0
    """Decode steps a device call, C; 0 adapts it to the load."""
    enforce_eager: bool = False
    """Run the step functions un-jitted with C = 1: for comparison and debugging only."""
    fail_on_recompile: bool = False
    """End the engine when a step compiles anything after the warm-up, instead of waiting for the compiler unnoticed."""
    tensor_parallel_size: int = 1
    """GPUs that share one model. Only 1 for now."""
    attention_implementation: str | None = None
    """Names a kernel implementation (`xla`, `reference`, ...), which then runs or raises; None picks the best supported once."""
    cascade: Literal["auto", "on", "off"] = "auto"
    """Attend to a prefix that decode rows share once for all of them: auto where a formula says that it is faster, with
    Pallas kernels only; on wherever a block is shared, for comparisons."""
    max_logprobs: int = 20
    """Most alternatives a request may ask for with logprobs."""
    compilation_cache_dir: str | None = None
    """Where compiled step functions are kept; None is ~/.cache/jaxkv/executables, empty keeps none."""
