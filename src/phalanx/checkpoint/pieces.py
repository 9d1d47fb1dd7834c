"""Whole tensors from the parts that ranks have written: rows of slices, slices of tensors."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from phalanx.checkpoint.manifest import PieceCut
from phalanx.errors import CheckpointError


def join_pieces(where: Path, names: Sequence[str], pieces: Iterable[tuple[str, PieceCut, Tensor]]) -> dict[str, Tensor]:
    """Return whole tensors by name.

    Args:
        where: The checkpoint, for error messages.
        names: Names of the stage's tensors.
        pieces: Name, place and rows of each part, in any order.
    """
    parts: dict[str, list[tuple[PieceCut, Tensor]]] = defaultdict(list)
    for name, cut, tensor in pieces:
        parts[name].append((cut, tensor))
    if sorted(parts) != sorted(names):
        raise CheckpointError(f"{where}: its pieces hold other tensors than the manifest says")
    return {name: _join_tensor(f"{where}: {name!r:.200}", parts.pop(name)) for name in names}


def _join_tensor(where: str, parts: Sequence[tuple[PieceCut, Tensor]]) -> Tensor:
    first, tensor = parts[0]
    if len(parts) == 1 and first == PieceCut():
        return tensor
    if len({(cut.dim, cut.parts, tensor.dtype, tensor.shape[1:]) for cut, tensor in parts}) != 1 or not tensor.ndim:
        raise CheckpointError(f"{where}: its pieces were cut in different ways")
    rows: dict[int, dict[int, Tensor]] = defaultdict(dict)
    for cut, tensor in parts:
        if rows[cut.slice].setdefault(cut.first_row, tensor) is not tensor:
            raise CheckpointError(f"{where}: two pieces begin at row {cut.first_row} of slice {cut.slice}")
    slices = []
    for number in range(max(rows) + 1):
        tensors, num_rows = [], 0
        for begin, tensor in sorted(rows.get(number, {}).items(), key=lambda item: item[0]):
            if begin != num_rows:
                raise CheckpointError(f"{where}: a piece of slice {number} begins at row {begin}, expected {num_rows}")
            tensors.append(tensor)
            num_rows += tensor.shape[0]
        if not tensors:
            raise CheckpointError(f"{where}: slice {number} is missing")
        slices.append(tensors[0] if len(tensors) == 1 else torch.cat(tensors))
    if first.dim is None:
        if len(slices) != 1:
            raise CheckpointError(f"{where}: has {len(slices)} slices, although no dimension is cut")
        return slices[0]
    if len({part.shape for part in slices}) != 1 or first.dim >= slices[0].ndim:
        raise CheckpointError(f"{where}: its slices differ in shape")
    cut_slices = [piece.chunk(first.parts, first.dim) for piece in slices]
    return torch.cat([piece[part] for part in range(first.parts) for piece in cut_slices], first.dim)
