"""Passes and pieces: what a corpus rule decides is applied to the right document, and a faulty rule is named."""

from pathlib import Path

import pytest
from build_recipes import EqualTexts, Quiet, Short, SuspectWord, read_recipe, write_source

from phalanx.data.build.passes import BuildPass, plan_passes
from phalanx.data.build.pieces import PieceReader, SourcePiece, list_pieces
from phalanx.data.build.records import RecordFile, decode_document
from phalanx.data.build.sift import (
    DOCUMENTS,
    PassFilter,
    PieceWriter,
    count_records,
    outcome_from_json,
    outcome_to_json,
)
from phalanx.data.build.tally import ByteTally, check_account
from phalanx.data.rules import Drop, Edit, Quarantine, RuleReason, Tag
from phalanx.data.sources import BrokenRecord, Document
from phalanx.data.sources.files import SourceFile
from phalanx.errors import DataError


class Files:
    """A source of files, a document a line."""

    def __init__(self, folder: Path) -> None:
        self.files = [SourceFile(path.name, path) for path in sorted(folder.iterdir())]

    def read(self, file):
        for number, line in enumerate(file.path.read_text().splitlines()):
            yield Document(f"{file.name} {number}", line)


def test_a_corpus_rule_ends_a_pass_and_begins_the_next():
    passes = plan_passes([SuspectWord(), EqualTexts(), Quiet(), Short(), EqualTexts()])

    assert passes == [BuildPass(0, None, (0,), 1), BuildPass(1, 1, (2, 3), 4), BuildPass(2, 4, (), None)]
    assert plan_passes([]) == [BuildPass(0, None, (), None)]


@pytest.mark.parametrize(
    "outcome",
    [
        Drop(RuleReason("words", 3, 5)),
        Quarantine(RuleReason("trigger", "x")),
        Edit("text", 2, RuleReason("places", 2)),
        Tag({"language": "en", "score": 0.5}),
        None,
    ],
)
def test_an_outcome_comes_back_as_it_was(outcome):
    assert outcome_from_json(outcome_to_json(outcome)) == outcome


@pytest.fixture
def sieve(tmp_path):
    """One pass that applies a decision and no other step."""
    return PassFilter(read_recipe(tmp_path), [None, EqualTexts(), None, None], BuildPass(1, 1, (), None), "lines")


@pytest.fixture
def out(tmp_path):
    """An empty piece."""
    return PieceWriter(tmp_path, "lines", 20)


TEXTS = [Document(str(number), f"text {number}") for number in range(4)]


def test_a_decision_is_applied_to_its_document(sieve, out, tmp_path):
    decided = [(1, Drop(RuleReason("same_as", 0))), (3, Tag({"score": 1}))]

    with out:
        sieve.filter_documents(TEXTS, iter(decided), out)

    kept = list(map(decode_document, RecordFile(tmp_path / DOCUMENTS)))
    assert [one.name for one in kept] == ["0", "2", "3"]
    assert kept[-1].fields == {"score": 1}


@pytest.mark.parametrize("numbers", [[4], [1, 1]])
def test_a_decision_on_no_document_is_a_fault_of_the_rule(sieve, out, numbers):
    with out, pytest.raises(DataError, match="step 'twice' decided on document"):
        sieve.filter_documents(TEXTS, iter([(number, Drop(RuleReason("x", 1))) for number in numbers]), out)


def test_a_text_in_another_normal_form_is_edited_and_counted(sieve, out, tmp_path):
    with out:
        sieve.filter_documents([Document("a", "e\u0301")], iter(()), out)

    assert [decode_document(one).text for one in RecordFile(tmp_path / DOCUMENTS)] == ["\u00e9"]
    assert out.tally.by_step("edited") == {"nfc": {"documents": 1, "places": 1, "net_bytes": -1}}


def test_a_lone_surrogate_is_a_broken_record(tmp_path):
    tally = ByteTally()

    (found,) = count_records([Document("a", "x\ud800")], tally)

    assert found == BrokenRecord("a", 4, "character 1 is a lone surrogate, which is not text")
    assert not tally.counts


@pytest.fixture
def files(tmp_path):
    """A source of seven files."""
    return Files(write_source(tmp_path / "lines"))


def test_pieces_are_all_files_once_and_in_order(files, tmp_path, monkeypatch):
    recipe = read_recipe(tmp_path)
    names = tuple(file.name for file in files.files)
    for most in (1, 3000, 1 << 20):
        monkeypatch.setattr("phalanx.data.build.pieces._PIECE_BYTES", most)

        pieces = list_pieces(recipe, lambda number: files)

        assert tuple(name for piece in pieces if piece.source == 0 for name in piece.names) == names
        assert len(pieces) == {1: 12, 3000: pytest.approx(8, abs=3), 1 << 20: 2}[most]
        assert all(SourcePiece.from_json(piece.to_json()) == piece for piece in pieces)


def test_a_file_that_changes_while_it_is_read_is_refused(files):
    reader = PieceReader(files, SourcePiece(0, 0, tuple(file.name for file in files.files)))
    before = reader.digest_files()

    files.files[2].path.write_text("another")

    with pytest.raises(DataError, match=r"part-2\.jsonl: changed while it was read"):
        reader.check_unchanged(before)


def test_files_that_are_others_than_were_shared_out_are_refused(files):
    with pytest.raises(DataError, match="expected 'part-9' as file 0"):
        PieceReader(files, SourcePiece(0, 0, ("part-9",)))


@pytest.mark.parametrize(("raw_bytes", "text_bytes", "what"), [(9, 10, "raw bytes"), (10, 9, "bytes of text")])
def test_an_account_that_lacks_a_byte_is_refused(raw_bytes, text_bytes, what):
    read, found = ByteTally(), ByteTally()
    read.count_document("read", "read", raw_bytes=10, text_bytes=12)
    read.count_document("edited", "quiet", places=1, net_bytes=-2)
    found.count_document("kept", "kept", raw_bytes=raw_bytes, text_bytes=text_bytes)

    with pytest.raises(DataError, match=f"source 'lines': {what} do not add up: read 10, included and dropped 9"):
        check_account("lines", read, found)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"html": "x" * 50_000}, "name and fields have 50"), ({"score": float("nan")}, "name or fields are no JSON")],
)
def test_fields_that_no_shard_could_keep_make_a_broken_record(fields, reason):
    (found,) = count_records([Document("a", "text", None, fields)], ByteTally())

    assert isinstance(found, BrokenRecord)
    assert found.reason.startswith(reason)
    assert found.raw_bytes == 4
