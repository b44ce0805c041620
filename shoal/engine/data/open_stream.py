"""Open a split of a corpus as a stream of token ids: files of token ids in place, others from the cache of shards."""

from __future__ import annotations

from shoal.base.errors import UsageError
from shoal.engine.data.megatron import MegatronStream
from shoal.engine.data.shards import open_shards
from shoal.engine.data.token_stream import Split, Stream, TokenStream
from shoal.engine.data.tokenizer import Tokenizer
from shoal.spec.config import DataConfig


def open_stream(config: DataConfig, tokenizer: Tokenizer, split: Split, *, progress: bool = False) -> Stream:
    """Open one split of the corpus of ``config``; tokenise it first if it is not in the cache.

    Raises:
        UsageError: naming the invalid input.
    """
    if config.mixture:
        raise UsageError(
            f"data.mixture has several sources ({', '.join(config.mixture)}), and one text is needed here."
            "\n  Name files, such as with --data."
        )
    if config.reads == "megatron":
        return MegatronStream(config, tokenizer, split)
    shards = open_shards(config, tokenizer, progress=progress)
    return TokenStream(shards, split, tokenizer.end_of_document, ", ".join(config.paths))
