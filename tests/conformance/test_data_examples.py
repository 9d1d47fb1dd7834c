"""Every recipe among the examples loads, names its own command, and the small ones are built."""

import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.data.build.preview import preview_build
from phalanx.data.build.recipe import load_recipe
from phalanx.data.sources import open_source
from phalanx.data.sources.warc import WarcConfig

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RECIPES = sorted(EXAMPLES.glob("data_*.toml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_loads_and_names_its_own_command(path):
    recipe = load_recipe(path)

    assert f"phalanx data build examples/{path.name}" in path.read_text()
    assert all(source.licence != "not stated" for source in recipe.sources)


def test_a_folder_takes_five_lines():
    lines = (EXAMPLES / "data_folder.toml").read_text().splitlines()

    assert len([line for line in lines if not line.startswith("#")]) == 5


def test_a_preview_of_what_cpython_carries_keeps_most_and_drops_short_texts():
    found = preview_build(load_recipe(EXAMPLES / "data_docs.toml"), 40)

    assert found.counts["kept"] > 20
    assert found.counts["dropped by length"] > 0
    assert {line["step"] for line in found.left_out} <= {"length", "exact_duplicates", "hidden_characters"}


def test_the_archive_of_the_script_is_whole_and_the_same_twice(tmp_path):
    folder = tmp_path / "debian-handbook" / "html"
    folder.mkdir(parents=True)
    for name in ("one", "two"):
        (folder / f"{name}.html").write_text(f"<html><body><p>Page {name} of a book about Debian.</p></body></html>")
    script = [sys.executable, str(EXAMPLES / "debian_docs_warc.py")]
    for name in ("first", "second"):
        subprocess.run([*script, tmp_path / f"{name}.warc.gz", "--folder", tmp_path], check=True, capture_output=True)

    source = open_source(WarcConfig(path=tmp_path / "first.warc.gz"))
    found = [document for file in source.files for document in source.read_file_records(file)]

    assert [one.origin.digest_holds for one in found] == [True, True]
    assert "book about Debian" in found[0].text
    assert (tmp_path / "first.warc.gz").read_bytes() == (tmp_path / "second.warc.gz").read_bytes()
    empty = subprocess.run([*script, tmp_path / "none.warc.gz", "--folder", folder], capture_output=True, check=False)
    assert (empty.returncode, b"no documentation package is installed" in empty.stderr) == (1, True)
