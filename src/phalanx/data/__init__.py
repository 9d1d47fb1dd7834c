"""Text to packed batches: sources, tokenizer, split, cache, order.

The config is there at once; what needs torch is imported at its first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from phalanx.data.config import BpeConfig, DataConfig, FileTokenizerConfig, ModelTokenizerConfig, TokenizerConfig
from phalanx.data.sources import (
    HtmlConfig,
    JsonlConfig,
    PythonDocstringsConfig,
    PythonManualConfig,
    SourceConfig,
    TextConfig,
)

if TYPE_CHECKING:
    from phalanx.data.batch import IGNORE, Batch
    from phalanx.data.corpus import Corpus, open_corpus
    from phalanx.data.loader import BatchLoader, validation_batches
    from phalanx.data.manifest import CorpusManifest
    from phalanx.data.preparation import prepare
    from phalanx.data.unigram import unigram_perplexity

__all__ = [
    "IGNORE",
    "Batch",
    "BatchLoader",
    "BpeConfig",
    "Corpus",
    "CorpusManifest",
    "DataConfig",
    "FileTokenizerConfig",
    "HtmlConfig",
    "JsonlConfig",
    "ModelTokenizerConfig",
    "PythonDocstringsConfig",
    "PythonManualConfig",
    "SourceConfig",
    "TextConfig",
    "TokenizerConfig",
    "open_corpus",
    "prepare",
    "unigram_perplexity",
    "validation_batches",
]

_LATER = {
    "IGNORE": "phalanx.data.batch",
    "Batch": "phalanx.data.batch",
    "Corpus": "phalanx.data.corpus",
    "open_corpus": "phalanx.data.corpus",
    "BatchLoader": "phalanx.data.loader",
    "validation_batches": "phalanx.data.loader",
    "CorpusManifest": "phalanx.data.manifest",
    "prepare": "phalanx.data.preparation",
    "unigram_perplexity": "phalanx.data.unigram",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module 'phalanx.data' has no attribute {name!r}")
