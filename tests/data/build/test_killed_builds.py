"""Builds in processes of their own: killed at any moment, on any engine, with any number of workers, the same bytes."""

import os
import random
import select
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from build_recipes import tree, write_recipe

from phalanx.data.build.run import build_recipe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
KILLS = 50
STEPS = """
[[steps]]
kind = "unicode"
label = "form"

[[steps]]
kind = "exact_duplicates"
label = "equal"
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A recipe of real steps over small pieces, so that a build has many moments to be killed at."""
    path = write_recipe(tmp_path)
    path.write_text(path.read_text().replace("[tokenizer]", f"{STEPS}\n[tokenizer]"))
    return tmp_path


def started(home, out, workers=2):
    """Start a build in a process group of its own."""
    words = ["data", "build", str(home / "recipe.toml"), "--out", str(out), "--workers", str(workers)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([sys.executable, "-m", "phalanx", *words], start_new_session=True, **quiet)


def children_of(pid):
    """Return handles of the processes that a process has started."""
    try:
        lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except (FileNotFoundError, ProcessLookupError):
        return []
    handles = []
    for child in {one for text in lists for one in text.split()}:
        try:
            handles.append(os.pidfd_open(int(child)))
        except ProcessLookupError:
            continue
    return handles


def test_a_build_that_is_killed_at_fifty_random_moments_comes_to_the_same_bytes(home):
    expected = tree(build_recipe(read_recipe_of(home), home / "whole").directory)
    draw = random.Random(17)
    kills, builds, longest_s = 0, 0, 6.0

    while kills < KILLS:
        out = home / f"killed-{builds}"
        builds += 1
        code = None
        while code is None:
            process = started(home, out)
            try:
                code = process.wait(draw.uniform(0.2, longest_s))
            except subprocess.TimeoutExpired:
                children = children_of(process.pid)
                process.kill()
                process.wait()
                kills += 1
                for child in children:
                    # its children end with it, before anything else is started in the directory
                    assert select.select([child], [], [], 60)[0]
                    os.close(child)
        assert code == 0
        assert tree(out) == expected

    assert kills >= KILLS


def read_recipe_of(home):
    from phalanx.data.build.recipe import load_recipe

    return load_recipe(home / "recipe.toml")


IN_SMALL_PIECES = """
import sys
from phalanx.data.build import pieces
pieces._PIECE_BYTES = 2000
from phalanx.cli import main
main()
"""


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(
    "engine",
    ["local", pytest.param("ray", marks=pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra `ray`"))],
)
def test_every_engine_makes_the_same_bytes(home, engine, workers):
    expected = tree(build_recipe(read_recipe_of(home), home / "one").directory)
    out = home / "other"
    words = ["data", "build", str(home / "recipe.toml"), "--out", str(out), "--workers", str(workers)]

    # a process for each: Ray reads the token of a cluster once
    subprocess.run([sys.executable, "-c", IN_SMALL_PIECES, *words, "--engine", engine], check=True)

    assert tree(out) == expected
