"""How files are put together into pieces, or cut into them, changes no byte of a dataset."""

import pytest
from build_recipes import fake_steps, read_recipe, tree

from phalanx.data.build import pieces
from phalanx.data.build.pieces import PieceReader, SourcePiece, list_pieces
from phalanx.data.build.run import build_recipe
from phalanx.data.sources import open_source
from phalanx.errors import DataError


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """A recipe over one file that has all lines."""
    monkeypatch.setattr("phalanx.data.build.work.make_steps", fake_steps)
    recipe = read_recipe(tmp_path)
    parts = sorted((tmp_path / "texts").glob("part-*"))
    content = b"".join(part.read_bytes() for part in parts)
    for part in parts[1:]:
        part.unlink()
    parts[0].write_bytes(content)
    return recipe


@pytest.mark.parametrize("piece_bytes", [800, 4000])
def test_pieces_of_any_size_make_the_same_bytes(tmp_path, monkeypatch, piece_bytes):
    monkeypatch.setattr("phalanx.data.build.work.make_steps", fake_steps)
    expected = tree(build_recipe(read_recipe(tmp_path), tmp_path / "whole").directory)
    monkeypatch.setattr("phalanx.data.build.pieces._PIECE_BYTES", piece_bytes)

    assert tree(build_recipe(read_recipe(tmp_path), tmp_path / "pieces").directory) == expected


def test_a_file_in_one_piece_and_in_spans_makes_the_same_bytes(tmp_path, monkeypatch, recipe):
    expected = tree(build_recipe(recipe, tmp_path / "whole").directory)
    monkeypatch.setattr(pieces, "_PIECE_BYTES", 2000)

    assert len(found_pieces(recipe)) > 5
    assert tree(build_recipe(recipe, tmp_path / "spans").directory) == expected
    assert build_recipe(recipe, tmp_path / "whole").already_existed


def found_pieces(recipe):
    return list_pieces(recipe, lambda number: open_source(recipe.sources[number]))


def test_a_span_is_plain_data_of_any_process(monkeypatch, recipe):
    import json

    monkeypatch.setattr(pieces, "_PIECE_BYTES", 2000)

    for piece in found_pieces(recipe):
        assert SourcePiece.from_json(json.loads(json.dumps(piece.to_json()))) == piece


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_span_that_changed_since_the_file_was_cut_is_refused(tmp_path, monkeypatch, recipe, moment):
    monkeypatch.setattr(pieces, "_PIECE_BYTES", 2000)
    path = tmp_path / "texts" / "part-0.jsonl"
    piece = found_pieces(recipe)[2]
    reader = PieceReader(open_source(recipe.sources[0]), piece)
    digests = reader.digest_files()
    path.write_bytes(path.read_bytes().replace(b"loud", b"LOUD"))

    with pytest.raises(DataError, match=r"part-0.jsonl: changed while it was read; run the build again"):
        reader.digest_files() if moment == "before" else reader.check_unchanged(digests)
