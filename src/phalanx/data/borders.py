"""Where texts begin and meet in tokens, by what a tokenizer itself says of them."""

from collections.abc import Sequence

import tokenizers


def border_of(encoding: tokenizers.Encoding, characters: int) -> int:
    """Return the number of the first token that reaches beyond so many characters; that of all where none does."""
    return next((at for at, (_, stop) in enumerate(encoding.offsets) if stop > characters), len(encoding.ids))


def first_ids_of(backend: tokenizers.Tokenizer) -> tuple[int, ...]:
    """Return what a tokenizer's post-processor writes before a text."""
    bare, whole = (list(backend.encode("a", add_special_tokens=adds).ids) for adds in (False, True))
    begins = (at for at in range(len(whole) - len(bare) + 1) if whole[at : at + len(bare)] == bare)
    return tuple(whole[: next(begins, 0)])


def without_last(ids: Sequence[int], bare: Sequence[int]) -> list[int]:
    """Return the ids of a text without what its tokenizer writes behind it.

    Args:
        ids: With what it writes before and behind.
        bare: Without.
    """
    whole, inner = list(ids), list(bare)
    begins = (at for at in range(len(whole) - len(inner) + 1) if whole[at : at + len(inner)] == inner)
    begin = next(begins, None)
    return whole if begin is None else whole[: begin + len(inner)]
