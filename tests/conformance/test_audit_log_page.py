"""docs/audit_log.md: a second implementation reads its examples, and the program still makes them."""

import ast
from pathlib import Path

import pytest
from audit_log_vectors import on_page, vectors
from independent_verifier import Draw, canonical, check_head, check_signature, digest, in_domain, merkle_root, parse

PAGE = on_page()
VERIFIER = Path(__file__).with_name("independent_verifier.py")


def test_the_page_shows_what_the_program_makes():
    assert vectors() == PAGE


def test_the_second_implementation_imports_nothing_of_the_first():
    tree = ast.parse(VERIFIER.read_text(encoding="utf-8"))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}

    assert {name.partition(".")[0] for name in imported} == {
        *(
            "blake3",
            "cryptography",
            "dataclasses",
            "datetime",
            "hashlib",
            "hmac",
            "json",
            "math",
            "pathlib",
            "re",
            "sys",
        ),
    }


@pytest.mark.parametrize("case", PAGE["canonical"])
def test_canonical_json_has_one_form(case):
    assert canonical(case["value"]).decode() == case["bytes"]
    assert parse(case["bytes"].encode()) == case["value"]


def test_lines_are_chained_and_signed_as_the_page_says():
    log = PAGE["log"]
    key = bytes.fromhex(log["public_key"])
    previous = digest(in_domain("log-start/1", log["head"]["run"].encode()))

    for text, expected in zip(log["lines"], log["digests"], strict=True):
        line = parse(text.encode())
        assert line["previous"] == previous
        check_signature(key, line.pop("signature"), "log/1", canonical(line))
        previous = digest(text.encode())
        assert previous == expected
    check_head(key, log["head"])
    assert (log["head"]["num_events"], log["head"]["digest"]) == (len(log["lines"]), previous)


def test_a_public_head_is_signed_and_hides_the_boot_as_the_page_says():
    found, key = PAGE["public_head"], bytes.fromhex(PAGE["log"]["public_key"])
    head = dict(found["head"])

    check_signature(key, head.pop("signature"), "log-public-head/1", canonical(head))
    assert head["boot"] == digest(in_domain("log-boot/1", canonical([head["run"], found["boot"]])))
    assert (head["last"]["number"], head["forced"]["number"]) == (2, 1)


@pytest.mark.parametrize("case", PAGE["merkle"], ids=lambda case: f"{len(case['leaves'])} leaves")
def test_merkle_roots_are_as_the_page_says(case):
    assert merkle_root([leaf.encode() for leaf in case["leaves"]]) == case["root"]


def test_a_message_header_is_signed_as_the_page_says():
    header = PAGE["header"]
    text = header["signed"]["header"].encode()

    check_signature(bytes.fromhex(header["public_key"]), header["signed"]["signature"], "frame/1", text)
    assert digest(text) == header["digest"]


@pytest.mark.parametrize("place", PAGE["draw"]["places"])
def test_draws_are_as_the_page_says(place):
    found = PAGE["draw"]
    draw = Draw(bytes.fromhex(found["key"]), bytes.fromhex(found["nonce"]), found["guard"])
    t, e, s = place["step"], place["epoch"], place["stage"]

    assert draw.microbatches(t, e, s, 8) == place["microbatches_of_8"]
    assert draw.microbatches(t, e, s, 5) == place["microbatches_of_5"]
    assert (draw.coin(t, e, s, -1) < found["guard"]["step_audit_rate"]) == place["whole_step"]
    assert (draw.coin(t, e, s, -2) < found["guard"]["owner_audit_rate"]) == place["owners_step"]
