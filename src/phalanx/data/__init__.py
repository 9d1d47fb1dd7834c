"""Text to packed batches: sources, tokenizer, split, cache, order.

The config is there at once; what needs torch is imported at its first use.
"""

from typing import TYPE_CHECKING

from phalanx.data.config import (
    BpeConfig as BpeConfig,
    DataConfig as DataConfig,
    FileTokenizerConfig as FileTokenizerConfig,
    ModelTokenizerConfig as ModelTokenizerConfig,
    TokenizerConfig as TokenizerConfig,
)
from phalanx.data.sources import (
    PythonDocstringsConfig as PythonDocstringsConfig,
    PythonManualConfig as PythonManualConfig,
)
from phalanx.late_names import late_names

if TYPE_CHECKING:
    from phalanx.data.batch import (
        DOCUMENTS as DOCUMENTS,
        IGNORE as IGNORE,
        OF_ATTENTION as OF_ATTENTION,
        PREFIX as PREFIX,
        Batch as Batch,
        without_attention as without_attention,
    )
    from phalanx.data.chat_corpus import ChatCorpus as ChatCorpus
    from phalanx.data.corpus import Corpus as Corpus, SequenceLayout as SequenceLayout
    from phalanx.data.loader import (
        BatchLoader as BatchLoader,
        unigram_perplexity as unigram_perplexity,
        validation_batches as validation_batches,
    )
    from phalanx.data.preparation import prepare_corpus as prepare_corpus
    from phalanx.data.prepared_corpus import open_corpus as open_corpus
    from phalanx.data.validation_sets import prepare_validation_sets as prepare_validation_sets


if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)
