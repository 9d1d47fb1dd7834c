"""Where texts begin and meet in tokens, how figures of vocabularies are counted, and lists of entries are read."""

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from phalanx.data.borders import bare_encoder, border_of, drop_trailing_ids, first_ids_of, special_ids_around
from phalanx.data.pack import token_dtype
from phalanx.data.rules import word_files
from phalanx.data.rules.word_files import fold_case, is_whole_word, read_entries, search_all
from phalanx.data.sources.extractors import extract_with
from phalanx.data.sources.xhtml import as_html
from phalanx.data.tokenizers.measure import TextFigures, unknown_id
from phalanx.errors import DataError


def bytes_tokenizer(*, begin: bool = True, end: bool = True) -> tokenizers.Tokenizer:
    """A tokenizer of single bytes that writes ``<s>`` before a text and ``</s>`` behind it."""
    names = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = tokenizers.Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    words = [*(["<s>"] if begin else []), "$A", *(["</s>"] if end else [])]
    if begin or end:
        backend.post_processor = processors.TemplateProcessing(
            " ".join(words), special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    return backend


@pytest.mark.parametrize(
    ("begin", "end", "around"),
    [(True, True, ((0,), (1,))), (True, False, ((0,), ())), (False, True, ((), (1,))), (False, False, ((), ()))],
)
def test_what_is_written_around_a_text_is_found(begin, end, around):
    backend = bytes_tokenizer(begin=begin, end=end)

    assert special_ids_around(backend) == around
    assert first_ids_of(backend) == around[0]


def test_a_bare_encoder_writes_nothing_around_a_text_and_leaves_the_tokenizer_as_it_was():
    backend = bytes_tokenizer()
    backend.enable_truncation(3)

    bare = bare_encoder(backend, special_is_text=True)

    assert len(bare.encode("<s>abcd").ids) == 7
    assert len(bare_encoder(backend, special_is_text=False).encode("<s>abcd").ids) == 5
    assert backend.encode("a").ids[0] == 0
    assert len(backend.encode("abcd").ids) == 3


@pytest.mark.parametrize(("characters", "border"), [(0, 0), (2, 2), (4, 4), (9, 4)])
def test_a_border_is_the_first_token_that_reaches_over_it(characters, border):
    encoding = bare_encoder(bytes_tokenizer(), special_is_text=True).encode("abcd")

    assert border_of(encoding, "abcd", characters) == border


def test_a_character_that_a_normalizer_composes_over_a_border_belongs_behind_it():
    backend = bytes_tokenizer(begin=False, end=False)
    backend.normalizer = normalizers.NFC()
    text = "xe\u0301y"

    encoding = bare_encoder(backend, special_is_text=True).encode(text)

    # the letter before the border and the accent behind it became one character
    assert border_of(encoding, text, 2) == 1


@pytest.mark.parametrize(
    ("ids", "bare", "left"),
    [([0, 7, 8, 1], [7, 8], [0, 7, 8]), ([7, 8], [7, 8], [7, 8]), ([0, 1], [], []), ([0, 7], [9], [0, 7])],
    ids=["around", "nothing", "empty text", "another text"],
)
def test_what_is_written_behind_a_text_is_dropped(ids, bare, left):
    assert drop_trailing_ids(ids, bare) == left


@pytest.mark.parametrize(("size", "kind"), [(1, "<u2"), (65536, "<u2"), (65537, "<u4")])
def test_tokens_have_the_narrowest_type_that_holds_every_id(size, kind):
    assert token_dtype(size) == kind


# figures


def test_figures_count_bytes_words_unknown_tokens_and_texts_that_do_not_come_back():
    figures = TextFigures()
    figures.count_text("ä b", [1, 0, 0], 0, "ä b")
    figures.count_text("c" * 70, [5], 0, "d")
    figures.count_text("e", [5], None, "f")

    assert figures.to_json() == {
        "documents": 3,
        "size_bytes": 75,
        "tokens": 5,
        "tokens_per_byte": 5 / 75,
        "tokens_per_word": 5 / 4,
        "unknown_share": 2 / 5,
        "returned_share": 1 / 3,
    }
    assert figures.altered == "c" * 60


def test_texts_of_white_space_alone_have_no_tokens_a_word():
    figures = TextFigures()
    figures.count_text(" ", [], 0, " ")

    assert (figures.to_json()["tokens_per_word"], figures.to_json()["unknown_share"]) == (None, None)


def test_the_unknown_token_is_the_models_own():
    assert unknown_id(bytes_tokenizer()) is None
    assert unknown_id(tokenizers.Tokenizer(models.WordLevel({"a": 0, "?": 1}, "?"))) == 1
    assert unknown_id(tokenizers.Tokenizer(models.Unigram([("a", 0.0), ("?", -1.0)], 1))) == 1


# lists of entries


def test_entries_are_read_without_comments_and_blank_lines(tmp_path):
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_text("# a list\n\n one \ntwo words\n")
    second.write_text("three\r\n")

    assert read_entries([first, second]) == ["one", "two words", "three"]


@pytest.mark.parametrize(
    ("content", "words"), [(b"# only\n", "has no entry"), (b"", "has no entry"), (b"\xff\n", "line 1")]
)
def test_a_list_without_an_entry_or_that_is_no_text_is_refused(tmp_path, content, words):
    path = tmp_path / "a.txt"
    path.write_bytes(content)

    with pytest.raises(DataError, match=words):
        read_entries([path])


def test_lists_are_bounded(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("x" * 2048 + "\n")
    assert read_entries([path]) == ["x" * 2048]
    path.write_text("x" * 2049 + "\n")
    with pytest.raises(DataError, match="line 1: an entry of 2049 characters"):
        read_entries([path])
    monkeypatch.setattr(word_files, "MAX_ENTRIES", 2)
    path.write_text("a\nb\nc\n")
    with pytest.raises(DataError, match="line 3"):
        read_entries([path])


def test_folding_keeps_every_character_in_its_place():
    assert fold_case("AbC") == "abc"
    assert fold_case("İstanbul AB") == "İstanbul ab"


def test_every_hit_is_found_those_that_overlap_too():
    assert sorted(search_all(["ab", "bc", "abc"], "rule")("xabc")) == [(0, 1, 3), (1, 2, 4), (2, 1, 4)]


@pytest.mark.parametrize(
    ("text", "word", "is_whole"),
    [("a cat sat", "cat", True), ("cat", "cat", True), ("concat", "cat", False), ("cats", "cat", False),
     ("cat2", "cat", False), ("(cat)", "cat", True), ("大猫好", "猫", True), ("แมวดี", "แมว", True)],
)  # fmt: skip
def test_a_word_stands_alone_but_in_scripts_without_spaces(text, word, is_whole):
    start = text.index(word)

    assert is_whole_word(text, start, start + len(word)) == is_whole


# pages


def test_xhtml_becomes_html_in_which_empty_elements_are_closed():
    page = '<html xmlns="http://www.w3.org/1999/xhtml"><head><title/><script>x</script></head><body>a&nbsp;b<br/></body></html>'

    assert as_html(page, "page") == (
        "<!DOCTYPE html><html><head><title></title><script></script></head><body>a\xa0b<br></body></html>"
    )


@pytest.mark.parametrize("page", ["", "<p>text", "<html><body>a<br></body></html>", "<svg><html/></svg>"])
def test_another_page_stays_as_it_is(page):
    assert as_html(page, "page") == page


@pytest.mark.parametrize(
    "declared", ['a "&#60;b>"', 'a "<b>"', 'a "&c;"', 'a SYSTEM "file:///etc/passwd"', '% a "x"', f'a "{"x" * 41}"']
)
def test_a_page_whose_entities_are_more_than_characters_is_refused(declared):
    with pytest.raises(DataError, match="page: declares the entity"):
        as_html(f"<!DOCTYPE html [<!ENTITY {declared}>]><html><body>a</body></html>", "page")


def test_an_extractor_that_fails_is_a_page_that_cannot_be_read():
    def fail(page):
        raise RecursionError

    assert extract_with(str.upper, "a") == "A"
    with pytest.raises(DataError, match=r"cannot read it \(RecursionError\)"):
        extract_with(fail, "a")
