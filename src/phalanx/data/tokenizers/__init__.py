"""Vocabularies: trained, checked, compared, and used as fast as libraries of the same ids allow.

The configs are there at once; what needs a library of tokenizers is imported at its first use.
"""

from typing import TYPE_CHECKING

from phalanx.data.tokenizers.config import (
    ByteBpeTraining as ByteBpeTraining,
    SentencePieceTraining as SentencePieceTraining,
    WordPieceTraining as WordPieceTraining,
)
from phalanx.late_names import late_names

if TYPE_CHECKING:
    from phalanx.data.tokenizers.encoder import Encoder as Encoder
    from phalanx.data.tokenizers.tokenizer import (
        TextTokenizer as TextTokenizer,
        fingerprint_tokenizer as fingerprint_tokenizer,
        load_tokenizer as load_tokenizer,
        open_tokenizer as open_tokenizer,
        original_tokenizer as original_tokenizer,
        read_json as read_json,
        vocabulary_digest as vocabulary_digest,
    )
    from phalanx.data.tokenizers.training import train_bpe as train_bpe, train_tokenizer as train_tokenizer


if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)
