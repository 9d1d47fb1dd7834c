"""Recipes, rules and small sources for the tests of builds."""

import hashlib
import json
from pathlib import Path

from phalanx.data.build.recipe import DataRecipe, load_recipe
from phalanx.data.rules import Drop, Edit, Quarantine, RuleReason

FILES = 6
LINES = 9


def write_source(folder: Path) -> Path:
    """Write files of JSON lines: some texts twice, some empty, some with a word that the rules look for."""
    folder.mkdir(parents=True)
    for file in range(FILES):
        lines = []
        for number in range(LINES):
            text = f"file {file} line {number} " + " ".join(f"word{(file * number + k) % 17}" for k in range(30))
            if number == 3:
                text = "the same line in every file " * 4
            if number == 4:
                text = f"suspect {text}"
            if number == 5:
                text = f"loud {text}"
            if number == 6:
                text = "short"
            if number == 7:
                text = " "
            lines.append(json.dumps({"text": text}))
        (folder / f"part-{file}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def write_recipe(home: Path, more: str = "") -> Path:
    """Write a recipe over `write_source`, with three steps that `fake_steps` replaces."""
    source = home / "texts"
    if not source.exists():
        write_source(source)
    path = home / "recipe.toml"
    path.write_text(f"""
[[sources]]
kind = "jsonl"
path = "{source}"
name = "lines"
licence = "CC0"

[[sources]]
kind = "text"
path = "{source}"
name = "again"

[[steps]]
kind = "length"
label = "suspect"

[[steps]]
kind = "length"
label = "twice"

[[steps]]
kind = "length"
label = "quiet"

[[steps]]
kind = "length"
min_characters = 20

[tokenizer]
kind = "bpe"
vocab_size = 300

[output]
shard_tokens = 2048
validation_share = 0.2
signer = "{home / "signer.key"}"
{more}
""")
    other = source / "note.txt"
    if not other.exists():
        other.write_text("A note that is long enough to be kept, in a file of plain text. " * 3)
    return path


def read_recipe(home: Path, *overrides: str, more: str = "") -> DataRecipe:
    """Return the recipe of `write_recipe`."""
    return load_recipe(write_recipe(home, more), overrides)


class SuspectWord:
    """Quarantines texts with a word."""

    def judge_page(self, page):
        return Quarantine(RuleReason("word", "suspect")) if "suspect" in page.text else None


class EqualTexts:
    """Drops texts that were there before."""

    def mark_page(self, page):
        return hashlib.sha256(page.text.encode()).digest()

    def decide_outcomes(self, marks, texts):
        seen = set()
        for number, mark in enumerate(marks):
            if mark in seen:
                yield number, Drop(RuleReason("same_as", texts.read_page(number).source))
            seen.add(mark)


class Quiet:
    """Takes a word out."""

    def judge_page(self, page):
        if "loud" not in page.text:
            return None
        return Edit(page.text.replace("loud ", ""), 1, RuleReason("word", "loud"))


class Short:
    """Drops short texts."""

    def judge_page(self, page):
        return Drop(RuleReason("characters", len(page.text), 20)) if 1 < len(page.text) < 20 else None


def fake_steps(recipe):
    """Stand in for `make_steps`."""
    del recipe
    return [SuspectWord(), EqualTexts(), Quiet(), Short()]


def tree(directory: Path) -> dict[str, str]:
    """Return the digest of every file of a dataset but the page."""
    return {
        path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != "report.html"
    }
