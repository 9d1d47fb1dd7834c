"""Texts are read once, cut at paragraphs, and a part is held out by content."""

import pytest
from made_texts import write_texts

from phalanx.errors import ConfigError, DataError
from phalanx.laptop.texts import MIN_BYTES, cut_documents, read_texts


def test_documents_are_whole_paragraphs_and_none_is_lost():
    text = "\n \n".join(f"paragraph {number} " + "x" * 400 for number in range(20))

    documents = list(cut_documents([text]))

    assert "\n\n".join(documents).split() == text.split()
    assert all(len(document) < 2500 for document in documents)


def test_the_held_out_part_is_the_same_again_and_not_learned(tmp_path):
    folder = write_texts(tmp_path / "texts")

    cut, again = read_texts([folder]), read_texts([folder])

    assert cut == again
    assert len(cut.held_out) >= 2
    assert not set(cut.held_out) & set(cut.train)


def test_a_document_that_is_there_twice_is_read_once(tmp_path):
    folder = write_texts(tmp_path / "texts")
    alone = read_texts([folder])
    (folder / "copy.md").write_text((folder / "book.md").read_text())

    assert read_texts([folder]).num_bytes == alone.num_bytes


def test_other_texts_have_another_digest(tmp_path):
    folder = write_texts(tmp_path / "texts")
    digest = read_texts([folder]).digest
    (folder / "more.md").write_text("one more paragraph")

    assert read_texts([folder]).digest != digest


def test_an_empty_folder_and_too_little_text_are_refused_with_the_figures(tmp_path):
    (tmp_path / "texts").mkdir()
    with pytest.raises(DataError, match="is empty; give"):
        read_texts([tmp_path / "texts"])

    (tmp_path / "texts" / "note.txt").write_text("y" * (MIN_BYTES - 1))
    with pytest.raises(DataError, match=r"19,999 bytes of different text; a model needs at least 20,000"):
        read_texts([tmp_path / "texts"])


def test_preferences_are_no_text(tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')

    with pytest.raises(ConfigError, match="--data-preferences"):
        read_texts([file])


def test_windows_line_ends_are_cut_alike():
    text = "one\n\ntwo\n\nthree"

    assert list(cut_documents([text.replace("\n", "\r\n")])) == list(cut_documents([text]))
