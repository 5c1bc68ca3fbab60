"""Fast steps on a plain CPU: packed weights, compiled kernels, one call for a whole step.

Does: keep weights as they were stored (4 bits, 8 bits, bfloat16) and compute steps of few tokens from them, all layers in
one compiled call on a team of threads; leave steps of many tokens to torch's matrix products where those are faster.
Does not: change a result beyond float32 rounding. Compiled by numba on first use and kept in the user's cache directory;
without numba, or for a model it does not fit, everything runs through torch.
"""
