"""The CUDA path: Triton kernels and the forward pass made of them.

Does: compute a step whose tensors never leave the device, in a form that a CUDA graph can hold. Does not: decide what a
step computes, or hold graphs (`engine/run/`). Imports triton: nothing outside imports this package unless it has a CUDA
device. Each kernel stands beside the function that launches it and is compared with torch in `tests/unit/models/cuda`.
"""
