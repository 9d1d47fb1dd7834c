"""Words with look-alike letters set a document aside; the ways in which people mix scripts do not."""

import pytest
from made_scans import make_scan

from phalanx.data.rules import Page, Quarantine
from phalanx.data.scan.homoglyphs import LOOK_ALIKES, HomoglyphsConfig
from phalanx.data.sources import Document


def judge(text, **settings):
    return make_scan(HomoglyphsConfig(**settings)).judge_page(Page(Document("a", text), "web"))


@pytest.mark.parametrize(
    "word",
    [
        "pаypal",
        "micrоsoft",
        "Αmazon",
        "Gооgle",
        "suppоrt",
        "hеllo",
        "\U0001d422\U0001d420\U0001d427\U0001d428\U0001d42b\U0001d41e",
    ],
)
def test_a_word_with_look_alikes_is_named_with_its_place_and_code_points(word):
    found = judge(f"Log in to {word} now.")

    assert isinstance(found, Quarantine)
    assert found.reason.value.startswith("1; first at character 10:")
    assert "U+" in found.reason.value


@pytest.mark.parametrize(
    "text",
    [
        "plain words",
        "naïve café Straße",
        "Привет, мир",
        "Καλημέρα κόσμε",
        "Hello, Привет и hello",
        "SMS-ка и iPhone-ом",
        "iPhoneом",  # a stem with an ending: м is no look-alike
        "5 kΩ, 3 μm, ΔT, αv, λx, ρgh",
        "Tο",  # too short to tell
        "x\U0001d465y",
        "ＦＵＬＬ width",
    ],
)
def test_the_ways_in_which_people_mix_scripts_pass(text):
    assert judge(text) is None


def test_a_recipe_may_allow_some():
    text = "pаypal and gооgle"

    assert judge(text, max_words=2) is None
    assert judge(text, max_words=1).reason.limit == 1


def test_the_table_maps_letters_of_other_scripts_to_single_latin_ones():
    assert all(not one.isascii() and one.isalpha() for one in LOOK_ALIKES)
    assert all(latin.isascii() and len(latin) == 1 for latin in LOOK_ALIKES.values())


@pytest.mark.parametrize("length", [50_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("piece", ["а", "aа", "aа ", "\U0001d422", "é"])
def test_a_million_hostile_characters_are_read_to_their_end(piece, length):
    found = judge(piece * (length // len(piece)))

    assert found is None or len(found.reason.value) < 2_000
