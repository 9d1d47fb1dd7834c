"""The page of keys names every file that signs, agrees on a key or encrypts, and no other one."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "keys.md").read_text(encoding="utf-8")
USES = re.compile(
    r"hazmat\.primitives|\bhmac\.(?:new|digest)\b|\b(?:sign_data|signature_fields|sign_ml_dsa|seal_for|sign_checkpoint)\("
    r"|\.exchange\(|SSLContext|ssl_(?:server|channel)_credentials|create_default_context|ssl_certfile"
)
SIGNATURES_AND_EXCHANGES = (
    "Ed25519",
    "ML-DSA-44",
    "ECDSA P-256",
    "X25519MLKEM768",
    "ML-KEM-768",
    "HPKE",
    "AES-256-GCM",
)


def files_of_the_source():
    source = ROOT / "src" / "phalanx"
    files = (path for path in source.rglob("*.py") if "lab" not in path.relative_to(source).parts)
    return {str(path.relative_to(source)) for path in files if USES.search(path.read_text(encoding="utf-8"))}


def rows_of_the_page():
    table = PAGE.split("## The table", 1)[1]
    lines = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| ") and "`" in line]
    return [[cell.strip() for cell in cells] for cells in lines]


def test_the_page_names_every_file_that_uses_a_key_and_no_other():
    named = [file for row in rows_of_the_page() for file in re.findall(r"`([\w/.]+\.py)`", row[4])]

    assert sorted(named) == sorted(set(named))
    assert set(named) == files_of_the_source()


def test_every_row_says_algorithm_lifetime_and_what_replaces_it():
    for row in rows_of_the_page():
        assert len(row) == 5
        assert all(row), row


@pytest.mark.parametrize("word", SIGNATURES_AND_EXCHANGES)
def test_the_algorithms_of_the_source_are_on_the_page(word):
    assert word in PAGE
