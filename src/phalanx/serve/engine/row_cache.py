"""Keys and values of one text each, and the beginnings of texts that an owner of keys may go on from."""

import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

CHUNK = 64
"""Prompts are read in pieces that end at multiples of this, and reused up to one: a text that goes on from a reused
beginning is computed in the same pieces as one that does not."""
_IDLE_S = 600.0


class RowCache:
    """Keys and values of one text, by layer; no tensor is shared with another text."""

    def __init__(self, num_layers: int) -> None:
        self._keys: list[Tensor | None] = [None] * num_layers
        self._values: list[Tensor | None] = [None] * num_layers
        self._capacity = 0
        self.length = 0

    def reserve_room(self, tokens: int) -> None:
        """Make room for so many tokens."""
        if tokens <= self._capacity:
            return
        self._capacity = -(-max(tokens, self._capacity * 3 // 2) // CHUNK) * CHUNK
        for tensors in (self._keys, self._values):
            for layer, tensor in enumerate(tensors):
                if tensor is not None:
                    tensors[layer] = _resize(tensor, self.length, self._capacity)

    def write_layer(self, layer: int, start: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Put the keys and values of some tokens behind those before them; return all, ``[heads, tokens, dim]``."""
        keys, values = self._keys[layer], self._values[layer]
        if keys is None or values is None:
            keys = self._keys[layer] = key.new_empty(key.shape[0], self._capacity, key.shape[2])
            values = self._values[layer] = value.new_empty(value.shape[0], self._capacity, value.shape[2])
        length = key.shape[1]
        keys.narrow(1, start, length).copy_(key)
        values.narrow(1, start, length).copy_(value)
        return keys.narrow(1, 0, start + length), values.narrow(1, 0, start + length)

    def copy_prefix(self, length: int) -> "RowCache":
        """Return a cache of its own memory with the first tokens."""
        copy = RowCache(len(self._keys))
        copy._capacity = -(-(length + 1) // CHUNK) * CHUNK
        copy.length = length
        for source, target in ((self._keys, copy._keys), (self._values, copy._values)):
            for layer, tensor in enumerate(source):
                if tensor is not None:
                    target[layer] = _resize(tensor, length, copy._capacity)
        return copy


def _resize(tensor: Tensor, length: int, capacity: int) -> Tensor:
    larger = tensor.new_empty(tensor.shape[0], capacity, tensor.shape[2])
    larger[:, :length] = tensor[:, :length]
    return larger


@dataclass
class _Owner:
    """Beginnings of one owner, the one used last at the end."""

    entries: OrderedDict[tuple[tuple[str, str], tuple[int, ...]], RowCache] = field(default_factory=OrderedDict)
    num_tokens: int = 0
    used_at: float = 0.0


class PrefixStore:
    """Beginnings of texts by owner: none is found, evicted or timed through the requests of another owner.

    A scope is an adapter and a salt, by which an owner who serves others keeps them apart: none is found from another
    scope of its owner, and they share its room.

    Args:
        max_tokens: Bound of one owner, whose oldest beginnings are dropped beyond it.
        max_owners: Owners with a room; a further one waits until another has given its room up.
        read_clock: Seconds; an owner that is idle for ten minutes gives its room up.
    """

    def __init__(
        self, max_tokens: int, max_owners: int = 256, read_clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_tokens, self._max_owners, self._read_clock = max_tokens, max_owners, read_clock
        self._owners: dict[str, _Owner] = {}

    def find_prefix(self, owner: str, scope: tuple[str, str], ids: Sequence[int]) -> RowCache | None:
        """Return a copy of the longest beginning that the owner has of a prompt; at least one token is left to read."""
        room = self._owners.get(owner)
        if room is None:
            return None
        room.used_at = self._read_clock()
        best, length = None, 0
        for key in room.entries:
            common = _common_length(key[1], ids) if key[0] == scope else 0
            common = min(common, len(ids) - 1) // CHUNK * CHUNK
            if common > length:
                best, length = key, common
        if best is None:
            return None
        room.entries.move_to_end(best)
        return room.entries[best].copy_prefix(length)

    def put_prefix(self, owner: str, scope: tuple[str, str], ids: Sequence[int], cache: RowCache) -> None:
        """Store a copy of a text's keys and values, up to a multiple of `CHUNK` tokens."""
        length = min(len(ids), cache.length) // CHUNK * CHUNK
        if not 0 < length <= self._max_tokens:
            return
        room = self._room_of(owner)
        key = (scope, tuple(ids[:length]))
        if room is None or key in room.entries:
            return
        for older in [k for k in room.entries if k[0] == scope and key[1][: len(k[1])] == k[1]]:
            del room.entries[older]
            room.num_tokens -= len(older[1])
        room.entries[key] = cache.copy_prefix(length)
        room.num_tokens += length
        while room.num_tokens > self._max_tokens:
            (_, dropped), _cache = room.entries.popitem(last=False)
            room.num_tokens -= len(dropped)

    def _room_of(self, owner: str) -> _Owner | None:
        now = self._read_clock()
        room = self._owners.get(owner)
        if room is None:
            for name in [name for name, other in self._owners.items() if now - other.used_at > _IDLE_S]:
                del self._owners[name]
            if len(self._owners) >= self._max_owners:
                return None
            room = self._owners[owner] = _Owner()
        room.used_at = now
        return room


def _common_length(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def causal_mask(start: int, length: int, window: int | None) -> Tensor | None:
    """Return which keys tokens from a position on see, bool ``[length, start + length]``; None for all of them."""
    if length == 1 and window is None:
        return None
    places = torch.arange(start, start + length)[:, None]
    keys = torch.arange(start + length)[None, :]
    mask = keys <= places
    return mask if window is None else mask & (keys > places - window)
