"""Data pipeline: corpus -> tokenizer -> shards -> order -> batches. Only `shoal.engine.data.batches` imports torch."""
