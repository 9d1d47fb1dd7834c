"""Text to packed batches: sources, tokenizer, split, cache, order.

The config is there at once; what needs torch is imported at its first use.
"""

from typing import TYPE_CHECKING

from phalanx.data.config import BpeConfig, DataConfig, FileTokenizerConfig, ModelTokenizerConfig, TokenizerConfig
from phalanx.data.sources import (
    PythonDocstringsConfig,
    PythonManualConfig,
)
from phalanx.late_names import late_names

if TYPE_CHECKING:
    from phalanx.data.batch import DOCUMENTS, IGNORE, OF_ATTENTION, PREFIX, Batch, without_attention
    from phalanx.data.chat_corpus import ChatCorpus
    from phalanx.data.corpus import Corpus, SequenceLayout
    from phalanx.data.loader import BatchLoader, unigram_perplexity, validation_batches
    from phalanx.data.preparation import prepare
    from phalanx.data.prepared_corpus import open_corpus
    from phalanx.data.validation_sets import prepare_validation_sets

__all__ = [
    "DOCUMENTS",
    "IGNORE",
    "OF_ATTENTION",
    "PREFIX",
    "Batch",
    "BatchLoader",
    "BpeConfig",
    "ChatCorpus",
    "Corpus",
    "DataConfig",
    "FileTokenizerConfig",
    "ModelTokenizerConfig",
    "PythonDocstringsConfig",
    "PythonManualConfig",
    "SequenceLayout",
    "TokenizerConfig",
    "open_corpus",
    "prepare",
    "prepare_validation_sets",
    "unigram_perplexity",
    "validation_batches",
    "without_attention",
]


if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)
