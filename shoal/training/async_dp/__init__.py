"""Relaxed data parallelism: engines and training loops for the methods of `shoal.training.async_dp.methods`."""
