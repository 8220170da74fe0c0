"""What the benchmark programs share: the engines that they compare, ways to drive jaxkv's, and fits of what they measure."""
