"""Addresses on the user's lists are dropped on the borders of domains; nothing is looked up."""

import pytest

from phalanx.data.rules import Drop, Page, Quarantine, RuleReason, UrlBlocklistConfig, make_rule
from phalanx.data.sources import Document
from phalanx.data.sources.source import Origin
from phalanx.errors import DataError

LIST = """\
# domains, beginnings of paths, and patterns
example.org
0.0.0.0 tracker.example
https://news.example/private
münchen.example
*.shop.example/*/ads/*
"""


def page(url):
    origin = Origin(raw_bytes=1, raw_digest="00", url=url)
    return Page(Document("a", "text", origin), "web")


@pytest.fixture
def make(tmp_path):
    (tmp_path / "list.txt").write_text(LIST, encoding="utf-8")
    return lambda **settings: make_rule(UrlBlocklistConfig(files=(tmp_path / "list.txt",), **settings))


@pytest.mark.parametrize(
    ("url", "entry"),
    [
        ("https://example.org/a", "example.org"),
        ("http://user@WWW.Example.ORG.:8080/a?b", "example.org"),
        ("https://notexample.org/", None),
        ("https://example.org.evil.example/", None),
        ("tracker.example", "tracker.example"),
        ("https://news.example/private/x", "news.example/private"),
        ("https://news.example/%70rivate", "news.example/private"),
        ("https://sub.news.example/private", "news.example/private"),
        ("https://news.example/privateer", None),
        ("https://news.example/", None),
        ("https://münchen.example/", "xn--mnchen-3ya.example"),
        ("https://xn--mnchen-3ya.example/", "xn--mnchen-3ya.example"),
        ("https://a.shop.example/x/ads/y?z", "*.shop.example/*/ads/*"),
        ("https://a.shop.example/x/adsy", None),
    ],
)
def test_an_address_falls_under_a_line_on_borders_alone(make, url, entry):
    expected = Drop(RuleReason("url", entry)) if entry else None

    assert make().judge_page(page(url)) == expected


@pytest.mark.parametrize("url", ["http://[::1", "https:///path", "https://a.example/" + "a" * 9_000])
def test_an_address_that_cannot_be_read_is_set_aside(make, url):
    assert isinstance(make().judge_page(page(url)), Quarantine)


def test_a_document_without_an_address_passes_unless_the_recipe_says_otherwise(make):
    assert make().judge_page(page(None)) is None
    assert make(without_url="quarantine").judge_page(page(None)) == Quarantine(RuleReason("url", "none is recorded"))


def test_more_patterns_than_can_be_tried_one_by_one_are_refused(tmp_path):
    file = tmp_path / "list.txt"
    file.write_text("".join(f"*a{number}\n" for number in range(1_001)))

    with pytest.raises(DataError, match="list domains instead"):
        make_rule(UrlBlocklistConfig(files=(file,)))


def test_a_pattern_of_many_stars_is_tried_on_a_hostile_address_to_its_end(tmp_path):
    file = tmp_path / "list.txt"
    file.write_text("*a" * 100 + "*b\n")
    rule = make_rule(UrlBlocklistConfig(files=(file,)))

    assert rule.judge_page(page("https://x.example/" + "a" * 8_000)) is None
