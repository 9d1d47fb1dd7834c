"""Many near copies from one site are set aside together; copies elsewhere and other texts of the site are not."""

import pytest
from made_corpus import decide, gibberish, rng
from made_scans import make_scan

from phalanx.data.rules import Page, Quarantine
from phalanx.data.scan.bursts import BurstsConfig
from phalanx.data.sources import Document
from phalanx.data.sources.source import Origin

SCAN = make_scan(BurstsConfig())


def page(name, text, url=None, source="web"):
    origin = Origin(1, "00", url=url) if url else None
    return Page(Document(name, text, origin), source)


def near_copy(draw, text, share=0.03):
    return " ".join("edit" if draw.random() < share else word for word in text.split())


def burst(count, url="https://burst.example/{}", source="web"):
    draw = rng(1)
    text = gibberish(draw, 300)
    return [page(f"copy{at}", near_copy(draw, text), url and url.format(at), source) for at in range(count)]


def others(count, url="https://burst.example/other/{}"):
    draw = rng(2)
    return [page(f"other{at}", gibberish(draw, 300), url.format(at)) for at in range(count)]


def test_all_near_copies_of_a_site_are_set_aside_and_the_first_one_is_named():
    found = decide(SCAN, others(30) + burst(25))

    assert list(found) == list(range(30, 55))
    assert found[40] == found[30]
    assert isinstance(found[30], Quarantine)
    assert found[30].reason.value == "25 near copies from burst.example; the first is copy0"


@pytest.mark.parametrize(
    "pages",
    [
        burst(19),
        others(60),
        burst(40, "https://site{}.example/a"),
        [page(str(at), "a b c") for at in range(50)],
        [page(str(at), "") for at in range(50)],
        [],
    ],
    ids=["few", "different", "many sites", "short", "empty", "none"],
)
def test_what_is_no_burst_passes(pages):
    assert decide(SCAN, pages) == {}


def test_documents_without_an_address_count_by_source():
    assert len(decide(SCAN, burst(25, url=None))) == 25
    assert decide(SCAN, burst(15, url=None) + burst(15, url=None, source="books")) == {}


def test_a_site_of_another_party_cannot_steer_a_terminal():
    pages = burst(25, "https://a\u202eb.example/{}")

    (value,) = {one.reason.value for one in decide(SCAN, pages).values()}

    assert value.isprintable()


def test_an_address_that_cannot_be_read_counts_as_none():
    assert len(decide(SCAN, burst(25, "http://[::1/{}"))) == 25


def test_a_mark_is_small_and_a_million_hostile_characters_are_read_to_their_end():
    assert len(SCAN.mark_page(page("a", "a " * 500_000))) <= 128
    assert len(SCAN.mark_page(page("a", gibberish(rng(1), 150_000)))) <= 128
