"""On a screen of 390 pixels no word is broken letter by letter, and a picture keeps a size that can be read."""

import re

import pytest

from phalanx.planner.cluster.catalog import known_clusters, known_models
from phalanx.planner.model.recipe import Recipe
from phalanx.planner.search.answer import answer_question
from phalanx.planner.search.question import Question
from phalanx.report.plan_page import render_plan
from phalanx.report.shell import make_section

RULE = re.compile(r"([^{}]+)\{([^{}]*)\}")
COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)


@pytest.fixture(scope="module")
def page():
    recipe = Recipe(32, 1024, precision="bf16")
    return render_plan(
        answer_question(Question("gpt2", known_models()["gpt2"], recipe, known_clusters()["a100-nodes"], (8,)))
    )


def rules(page):
    """Each selector of the page's style sheets with its declarations; of nested rules the inner ones."""
    sheets = COMMENT.sub("", "".join(re.findall(r"<style[^>]*>(.*?)</style>", page, re.DOTALL)))
    return [(selector.strip(), body) for selectors, body in RULE.findall(sheets) for selector in selectors.split(",")]


def test_no_cell_may_be_narrower_than_its_longest_word(page):
    of_cells = [body for selector, body in rules(page) if selector.split()[-1] in ("td", "th", "table", "h1")]

    assert any("overflow-wrap: break-word" in body for body in of_cells)
    # with `anywhere` the narrowest width of a cell is one letter, and the scroll bar is never needed
    assert not any("anywhere" in body or "break-all" in body for body in of_cells)


def test_no_value_of_a_tile_is_one_long_word():
    recipe = Recipe(32, 1024, precision="bf16")
    asked = Question("gpt2", known_models()["gpt2"], recipe, known_clusters()["a100-nodes"], (8,), tokens=1e15)

    page = render_plan(answer_question(asked))

    values = re.findall(r'<div class="value">([^<]*)</div>', page)
    assert any(" to " in value and "million" in value for value in values)
    # 158 px less the tile's edges hold about 14 characters of this size; a longer word is broken between two letters
    assert max(len(word) for value in values for word in re.split("[ \u2009]", value)) <= 14


def test_what_is_wider_than_the_screen_is_moved_under_it(page):
    found = dict(rules(page))

    assert "overflow-x: auto" in found[".scroll"]
    assert page.count("<table") == len(re.findall(r'<div class="scroll"><table', page)) > 0
    assert page.count("<svg") == len(re.findall(r'<div class="scroll"><svg', page)) > 0


def test_a_picture_is_not_shrunk_below_what_can_be_read(page):
    narrow = re.search(r"@media \(max-width: (\d+)px\) \{ \.scroll > \.chart \{ width: (\d+)px; \} \}", page)
    text_px = float(re.search(r"\.chart text \{[^}]*font-size: ([\d.]+)px", page)[1])
    widths = [float(width) for width in re.findall(r'viewBox="0 0 (\d+)', page)]

    assert int(narrow[2]) <= int(narrow[1])
    assert all(text_px * int(narrow[2]) / width >= 9 for width in widths)


def test_only_pictures_are_wrapped():
    assert "scroll" not in make_section("Loss", "a remark", "<p>no curve</p>")


def test_a_short_training_is_not_told_in_fractions_of_a_day():
    recipe = Recipe(32, 1024, precision="bf16")
    question = Question("gpt2", known_models()["gpt2"], recipe, known_clusters()["a100-nodes"], (8,), tokens=1e8)

    assert re.search(r"Time</div><div class=\"value\">[\d.]+ (s|min)<", render_plan(answer_question(question)))
