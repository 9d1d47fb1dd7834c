"""Sentences of the docs that once said more than holds, each held to what the code does."""

import re
from pathlib import Path

import pytest

from phalanx.cli.outcome import run_command
from phalanx.data.build.preview import preview_build
from phalanx.data.build.recipe import load_recipe
from phalanx.pipeline import PRESETS, GuardConfig

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
TEXT = "The {} text speaks of rivers, of hills and of the sea, and has a few more words.\n"


def page(name):
    """A page as one line of words."""
    return " ".join((DOCS / name).read_text(encoding="utf-8").split())


@pytest.fixture
def built(tmp_path, monkeypatch, capsys):
    """The dataset of the page's recipe, over files that have the page's names."""
    text = (DOCS / "data_build.md").read_text(encoding="utf-8")
    recipe = re.search(r"```toml\n(tokenizer = .*?)```", text, re.DOTALL)[1]
    quarantine = re.search(r"```toml\n(\[quarantine\].*?)```", text, re.DOTALL)[1]
    folder = re.search(r'path = "(\w+)"', recipe)[1]
    names = [*re.findall(r"inspect \S+ --document (\S+)", text), *re.findall(r'"([\w/.]+\.txt)"', quarantine)]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    for number, name in enumerate([*names, "one.txt", "two.txt"]):
        path = tmp_path / folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(TEXT.format(number))
    (tmp_path / "folder.toml").write_text(recipe.replace("4096", "300") + quarantine)
    assert len(names) == 3
    return tmp_path, names


def test_every_document_that_the_page_on_builds_names_is_found_under_that_name(built, capsys):
    home, names = built

    assert run_command(["data", "build", "folder.toml", "--out", "datasets/mine"]) == 0
    for name in names:
        assert run_command(["data", "inspect", "datasets/mine", "--document", name]) == 0

    capsys.readouterr()
    assert run_command(["data", "inspect", "datasets/mine", "--json"]) == 0
    assert '"not_found": []' in capsys.readouterr().out
    assert preview_build(load_recipe(home / "folder.toml"), 10).counts["kept"] > 0


def test_every_guard_that_the_bench_page_speaks_of_is_one_or_is_said_to_be_gone():
    text = page("benchmarks.md")
    earlier = text.partition("detection-attacks-cpu-2cores-busy.json`")[2].partition("### The same against")[0]

    assert "is of earlier code" in earlier.split(":")[0]
    assert "Two of its guards are gone: `default`" in earlier
    assert "default p = 1/32" not in text
    assert GuardConfig(preset="standard").step_audit_rate == PRESETS["standard"]["step_audit_rate"] != 1 / 32
    p, r = (PRESETS["standard"][rate] for rate in ("step_audit_rate", "owner_audit_rate"))
    assert f"with the preset `standard` in one step of {1 / (1 - (1 - p) * (1 - r)):.0f}:" in text


def test_no_page_says_that_whoever_withholds_is_never_replaced():
    for name in ("benchmarks.md", "guarantees.md", "sharp_edges.md", "failures.md"):
        assert "can slow a run down for ever" not in page(name)
    assert "withholds is replaced by name at the second" in page("benchmarks.md")


def test_the_page_on_rounds_names_the_carriers_that_one_test_holds_to_the_same_promises():
    tested = (ROOT / "tests" / "federated" / "test_carriers.py").read_text(encoding="utf-8")
    text = page("federated.md")

    assert re.search(r"IN_PROCESSES = (\(.*\))", tested)[1] == '("loopback", "bridge", "flower")'
    assert "all carriers" not in text
    assert (
        "tests the same promises for `loopback`, `bridge` with an engine that only forwards, and `bridge` with the "
        "two ends of the Flower" in text
    )


def test_the_first_page_gives_the_bound_of_its_word_on_poison():
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())

    assert "Semantic poison is not found by anything here" in page("data_scan.md")
    assert re.search(r"poison\]\(docs/data_scan.md\)[^-]* but not semantic poison", text)


def test_the_promise_about_blame_has_the_bound_of_the_sharp_edge():
    fourth = page("guarantees.md").partition(" 4. ")[2].partition(" 5. ")[0]
    seventh = page("sharp_edges.md").partition(" 7. ")[2].partition(" 8. ")[0]

    assert "is named like a liar" in seventh
    assert "never on an honest one" not in fourth
    assert "numeric class" in fourth and "(sharp_edges.md)" in fourth


@pytest.mark.parametrize(
    "words",
    [["explain", "absent.json"], ["explain", "foreign.json"], ["verify", "absent"], ["verify", "."]],
    ids="_".join,
)
def test_what_cannot_be_judged_ends_with_the_code_that_the_page_names(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "foreign.json").write_text('{"a": 1}')
    rows = dict(re.findall(r"^\| (\d) \| (.*) \|$", (DOCS / "howto/read_a_verdict.md").read_text(), re.MULTILINE))

    assert set(rows) == {"0", "5", "7"}
    assert run_command(["audit", *words]) == 5
    assert "cannot be judged: missing" in rows["5"] and "of another version" in rows["5"]
    assert "the log or a certificate is missing" in rows["5"]
