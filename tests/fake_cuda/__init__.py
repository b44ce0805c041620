"""Run training steps on fake `cuda` tensors with torch's CPU build, to find errors and delays without a GPU.

The tensors have shapes, dtypes and a device, but no values; index tensors computed from data have values too. A census
of one step of one rank lists device mismatches, host synchronisations, host-device copies and kernel launches, each
with its source line:

    python -m tests.fake_cuda RUN.toml [--rank R] [--step N] [--most LINES]

The library that pretends to be CUDA must be loaded before torch, so tests use a child process:

    from tests.fake_cuda.library import start_process, why_unavailable
    from tests.fake_cuda.census import take_census

    with start_process() as process:  # a ProcessPoolExecutor; skip the test if why_unavailable() returns a reason
        census = process.submit(take_census, config, rank).result()
    assert not census.mismatches and census.synchronisations.total() <= 2 and census.launches.total() <= 900

In such a process the context `tests.fake_cuda.census.fake_cuda` runs any other code on fake tensors. The module
that a process imports first must not import torch, so import it inside the function that `submit` gets.
A census does not show that kernels compute the right values or are fast.
"""
