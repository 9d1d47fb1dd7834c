"""What a rule says does not depend on what this process has read before, nor on the number of processes."""

import random

import pytest
from made_pages import HONEST, TextsInMemory, page_of

from phalanx.data.rules import RULES, make_rule, term_table

SETTINGLESS = [
    name for name, line in RULES.items() if not any(f.is_required() for f in line.config.model_fields.values())
]


def made_texts():
    draw = random.Random(5)
    lines = HONEST.splitlines()
    texts = ["\n".join(draw.choices(lines, k=draw.randint(1, 12))) for _ in range(24)]
    return [*texts, "", " \n", "x" * 300, *texts[3:6], *(text.replace("file", "table") for text in texts[:6])]


def outcomes(rule, texts, order):
    """Judge or mark in this order; return what came out, by document."""
    corpus = TextsInMemory(texts)
    if hasattr(rule, "judge_page"):
        found = {number: rule.judge_page(corpus.read_page(number)) for number in order}
        return [found[number] for number in range(len(texts))]
    marks = {number: rule.mark_page(corpus.read_page(number)) for number in order}
    return list(rule.decide_outcomes((marks[number] for number in range(len(texts))), corpus))


@pytest.mark.parametrize("name", SETTINGLESS)
def test_a_rule_says_the_same_in_every_order_and_with_every_term_table(name, monkeypatch):
    rule = make_rule(RULES[name].config())
    texts = made_texts()
    forward = outcomes(rule, texts, range(len(texts)))

    order = list(range(len(texts)))
    random.Random(6).shuffle(order)
    assert outcomes(rule, texts, order) == forward

    # as another process would: with a term table that begins anew, every other document
    monkeypatch.setattr(term_table, "_of_thread", term_table._ThreadTable())
    monkeypatch.setattr(term_table, "_MAX_CHARACTERS", 200)
    assert outcomes(rule, texts, order[::-1]) == forward


def test_a_page_is_not_changed_by_a_rule():
    page, alone = page_of(HONEST), page_of(HONEST)
    for name in SETTINGLESS:
        rule = make_rule(RULES[name].config())
        if hasattr(rule, "judge_page"):
            rule.judge_page(page)
        else:
            rule.mark_page(page)

    assert page.term_grams(3).tolist() == alone.term_grams(3).tolist()
    assert page.term_lengths.tolist() == alone.term_lengths.tolist()
    assert page.text == HONEST
