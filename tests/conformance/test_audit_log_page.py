"""docs/audit_log.md: a second implementation reads its examples, and the program still makes them."""

import pytest
from audit_log_vectors import on_page, vectors

from phalanx.verifier.forms import canonical, check_signature, digest, in_domain, merkle_root, parse
from phalanx.verifier.log import LoggedDraw

PAGE = on_page()


def test_the_page_shows_what_the_program_makes():
    assert vectors() == PAGE


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
    head = dict(log["head"])
    check_signature(key, head.pop("signature"), "log-head/1", canonical(head))
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
    draw = LoggedDraw(bytes.fromhex(found["key"]), bytes.fromhex(found["nonce"]), found["guard"])
    t, e, s = place["step"], place["epoch"], place["stage"]

    assert draw.microbatches(t, e, s, 8) == place["microbatches_of_8"]
    assert draw.microbatches(t, e, s, 5) == place["microbatches_of_5"]
    assert (draw.coin(t, e, s, -1) < found["guard"]["step_audit_rate"]) == place["whole_step"]
    assert (draw.coin(t, e, s, -2) < found["guard"]["owner_audit_rate"]) == place["owners_step"]
