"""SentencePiece vocabularies: trained by its library, then written as a tokenizer.json that gives the same ids."""

import importlib
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from phalanx.data.tokenizers.config import SentencePieceTraining
from phalanx.data.tokenizers.probes import probe_texts
from phalanx.errors import DataError

_SPACE = "\u2581"
_UNKNOWN = "<unk>"
_LONGEST = 2_000
"""Characters that are given to the trainer at once; it holds all of them in memory."""
_KEPT_FOR_PROOF = 200
_ROUNDING = 1e-5
"""SentencePiece adds scores as float32."""
_TOO_MANY = re.compile(r"to a value <= (\d+)")
_TOO_FEW = re.compile(r"smaller than required_chars\. \d+ vs (\d+)")


def train_sentence_piece(
    texts: Iterator[str], config: SentencePieceTraining, normalizer: Any, where: str
) -> tokenizers.Tokenizer:
    """Train a vocabulary and return it in the form of the tokenizers library.

    Args:
        normalizer: Normalizer of the tokenizers library, applied before SentencePiece, which gets none of its own; or
            None.
        where: The section of `config`, for messages.

    Raises:
        DataError: The extra is missing, the text supports another number of tokens, or the two forms give different ids
            for a text.
    """
    library = _import_library()
    texts_kept: list[str] = []
    learned, model = config.vocab_size - len(config.all_special), io.BytesIO()
    try:
        library.SentencePieceTrainer.train(
            sentence_iterator=_pieces_of(texts, normalizer, texts_kept),
            model_writer=model,
            model_type=config.kind.removeprefix("sentencepiece_"),
            vocab_size=learned,
            character_coverage=config.character_coverage,
            byte_fallback=config.byte_fallback,
            split_digits=config.split_digits,
            # text comes back as it was: what is given up is up to the normalizer alone
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            unk_id=0,
            bos_id=-1,
            eos_id=-1,
            pad_id=-1,
            # sums of floats depend on the number of threads
            num_threads=1,
            max_sentence_length=8 * _LONGEST,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as exc:
        raise _training_error(exc, config, learned, where) from exc
    processor = library.SentencePieceProcessor(model_proto=model.getvalue())
    backend = _convert_model(processor, config, normalizer)
    prove_equal(processor, backend, normalizer, [*texts_kept, *probe_texts(config.all_special)])
    return backend


def prove_equal(processor: Any, backend: tokenizers.Tokenizer, normalizer: Any, texts: Iterable[str]) -> None:
    """Compare ids of both forms on each text.

    Where two splits of a text have the same score, a unigram model may take either; both forms then do as they like.
    """
    for text in texts:
        expected = processor.encode(_normalize_text(text, normalizer))
        ids = backend.encode(text, add_special_tokens=False).ids
        if expected != ids and not _are_equally_good(processor, backend, expected, ids):
            pairs = zip([*expected, None], [*ids, None], strict=False)
            index = next(position for position, (expected_id, other) in enumerate(pairs) if expected_id != other)
            raise DataError(
                f"SentencePiece gives other ids than its tokenizer.json from token {index} on, for the text that "
                f"starts {text[:40]!r}; train with other settings, or use kind = 'bpe'"
            ).with_facts(code="PHX-I019")


def _are_equally_good(processor: Any, backend: tokenizers.Tokenizer, one: list[int], other: list[int]) -> bool:
    """Whether two splits are of the same text and, for a unigram model, have the same score."""
    if not isinstance(backend.model, models.Unigram) or backend.decode(one) != backend.decode(other):
        return False
    first, second = (sum(processor.get_score(number) for number in ids) for ids in (one, other))
    return bool(abs(first - second) <= _ROUNDING * abs(first))


def _import_library() -> Any:
    try:
        return importlib.import_module("sentencepiece")
    except ImportError as exc:
        raise DataError("SentencePiece is not installed; pip install 'phalanx-train[tokenizers]'").with_facts(
            do="pip install 'phalanx-train[tokenizers]'"
        ) from exc


def _pieces_of(texts: Iterator[str], normalizer: Any, kept: list[str]) -> Iterator[str]:
    """Yield texts in parts that end behind white space where they can; keep the first ones for the proof."""
    for text in texts:
        normal = _normalize_text(text, normalizer)
        if len(kept) < _KEPT_FOR_PROOF:
            kept.append(text[: 10 * _LONGEST])
        start = 0
        while start < len(normal):
            stop = min(start + _LONGEST, len(normal))
            blank = max(normal.rfind(" ", start + 1, stop), normal.rfind("\n", start + 1, stop))
            stop = blank if blank > start and stop < len(normal) else stop
            # the trainer passes over a sentence with a NUL
            yield normal[start:stop].replace("\x00", " ")
            start = stop


def _convert_model(processor: Any, config: SentencePieceTraining, normalizer: Any) -> tokenizers.Tokenizer:
    count = processor.get_piece_size()
    pieces = [(processor.id_to_piece(number), processor.get_score(number)) for number in range(count)]
    is_learned = [
        not (processor.is_unknown(number) or processor.is_byte(number) or processor.is_control(number))
        for number in range(count)
    ]
    if config.kind == "sentencepiece_bpe":
        model: Any = _as_bpe(pieces, is_learned, byte_fallback=config.byte_fallback)
    else:
        model = models.Unigram(pieces, unk_id=0, byte_fallback=config.byte_fallback)
    backend = tokenizers.Tokenizer(model)
    space = normalizers.Replace(" ", _SPACE)
    backend.normalizer = space if normalizer is None else normalizers.Sequence([normalizer, space])
    # the library finds the names of bytes and of the unknown in a text, where SentencePiece sees characters
    names = Regex(r"<(?=unk>|0x[0-9A-F]{2}>)")
    if config.kind == "sentencepiece_unigram":
        backend.pre_tokenizer = pre_tokenizers.Split(names, "isolated")
    backend.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(list(config.all_special))
    backend.encode_special_tokens = True
    return backend


def _as_bpe(pieces: Sequence[tuple[str, float]], is_learned: Sequence[bool], *, byte_fallback: bool) -> Any:
    """Return a BPE that merges in every way to make a piece of two others, best piece first."""
    vocabulary = {piece: number for number, (piece, _) in enumerate(pieces)}
    merges = []
    for piece, score in pieces:
        if not is_learned[vocabulary[piece]]:
            continue
        halves = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        scored_merges = [
            (vocabulary[first], vocabulary[right], first, right)
            for first, right in halves
            if first in vocabulary and right in vocabulary
        ]
        merges += [(-score, vocabulary[piece], *merge) for merge in sorted(scored_merges)]
    pairs = [(first, right) for *_, first, right in sorted(merges)]
    return models.BPE(vocabulary, pairs, unk_token=_UNKNOWN, fuse_unk=True, byte_fallback=byte_fallback)


def _normalize_text(text: str, normalizer: Any) -> str:
    return text if normalizer is None else str(normalizer.normalize_str(text))


def _training_error(exc: Exception, config: SentencePieceTraining, learned: int, where: str) -> DataError:
    message, vocab_size = str(exc), config.vocab_size
    special = vocab_size - learned
    limits = (("too large", "lower", "at most", _TOO_MANY), ("too small", "raise", "at least", _TOO_FEW))
    for what, change, bound, pattern in limits:
        match = pattern.search(message)
        if match is not None:
            limit = int(match[1]) + special
            return DataError(
                f"{where}.vocab_size={vocab_size}: {what} for the training text; {change} it to {bound} {limit}"
            ).with_facts(code="PHX-I017", key=f"{where}.vocab_size", found=str(vocab_size), expected=f"{bound} {limit}")
    return DataError(
        f"{where}: SentencePiece made no vocabulary of {vocab_size} tokens ({message.strip()[-120:]}); add text"
    ).with_facts(code="PHX-I017", key=f"{where}.vocab_size", found=str(vocab_size), do="add text")
