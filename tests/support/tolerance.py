"""How far an implementation may be from its reference, and from float64, absolute, on normal random inputs.

Largest errors over all cases, JAX 0.10.2 on CPU: outputs 1.3e-5 in float32 (scale 0.2 at head_dim 256: logits of 40; 9.5e-7
with ordinary ones), 1.6e-2 in bfloat16 and 2.0e-3 in float16
(one unit in the last place between 2 and 4), lse 4.8e-7. That a wrong block, swapped keys and values, or a length off
by one are outside, the mutant tests prove.
"""

ATTENTION_OUT = {"float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3}
ATTENTION_LSE = {"float32": 5e-6, "bfloat16": 5e-6, "float16": 5e-6}
# Kernels take products with int8 in float16: 2^-11 of a float32 query and of a probability are rounded away.
FLOAT16_MATH = 2e-3
