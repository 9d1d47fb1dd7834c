"""Numbers with personal data behind them: how each is written, its checksum, and what must be said before it."""

import ipaddress
import re
from dataclasses import dataclass

from phalanx.data.rules.pii_numbers import (
    IBAN_LENGTH,
    Check,
    is_card,
    is_de_tax_id,
    is_es_dni,
    is_fi_hetu,
    is_fr_nir,
    is_iban,
    is_it_codice_fiscale,
    is_nl_bsn,
    is_pl_pesel,
    is_se_personnummer,
    is_uk_nhs,
    is_us_ssn,
)

_BEFORE_CHARACTERS = 32
_SEPARATORS = str.maketrans("", "", " ().-/")
_END = r"(?![A-Za-z0-9_])(?![-.][0-9])"


@dataclass(frozen=True)
class NumberShape:
    """One way in which a number is written.

    Attributes:
        pattern: Read from where the number starts; no quantifier of it is unbounded and no two can share a character.
        check: Is given the number without separators.
        after: Pattern required in the few characters before it, where the form alone is ambiguous.
    """

    kind: str
    pattern: re.Pattern[str]
    check: Check
    after: re.Pattern[str] | None = None
    unless: re.Pattern[str] | None = None

    def end_at(self, text: str, start: int) -> int:
        """Return where the number that starts at a place ends, or 0."""
        match = self.pattern.match(text, start)
        if not match:
            return 0
        context = text[max(start - _BEFORE_CHARACTERS, 0) : start]
        if (self.after and not self.after.search(context)) or (self.unless and self.unless.search(context)):
            return 0
        return match.end() if self.check(match[0]) else 0


def _ignore_separators(check: Check) -> Check:
    return lambda number: check(number.translate(_SEPARATORS))


def _is_global_ipv4(text: str) -> bool:
    try:
        address = ipaddress.IPv4Address(text)
    except ValueError:
        return False
    return address.is_global and not address.is_multicast


def _is_international(text: str) -> bool:
    return 8 <= sum(map(str.isdigit, text)) <= 15


def _is_national(text: str) -> bool:
    return 9 <= sum(map(str.isdigit, text)) <= 12


def _is_true(text: str) -> bool:
    return bool(text)


def _make_shape(kind: str, pattern: str, check: Check, after: str = "", unless: str = "") -> NumberShape:
    patterns = [
        re.compile(words_pattern, re.IGNORECASE) if words_pattern else None for words_pattern in (after, unless)
    ]
    return NumberShape(kind, re.compile(pattern + _END), check, *patterns)


_TELEPHONE = r"\b(?:phone|tel|telephone|fax|cell|mobile|call|dial|t[ée]l[ée]phone|telefon|tfno|handy|mob|ph)\b"
_VERSION = r"(?:version|release|\b(?:ver|rev)\.?|\bv)\s?$"

AT_DIGITS: tuple[NumberShape, ...] = (
    _make_shape(
        "card",
        r"[0-9]{4}[ -]?(?:[0-9]{4}[ -]?[0-9]{4}[ -]?[0-9]{1,7}|[0-9]{6}[ -]?[0-9]{4,5})",
        _ignore_separators(is_card),
    ),
    _make_shape("national_number", r"[0-9]{3}-[0-9]{2}-[0-9]{4}", _ignore_separators(is_us_ssn)),
    _make_shape("national_number", r"[0-9]{3} [0-9]{3} [0-9]{4}", _ignore_separators(is_uk_nhs)),
    _make_shape("national_number", r"[0-9]{3}-?[0-9]{3}-?[0-9]{4}", _ignore_separators(is_uk_nhs), r"\bNHS\b"),
    _make_shape("national_number", r"(?:[0-9]{8}|[XYZ][0-9]{7})-?[A-Z]", _ignore_separators(is_es_dni)),
    _make_shape(
        "national_number",
        r"[12] ?[0-9]{2} ?(?:0[1-9]|1[0-2]) ?[0-9]{2} ?[0-9]{3} ?[0-9]{3} ?[0-9]{2}",
        _ignore_separators(is_fr_nir),
    ),
    _make_shape("national_number", r"[0-9]{6}[-+A][0-9]{3}[0-9A-Y]", is_fi_hetu),
    _make_shape("national_number", r"(?:19|20)?[0-9]{6}[-+][0-9]{4}", lambda n: is_se_personnummer(_ten_digits(n))),
    _make_shape("national_number", r"[0-9]{9}", is_nl_bsn, r"\b(?:BSN|burgerservicenummer)\b"),
    _make_shape(
        "national_number",
        r"[0-9]{2} ?[0-9]{3} ?[0-9]{3} ?[0-9]{3}",
        _ignore_separators(is_de_tax_id),
        r"steuer|\bIdNr|\bTIN\b",
    ),
    _make_shape("national_number", r"[0-9]{11}", is_pl_pesel, r"\bPESEL\b"),
    _make_shape("ip", r"[0-9]{1,3}\.[0-9]{1,3}\.[0-9]{1,3}\.[0-9]{1,3}", _is_global_ipv4, unless=_VERSION),
    _make_shape("phone", r"\+[0-9][0-9 .()\-\u2013]{6,22}[0-9]", _is_international),
    _make_shape("phone", r"(?:1[ .-]?)?\([2-9][0-9]{2}\)[ .-]?[2-9][0-9]{2}[ .-][0-9]{4}", _is_true),
    _make_shape("phone", r"(?:1[.\u2013-])?[2-9][0-9]{2}(?P<dot>[.\u2013-])[2-9][0-9]{2}(?P=dot)[0-9]{4}", _is_true),
    _make_shape("phone", r"(?:1 )?[2-9][0-9]{2}[ -][2-9][0-9]{2}[ -][0-9]{4}", _is_true, _TELEPHONE),
    _make_shape("phone", r"\(?0[0-9][0-9 /.()\-\u2013]{6,16}[0-9]", _is_national, _TELEPHONE),
)
"""Shapes that begin with a digit, a plus sign, a bracket or the letter of a Spanish NIE; the first that fits counts."""


def _ten_digits(number: str) -> str:
    return re.sub(r"[-+]", "", number)[-10:]


def _iban_end(text: str) -> bool:
    return is_iban(text.replace(" ", ""))


@dataclass(frozen=True)
class IbanShape(NumberShape):
    """An IBAN: its country says how many characters it has, so what stands behind it is not swallowed."""

    def end_at(self, text: str, start: int) -> int:
        """Return where the account's number ends, or 0."""
        length = IBAN_LENGTH.get(text[start : start + 2], 0)
        stop = start
        for _ in range(length):
            # groups are parted by single spaces
            stop += 1 if text[stop : stop + 1] != " " else 2
        match = self.pattern.fullmatch(text, start, stop) if length else None
        border = text[stop : stop + 1]
        is_over = not (border.isascii() and border.isalnum())
        return stop if match and is_over and self.check(match[0]) else 0


AT_LETTERS: tuple[NumberShape, ...] = (
    IbanShape("iban", re.compile(r"[A-Z]{2}[0-9]{2}[A-Z0-9 ]{11,38}"), _iban_end),
    _make_shape(
        "national_number",
        r"[A-Z]{6}[0-9]{2}[A-EHLMPRST][0-9]{2}[A-Z][0-9]{3}[A-Z]",
        is_it_codice_fiscale,
    ),
)
"""Shapes that begin with capital letters."""
