"""The least that an attention call must move and compute, and the time that a good kernel should take for it.

Nothing here knows jax. Bytes and FLOPs are counted, times are predicted from a device's rates: a fixed cost, the bytes at
the share of the copy bandwidth that is aimed at, the products at a rate of the tensor cores.
"""

import dataclasses

# Tokens of a work item when decode splits a row's keys; each writes one partial result.
SPLIT_TOKENS = 1024


@dataclasses.dataclass(frozen=True)
class Rates:
    """What predictions rest on.

    Attributes:
      copy: bytes a second of a large device-to-device copy, read and written bytes counted.
      matmul: FLOP/s of a large bfloat16 product.
      prefill: FLOP/s expected of prefill attention.
      share: of `copy` that decode is aimed at, by bytes of a stored number: one-byte formats are dequantised on the way.
      launch: seconds of a decode call that do not depend on its size. merge: of the second launch and merge of a cascade.
      write_launch: seconds of a kv_write that do not depend on its size.
    """

    copy: float = 4.3e12
    matmul: float = 790e12
    prefill: float = 350e12
    share: tuple[tuple[int, float], ...] = ((1, 0.80), (2, 0.90), (4, 0.90))
    launch: float = 8e-6
    merge: float = 4e-6
    write_launch: float = 3e-6

    def memory(self, itemsize: int) -> float:
        """Bytes a second that decode should reach."""
        return dict(self.share)[itemsize] * self.copy


# An NVIDIA H200: 4.3 TB/s copied and 790 TFLOP/s multiplied are what such cards were measured at.
H200 = Rates()


@dataclasses.dataclass(frozen=True)
class Heads:
    """The attention heads of a layer."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int = 128

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Stored bytes of a token's keys and values; one-byte formats have a bfloat16 scale a token and head for each."""
        return 2 * self.num_kv_heads * (self.head_dim * itemsize + (2 if itemsize == 1 else 0))


LLAMA_3_8B = Heads("Llama-3-8B", 32, 8)
LLAMA_2_7B = Heads("Llama-2-7B", 32, 32)
MODELS = {heads.name: heads for heads in (LLAMA_3_8B, LLAMA_2_7B)}
ITEMSIZE = {"bfloat16": 2, "float16": 2, "int8": 1}


@dataclasses.dataclass(frozen=True)
class Work:
    """What one call must do at the least. The larger of the two times is the floor."""

    num_bytes: float
    flops: float

    def floor(self, rates: Rates) -> float:
        """Seconds that no kernel can beat."""
        return max(self.num_bytes / rates.copy, self.flops / rates.matmul)

    @property
    def intensity(self) -> float:
        """FLOP a byte."""
        return self.flops / self.num_bytes


@dataclasses.dataclass(frozen=True)
class DecodePoint:
    """`batch` rows of `context` tokens each, one query a row."""

    heads: Heads
    batch: int
    context: int
    kv_format: str

    @property
    def kv_bytes(self) -> int:
        return self.batch * self.context * self.heads.kv_bytes_per_token(ITEMSIZE[self.kv_format])

    @property
    def work(self) -> Work:
        """K/V once, queries in, outputs out."""
        heads = self.heads
        queries = self.batch * heads.num_heads * heads.head_dim
        return Work(self.kv_bytes + 2 * 2 * queries, 4 * queries * self.context)

    def predict(self, rates: Rates) -> float:
        """Seconds; with the partial results of the splits written and read again, float32 outputs, maximum and sum."""
        heads, splits = self.heads, -(-self.context // SPLIT_TOKENS)
        partials = 2 * self.batch * heads.num_heads * splits * (4 * heads.head_dim + 8)
        return rates.launch + (self.work.num_bytes + partials) / rates.memory(ITEMSIZE[self.kv_format])

    def __str__(self) -> str:
        return f"{self.heads.name} {self.kv_format} {self.batch} x {in_k(self.context)}"


@dataclasses.dataclass(frozen=True)
class PrefillPoint:
    """One chunk of `query_len` tokens after `context` tokens, causal."""

    heads: Heads
    query_len: int
    context: int
    kv_format: str = "bfloat16"

    @property
    def work(self) -> Work:
        heads = self.heads
        queries = self.query_len * heads.num_heads * heads.head_dim
        kv = (self.context + self.query_len) * heads.kv_bytes_per_token(ITEMSIZE[self.kv_format])
        return Work(kv + 2 * 2 * queries, 4 * queries * (self.context + self.query_len / 2))

    def predict(self, rates: Rates) -> float:
        return self.work.flops / rates.prefill

    def __str__(self) -> str:
        return f"{self.heads.name} {self.kv_format} chunk {in_k(self.query_len)} after {in_k(self.context)}"


@dataclasses.dataclass(frozen=True)
class CascadePoint:
    """`batch` rows that share their first `prefix` tokens and have `suffix` tokens of their own."""

    heads: Heads
    batch: int
    prefix: int
    suffix: int
    kv_format: str = "bfloat16"

    def _kv_bytes(self, tokens: int) -> int:
        return tokens * self.heads.kv_bytes_per_token(ITEMSIZE[self.kv_format])

    @property
    def work(self) -> Work:
        """The shared tokens once."""
        queries = self.batch * self.heads.num_heads * self.heads.head_dim
        kv = self._kv_bytes(self.prefix + self.batch * self.suffix)
        return Work(kv + 2 * 2 * queries, 4 * queries * (self.prefix + self.suffix))

    def predict_flat(self, rates: Rates) -> float:
        """Seconds when every row reads the prefix from memory. An upper bound: a short prefix stays in the L2 cache."""
        kv = self._kv_bytes(self.batch * (self.prefix + self.suffix))
        return rates.launch + kv / rates.memory(ITEMSIZE[self.kv_format])

    def predict(self, rates: Rates) -> float:
        """Seconds of prefix, suffixes and their merge."""
        memory = rates.memory(ITEMSIZE[self.kv_format])
        flops = 4 * self.heads.head_dim * self.heads.num_heads * self.batch * self.prefix
        prefix = max(self._kv_bytes(self.prefix) / memory, flops / rates.prefill)
        suffix = self._kv_bytes(self.batch * self.suffix) / memory
        return rates.launch + rates.merge + prefix + suffix

    def __str__(self) -> str:
        return f"{self.heads.name} {self.kv_format} {self.batch} rows, {in_k(self.prefix)} shared + {in_k(self.suffix)}"


@dataclasses.dataclass(frozen=True)
class WritePoint:
    """Keys and values of `num_tokens` tokens, bfloat16, into blocks."""

    heads: Heads
    num_tokens: int
    kv_format: str

    @property
    def work(self) -> Work:
        heads = self.heads
        read = 2 * 2 * self.num_tokens * heads.num_kv_heads * heads.head_dim
        return Work(read + self.num_tokens * heads.kv_bytes_per_token(ITEMSIZE[self.kv_format]), 0)

    def predict(self, rates: Rates) -> float:
        return rates.write_launch + self.work.num_bytes / rates.memory(ITEMSIZE[self.kv_format])

    def __str__(self) -> str:
        return f"{self.heads.name} {self.kv_format} {in_k(self.num_tokens)} tokens"


Point = DecodePoint | PrefillPoint | CascadePoint | WritePoint


def in_k(count: int) -> str:
    """2048 as 2k, as people name context lengths."""
    return f"{count // 1024}k" if count >= 1024 and count % 1024 == 0 else str(count)


# ---- what is measured

KV_FORMATS = ("bfloat16", "int8")
DECODE = tuple(
    DecodePoint(heads, batch, context, kv_format)
    for heads in MODELS.values()
    for batch in (1, 8, 64, 256)
    for context in (2048, 8192, 32768)
    for kv_format in KV_FORMATS
)
PREFILL = tuple(
    PrefillPoint(LLAMA_3_8B, query_len, context, kv_format)
    for query_len, context in ((8192, 0), (2048, 8192))
    for kv_format in KV_FORMATS
)
CASCADE = tuple(CascadePoint(LLAMA_3_8B, 64, 2048, 512, kv_format) for kv_format in KV_FORMATS)
WRITES = tuple(
    WritePoint(LLAMA_3_8B, num_tokens, kv_format) for num_tokens in (64, 256, 8192) for kv_format in KV_FORMATS
)
# The points that targets are set for, and what they are compared with.
ACCEPTANCE: dict[str, tuple[Point, ...]] = {
    "decode": tuple(
        DecodePoint(LLAMA_3_8B, batch, context, kv_format)
        for batch, context in ((8, 32768), (64, 8192), (1, 32768))
        for kv_format in KV_FORMATS
    ),
    "prefill": PREFILL,
    "cascade": CASCADE,
    "kv_write": (WritePoint(LLAMA_3_8B, 256, "bfloat16"), WritePoint(LLAMA_3_8B, 256, "int8")),
}
FULL: dict[str, tuple[Point, ...]] = {"decode": DECODE, "prefill": PREFILL, "cascade": CASCADE, "kv_write": WRITES}
