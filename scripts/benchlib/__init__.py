"""What the benchmark programs share: engines to compare, ways to drive jaxkv's, fits of what they measure."""
