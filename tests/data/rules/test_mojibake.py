"""Lines read in a wrong encoding come back; all others stay as they are."""

import pytest
from made_pages import HONEST, page_of

from phalanx.data.rules import Edit, MojibakeConfig, RuleReason, make_rule

pytest.importorskip("ftfy")


def judge(text):
    return make_rule(MojibakeConfig()).judge_page(page_of(text))


@pytest.mark.parametrize("text", ["", HONEST, "café, “quotes” and ﬁ\n中文\n", "Über Österreich, naïve", "lost: \ufffd"])
def test_text_without_signs_passes(text):
    assert judge(text) is None


def test_a_line_is_repaired_and_the_others_are_left_alone():
    wrong = "The café’s menu".encode().decode("cp1252")

    found = judge(f"“kept”\n{wrong}\nplain")

    assert found == Edit("“kept”\nThe café’s menu\nplain", 1, RuleReason("lines_repaired", 1))
