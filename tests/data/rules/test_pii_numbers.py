"""Checksums of numbers with a person behind them: published or computed examples, one digit off, and the forms."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.data.rules import pii_numbers as numbers
from phalanx.data.rules.pii_shapes import AT_DIGITS, AT_LETTERS

VALID = {
    numbers.is_card: ("4111111111111111", "5555555555554444", "378282246310005", "30569309025904", "6011111111111117"),
    numbers.is_iban: ("GB82WEST12345698765432", "DE89370400440532013000", "NO9386011117947"),
    numbers.is_us_ssn: ("123456789", "665010001"),
    numbers.is_uk_nhs: ("9434765919", "4010232137"),
    numbers.is_es_dni: ("12345678Z", "X1234567L", "Z1234567R"),
    numbers.is_fr_nir: ("255081416802538",),
    numbers.is_it_codice_fiscale: ("RSSMRA85T10A562S",),
    numbers.is_nl_bsn: ("111222333",),
    numbers.is_de_tax_id: ("86095742719", "47036892816"),
    numbers.is_pl_pesel: ("44051401359",),
    numbers.is_se_personnummer: ("8112189876", "8112789873"),
    numbers.is_fi_hetu: ("131052-308T",),
}
BAD = {
    numbers.is_card: ("0000000000000000", "4111111111111", "9111111111111111", "411111111111111"),
    numbers.is_iban: ("GB82WEST1234569876543", "XX82WEST12345698765432", "GB"),
    numbers.is_us_ssn: ("000123456", "666123456", "900123456", "123006789", "123450000"),
    numbers.is_uk_nhs: ("0000000000", "1111111111"),
    numbers.is_nl_bsn: ("000000000",),
    numbers.is_de_tax_id: ("06095742719",),
    numbers.is_pl_pesel: ("44131401358", "44001401356"),
    numbers.is_se_personnummer: ("8113189875", "8112329876"),
    numbers.is_fi_hetu: ("311352-308T",),
}
WITH_CHECK = [check for check in VALID if check not in (numbers.is_us_ssn,)]


def name_of(check) -> str:
    return check.__name__


@pytest.mark.parametrize("check", VALID, ids=name_of)
def test_true_numbers_pass(check):
    assert [number for number in VALID[check] if not check(number)] == []


@pytest.mark.parametrize("check", BAD, ids=name_of)
def test_numbers_that_nobody_is_given_are_refused(check):
    assert [number for number in BAD[check] if check(number)] == []


@pytest.mark.parametrize("check", WITH_CHECK, ids=name_of)
def test_a_number_with_another_check_digit_is_refused(check):
    for number in VALID[check]:
        # a DNI has its check letter last, as all others have a digit or letter there
        last = number[-1]
        others = "0123456789" if last.isdigit() else "ABCDEFGHJKLMNPQRSTVWXY"
        assert [other for other in others if other != last and check(number[:-1] + other)] == []


@given(st.text("0123456789", min_size=1, max_size=18), st.data())
def test_luhn_finds_every_single_digit(digits, data):
    check = next(digit for digit in "0123456789" if numbers.passes_luhn(digits + digit))
    whole = digits + check
    place = data.draw(st.integers(0, len(whole) - 1))
    other = data.draw(st.sampled_from([digit for digit in "0123456789" if digit != whole[place]]))

    assert not numbers.passes_luhn(whole[:place] + other + whole[place + 1 :])


def found(text: str) -> list[tuple[str, str]]:
    """What begins at the first digit, plus sign, bracket or capital of a text by its first fitting shape."""
    shapes = (*AT_DIGITS, *AT_LETTERS)
    start = next(place for place, character in enumerate(text) if character in "0123456789+(" or character.isupper())
    hits = [(shape.kind, text[start:end]) for shape in shapes if (end := shape.end_at(text, start))]
    return hits[:1]


@pytest.mark.parametrize(
    ("text", "hit"),
    [
        ("4111 1111 1111 1111", ("card", "4111 1111 1111 1111")),
        ("3782-822463-10005", ("card", "3782-822463-10005")),
        ("123-45-6789.", ("national_number", "123-45-6789")),
        ("943 476 5919", ("national_number", "943 476 5919")),
        ("12345678Z", ("national_number", "12345678Z")),
        ("2 55 08 14 168 025 38", ("national_number", "2 55 08 14 168 025 38")),
        ("131052-308T", ("national_number", "131052-308T")),
        ("19811218-9876", ("national_number", "19811218-9876")),
        ("8.8.8.8", ("ip", "8.8.8.8")),
        ("+44 20 7946 0958", ("phone", "+44 20 7946 0958")),
        ("(212) 555-0100", ("phone", "(212) 555-0100")),
        ("212-555-0100", ("phone", "212-555-0100")),
        ("GB82 WEST 1234 5698 7654 32, he", ("iban", "GB82 WEST 1234 5698 7654 32")),
        ("RSSMRA85T10A562S", ("national_number", "RSSMRA85T10A562S")),
    ],
)
def test_a_number_is_found_as_it_is_written_to_its_end(text, hit):
    assert found(text) == [hit]


@pytest.mark.parametrize(
    "text",
    ["4111 1111 1111 1112", "4111111111111111x", "123-45-67890", "192.168.0.1", "256.1.1.1", "8.8.8.8.8", "224.0.0.1",
     "GB82 WEST 1234 5698 7654 33", "GB82WEST123456987654321", "+44 20", "212 555 0100", "111222333", "2024-05-06"],
)  # fmt: skip
def test_what_only_looks_like_a_number_is_left(text):
    assert found(text) == []


@pytest.mark.parametrize(
    ("words", "number", "kind"),
    [
        ("call ", "212 555 0100", "phone"),
        ("bsn: ", "111222333", "national_number"),
        ("idnr ", "86 095 742 719", "national_number"),
        ("pesel ", "44051401359", "national_number"),
        ("nhs ", "9434765919", "national_number"),
    ],
)
def test_an_ambiguous_number_counts_beside_its_name_alone(words, number, kind):
    assert found(words + number) == [(kind, number)]
    assert found("about " + number) == []
    assert found(words + "x" * 40 + " " + number) == []


def test_a_version_is_no_address():
    assert found("release 8.8.8.8") == []
    assert found("server 8.8.8.8") == [("ip", "8.8.8.8")]
