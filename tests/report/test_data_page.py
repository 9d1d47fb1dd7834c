"""The page of a dataset: the account as bars and tables, names and texts that cannot become markup, nothing fetched."""

import json
import re

import pytest

from phalanx.errors import DataError
from phalanx.report.data_page import render_data_report, write_data_report

SIZES = {"documents": 2, "raw_bytes": 4096, "text_bytes": 2048}
LINE = {
    "source": "web",
    "document": "<script>alert(1)</script>",
    "fate": "dropped",
    "step": "short",
    "measure": "characters",
    "value": 3,
    "limit": 20,
    "excerpt": "a \u202etext <img src=x>",
}


def source(**other):
    """Return what a report says of one source."""
    empty = {name: {} for name in ("dropped", "quarantined", "edited", "tagged", "released", "broken", "samples")}
    return {"name": "web", "kind": "warc", "licence": "CC0", "consent": "asked", "files": 3, "read": SIZES} | {
        "group": "web",
        "weight": None,
        "fingerprint": "00",
        "kept": SIZES,
        **empty,
        **other,
    }


def report(*sources):
    """Return a whole report."""
    return {
        "format": 1,
        "inputs": "00",
        "tokenizer": {"kind": "bpe", "vocab_size": 300, "eos_id": 0, "digest": "00"},
        "versions": {"python": "3.11.2"},
        "steps": [{"name": "short", "kind": "length", "reference": "none", "settings": {"least": 20}}],
        "groups": [{"group": "web", "split": "train", "documents": 2, "tokens": 99}],
        "sources": list(sources),
    }


def test_a_bar_for_each_source_shows_what_each_step_left_out():
    page = render_data_report(report(source(dropped={"short": SIZES}, quarantined={"hidden": SIZES})), "mine")

    assert "short: 4.0 KiB" in page
    assert "hidden (quarantine): 4.0 KiB" in page
    assert "kept: 4.0 KiB" in page


def test_names_and_texts_of_documents_are_never_markup():
    page = render_data_report(report(source(dropped={"short": SIZES}, samples={"short": [LINE]})), "<b>mine</b>")

    assert "<script>" not in page
    assert "<img" not in page
    assert "<b>" not in page
    assert "\u202e" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;: dropped: characters 3, limit 20" in page


def test_nothing_is_fetched_and_no_script_runs():
    page = render_data_report(report(source()), "mine")

    assert "default-src &#x27;none&#x27;" in page
    assert not re.findall(r"<script|src=|href=|url\(", page)


def test_on_a_small_screen_what_is_wide_is_moved_under_it():
    page = render_data_report(report(source(dropped={"short": SIZES})), "mine")

    assert "width=device-width" in page
    assert page.count("<table") == len(re.findall(r'<div class="scroll"><table', page)) > 0
    assert page.count("<svg") == len(re.findall(r'<div class="scroll"><svg', page)) > 0


def test_many_sources_and_steps_are_cut_and_the_rest_is_told_together():
    many = [source(name=f"source-{n}", dropped={f"step-{k}": SIZES for k in range(30)}) for n in range(200)]

    page = render_data_report(report(*many), "mine")

    assert "by other steps" in page
    assert len(page) < 2_000_000


@pytest.mark.parametrize(
    "other",
    [
        {"kept": None},
        {"kept": {"raw_bytes": float("nan")}},
        {"dropped": [1, 2]},
        {"dropped": {"short": 3}},
        {"samples": {"short": [7, None, {}]}},
        {"name": {"a": 1}, "licence": ["x"]},
        {"read": {"raw_bytes": 10**400}},
    ],
)
def test_a_report_of_another_party_with_odd_values_is_still_a_page(other):
    assert render_data_report(report(source(**other)), "mine").startswith("<!doctype html>")


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"format": 2}', b'{"sources": 3}', b"[" * 99_999])
def test_what_is_no_report_is_refused(tmp_path, content):
    (tmp_path / "report.json").write_bytes(content)

    with pytest.raises(DataError, match="is not the report of a dataset"):
        write_data_report(tmp_path)


def test_a_page_lies_beside_its_report(tmp_path):
    (tmp_path / "report.json").write_text(json.dumps(report(source())))

    assert write_data_report(tmp_path) == tmp_path / "report.html"
