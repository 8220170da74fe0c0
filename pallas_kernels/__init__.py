"""Array operations over a paged KV cache: imports jax only, never jaxkv, and is usable on its own.

Shape letters used everywhere: N blocks, P block_size, K KV heads, G query heads per KV head, H = K*G, D head_dim, S rows,
M blocks a row, T tokens (padded), R sequences of a prefill call.
"""
