"""Words of the user's lists are counted; only beyond a threshold is a document dropped."""

import sys
import unicodedata

import pytest
from pydantic import ValidationError

from phalanx.data.rules import BadWordsConfig, Drop, Page, RuleReason, Tag, make_rule
from phalanx.data.sources import Document
from phalanx.errors import DataError


@pytest.fixture
def words(tmp_path):
    file = tmp_path / "words.txt"
    file.write_text("# a list\nfrob\nfrob the nicator\n坏话\n\n", encoding="utf-8")
    return file


def judge(text, **settings):
    return make_rule(BadWordsConfig(**settings)).judge_page(Page(Document("a", text), "web"))


@pytest.mark.parametrize(
    ("text", "hits"),
    [
        ("He did FROB it.", 1),
        ("frob, frob; (frob)", 3),
        ("frobbing refrob frob2", 0),
        ("to frob the nicator", 2),  # the word and the phrase
        ("这是坏话吗", 1),
        ("İİİ frob", 1),
        ("这是frob的", 1),
        ("nothing", 0),
        ("", 0),
    ],
)
def test_whole_words_and_phrases_are_counted(words, text, hits):
    found = judge(text, files=(words,), own=False)

    assert (found.fields["bad_words"] if found else 0) == hits


@pytest.mark.parametrize(("of_list", "of_text"), [("NFD", "NFC"), ("NFC", "NFD")])
def test_a_word_is_found_in_either_normal_form(tmp_path, of_list, of_text):
    (tmp_path / "a.txt").write_text(unicodedata.normalize(of_list, "blöde\n"), encoding="utf-8")

    found = judge(unicodedata.normalize(of_text, "so blöde"), files=(tmp_path / "a.txt",), own=False)

    assert found == Tag({"bad_words": 1, "bad_words_share": 0.5})


def test_a_document_is_tagged_and_never_dropped_without_a_threshold(words):
    found = judge("frob " * 10, files=(words,))

    assert found == Tag({"bad_words": 10, "bad_words_share": 1.0})


def test_beyond_the_threshold_a_document_is_dropped_and_its_words_are_told(words):
    text = "frob " * 3 + "good " * 27

    assert judge(text, files=(words,), max_share=0.09) == Drop(RuleReason("bad_words (frob 3)", 0.1, 0.09))
    assert isinstance(judge(text, files=(words,), max_share=0.1), Tag)
    assert isinstance(judge(text, files=(words,), max_share=0.09, min_hits=4), Tag)


def test_the_own_list_works_without_a_file():
    assert judge("What a bastard.") == Tag({"bad_words": 1, "bad_words_share": 0.333333})


def test_a_rule_without_any_word_is_refused():
    with pytest.raises(ValidationError, match="give no words"):
        BadWordsConfig(own=False)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"# nothing\n", "has no entry"), (b"\xff\n", "line 1: byte 0"), (b"a" * 3000, "shorten the list")],
)
def test_a_list_that_cannot_be_used_is_an_error_that_names_it(tmp_path, content, message):
    file = tmp_path / "list.txt"
    file.write_bytes(content)

    with pytest.raises(DataError, match=message) as caught:
        judge("a", files=(file,))
    assert str(file) in str(caught.value)


def test_a_missing_list_is_an_error_that_names_it(tmp_path):
    with pytest.raises(DataError, match=r"none\.txt: cannot be read"):
        judge("a", files=(tmp_path / "none.txt",))


def test_without_the_extra_the_error_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ahocorasick_rs", None)

    with pytest.raises(DataError, match=r"bad_words: needs ahocorasick-rs; install phalanx-train\[data\]"):
        judge("a")


def test_a_million_hostile_characters_are_read_to_their_end(words):
    found = judge("frob the " * 111_111, files=(words,), own=False)

    assert found.fields["bad_words"] == 111_111
