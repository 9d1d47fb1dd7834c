"""Form NFC: the standard's result for every text, in time that an author of a text cannot make quadratic."""

import time
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.data.normal_form import to_nfc
from phalanx.data.rules import make_rule
from phalanx.data.rules.c4 import C4Config
from phalanx.data.rules.characters import UnicodeConfig
from phalanx.data.rules.page import Page
from phalanx.data.sources import Document

MARKS = "\u0301\u0300\u0323\u0345\u0344\u0f71\u0f72\u0f73\u0f81\u3099\U0001d165\U0001e94a"


@given(parts=st.lists(st.tuples(st.sampled_from("ae\u1ea1 \u1100"), st.text(MARKS, max_size=80)), max_size=5))
def test_the_form_is_that_of_the_standard(parts):
    text = "".join(letter + marks for letter, marks in parts)

    assert to_nfc(text) == unicodedata.normalize("NFC", text)


@pytest.mark.parametrize("marks", ["\u0f71\u0f72", "\u0301\u0323", "\u0f73\u0f71"])
def test_marks_out_of_order_take_no_more_than_their_share(marks):
    before = time.process_time()

    to_nfc("a" + marks * 200_000)

    assert time.process_time() - before < 3


@pytest.mark.parametrize(
    ("config", "unit"), [(UnicodeConfig(), "\u0f71\u0f72"), (C4Config(), "! "), (C4Config(), ". ")]
)
def test_a_rule_takes_no_more_than_its_share_of_one_mark_over_and_over(config, unit):
    page = Page(Document("a", unit * 200_000), "web")
    before = time.process_time()

    make_rule(config).judge_page(page)

    assert time.process_time() - before < 3
