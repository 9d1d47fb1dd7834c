"""The keys of the races of a marked text: a secret and the tokens before a place decide the noise there."""

import struct
from collections.abc import Sequence

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from phalanx.config import canonical_json
from phalanx.models.token_draw import KEY_BYTES, row_key
from phalanx.security.crypto import in_domain
from phalanx.serve.marks.keys import MarkKey

CONTEXT_TOKENS = 4
"""Tokens before a place that decide its noise; the first so many of a text are drawn without a mark."""
LANES = 4
"""Kinds of noise of one key: samples of one request take turns, so that equal beginnings go on differently."""
_MARK_DOMAIN = "text-mark/1"
_SEED_DOMAIN = "served-draw/1"

Context = tuple[int, ...]


def mark_row_key(key: MarkKey, lane: int, context: Context) -> tuple[int, int]:
    """Return the key of the race behind `CONTEXT_TOKENS` tokens.

    Guarantees:
        Without the secret the noise cannot be told from random numbers, whatever else of it is known: BLAKE3 in keyed
        mode is a pseudo-random function. Who sees texts can therefore neither forge nor predict a mark.
    """
    return row_key(_mark_digest(key, lane, context))


def mark_row_keys(key: MarkKey, lane: int, contexts: Sequence[Context]) -> Tensor:
    """Return `mark_row_key` of many contexts, int64 ``[contexts, 2]``."""
    content = b"".join(_mark_digest(key, lane, context) for context in contexts)
    return torch.from_numpy(np.frombuffer(content, ">i8").astype(np.int64).reshape(-1, 2))


def _mark_digest(key: MarkKey, lane: int, context: Context) -> bytes:
    content = bytes([lane]) + struct.pack(f"<{len(context)}I", *context)
    return blake3(in_domain(_MARK_DOMAIN, content), key=key.secret).digest(KEY_BYTES)


def seed_row_key(seed: int, sample: int, position: int) -> tuple[int, int]:
    """Return the key of a race that carries no mark: a public function of a request's seed."""
    place = canonical_json([seed, sample, position])
    return row_key(blake3(in_domain(_SEED_DOMAIN, place)).digest(KEY_BYTES))


def marked_places(tokens: Sequence[int]) -> list[tuple[Context, int]]:
    """Return the context and the token of every place that a marked text would have marked.

    A context that stood before is left out: its noise was used, and further use would make a text repeat itself when it
    is written, and repetitive text look marked when it is judged.
    """
    places = []
    seen = set[Context]()
    for position in range(CONTEXT_TOKENS, len(tokens)):
        context = tuple(tokens[position - CONTEXT_TOKENS : position])
        if context not in seen:
            seen.add(context)
            places.append((context, tokens[position]))
    return places
