"""Vocabularies: trained, checked, compared, and used as fast as libraries of the same ids allow.

The configs are there at once; what needs a library of tokenizers is imported at its first use.
"""

from typing import TYPE_CHECKING

from phalanx.data.tokenizers.config import (
    ByteBpeTraining,
    SentencePieceTraining,
    WordPieceTraining,
)
from phalanx.late_names import late_names

if TYPE_CHECKING:
    from phalanx.data.tokenizers.encoder import Encoder
    from phalanx.data.tokenizers.tokenizer import (
        TextTokenizer,
        fingerprint_tokenizer,
        load_tokenizer,
        open_tokenizer,
        original_tokenizer,
        read_json,
        vocabulary_digest,
    )
    from phalanx.data.tokenizers.training import train_bpe, train_tokenizer

__all__ = [
    "ByteBpeTraining",
    "Encoder",
    "SentencePieceTraining",
    "TextTokenizer",
    "WordPieceTraining",
    "fingerprint_tokenizer",
    "load_tokenizer",
    "open_tokenizer",
    "original_tokenizer",
    "read_json",
    "train_bpe",
    "train_tokenizer",
    "vocabulary_digest",
]

if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)
