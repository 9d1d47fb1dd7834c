"""Texts to arrays of token ids, by the faster library where both give the same."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from phalanx.data.tokenizers.tiktoken_encoder import TiktokenEncoder, UnequalError, make_tiktoken_encoder
from phalanx.data.tokenizers.tokenizer import TextTokenizer, unusable_error
from phalanx.errors import DataError

_WORTH_BYTES = 4 << 20
"""Of less text, the proof would cost more than it saves."""


class Encoder:
    """An encoder of whole documents; its ids equal the tokenizer's, whichever library computes them.

    Args:
        tokenizer: A special token written in a text is text to it.
        size_bytes: About how much text will come; left out: a lot.
        threads: Threads of this process; one a core when left out.

    Attributes:
        library: That encodes: "tiktoken" or "tokenizers".
        reason: Why it is not tiktoken; empty where it is.
    """

    def __init__(self, tokenizer: TextTokenizer, size_bytes: int | None = None, threads: int | None = None) -> None:
        self.tokenizer = tokenizer
        self._threads = _thread_count() if threads is None else threads
        self._tiktoken: TiktokenEncoder | None = None
        self.reason = ""
        if size_bytes is not None and size_bytes < _WORTH_BYTES:
            self.reason = "there is little text"
        else:
            try:
                self._tiktoken = make_tiktoken_encoder(tokenizer.backend)
            except UnequalError as exc:
                self.reason = str(exc)
        # where one token both begins and ends texts, the end of the document before stands there already
        begins = () if tokenizer.eos_id in tokenizer.first_ids else tokenizer.first_ids
        self._first = np.array(begins, dtype=np.uint32)
        self.library = "tokenizers" if self._tiktoken is None else "tiktoken"

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Return the token ids of each document behind the tokenizer's first token, without the end token.

        Raises:
            DataError: A text encodes to the end-of-text token or to nothing, or holds a lone surrogate.
        """
        try:
            encoded = self._by_tokenizers(texts) if self._tiktoken is None else self._by_tiktoken(self._tiktoken, texts)
        except (UnicodeEncodeError, TypeError) as exc:
            raise DataError(f"a text cannot be encoded ({exc}); repair the document") from exc
        for text, ids in zip(texts, encoded, strict=True):
            if not ids.size or (ids == self.tokenizer.eos_id).any():
                raise unusable_error(text, num_tokens=ids.size)
        first = self._first
        return [np.concatenate([first, ids]) for ids in encoded] if first.size else encoded

    def _by_tokenizers(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        encodings = self.tokenizer.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(item.ids, dtype=np.uint32) for item in encodings]

    def _by_tiktoken(self, encoder: TiktokenEncoder, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        if self._threads > 1 and len(texts) > 1:
            # for this batch alone: a thread that stays would be cut off in a process that forks
            with ThreadPoolExecutor(self._threads) as pool:
                encoded = list(pool.map(encoder.encode_text, texts))
        else:
            encoded = [encoder.encode_text(text) for text in texts]
        remaining = iter(self._by_tokenizers([text for text, ids in zip(texts, encoded, strict=True) if ids is None]))
        return [next(remaining) if ids is None else ids for ids in encoded]


def _thread_count() -> int:
    if os.environ.get("TOKENIZERS_PARALLELISM", "").lower() in ("false", "0", "off", "no"):
        return 1
    return len(os.sched_getaffinity(0))
