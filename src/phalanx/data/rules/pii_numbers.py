"""Checksums of the numbers that name a person, a card or an account: each says whether a number can be one at all.

A checksum alone proves little: one in ten (Luhn), one in eleven (mod 11) or one in 97 random numbers passes. Where a
number has neither a form of its own nor a long checksum, the search asks for its name close before it besides.
"""

import datetime
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

_IBAN_LENGTHS = (
    "AD24 AE23 AL28 AT20 AZ28 BA20 BE16 BG22 BH22 BR29 BY28 CH21 CR22 CY28 CZ24 DE22 DK18 DO28 EE20 EG29 ES24 FI18 "
    "FO18 FR27 GB22 GE22 GI23 GL18 GR27 GT28 HR21 HU28 IE22 IL23 IQ23 IS26 IT27 JO30 KW30 KZ20 LB28 LC32 LI21 LT20 "
    "LU20 LV21 LY25 MC27 MD24 ME22 MK19 MR27 MT31 MU30 NL18 NO15 PK24 PL28 PS29 PT25 QA29 RO24 RS22 SA24 SC31 SE24 "
    "SI19 SK24 SM27 ST25 SV28 TL23 TN24 TR26 UA29 VA22 VG24 XK20"
)
IBAN_LENGTH: Mapping[str, int] = MappingProxyType({entry[:2]: int(entry[2:]) for entry in _IBAN_LENGTHS.split()})
"""Characters of an IBAN by country (ISO 13616 registry)."""

_CARD_LENGTHS = (
    (r"4", {13, 16, 19}),
    (r"5[1-5]|2(?:22[1-9]|2[3-9]|[3-6]|7[01]|720)", {16}),
    (r"3[47]", {15}),
    (r"3(?:0[0-5]|[68])", {14}),
    (r"6(?:011|5|4[4-9])", {16, 19}),
    (r"35(?:2[89]|[3-8])", {16, 19}),
    (r"62", {16, 17, 18, 19}),
)
_CARDS = tuple((re.compile(prefix), lengths) for prefix, lengths in _CARD_LENGTHS)


def passes_luhn(digits: str) -> bool:
    """Return whether the last digit is the check digit of ISO/IEC 7812."""
    doubled = (int(digit) * 2 for digit in digits[-2::-2])
    return (sum(map(int, digits[-1::-2])) + sum(two - 9 if two > 9 else two for two in doubled)) % 10 == 0


def is_card(digits: str) -> bool:
    """Return whether an issuer's prefix, its lengths and Luhn's digit fit."""
    fits = any(prefix.match(digits) and len(digits) in lengths for prefix, lengths in _CARDS)
    return fits and len(set(digits)) > 1 and passes_luhn(digits)


def is_iban(text: str) -> bool:
    """Return whether the length is the country's and the remainder by 97 is 1 (ISO 7064); no spaces."""
    if len(text) != IBAN_LENGTH.get(text[:2]):
        return False
    return int("".join(str(int(character, 36)) for character in text[4:] + text[:4])) % 97 == 1


def is_us_ssn(digits: str) -> bool:
    """Return whether area, group and serial may be given out; there is no checksum."""
    return digits[:3] not in {"000", "666"} and digits[0] != "9" and digits[3:5] != "00" and digits[5:] != "0000"


def is_uk_nhs(digits: str) -> bool:
    """Return whether the weighted sum fits modulo 11; 10 is never a check digit."""
    check = 11 - sum(int(digit) * weight for digit, weight in zip(digits, range(10, 1, -1), strict=False)) % 11
    return check % 11 == int(digits[9]) and check != 10 and len(set(digits)) > 1


def is_es_dni(text: str) -> bool:
    """Return whether the letter of a Spanish DNI or NIE is that of its number modulo 23."""
    number = text[:-1].translate(str.maketrans("XYZ", "012"))
    return "TRWAGMYFPDXBNJZSQVHLCKE"[int(number) % 23] == text[-1]


def is_fr_nir(digits: str) -> bool:
    """Return whether the two last digits complete the French NIR to a multiple of 97."""
    return 97 - int(digits[:13]) % 97 == int(digits[13:])


def is_it_codice_fiscale(text: str) -> bool:
    """Return whether the letter at the end fits the odd and even characters (decree of 23 December 1976)."""
    odd = (1, 0, 5, 7, 9, 13, 15, 17, 19, 21, 2, 4, 18, 20, 11, 3, 6, 8, 12, 14, 16, 10, 22, 25, 24, 23)
    values = [int(character) if character.isdigit() else ord(character) - ord("A") for character in text[:15]]
    total = sum(odd[value] if index % 2 == 0 else value for index, value in enumerate(values))
    return chr(ord("A") + total % 26) == text[15]


def is_nl_bsn(digits: str) -> bool:
    """Return whether the Dutch eleven-test holds."""
    weights = (9, 8, 7, 6, 5, 4, 3, 2, -1)
    return digits != "0" * 9 and sum(map(_weighted_digit, digits, weights)) % 11 == 0


def is_de_tax_id(digits: str) -> bool:
    """Return whether the check digit of a German tax number fits (ISO 7064, mod 11, 10)."""
    product = 10
    for digit in digits[:10]:
        product = ((int(digit) + product) % 10 or 10) * 2 % 11
    return digits[0] != "0" and (11 - product) % 10 == int(digits[10])


def is_pl_pesel(digits: str) -> bool:
    """Return whether weights and month of a Polish PESEL fit."""
    total = sum(map(_weighted_digit, digits, (1, 3, 7, 9, 1, 3, 7, 9, 1, 3)))
    return (10 - total % 10) % 10 == int(digits[10]) and 1 <= int(digits[2:4]) % 20 <= 12


def is_se_personnummer(digits: str) -> bool:
    """Return whether the date exists (60 is added to the day of a coordination number) and Luhn's digit fits."""
    day = int(digits[4:6])
    return _is_date(digits[:4], day - 60 if day > 60 else day) and passes_luhn(digits)


def is_fi_hetu(text: str) -> bool:
    """Return whether the check character of a Finnish HETU is that of its nine digits modulo 31."""
    is_valid_check = "0123456789ABCDEFHJKLMNPRSTUVWXY"[int(text[:6] + text[7:10]) % 31] == text[10]
    return is_valid_check and _is_date(text[4:6] + text[2:4], int(text[:2]))


def _weighted_digit(digit: str, weight: int) -> int:
    return int(digit) * weight


def _is_date(year_and_month: str, day: int) -> bool:
    try:
        datetime.date(2000 + int(year_and_month[:2]), int(year_and_month[2:]), day)
    except ValueError:
        return False
    return True


Check = Callable[[str], bool]
