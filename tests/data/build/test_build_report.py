"""A report is read with suspicion: sizes are counts, texts are bounded, and nothing else is in it."""

import pytest
from pydantic import ValidationError

from phalanx.data.build.report import BuildReport, ByteCounts, EditCounts, LeftOut

LINE = {
    "source": "s", "document": "d", "fate": "dropped", "step": "length", "measure": "words", "value": 1, "limit": 2,
    "raw_bytes": 1, "text_bytes": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"fate": "kept"},
        {"raw_bytes": -1},
        {"text_bytes": 1 << 63},
        {"value": float("nan")},
        {"step": "x" * 4097},
        {"document": "x" * 65537},
        {"more": 1},
        {"raw_bytes": "1"},
    ],
    ids=str,
)
def test_a_line_of_the_account_that_makes_no_sense_is_refused(change):
    assert LeftOut(**LINE).digest is None
    with pytest.raises(ValidationError):
        LeftOut(**{**LINE, **change})


def test_bytes_may_come_or_go_by_an_edit_and_a_count_may_not():
    assert EditCounts(documents=1, places=2, net_bytes=-7).net_bytes == -7
    with pytest.raises(ValidationError):
        ByteCounts(documents=-1)


def test_a_report_of_another_format_or_without_a_source_is_refused():
    report = {"inputs": "x", "versions": {}, "steps": (), "groups": (), "sources": ()}
    vocabulary = {"kind": "bpe", "vocab_size": 300, "eos_id": 0, "digest": "d"}
    for wrong in ({"format": 2}, {}):
        with pytest.raises(ValidationError):
            BuildReport(**{**report, "tokenizer": vocabulary, **wrong})
