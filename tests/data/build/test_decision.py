"""A corpus rule decides once over all pieces, in order, and a piece's share does not depend on the pieces before."""

from types import SimpleNamespace

import pytest

from phalanx.data.build import decision
from phalanx.data.build.decision import PieceTexts, apply_corpus_rule
from phalanx.data.build.records import RecordWriter, encode_document
from phalanx.data.build.sift import DOCUMENTS, MARKS
from phalanx.data.build.store import WorkStore
from phalanx.data.rules import Drop, RuleReason
from phalanx.data.sources import Document
from phalanx.errors import DataError

DROP = Drop(RuleReason("again", 1, 0))


class Marked:
    """Drops the documents of these numbers; as a rule of a fault, in the order that it is given."""

    def __init__(self, *numbers):
        self.numbers, self.decided = numbers, 0

    def mark_page(self, page):
        return b""

    def decide_outcomes(self, marks, texts):
        self.decided += 1
        assert len(list(marks)) == len(texts)
        yield from ((number, DROP) for number in self.numbers)


@pytest.fixture
def decide(tmp_path, monkeypatch):
    monkeypatch.setattr(decision, "as_corpus_rule", lambda rule: rule)
    monkeypatch.setattr(decision, "step_settings", lambda step: {"kind": step})
    (tmp_path / "work").mkdir()
    store = WorkStore(tmp_path / "work")

    def piece(key, texts):
        (tmp_path / "work" / key).mkdir(exist_ok=True)
        for name, encode in ((DOCUMENTS, encode_document), (MARKS, lambda document: b"m")):
            with RecordWriter(tmp_path / "work" / key / name) as writer:
                for number, text in enumerate(texts):
                    writer.append_record(encode(Document(f"{key}-{number}", text)))
        return {"key": key, "documents": len(texts)}

    def run(rule, **pieces):
        recipe = SimpleNamespace(steps=["again"], step_names=["again"])
        worker = SimpleNamespace(step_rules=[rule], work_store=store, recipe=recipe)
        summaries = [piece(key, texts) for key, texts in pieces.items()]
        return apply_corpus_rule(worker, 0, summaries, [f"source of {key}" for key in pieces])

    run.store = store
    return run


def test_each_piece_has_its_share_and_the_decision_is_made_once(decide):
    rule = Marked(1, 2, 4)

    first = decide(rule, a=["x", "y"], b=["z"], c=["u", "v"])

    assert [(share["first"], share["count"], share["start"]) for share in first] == [(0, 1, 0), (1, 1, 2), (2, 1, 3)]
    assert decide(rule, a=["x", "y"], b=["z"], c=["u", "v"]) == first
    assert rule.decided == 1


def test_the_digest_of_a_share_is_the_same_behind_another_piece(decide):
    (_, behind) = decide(Marked(3), a=["x", "y"], b=["z", "w"])
    (_, _, further) = decide(Marked(4), a=["x", "y"], n=["new"], b=["z", "w"])

    assert behind["digest"] == further["digest"]
    assert decide(Marked(2), a=["x", "y"], b=["z", "w"], e=["end"])[1]["digest"] != behind["digest"]


@pytest.mark.parametrize("numbers", [(1, 1), (2, 0), (5,), (-1,)], ids=["twice", "out of order", "behind", "before"])
def test_a_rule_that_decides_on_a_document_twice_or_on_none_is_at_fault(decide, numbers):
    with pytest.raises(DataError, match="fault of the rule"):
        decide(Marked(*numbers), a=["x", "y", "z"])


def test_texts_are_read_by_number_with_their_source(decide):
    decide(Marked(), a=["x", "y"], b=["z"])
    texts = PieceTexts(decide.store, ["a", "b"], [2, 1], ["first", "second"])

    assert [texts.read_page(number).text for number in range(3)] == ["x", "y", "z"]
    assert [texts.read_page(number).source for number in range(3)] == ["first", "first", "second"]
    with pytest.raises(DataError, match="asked for document 3 of 3"):
        texts.read_page(3)
