"""Fused GPU kernels: each file has one operation, as a plain PyTorch reference and as a custom operator.

On CUDA the operator launches its Triton program (`shoal.engine.kernels.programs`). Operators have fake and autograd
registrations, so that they work under `torch.compile`, on fake tensors and in dry runs.

A module's function ``examples()`` yields one `Example` or more of each of its operators. The suite compares them with
the reference in float64 on the CPU, and `shoal bench gpu --part 2` on the GPU.
"""
