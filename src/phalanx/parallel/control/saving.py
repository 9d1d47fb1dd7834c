"""A copy of the state on its way to rank 0 while training goes on: over a group of its own, from a thread of its own.

Collectives of two threads on one group would be mixed up, so nothing here touches the groups of the training.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from datetime import timedelta
from pathlib import Path

import torch
from pydantic import Field
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from phalanx.checkpoint.manifest import FileEntry, PieceCut, PieceEntry, ShardEntry, piece_file
from phalanx.checkpoint.save import WrittenPieces, write_synced
from phalanx.checkpoint.stream import safetensors_pieces
from phalanx.config import StrictModel
from phalanx.errors import CheckpointError
from phalanx.parallel.control.rank_trainer import RankTrainer
from phalanx.parallel.data.parameters import RankParameter, local_slice
from phalanx.parallel.data.state_dict import state_dtype
from phalanx.parallel.groups.mesh import Domain
from phalanx.parallel.tensor.tensor_parallel import Split

_PATIENCE = timedelta(minutes=30)
_UNCUT = -1


@dataclass(frozen=True)
class StatePiece:
    """The part of a whole tensor that one rank contributes.

    Attributes:
        tensor: Number of the tensor in the member's catalogue.
        slice: Number of the slice among tensor parallel ranks; 0 where they do not cut the tensor.
        dim: Along which dimension they cut it; -1 where they do not.
        parts: Matrices that lie side by side in that dimension.
    """

    tensor: int
    slice: int
    dim: int
    parts: int
    first_row: int
    rows: int

    def slice_shape(self, whole: tuple[int, ...], tp: int) -> tuple[int, ...]:
        """Shape of the slice that this is a piece of."""
        return tuple(size // tp if dim == self.dim else size for dim, size in enumerate(whole))


class RankSaver:
    """One rank's end of it; every rank makes one, together."""

    def __init__(self, member: RankTrainer, domain: Domain) -> None:
        self._member = member
        self._domain = domain
        self._group = dist.new_group(backend="gloo", timeout=_PATIENCE)
        self._own = {
            number: _piece_of(number, parameter, value, domain) for number, parameter, value in member.held_state()
        }
        self._plan = self._share_plans()
        self._taken: dict[int, Tensor] = {}
        self._sender: threading.Thread | None = None

    @torch.no_grad()
    def copy_contribution(self) -> None:
        """Copy this rank's contribution, as it is now; the previous one must have arrived."""
        self.wait_until_sent()
        for number, _, value in self._member.held_state():
            piece = self._own[number]
            if piece is not None:
                # not a view of what the next step changes
                self._taken[number] = local_slice(value).to("cpu", copy=True).contiguous()

    def begin_sending(self) -> None:
        """Let a thread send the copied contribution to rank 0."""
        self._sender = threading.Thread(target=self._send_pieces, name="saving", daemon=True)
        self._sender.start()

    def wait_until_sent(self) -> None:
        """Wait until the copied contribution has been sent."""
        if self._sender is not None:
            self._sender.join()
            self._sender = None

    def begin_writing(self, folder: Path, num_steps: int) -> None:
        """On other ranks: let a thread write the copied contribution to files, and report them to rank 0."""
        self._sender = threading.Thread(target=self._report_pieces, args=(folder, num_steps), daemon=True)
        self._sender.start()

    def gather_pieces(self, folder: Path, num_steps: int) -> WrittenPieces:
        """On rank 0: write its own files, and wait for the others'."""
        reports = [self._write_pieces(folder, num_steps)]
        try:
            reports += [self._receive_report(rank) for rank in range(1, dist.get_world_size())]
        except RuntimeError as exc:
            raise CheckpointError(f"a rank was lost while it wrote its state: {exc}") from exc
        files: dict[str, FileEntry] = {}
        pieces: dict[int, list[PieceEntry]] = {}
        for rank, report in enumerate(reports):
            if report.num_steps != num_steps:
                raise CheckpointError(f"rank {rank} wrote its state of step {report.num_steps}, not of {num_steps}")
            if report.error is not None:
                raise CheckpointError(f"rank {rank} cannot write its state: {report.error}")
            for stage, piece in report.pieces.items():
                name = piece_file(stage, rank)
                _check_shared_disk(folder / name, report.files[name], rank)
                files[name] = report.files[name]
                pieces.setdefault(stage, []).append(piece)
        shards = []
        for stage, tensors in enumerate(self._member.state_catalogue()):
            names = tuple(sorted(name for name, _ in tensors))
            if {name for piece in pieces.get(stage, ()) for name in piece.tensors} != set(names):
                raise CheckpointError(f"parallel: no rank has a part of stage {stage}; this is a fault of Phalanx")
            shards.append(ShardEntry(stage=stage, num_steps=num_steps, tensors=names, pieces=tuple(pieces[stage])))
        return WrittenPieces(folder, files, tuple(shards))

    def _write_pieces(self, folder: Path, num_steps: int) -> "PieceReport":
        """Write this rank's part of each stage to a file, and let go of what was copied."""
        rank, report, number = dist.get_rank(), PieceReport(num_steps=num_steps), 0
        try:
            for stage, tensors in enumerate(self._member.state_catalogue()):
                numbers = {name: number + place for place, (name, _) in enumerate(tensors)}
                number += len(tensors)
                held = {name: self._taken.pop(place) for name, place in numbers.items() if place in self._taken}
                if held:
                    cuts = {name: self._cut_of(numbers[name]) for name in held}
                    name = piece_file(stage, rank)
                    report.files[name] = write_synced(folder / name, safetensors_pieces(held))
                    report.pieces[stage] = PieceEntry(rank=rank, tensors=cuts)
        except (OSError, CheckpointError) as exc:
            # told to rank 0, which would wait for a report
            self._taken.clear()
            report = PieceReport(num_steps=num_steps, error=f"{folder}: {exc}")
        return report

    def _cut_of(self, number: int) -> PieceCut:
        piece = self._own[number]
        if piece is None:
            raise CheckpointError(f"parallel: tensor {number} is no part of this rank's; this is a fault of Phalanx")
        dim = None if piece.dim == _UNCUT else piece.dim
        return PieceCut(slice=piece.slice, dim=dim, parts=piece.parts, first_row=piece.first_row)

    def _report_pieces(self, folder: Path, num_steps: int) -> None:
        report = self._write_pieces(folder, num_steps).model_dump_json().encode()
        with contextlib.suppress(RuntimeError):
            # where rank 0 is gone, the training learns of that by itself
            dist.send(torch.tensor([len(report)]), dst=0, group=self._group)
            dist.send(torch.frombuffer(bytearray(report), dtype=torch.uint8), dst=0, group=self._group)

    def _receive_report(self, rank: int) -> "PieceReport":
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, src=rank, group=self._group)
        report = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(report, src=rank, group=self._group)
        return PieceReport.model_validate_json(report.numpy().tobytes())

    def receive_state(self) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """On rank 0: the state that all ranks have taken, a stage at a time; to be gone through to its end."""
        number = 0
        for stage, tensors in enumerate(self._member.state_catalogue()):
            stage_tensors = {}
            for name, shape in tensors:
                stage_tensors[name] = self._join_tensor(number, shape, state_dtype(name))
                number += 1
            yield stage, stage_tensors

    def _send_pieces(self) -> None:
        try:
            for number in sorted(self._taken):
                dist.send(self._taken.pop(number), dst=0, group=self._group)
        except RuntimeError:
            # rank 0 is gone, and the training learns of that by itself
            self._taken.clear()

    def _join_tensor(self, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        slices: dict[int, Tensor] = {}
        how: StatePiece | None = None
        for rank, pieces in enumerate(self._plan):
            piece = pieces.get(number)
            if piece is None:
                continue
            how = piece
            if piece.slice not in slices:
                slices[piece.slice] = torch.empty(piece.slice_shape(shape, self._domain.config.tp), dtype=dtype)
            place = slices[piece.slice]
            self._fetch_piece(number, rank, place[piece.first_row : piece.first_row + piece.rows] if shape else place)
        if how is None:
            raise CheckpointError(f"parallel: no rank has tensor {number} of the state; this is a fault of Phalanx")
        if how.dim == _UNCUT:
            return slices[0]
        return Split(how.dim, how.parts).join_slices([slices[index] for index in sorted(slices)])

    def _fetch_piece(self, number: int, rank: int, place: Tensor) -> None:
        if rank == 0:
            place.copy_(self._taken.pop(number))
            return
        try:
            dist.recv(place, src=rank, group=self._group)
        except RuntimeError as exc:
            raise CheckpointError(f"rank {rank} was lost while its state was collected: {exc}") from exc

    def _share_plans(self) -> list[dict[int, StatePiece]]:
        """Return each rank's pieces, exchanged once: they do not change while the layout does not."""
        own_pieces = [list(astuple(piece)) for piece in self._own.values() if piece is not None]
        world, width = dist.get_world_size(), len(astuple(StatePiece(0, 0, 0, 0, 0, 0)))
        num_pieces = torch.tensor(len(own_pieces))
        dist.all_reduce(num_pieces, dist.ReduceOp.MAX, group=self._group)
        mine = torch.full((int(num_pieces), width), _UNCUT, dtype=torch.int64)
        if own_pieces:
            mine[: len(own_pieces)] = torch.tensor(own_pieces)
        everybody = [torch.empty_like(mine) for _ in range(world)]
        dist.all_gather(everybody, mine, group=self._group)
        plans = []
        for rows in everybody:
            pieces = [StatePiece(*row) for row in rows.tolist() if row[0] != _UNCUT]
            plans.append({piece.tensor: piece for piece in pieces})
        return plans


class PieceReport(StrictModel):
    """What one rank has written.

    Attributes:
        files: Sizes and digests of its files, by name.
        pieces: Its part of each stage that it holds.
        error: Reason why it could not; None where it could.
    """

    num_steps: int
    files: dict[str, FileEntry] = Field(default_factory=dict)
    pieces: dict[int, PieceEntry] = Field(default_factory=dict)
    error: str | None = None


def _check_shared_disk(path: Path, entry: FileEntry, rank: int) -> None:
    size_bytes = path.stat().st_size if path.is_file() else None
    if size_bytes != entry.size_bytes:
        size_text = "no file" if size_bytes is None else f"{size_bytes} bytes"
        raise CheckpointError(
            f"{path}: rank {rank} wrote {entry.size_bytes} bytes, found {size_text}; checkpoint.sharded needs a "
            "directory that all ranks share"
        )


def _piece_of(number: int, one: RankParameter, value: Tensor, domain: Domain) -> StatePiece | None:
    """Return this rank's piece of a tensor; None where another rank has the same."""
    rows = _piece_rows(one.name, value, domain)
    if rows is None or (one.split is None and domain.tp != 0):
        return None
    if one.split is None:
        return StatePiece(number, 0, _UNCUT, 1, *rows)
    return StatePiece(number, domain.tp, one.split.dim % value.ndim, one.split.parts, *rows)


def _piece_rows(name: str, value: Tensor, domain: Domain) -> tuple[int, int] | None:
    """First row and number of rows that this copy contributes; None where another one has them."""
    first, rows = 0, value.shape[0] if value.ndim else 1
    if not isinstance(value, DTensor):
        return (first, rows) if domain.island_copy_index == 0 else None
    coordinates: Sequence[int] = value.device_mesh.get_coordinate() or ()
    for dim, (placement, place) in enumerate(zip(value.placements, coordinates, strict=True)):
        if placement.is_replicate():
            # the first of the ranks that have the same speaks for them
            rows = rows if place == 0 else 0
        elif placement.is_shard(0):
            # as torch cuts: equal shares but for the last ones
            share = -(-rows // value.device_mesh.size(dim))
            first, rows = first + min(place * share, rows), max(0, min(share, rows - place * share))
        else:
            raise CheckpointError(
                f"{name}: is cut as {placement}, which cannot be collected beside the training; leave "
                "checkpoint.asynchronous out"
            )
    return (first, rows) if rows else None
