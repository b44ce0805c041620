"""From text to batches: corpus -> tokenizer -> shards -> order -> batches. Only `shoal.data.batches` imports torch."""
