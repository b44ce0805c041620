"""Training engine: models, optimizers, number formats, data, collectives, parallelism, runtime and checkpoints.

Models are single-device PyTorch modules; each parallelism is a module that transforms them by a table. The engine uses
`shoal.base`, `shoal.spec` and `shoal.pipeline`. Device-specific code is in `shoal.engine.device`.
"""
