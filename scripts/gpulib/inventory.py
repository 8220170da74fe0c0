"""The figures that a kernel is judged by, out of its machine code and its launch."""

from gpulib.census import Census, Launch

FIGURES = {
    "registers": "a thread",
    "spilled": "bytes of registers spilled and loaded again",
    "threads": "a CTA",
    "shared_memory": "bytes a CTA, static and dynamic",
    "cp_async_16": "asynchronous copies to shared memory of 16 bytes a thread",
    "cp_async_narrow": "the same of fewer bytes",
    "tma": "loads of the tensor memory accelerator",
    "loads_16": "global loads of 16 bytes a thread",
    "mma": "tensor-core instructions of a warp",
    "wgmma": "tensor-core instructions of a warpgroup",
    "wgmma_serialized": "1 where ptxas made them wait for one another",
    "byte_lds": "byte-wide shared-memory loads",
    "int_to_float": "conversions in the inner loop",
    "tf32": "tensor-core instructions in TF32",
    "loop_instructions": "of a warp in the largest innermost loop",
    "smallest_loop_instructions": "of a warp in the smallest innermost loop: of prefill, the one without masks",
    "loop_instructions_per_kv_byte": "of all warps, over the bytes of K and V that a turn of the loop reads",
}
"""What each figure counts."""


def inventory(census: Census, launch: Launch, loop_kv_bytes: int | None = None) -> dict[str, float]:
    """All FIGURES of a kernel; the last one only where it is known what a turn of the inner loop reads."""
    loop_instructions = sum(census.loop.values())
    wide = census.count(r"LDGSTS.*\.128")
    figures = {
        "registers": census.registers,
        "spilled": census.spilled,
        "threads": launch.threads,
        "shared_memory": census.static_shared + launch.shared_memory,
        "cp_async_16": wide,
        "cp_async_narrow": census.count("LDGSTS") - wide,
        "tma": census.count("UTMALDG"),
        "loads_16": census.count(r"LDG\..*128"),
        "mma": census.count("[HIQD]MMA"),
        "wgmma": census.count("[HIQ]GMMA"),
        "wgmma_serialized": int(census.wgmma_serialized),
        "byte_lds": census.count(r"LDS\.(.*\.)?[US]8"),
        "int_to_float": census.count("I2F", loop=True),
        "tf32": census.count(".*TF32"),
        "loop_instructions": loop_instructions,
        "smallest_loop_instructions": sum(census.loops[-1].values()) if census.loops else 0,
    }
    if loop_kv_bytes is not None:
        figures["loop_instructions_per_kv_byte"] = loop_instructions * launch.threads / 32 / loop_kv_bytes
    return figures
