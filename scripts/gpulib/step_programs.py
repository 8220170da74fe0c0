"""The executor's own step functions at real models' shapes, compiled for GPUs that are not here."""

import collections
import contextlib
import dataclasses
import math
import pathlib
import re

import jax
from jax.sharding import NamedSharding, PartitionSpec

from gpulib import mosaic
from gpulib.census import Launch, launches
from gpulib.deviceless import compiler_options, target_mesh
from jaxkv.capacity import shard
from jaxkv.control.executor import ExecutorLimits
from jaxkv.core.model_config import ModelConfig, RopeConfig
from jaxkv.execution.programs import Programs, ProgramShapes, abstract_model
from jaxkv.models.llama import KVStorage

_LLAMA = {
    "architecture": "LlamaForCausalLM",
    "hidden_size": 4096,
    "num_layers": 32,
    "num_heads": 32,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "window_sizes": (None,) * 32,
    "dtype": "bfloat16",
}
_LLAMA_3_8B = ModelConfig(
    vocab_size=128_256,
    intermediate_size=14_336,
    num_kv_heads=8,
    max_position_embeddings=8192,
    rope=RopeConfig(theta=500_000.0),
    **_LLAMA,
)
_LLAMA_2_7B = ModelConfig(
    vocab_size=32_000,
    intermediate_size=11_008,
    num_kv_heads=32,
    max_position_embeddings=4096,
    rope=RopeConfig(),
    **_LLAMA,
)


MODELS = {
    "llama-3-8b": _LLAMA_3_8B,
    "llama-2-7b": _LLAMA_2_7B,
    "llama-3-8b/2": shard(_LLAMA_3_8B, 2),
    "llama-2-7b/2": shard(_LLAMA_2_7B, 2),
}
BUCKETS = {"decode": 64, "prefill": 2048}
"""The bucket of each step function that is compiled."""


@dataclasses.dataclass(frozen=True)
class StepBuild:
    """What became of a step function.

    Attributes:
      cache_bytes: of the whole cache. aliased_bytes: of all donated arguments that the results reuse.
      temporary_bytes: the biggest temporary. cache_copies: copies of an array as large as a layer's pool. weight_copies: as
        large as a weight matrix. launches: in program order, those in CUDA graphs included.
      graphs: CUDA graphs that XLA makes of them. outside_graphs: launches that stay out of graphs.
      custom_calls: calls of foreign code, none of them in graphs: Mosaic GPU's kernels, and what XLA calls libraries for.
    """

    cache_bytes: int
    aliased_bytes: int
    temporary_bytes: int
    cache_copies: list[str]
    weight_copies: list[str]
    launches: list[Launch]
    num_layers: int
    graphs: int
    outside_graphs: int
    custom_calls: int

    @property
    def problems(self) -> list[str]:
        """What must not be: a cache that is not updated in place, and copies of cache or weights."""
        found = [f"{name} copies a layer's pool" for name in self.cache_copies]
        found += [f"{name} copies a weight matrix" for name in self.weight_copies]
        if self.aliased_bytes < self.cache_bytes:
            found.append(f"{self.aliased_bytes:,} bytes are aliased, the cache has {self.cache_bytes:,}")
        return found

    @property
    def launches_per_layer(self) -> dict[str, float]:
        """Launches of kernels that every layer makes, by name without its number."""
        names = collections.Counter(re.sub(r"_\d+$", "", launch.kernel) for launch in self.launches)
        return {name: count / self.num_layers for name, count in names.items() if count >= self.num_layers}


def programs(model: ModelConfig, kv_format: str, implementation: str, *, num_blocks: int = 1024) -> Programs:
    """Step functions for a GPU: blocks of 64 tokens, 64 rows."""
    limits = ExecutorLimits(
        num_blocks=num_blocks,
        block_size=64,
        max_num_seqs=BUCKETS["decode"],
        max_num_batched_tokens=BUCKETS["prefill"],
        max_prefill_seqs=16,
        max_model_len=model.max_position_embeddings,
        max_decode_steps=8,
    )
    shapes = ProgramShapes(
        model=model,
        dtype="bfloat16",
        kv_dtype=kv_format,
        limits=limits,
        prefill_buckets=(BUCKETS["prefill"],),
        decode_buckets=(BUCKETS["decode"],),
        num_top=20,
        implementation=implementation,
        storage=KVStorage(rotates=kv_format in ("int8", "int4")),  # as kv_rotation=auto does
    )
    abstract = abstract_model(
        model, dtype="bfloat16", max_model_len=limits.max_model_len, storage=shapes.storage
    )
    return Programs(abstract, shapes)


def build_step(
    model: ModelConfig, kv_format: str, kind: str, target: str, dump: pathlib.Path, implementation: str
) -> StepBuild:
    """Compile step function `kind` of BUCKETS for a target; `dump` is emptied first."""
    made = programs(model, kv_format, implementation)
    mesh = target_mesh(target)
    is_mosaic = implementation.startswith("pallas_mosaic_gpu")
    with jax.set_mesh(mesh), mosaic.building(target) if is_mosaic else contextlib.nullcontext():
        lowered = made.lower(kind, BUCKETS[kind], NamedSharding(mesh, PartitionSpec()))
        compiled = lowered.compile(compiler_options=compiler_options(dump, fail_on_spill=False))
    memory = compiled.memory_analysis()
    pools = jax.tree.leaves(made.abstract_cache)
    thunks = next(dump.glob("*thunk_sequence_after_thunk_passes.txt")).read_text()
    graphs, outside = graph_grouping(thunks)
    hlo = compiled.as_text()
    return StepBuild(
        cache_bytes=sum(x.size * x.dtype.itemsize for x in pools),
        aliased_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        cache_copies=copies(hlo, {x.size for x in pools}),
        weight_copies=copies(hlo, {x.size for x in made.abstract_weights if x.ndim > 1}),
        launches=launches(dump),
        num_layers=model.num_layers,
        graphs=graphs,
        outside_graphs=outside,
        custom_calls=len(re.findall(r"(?m)^ *\d+: kCustomCall", thunks)),
    )


def biggest_temporary(made: Programs, target: str) -> int:
    """Bytes of the biggest temporary of all step functions, compiled for a target; up to minutes.

    Without a GPU XLA sorts in its own way instead of CUB's, so a target's own compiler may tell a little less or more.
    """
    mesh = target_mesh(target)
    with jax.set_mesh(mesh):
        lowered = [made.lower(*work, NamedSharding(mesh, PartitionSpec())) for work in made.largest()]
        compiled = [step.compile(compiler_options=compiler_options(None, fail_on_spill=False)) for step in lowered]
    return max(step.memory_analysis().temp_size_in_bytes for step in compiled)


def copies(hlo: str, sizes: set[int]) -> list[str]:
    """Names of the instructions of compiled HLO that copy or transpose an array of one of these numbers of elements."""
    pattern = r"(?m)^\s*(?:ROOT )?(\S+) = \(?\w+\[([\d,]+)\][^=\n]*? (?:copy|copy-start|transpose)\("
    return [
        name for name, dimensions in re.findall(pattern, hlo) if math.prod(map(int, dimensions.split(","))) in sizes
    ]


def graph_grouping(thunks: str) -> tuple[int, int]:
    """(CUDA graphs, kernel launches in none of them) of XLA's dump of the thunks as they run."""
    graphs = outside = 0
    graph_indent = None
    for indent, kind in re.findall(r"(?m)^( *)\d+: (k\w+)", thunks):
        if graph_indent is not None and len(indent) <= graph_indent:
            graph_indent = None
        if kind == "kCommandBuffer":
            graphs, graph_indent = graphs + 1, len(indent)
        elif kind == "kCustomKernel" and graph_indent is None:
            outside += 1
    return graphs, outside
