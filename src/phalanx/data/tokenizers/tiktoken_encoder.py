"""A byte-level BPE a second time, in tiktoken, where it can be shown to give the same ids (ADR 112)."""

import functools
import importlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import Regex, pre_tokenizers

from phalanx.data.tokenizers.patterns import GPT2, GPT2_DIGITS, KNOWN_PATTERNS
from phalanx.data.tokenizers.probes import probe_texts

_CLASSES = (r"\p{L}", r"\p{N}", r"\s")
_FIRST_UNCHECKED = 0x33480
"""From here on Unicode has no letter, number or space; a text with such a character is left to the other library."""
_BLANKS = 20_000
_LONG_BLANK = re.compile(rf"\s{{{_BLANKS}}}")
"""Before this pattern ends, tiktoken's matcher has used up its stack."""


class UnequalError(ValueError):
    """tiktoken cannot be shown to give the same ids; says why."""


@dataclass(frozen=True)
class TiktokenEncoder:
    """A vocabulary in tiktoken.

    Attributes:
        odd: Finds a character that the two libraries do not class alike, or that was not compared.
    """

    encoding: Any
    ids: NDArray[np.uint32]
    unequal_characters: re.Pattern[str]

    def encode_text(self, text: str) -> NDArray[np.uint32] | None:
        """Return the ids of a text; None where it is to be encoded by tokenizers."""
        if not text.isascii() and self.unequal_characters.search(text):
            return None
        if len(text) >= _BLANKS and _LONG_BLANK.search(text):
            return None
        ids: NDArray[np.uint32] = self.ids[self.encoding.encode_to_numpy(text, disallowed_special=())]
        return ids


def make_tiktoken_encoder(backend: tokenizers.Tokenizer) -> TiktokenEncoder:
    """Load a tokenizer's vocabulary into tiktoken.

    Raises:
        UnequalError: It is no byte-level BPE of a known pattern, tiktoken is not installed, or the proof fails.

    Guarantees:
        The same ids for every text. Merges: see `check_merges`. Pattern: it is one of a known list, and both libraries
        class each character below U+33480 alike, which is looked up here; texts with others are not encoded. Beyond
        that, ids of hard texts are compared.
    """
    try:
        tiktoken = importlib.import_module("tiktoken")
    except ImportError as exc:
        raise UnequalError("tiktoken is not installed; pip install 'phalanx-train[tokenizers]'") from exc
    parts = json.loads(backend.to_str())
    pattern = _split_pattern(parts)
    merges = _merge_halves(parts["model"])
    ranks, ids = _token_ranks(parts["model"], merges)
    check_merges(merges)
    encoding = tiktoken.Encoding("phalanx", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    encoder = TiktokenEncoder(encoding, ids, _unequal_characters())
    for text in probe_texts(token["content"] for token in parts["added_tokens"]):
        encoded = encoder.encode_text(text)
        if encoded is not None and encoded.tolist() != backend.encode(text, add_special_tokens=False).ids:
            raise UnequalError(f"other ids for the text that starts {text[:40]!r}")
    return encoder


def check_merges(merges: Sequence[tuple[bytes, bytes]]) -> None:
    """Show that two neighbours which together are a token are always the two that its own merge joins.

    tokenizers joins the pair that a merge names; tiktoken joins any two neighbours that together are a token. Take the
    bytes of one token alone, and join pairs of lower ranks. If the two halves of its merge are left, then they are left
    wherever both its ends are borders of tokens, since joins between two borders do not depend on the text beyond them.
    So when the turn of its rank comes, no other pair makes it, and no join makes one of a lower rank possible. If that
    holds for every token, both libraries do the same at every rank, for every text.

    Args:
        merges: Pairs in their order, no two of which make the same token.
    """
    ranks = {first + right: rank for rank, (first, right) in enumerate(merges)}
    for rank, (first, right) in enumerate(merges):
        if _merge_below(first + right, rank, ranks) != [first, right]:
            raise UnequalError(f"the merge that makes token {first + right!r} differs from the one that tiktoken uses")


def _merge_below(token: bytes, limit: int, ranks: Mapping[bytes, int]) -> list[bytes]:
    """Join pairs of ranks below a limit, lowest first, leftmost first."""
    parts = [token[index : index + 1] for index in range(len(token))]
    while len(parts) > 2:
        rank, index = min(
            (ranks.get(parts[position] + parts[position + 1], limit), position) for position in range(len(parts) - 1)
        )
        if rank >= limit:
            break
        parts[index : index + 2] = [parts[index] + parts[index + 1]]
    return parts


def _split_pattern(parts: Mapping[str, Any]) -> str:
    model = parts["model"]
    if model["type"] != "BPE":
        raise UnequalError(f"the vocabulary is {model['type']}, not byte-level BPE")
    unusual = [name for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix") if model.get(name)]
    unusual += ["byte_fallback"] if model.get("byte_fallback") else []
    unusual += ["normalizer"] if parts["normalizer"] is not None else []
    unusual += [
        f"{token['content']!r} is added but not special" for token in parts["added_tokens"] if not token["special"]
    ]
    if unusual:
        raise UnequalError(f"tiktoken lacks: {unusual[0]}")
    steps = _pre_tokenizer_steps(parts["pre_tokenizer"])
    kinds = [step["type"] for step in steps]
    if not kinds or kinds[-1] != "ByteLevel" or steps[-1]["add_prefix_space"]:
        raise UnequalError("text is not cut into bytes")
    if kinds == ["ByteLevel"] and steps[0]["use_regex"]:
        return GPT2
    if kinds == ["Digits", "ByteLevel"] and steps[0]["individual_digits"] and steps[1]["use_regex"]:
        return GPT2_DIGITS
    if kinds == ["Split", "ByteLevel"] and not steps[1]["use_regex"]:
        pattern = steps[0]["pattern"].get("Regex")
        if pattern in KNOWN_PATTERNS and steps[0]["behavior"] == "Isolated" and not steps[0]["invert"]:
            return str(pattern)
    raise UnequalError("text is cut by an untested pattern")


def _pre_tokenizer_steps(pre_tokenizer: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:
    if pre_tokenizer is None:
        return ()
    if pre_tokenizer["type"] == "Sequence":
        return tuple(pre_tokenizer["pretokenizers"])
    return (pre_tokenizer,)


def _merge_halves(model: Mapping[str, Any]) -> list[tuple[bytes, bytes]]:
    byte_of = byte_alphabet()
    merges = []
    for written in model["merges"]:
        halves = written.split(" ") if isinstance(written, str) else written
        try:
            first, right = (bytes(byte_of[character] for character in half) for half in halves)
        except KeyError as exc:
            raise UnequalError(f"the merge of {halves} is not of bytes") from exc
        merges.append((first, right))
    return merges


def _token_ranks(
    model: Mapping[str, Any], merges: Sequence[tuple[bytes, bytes]]
) -> tuple[dict[bytes, int], NDArray[np.uint32]]:
    """Return the rank of each token by its bytes, single bytes first, and the id of each rank."""
    shown = {byte: character for character, byte in byte_alphabet().items()}
    vocabulary = model["vocab"]
    ranks: dict[bytes, int] = {}
    ids = []
    for token in (*(bytes([byte]) for byte in range(256)), *(first + right for first, right in merges)):
        number = vocabulary.get("".join(shown[byte] for byte in token))
        if number is None:
            raise UnequalError(f"the vocabulary lacks {token!r}; it needs all 256 bytes")
        if token in ranks:
            raise UnequalError(f"token {token!r} is made by two merges")
        ranks[token] = len(ranks)
        ids.append(number)
    if model.get("ignore_merges") and len(ranks) != len(vocabulary):
        raise UnequalError("it has tokens that no merge makes, which are matched as whole words")
    return ranks, np.array(ids, dtype=np.uint32)


def byte_alphabet() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for (Radford et al. 2019)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in set(shown)]
    return {chr(byte): byte for byte in shown} | {chr(0x100 + offset): byte for offset, byte in enumerate(hidden)}


@functools.cache
def _unequal_characters() -> re.Pattern[str]:
    """Compare how both libraries class each character; return a pattern of the characters that differ."""
    tiktoken = importlib.import_module("tiktoken")
    characters = "".join(chr(code) for code in range(_FIRST_UNCHECKED) if not 0xD800 <= code < 0xE000)
    single = {bytes([byte]): byte for byte in range(256)}
    odd: set[str] = set()
    for name in _CLASSES:
        encoding = tiktoken.Encoding("class", pat_str=name, mergeable_ranks=single, special_tokens={})
        ours = pre_tokenizers.Split(Regex(f"{name}+"), "removed").pre_tokenize_str(characters)
        outside = set("".join(piece for piece, _ in ours))
        inside = set(encoding.decode(encoding.encode_ordinary(characters)))
        odd |= set(characters) - (outside ^ inside)
    listed = "".join(re.escape(character) for character in sorted(odd))
    return re.compile(f"[{listed}{chr(_FIRST_UNCHECKED)}-{chr(0x10FFFF)}]")
