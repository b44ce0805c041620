"""What computes: models, optimizers, number formats, data, collectives, parallelism, the runtime and checkpoints.

Models are plain single-device PyTorch; each parallelism is one module that transforms them by a table. It uses
`shoal.base`, `shoal.spec` and `shoal.pipeline`. Lines that depend on the device are in `shoal.engine.device`.
"""
