"""Training with relaxed data parallelism: the engines and loops around the methods of
`shoal.training.async_dp.methods`."""
