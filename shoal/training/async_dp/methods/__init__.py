"""Relaxed data parallelism: methods without an exact synchronous sum of gradients. See docs/relaxed.md."""
