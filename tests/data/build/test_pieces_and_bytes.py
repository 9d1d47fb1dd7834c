"""How files are put together into pieces changes no byte of a dataset."""

import pytest
from build_recipes import fake_steps, read_recipe, tree

from phalanx.data.build.run import build


@pytest.mark.parametrize("piece_bytes", [1, 4000])
def test_pieces_of_any_size_make_the_same_bytes(tmp_path, monkeypatch, piece_bytes):
    monkeypatch.setattr("phalanx.data.build.work.make_steps", fake_steps)
    expected = tree(build(read_recipe(tmp_path), tmp_path / "whole").directory)
    monkeypatch.setattr("phalanx.data.build.pieces._PIECE_BYTES", piece_bytes)

    assert tree(build(read_recipe(tmp_path), tmp_path / "pieces").directory) == expected
