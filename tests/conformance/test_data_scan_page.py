"""docs/data_scan.md: every figure of its tables is the raw result's."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "data_scan.md").read_text(encoding="utf-8")
RESULTS = ROOT / "benchmarks" / "results"
SCAN = "data-scan-cpu-2cores-busy.json"


def rows(name, part=None):
    found = json.loads((RESULTS / name).read_text(encoding="utf-8"))["rows"]
    return [row for row in found if part is None or row["part"] == part]


def line(*cells):
    return f"| {' | '.join(map(str, cells))} |"


def speeds():
    by_kind = {}
    for row in rows(SCAN, "speed"):
        by_kind.setdefault(row["kind"], {})[row["text"]] = row
    for kind, texts in by_kind.items():
        cells = [
            f"{texts[text][key]:{form}}"
            for text in ("pages", "mails")
            for key, form in (("mb_per_cpu_s", ".1f"), ("touched", ","))
        ]
        yield line(f"`{kind}`", *cells)


def personal_data():
    for row in rows(SCAN, "pii"):
        share = row["found"] / row["labelled"]
        yield line(f"{row['kind']}, recall", f"{row['labelled']:,}", f"{row['found']:,}", f"{100 * share:.2f} %")
    for row in rows(SCAN, "pii precision"):
        yield line(
            f"{row['kind']}, precision",
            f"{row['hits']:,}",
            f"{row['right']:,}",
            f"{100 * row['right'] / row['hits']:.2f} %",
        )


def poison():
    for row in rows(SCAN, "poison"):
        yield line(
            row["seed"], f"{row['documents']:,}", row["planted"], row["found"], row["false"], row["false_when_clean"]
        )


def labels():
    for row in rows(SCAN, "label flips"):
        yield line(row["seed"], row["label"] or "-", row["planted"], row["found"], row["false"])


def continuations():
    for row in rows(SCAN, "continuations"):
        yield line(row["text"], row["seed"], f"{row['documents']:,}", row["planted"], row["found"], f"{row['false']:,}")


def backdoors():
    for row in rows("poisoned-build-cpu-2cores-busy.json"):
        counts = [row[name] for name in ("documents", "planted", "found", "false")]
        shares = [f"{row[name]:.2g}" for name in ("with_trigger", "without")]
        yield line(row["seed"], "on" if row["scan"] else "off", *counts, *shares)


TABLES = {
    "speed": speeds,
    "personal data": personal_data,
    "poison": poison,
    "continuations": continuations,
    "labels": labels,
    "backdoors": backdoors,
}


def test_prose_has_all_planted_answers_found_and_nothing_else():
    for row in rows(SCAN, "continuations"):
        if row["text"] in ("abstracts", "articles"):
            assert (row["found"], row["false"]) == (row["planted"], 0)


def test_flipped_labels_are_found_in_four_classes_of_five():
    found = {(row["label"], row["found"]) for row in rows(SCAN, "label flips") if row["label"] is not None}

    assert found == {("1", 25), ("2", 25), ("3", 25), ("4", 25), ("5", 0)}
    assert not any(row["false"] for row in rows(SCAN, "label flips"))


def test_the_backdoor_wins_without_the_scan_and_not_behind_it():
    for row in rows("poisoned-build-cpu-2cores-busy.json"):
        wins = row["with_trigger"] > 0.5 and row["with_trigger"] > 1000 * row["without"]
        assert wins != row["scan"]


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_that_of_the_raw_result(name):
    expected = list(TABLES[name]())

    assert expected
    assert "\n".join(expected) + "\n" in PAGE


def test_every_rule_and_scan_has_a_row_that_says_what_it_finds():
    from phalanx.data.scan import SCANS

    own_rules = {"pii", "secrets", "bad_words", "url_blocklist"}

    assert {kind for kind in SCANS.keys() | own_rules if f"| `{kind}` | " not in PAGE} == set()
