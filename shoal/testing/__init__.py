"""Proofs that training is correct: comparison with one device, and faults injected into computations and runs.

`shoal.testing.verify` compares losses, gradients and weights of any layout with a plain model on one device.
`shoal.testing.chaos` kills ranks of a run and checks that it recovers. Uses the packages up to `shoal.launch`.
"""
