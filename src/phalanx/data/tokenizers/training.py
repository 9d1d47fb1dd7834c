"""Vocabularies that are trained here; the same texts in the same order give the same bytes."""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from phalanx.data.config import BpeConfig
from phalanx.data.tokenizers.config import (
    ByteBpeTraining,
    SentencePieceTraining,
    TrainingConfig,
    VocabularyTraining,
    WordPieceTraining,
)
from phalanx.data.tokenizers.patterns import GPT2_DIGITS
from phalanx.data.tokenizers.sentence_piece import train_sentence_piece
from phalanx.data.tokenizers.tokenizer import TextTokenizer, wrap_backend
from phalanx.errors import DataError

_CONTINUED = "##"
MAX_WORD = 4096
_LONG_RUN = re.compile(rf"\S{{{MAX_WORD}}}|\s{{{MAX_WORD}}}")


def train_tokenizer(texts: Iterable[str], config: TrainingConfig, where: str = "tokenizer") -> TextTokenizer:
    """Train a vocabulary.

    Args:
        texts: Read once; all of their words, or all of their text, is held in memory.
        where: The section of `config` in its file, for messages.

    Guarantees:
        The same texts in the same order, config and library versions give the same ``tokenizer.json``, whatever the
        machine's number of cores. `TextTokenizer` gives no special token for any text.

    Source: Sennrich et al. 2016 (BPE); Schuster and Nakajima 2012 (WordPiece); Kudo 2018 (unigram); Kudo and
        Richardson 2018 (SentencePiece).
    """
    return TRAINERS[config.kind](iter(texts), config, where)


def cut_words(texts: Iterator[str], backend: tokenizers.Tokenizer) -> Iterator[str]:
    """Return texts without words of more than `MAX_WORD` characters, on which the trainers spend quadratic time."""
    # while the backend learns from the texts, it may not be asked for its parts
    normalizer, pre_tokenizer = backend.normalizer, backend.pre_tokenizer

    def cut_text(text: str) -> Iterator[str]:
        begin, normal = 0, text if normalizer is None else normalizer.normalize_str(text)
        for _, (start, stop) in pre_tokenizer.pre_tokenize_str(normal):
            for place in range(start + MAX_WORD, stop, MAX_WORD):
                yield normal[begin:place]
                begin = place
        yield normal[begin:]

    return (part for text in texts for part in ([text] if _LONG_RUN.search(text) is None else cut_text(text)))


def train_bpe(texts: Iterator[str], config: BpeConfig) -> TextTokenizer:
    """Train the byte-level BPE that a run file asks for by ``kind = "bpe"``: as `train_tokenizer`."""
    training = ByteBpeTraining(vocab_size=config.vocab_size, special_tokens=config.special_tokens)
    return train_tokenizer(texts, training, "data.tokenizer")


def _train_byte_bpe(texts: Iterator[str], config: ByteBpeTraining, where: str) -> TextTokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    _set_normalizer(backend, config)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if config.split_digits:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(GPT2_DIGITS), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        min_frequency=config.min_frequency,
        special_tokens=list(config.all_special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(cut_words(texts, backend), trainer=trainer)
    check_size(backend.get_vocab_size(), config.vocab_size, where)
    return wrap_backend(backend, config.end_of_text, "trained tokenizer")


def _train_word_piece(texts: Iterator[str], config: WordPieceTraining, where: str) -> TextTokenizer:
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token=config.unknown))
    _set_normalizer(backend, config)
    pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    digits = [pre_tokenizers.Digits(individual_digits=True)] if config.split_digits else []
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizer, *digits]) if digits else pre_tokenizer
    counts = _count_words(cut_words(texts, backend), backend)
    # the library numbers characters inside words in the order of a hash table, which is another one at each run, and
    # breaks ties by these numbers: told as special tokens, they have fixed ones
    inside = sorted({f"{_CONTINUED}{character}" for word in counts for character in word[1:]})
    trainer = trainers.WordPieceTrainer(
        vocab_size=config.vocab_size,
        min_frequency=config.min_frequency,
        special_tokens=[*config.all_special, *inside],
        continuing_subword_prefix=_CONTINUED,
        show_progress=False,
    )
    learning = tokenizers.Tokenizer(models.WordPiece(unk_token=config.unknown))
    learning.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    learning.train_from_iterator((word for word, count in counts.items() for _ in range(count)), trainer=trainer)
    vocabulary = learning.get_vocab(with_added_tokens=False)
    check_size(len(vocabulary), config.vocab_size, where)
    backend.model = models.WordPiece(
        vocabulary, unk_token=config.unknown, continuing_subword_prefix=_CONTINUED, max_input_chars_per_word=100
    )
    backend.decoder = decoders.WordPiece(prefix=_CONTINUED, cleanup=False)
    backend.add_special_tokens(list(config.all_special))
    return wrap_backend(backend, config.end_of_text, "trained tokenizer")


def _train_sentence_piece(texts: Iterator[str], config: SentencePieceTraining, where: str) -> TextTokenizer:
    backend = train_sentence_piece(texts, config, _make_normalizer(config), where)
    return wrap_backend(backend, config.end_of_text, "trained tokenizer")


TRAINERS: dict[str, Callable[[Iterator[str], Any, str], TextTokenizer]] = {
    "bpe": _train_byte_bpe,
    "wordpiece": _train_word_piece,
    "sentencepiece_bpe": _train_sentence_piece,
    "sentencepiece_unigram": _train_sentence_piece,
}


def check_size(size: int, wanted: int, where: str) -> None:
    """Refuse a vocabulary that the text could not fill."""
    if size < wanted:
        raise DataError(
            f"{where}.vocab_size={wanted}: the training text supports {size} tokens only; "
            f"lower vocab_size to {size} or add text"
        ).with_facts(
            code="PHX-I017",
            key=f"{where}.vocab_size",
            found=str(wanted),
            expected=f"at most {size}",
            do=f"lower vocab_size to {size} or add text",
        )
    if size > wanted:
        raise DataError(
            f"{where}.vocab_size={wanted}: special tokens and single characters are already {size}; raise "
            f"vocab_size above {size}"
        ).with_facts(code="PHX-I017", key=f"{where}.vocab_size", found=str(wanted), expected=f"more than {size}")


def _make_normalizer(config: VocabularyTraining) -> Any:
    forms: dict[str, list[Any]] = {"none": [], "nfc": [normalizers.NFC()], "nfkc": [normalizers.NFKC()]}
    steps = [*forms[config.normalization], *([normalizers.Lowercase()] if config.lowercase else [])]
    return normalizers.Sequence(steps) if len(steps) > 1 else (steps or [None])[0]


def _set_normalizer(backend: tokenizers.Tokenizer, config: VocabularyTraining) -> None:
    normalizer = _make_normalizer(config)
    if normalizer is not None:
        backend.normalizer = normalizer


def _count_words(texts: Iterator[str], backend: tokenizers.Tokenizer) -> dict[str, int]:
    counts: dict[str, int] = {}
    for text in texts:
        normal = text if backend.normalizer is None else backend.normalizer.normalize_str(text)
        for word, _ in backend.pre_tokenizer.pre_tokenize_str(normal):
            counts[word] = counts.get(word, 0) + 1
    return counts
