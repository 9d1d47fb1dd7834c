"""Where texts begin and meet in tokens, by a tokenizer's own markers."""

import unicodedata
from collections.abc import Sequence

import tokenizers


def bare_encoder(backend: tokenizers.Tokenizer, *, special_is_text: bool) -> tokenizers.Tokenizer:
    """Return a copy that writes nothing around a text, and whose offsets count every character.

    Post-processors of byte-level tokenizers trim spaces off the offsets of a token, so that a token seems to end before
    a border that it reaches over.

    Args:
        special_is_text: Whether a special token that is spelled out in a text is text.
    """
    copy = tokenizers.Tokenizer.from_str(backend.to_str())
    copy.no_truncation()
    copy.no_padding()
    copy.post_processor = None
    copy.encode_special_tokens = special_is_text
    return copy


def border_of(encoding: tokenizers.Encoding, text: str, characters: int) -> int:
    """Return the number of the first token that reaches beyond so many characters; that of all where none does.

    Args:
        encoding: Of the text by a `bare_encoder`.
    """
    offsets = encoding.offsets
    if _is_composed(offsets, text, characters):
        characters -= 1
    return next((place for place, (_, stop) in enumerate(offsets) if stop > characters), len(encoding.ids))


def _is_composed(offsets: Sequence[tuple[int, int]], text: str, at: int) -> bool:
    """Return whether a normalizer made one character of those on both sides of a place; offsets name the first."""
    if not 0 < at < len(text) or any(start <= at < stop for start, stop in offsets):
        return False
    pair = text[at - 1 : at + 1]
    return len(unicodedata.normalize("NFC", pair)) < sum(
        len(unicodedata.normalize("NFC", character)) for character in pair
    )


def special_ids_around(backend: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens that a tokenizer's post-processor writes before a text, and behind it."""
    bare, encoded = (list(backend.encode("a", add_special_tokens=adds).ids) for adds in (False, True))
    begins = (place for place in range(len(encoded) - len(bare) + 1) if encoded[place : place + len(bare)] == bare)
    begin = next(begins, None)
    return ((), ()) if begin is None else (tuple(encoded[:begin]), tuple(encoded[begin + len(bare) :]))


def first_ids_of(backend: tokenizers.Tokenizer) -> tuple[int, ...]:
    """Return the ids that a tokenizer's post-processor writes before a text."""
    return special_ids_around(backend)[0]


def drop_trailing_ids(ids: Sequence[int], bare: Sequence[int]) -> list[int]:
    """Return the ids of a text without what its tokenizer writes behind it.

    Args:
        ids: Ids with the post-processor's own before and behind.
    """
    token_ids, inner = list(ids), list(bare)
    begins = (
        place for place in range(len(token_ids) - len(inner) + 1) if token_ids[place : place + len(inner)] == inner
    )
    begin = next(begins, None)
    return token_ids if begin is None else token_ids[: begin + len(inner)]
