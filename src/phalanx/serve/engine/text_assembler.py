"""Tokens to text while they are written: whole characters only, and stop sequences that reach over tokens."""

import json
import re
from collections.abc import Sequence
from functools import cache as cached

import tokenizers

from phalanx.serve.engine.request import TokenScore

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TextAssembler:
    """The text of one choice.

    Args:
        skips_special: Leave special tokens out of the text.

    Attributes:
        stop: The stop sequence that ended the text; None as long as none did.
    """

    def __init__(self, backend: tokenizers.Tokenizer, stops: Sequence[str], *, skips_special: bool = True) -> None:
        self._backend, self._stops, self._skips_special = backend, stops, skips_special
        self._ids: list[int] = []
        self._context_start = self._num_decoded = 0
        self._pending = ""
        self._decoded_length = self._written_length = 0
        self._scores: list[tuple[int, TokenScore]] = []
        self.stop: str | None = None

    def feed_token(self, score: TokenScore) -> tuple[str, tuple[TokenScore, ...]]:
        """Take the next token; return the text that is decided by it, and the scores of the tokens in it."""
        self._ids.append(score.token)
        return self._add_text(self._decode_next(is_end=False), score)

    def _decode_next(self, *, is_end: bool) -> str:
        """Return the text of the tokens behind the last text, unless a further token may complete its last character.

        They are decoded with the tokens of the last text before them, for a text begins otherwise than it goes on. A
        decoder that writes the earlier bytes anew, once others have made them invalid, changes no text that is out.
        """
        ids, skips_special = self._ids[self._context_start :], self._skips_special
        context = self._backend.decode(
            ids[: self._num_decoded - self._context_start], skip_special_tokens=skips_special
        )
        text = self._backend.decode(ids, skip_special_tokens=skips_special)
        if not is_end and (len(text) <= len(context) or text.endswith("\ufffd")):
            return ""
        self._context_start, self._num_decoded = self._num_decoded, len(self._ids)
        return text[len(context) :]

    def _add_text(self, text: str, score: TokenScore | None) -> tuple[str, tuple[TokenScore, ...]]:
        self._pending += text
        self._decoded_length += len(text)
        if score is not None:
            self._scores.append((self._decoded_length, score))
        places = [(place, stop) for stop in self._stops if (place := self._pending.find(stop)) >= 0]
        if places:
            place, self.stop = min(places)
            return self._release(place)
        return self._release(len(self._pending) - self._held_length())

    def _held_length(self) -> int:
        """Characters at the end that may begin a stop sequence."""
        lengths = (
            length
            for stop in self._stops
            for length in range(min(len(stop) - 1, len(self._pending)), 0, -1)
            if self._pending.endswith(stop[:length])
        )
        return max(lengths, default=0)

    def _release(self, length: int) -> tuple[str, tuple[TokenScore, ...]]:
        text, self._pending = self._pending[:length], self._pending[length:]
        self._written_length += length
        ready = tuple(score for end, score in self._scores if end <= self._written_length)
        self._scores = [(end, score) for end, score in self._scores if end > self._written_length]
        return text, ready

    def close(self) -> tuple[str, tuple[TokenScore, ...]]:
        """End the text; return its held-back end, unless a stop sequence ended it."""
        if self.stop is not None:
            return "", ()
        # bytes that never became a character are replacement characters at the very end
        text, scores = self._add_text(self._decode_next(is_end=True), None)
        if self.stop is not None:
            return text, scores
        last, others = self._release(len(self._pending))
        return text + last, scores + others


class TokenNames:
    """The text and the bytes of single tokens, for lists of log-probabilities."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        decoder = json.loads(backend.to_str()).get("decoder") or {}
        self._is_byte_level = "ByteLevel" in json.dumps(decoder)

    def text_of(self, token: int) -> str:
        """Return a token as text; bytes that are no character become a replacement character."""
        return self.bytes_of(token).decode("utf-8", errors="replace")

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes that a token stands for."""
        name = self._backend.id_to_token(token)
        if name is None:
            return b""
        added = self._backend.get_added_tokens_decoder().get(token)
        byte = _BYTE_TOKEN.fullmatch(name)
        if added is None and byte is not None:
            return bytes([int(byte[1], 16)])
        if added is None and self._is_byte_level:
            table = _byte_table()
            return bytes(table[character] for character in name if character in table)
        # SentencePiece writes a space as this character
        return name.replace("\u2581", " ").encode() if added is None else name.encode()


@cached
def _byte_table() -> dict[str, int]:
    """Characters that stand for bytes in byte-level vocabularies (Radford et al. 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return table | {chr(256 + place): byte for place, byte in enumerate(others)}
