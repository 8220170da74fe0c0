"""The rows that get a verdict. A: an article on raising the hit rate of a served 7B model on an A100 with 40 GB; B: one on
the basics of KV caches, 7B on an A100 with 80 GB.
"""

CLAIMS = {
    "B1": "a KV cache makes the first token 4 to 65 times faster",
    "B2": "bytes a request follow from layers, heads, head_dim and length",
    "B3": "every request takes 1 GB, so 66 GB hold 60",
    "B4": "requests by gpu_memory_utilization",
    "B5": "gpu_memory_utilization is KV's share",
    "B6": "safe values of gpu_memory_utilization",
    "B7": "too large a batch limit crashes the service",
    "B8": "throughput and waste by block_size; 16 is the best",
    "A1": "larger blocks lower the hit rate",
    "B9": "a cached prefix of 500 tokens makes TTFT 2.6 times shorter",
    "A2": "without shared prefixes the prefix cache costs next to nothing",
    "A3": "questions about the same documents gain likewise",
    "B10": "int8 KV: half the memory, 40 % more throughput, the same quality",
    "A4": "8-bit KV: 80 % more capacity, a higher hit rate, the same quality",
    "A5": "misses turn decoding into prefill: a third of the load",
    "A6": "more memory and fewer sequences raise the hit rate",
    "A7": "a long system prompt raises the hit rate and lowers TTFT",
    "A8": "all steps together double the throughput",
    "B11": "three steps double the throughput",
    "A9": "a good mean hit rate hides slow misses",
    "A10": "a high hit rate with an unchanged TTFT comes from queueing",
    "A11": "what changes at the front of a prompt destroys sharing",
    "A12": "paged memory fragments with time",
    "A13": "the prefix cache should be warmed after a restart",
    "B12": "a window keeps memory flat and forgets",
    "B13": "eager mode reaches 40 % of the compiled throughput",
    "B14": "tensor parallelism fills caches unevenly",
    "A14": "the start lines tell what fits",
}
