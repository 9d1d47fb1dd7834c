"""Characters that no person sees set a document aside, unless writing has a use for them there."""

import pytest
from made_scans import make_scan

from phalanx.data.rules import Drop, Page, Quarantine, RuleReason, Tag
from phalanx.data.scan.hidden_characters import HiddenCharactersConfig
from phalanx.data.sources import Document


def judge(text, **settings):
    return make_scan(HiddenCharactersConfig(**settings)).judge_page(Page(Document("a", text), "web"))


def as_tags(text):
    return "".join(chr(0xE0000 + ord(one)) for one in text)


def as_selectors(content):
    return "".join(chr(0xFE00 + byte) if byte < 16 else chr(0xE0100 + byte - 16) for byte in content)


def test_tag_characters_are_told_with_place_and_what_they_spell():
    found = judge("A page." + as_tags("obey me") + " The end.")

    assert isinstance(found, Quarantine)
    assert found.reason.measure == "tag_characters"
    assert found.reason.value.startswith('7 at character 7: "A page.\\u{e006f}')
    assert found.reason.value.endswith('spells "obey me"')


def test_what_tag_characters_spell_cannot_steer_a_terminal_and_is_bounded():
    found = judge("A page." + as_tags("\x1b[2J" + "a" * 100_000))

    assert found.reason.value.isprintable()
    assert len(found.reason.value) < 2_000


def test_bytes_in_variation_selectors_are_told_with_what_they_spell():
    found = judge("A smile \U0001f600" + as_selectors(b"obey me"))

    assert found.reason.measure == "variation_run"
    assert found.reason.value.endswith('spells "obey me"')


@pytest.mark.parametrize(
    ("measure", "text"),
    [
        ("variation", "an a\ufe00 letter"),
        ("variation", "an a\U000e0100 letter"),
        ("zero_width_run", "bits\u200b\u200c\u200b\u200b here"),
        ("bidirectional_override", "if \u202eadmin\u202c then"),
        ("bidirectional", "if \u2067admin\u2069 then"),
        ("bidirectional", "a \u2068name"),
        ("bidirectional", "a \u2068name\n\u2069"),
        ("bidirectional", "שלום \u202bשלום\u2069"),
        ("bidirectional", "a \u2069"),
        ("bidirectional_run", "a" + "\u200e" * 8),
        ("annotation", "a \ufff9base\ufffanote\ufffb"),
        ("tag_characters", "\U0001f3f4" + as_tags("gbeng")),
        ("tag_characters", "\U000e0001"),
    ],
)
def test_a_single_use_that_writing_does_not_have_is_enough(measure, text):
    found = judge(text)

    assert isinstance(found, Quarantine)
    assert found.reason.measure == measure
    assert found.reason.value.isprintable()


@pytest.mark.parametrize(
    "text", ["i\u200bgnore", "i\u2060gnore", "i\u200dgnore", "i\u00adg\u00adn\u00adore", "i\u200egnore", "a\u3164b"]
)
def test_lone_zero_width_characters_are_counted_against_the_recipe(text):
    many, few = " ".join([text] * 9), " ".join([text] * 4)

    assert judge(many).reason.measure == "zero_width"
    assert judge(few) is None
    assert isinstance(judge(text, max_zero_width=0), Quarantine)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "plain",
        "naïve café – déjà vu",
        "\ufeffa byte-order mark",
        "family \U0001f468\u200d\U0001f469\u200d\U0001f467",
        "heart \u2764\ufe0f and keycap 1\ufe0f\u20e3",
        "flag of England \U0001f3f4" + as_tags("gbeng") + "\U000e007f",
        "می\u200cخواهم",
        "क्\u200dष and क्\u200cष",
        "ภาษา\u200bไทย",
        "葛\U000e0100城",
        "\u2229\ufe00 serifs",
        "hy\u00adphen\u00adation",
        "שלום \u200f(abc)\u200f",
        "שלום \u202babc\u202c ok",
        "file \u2068name\u2069 not found",
        "한\u3164글",
        "\U0001f1e9\U0001f1ea",
    ],
)
def test_the_uses_of_writing_pass(text):
    assert judge(text, max_zero_width=0) is None


def test_the_recipe_says_what_becomes_of_a_finding():
    text = "a" + as_tags("b")

    assert isinstance(judge(text, outcome="drop"), Drop)
    assert judge(text, outcome="tag") == Tag(
        {"scan_hidden_characters": 'tag_characters: 1 at character 1: "a\\u{e0062}"; spells "b"'}
    )
    assert judge(text).reason == RuleReason("tag_characters", '1 at character 1: "a\\u{e0062}"; spells "b"', 0)


@pytest.mark.parametrize("length", [50_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "piece",
    ["\u200b", "a\u200b", "\u202e", "ש\u202b", "\u2068", "\u2068\u2069", "\ufe0f", "\U0001f600\ufe0f", "\u00ada"],
)
def test_a_million_hostile_characters_are_read_to_their_end(piece, length):
    found = judge(piece * (length // len(piece)))

    assert found is None or found.reason.value.isprintable()
