"""A checkpoint whose stages are in pieces, each written by another rank, is the same state as one that is whole."""

import re

import pytest
import torch

from phalanx.checkpoint import Retention, WrittenPieces, make_folder, open_checkpoint, save_checkpoint
from phalanx.checkpoint.manifest import PieceCut, PieceEntry, ShardEntry, piece_file
from phalanx.checkpoint.pieces import join_pieces
from phalanx.checkpoint.save import write_synced
from phalanx.checkpoint.stream import safetensors_pieces
from phalanx.errors import CheckpointError
from phalanx.parallel.control.saving import _check_shared_disk
from phalanx.security.crypto import Identity

OWNER = Identity.without_certificate("owner")
STATE = {"run": "r", "config_digest": "c"}
WHOLE = torch.arange(64.0).reshape(8, 8)


def cut_rows():
    """Two data parallel ranks of each of two tensor parallel ones, that cut two matrices that lie side by side."""
    slices = [torch.cat([part.chunk(2, 1)[number] for part in WHOLE.chunk(2, 1)], 1) for number in range(2)]
    return [
        (PieceCut(slice=number, dim=1, parts=2, first_row=first), slices[number][first : first + rows])
        for number in range(2)
        for first, rows in ((0, 5), (5, 3))
    ]


def write_pieces(directory):
    folder, files, pieces = make_folder(directory), {}, []
    for rank, (cut, rows) in enumerate(cut_rows()):
        tensors = {"weight/a": rows.contiguous(), **({"weight/b": torch.tensor(7.0)} if rank == 0 else {})}
        cuts = {"weight/a": cut, **({"weight/b": PieceCut()} if rank == 0 else {})}
        name = piece_file(0, rank)
        files[name] = write_synced(folder / name, safetensors_pieces(tensors))
        pieces.append(PieceEntry(rank=rank, tensors=cuts))
    shard = ShardEntry(stage=0, num_steps=3, tensors=("weight/a", "weight/b"), pieces=tuple(pieces))
    return WrittenPieces(folder, files, (shard,))


def save(directory):
    return save_checkpoint(directory, 3, write_pieces(directory), STATE, sign=OWNER, retention=Retention(2))


def open_saved(path):
    return open_checkpoint(path, OWNER.public, run="r", config_digest="c")


def test_tensors_are_whole_again_whatever_the_cut(tmp_path):
    checkpoint = open_saved(save(tmp_path))

    tensors = checkpoint.stage_tensors(0)

    assert torch.equal(tensors["weight/a"], WHOLE)
    assert torch.equal(tensors["weight/b"], torch.tensor(7.0))
    assert torch.equal(checkpoint.read_tensor("weight/a"), WHOLE)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


@pytest.mark.parametrize("rank", range(4))
def test_a_piece_that_was_altered_swapped_or_lost_is_named(tmp_path, rank):
    path = save(tmp_path)
    piece, other = path / piece_file(0, rank), path / piece_file(0, (rank + 2) % 4)
    data, others = piece.read_bytes(), other.read_bytes()

    for fault, content in (("altered", data[:-1] + bytes([data[-1] ^ 1])), ("altered|truncated", others)):
        piece.write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"{re.escape(piece.name)}: .*({fault})"):
            open_saved(path)
    piece.unlink()
    with pytest.raises(CheckpointError, match=rf"{re.escape(piece.name)}: missing"):
        open_saved(path)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda parts: parts[1:], "begins at row 5, expected 0"),
        (lambda parts: parts[2:], "slice 0 is missing"),
        (lambda parts: [*parts, parts[0]], "two pieces begin at row 0"),
        (lambda parts: parts[:3], "differ in shape"),
        (lambda parts: [(parts[0][0].model_copy(update={"parts": 1}), parts[0][1]), *parts[1:]], "different ways"),
        (lambda parts: [(parts[0][0], parts[0][1].double()), *parts[1:]], "different ways"),
        (lambda parts: [(cut.model_copy(update={"dim": None}), rows) for cut, rows in parts], "no dimension is cut"),
        (lambda parts: [], "other tensors"),
    ],
)
def test_parts_that_do_not_make_a_whole_are_refused(tmp_path, change, fault):
    parts = [("weight/a", cut, rows.clone()) for cut, rows in change(cut_rows())]

    with pytest.raises(CheckpointError, match=fault):
        join_pieces(tmp_path, ["weight/a"], parts)


@pytest.mark.parametrize("content", [None, b"12", b"1234"])
def test_a_piece_that_rank_0_does_not_see_whole_is_refused(tmp_path, content):
    """A rank on a machine whose directory is another disk, or a shared one that is not up to date."""
    entry = write_synced(tmp_path / "there", [b"123"])
    if content is not None:
        (tmp_path / "here").write_bytes(content)

    with pytest.raises(CheckpointError, match=r"rank 3 wrote 3 bytes, found .*all ranks share"):
        _check_shared_disk(tmp_path / "here", entry, 3)
    _check_shared_disk(tmp_path / "there", entry, 3)


def test_a_save_that_fails_leaves_no_folder_and_the_last_good_one(tmp_path):
    path = save(tmp_path)

    with pytest.raises(CheckpointError):
        save_checkpoint(tmp_path, 4, write_pieces(tmp_path), {**STATE, "x": b""}, sign=OWNER, retention=Retention(2))

    assert open_saved(path).step == 3
    assert save(tmp_path) == path
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
