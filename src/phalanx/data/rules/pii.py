"""Personal data: addresses, numbers and names, found in one pass over a document's text.

Every pattern starts at a character that is searched for in C and goes on over a bounded number of characters without
two ways to read the same ones, so that the work is linear in the text whatever the text is.
"""

import ipaddress
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, model_validator

from phalanx.data.rules.page import Page
from phalanx.data.rules.pii_shapes import AT_DIGITS, AT_LETTERS, NumberShape
from phalanx.data.rules.rule import Drop, Edit, Outcome, RuleReason, RuleSettings, Tag
from phalanx.data.rules.word_files import SPACELESS

PiiAction = Literal["mask", "drop", "tag", "leave"]

_BORDERLESS = f"{SPACELESS}\u1100-\u11ff\uac00-\ud7af"
"""Letters beside which a number or a name begins and ends without a space: Korean writes particles behind them."""
_JOINED = rf"[^\W{_BORDERLESS}]"
_DIGITS = re.compile(rf"[0-9+(XYZ](?<!{_JOINED}.)(?<![0-9][-.].)(?=[0-9 ().\-\u2013/A]{{6}})")
_LETTERS = re.compile(rf"[A-Z](?<!{_JOINED}.)(?=[A-Z][0-9]{{2}}|[A-Z]{{5}}[0-9])")
_ASCII_OF = {
    **dict.fromkeys("\u00a0\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B))), " "),
    **dict.fromkeys("\u2010\u2011\u2012\u2212", "-"),
    # digits of Arabic, Persian, Devanagari, Bengali and Thai
    **{chr(zero + digit): str(digit) for zero in (0x660, 0x6F0, 0x966, 0x9E6, 0xE50) for digit in range(10)},
    # full-width; a colon or comma of that width is punctuation
    **{chr(ord(sign) + 0xFEE0): sign for sign in string.ascii_letters + string.digits + "()+-./@_"},
}
"""Spaces, dashes, digits and letters that stand for one of ASCII in a number or an address."""
_VARIANTS = re.compile(f"[{''.join(_ASCII_OF)}]")
_ANY_DIGITS, _ANY_LETTERS = (
    re.compile("|".join(f"(?:{shape.pattern.pattern})" for shape in shapes)) for shapes in (AT_DIGITS, AT_LETTERS)
)
_COLONS = re.compile(r":[0-9A-Fa-f]{0,4}:")
_LETTER = "A-Za-z0-9\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u037d\u0386\u0388-\u0559\u0561-\u0587\u1e00-\u1fff"
"""Latin, Greek, Cyrillic and Armenian, with combining marks: a word of these ends where another script begins."""
_LOCAL = string.ascii_letters + string.digits + "!#$%&'*+/=?^_`{|}~.-"
_LOCAL_CHARACTERS = 64
_LOCAL_SIGN = rf"[{_LETTER}.!#$%&'*+/=?^_`{{|}}~-]"
_LAST_LOCAL = re.compile(rf"{_LOCAL_SIGN}*+\Z")
_DOMAIN = re.compile(
    rf"(?=[^\s@]{{4}})[{_LETTER}][{_LETTER}-]{{0,62}}(?:\.[{_LETTER}][{_LETTER}-]{{0,62}}){{1,8}}(?![{_LETTER}])"
)
_DOMAIN_CHARACTERS = 253
_OPEN_ADDRESS = re.compile(rf"(?:[^\s@]{{0,{_DOMAIN_CHARACTERS}}}@)?{_LOCAL_SIGN}{{0,{_LOCAL_CHARACTERS}}}")
"""From the end of a text backwards."""
_HEX = "0123456789abcdefABCDEF:"
_ADDRESS_CHARACTERS = 45


class PiiConfig(RuleSettings):
    """Personal data; each kind is masked, tagged or left, or a document that has it is dropped.

    A mask is the kind in angle brackets: ``<email>``, ``<phone>``, ``<ip>``, ``<card>``, ``<iban>``,
    ``<national_number>``, ``<name>``. Names take a model, and none is carried here: let one run beforehand write the
    names that it found in a record, separated by semicolons, into the field that `names_field` says. A document that
    no such text came with is dropped, for nobody has looked for its names.
    """

    kind: Literal["pii"] = "pii"
    email: PiiAction = "mask"
    phone: PiiAction = "mask"
    ip: PiiAction = "mask"
    card: PiiAction = "mask"
    iban: PiiAction = "mask"
    national_number: PiiAction = "mask"
    name: PiiAction = "leave"
    names_field: str | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _check_actions(self) -> Self:
        actions = set(self.actions_by_kind().values())
        if {"mask", "tag"} <= actions:
            raise ValueError("pii: a step either masks or tags; use two steps, the tagging step first")
        if actions == {"leave"}:
            raise ValueError("pii: no kind is masked or tagged; remove the step")
        if (self.name != "leave") != (self.names_field is not None):
            raise ValueError(
                "pii: Phalanx includes no model of names; for `name` set `names_field` to a field with the names "
                "of another model, separated by semicolons"
            )
        return self

    def actions_by_kind(self) -> dict[str, PiiAction]:
        """What becomes of each kind."""
        return {
            "email": self.email,
            "phone": self.phone,
            "ip": self.ip,
            "card": self.card,
            "iban": self.iban,
            "national_number": self.national_number,
            "name": self.name,
        }


@dataclass(frozen=True)
class Span:
    """A place in a text that holds personal data of one kind."""

    start: int
    end: int
    kind: str


class Pii:
    """Masks, tags or drops personal data; `find` defines it."""

    def __init__(self, config: PiiConfig) -> None:
        self._names_field = config.names_field
        self._actions = {kind: action for kind, action in config.actions_by_kind().items() if action != "leave"}

    def judge_page(self, page: Page) -> Outcome:
        """Drop at the first kind that drops; else mask all that is found, or tag with how often."""
        if self._names_field is not None and not isinstance(page.fields.get(self._names_field), str):
            return Drop(RuleReason("pii name", "no field", self._names_field))
        spans = [span for span in find_personal_data(page.text, self._page_names(page)) if span.kind in self._actions]
        if not spans:
            return None
        counts = Counter(span.kind for span in spans)
        for kind, action in self._actions.items():
            if action == "drop" and counts[kind]:
                return Drop(RuleReason(f"pii {kind}", counts[kind], 0))
        if "tag" in self._actions.values():
            return Tag({f"pii_{kind}": counts[kind] for kind in sorted(counts)})
        summary = ", ".join(f"{kind} {counts[kind]}" for kind in sorted(counts))
        return Edit(mask_spans(page.text, spans), len(spans), RuleReason("pii", summary))

    def _page_names(self, page: Page) -> list[str]:
        names_value = str(page.fields[self._names_field]) if self._names_field is not None else ""
        names = {name.strip() for name in names_value.split(";")}
        # the longest first: a surname alone must not cut a full name in two
        return sorted((name for name in names if name), key=lambda name: (-len(name), name))


def mask_spans(text: str, spans: list[Span]) -> str:
    """Return the text with each span as its kind in angle brackets."""
    parts, position = [], 0
    for span in spans:
        parts += [text[position : span.start], f"<{span.kind}>"]
        position = span.end
    return "".join((*parts, text[position:]))


def find_personal_data(text: str, names: list[str] | None = None) -> list[Span]:
    """Return all personal data of a text that this rule knows, in order and without overlaps.

    Digits, spaces and hyphens may be those of other scripts, and letters around a number those of a script without
    spaces.

    Guarantees:
        The earlier kind in this order has a place that two could have: e-mail, IPv6, letters and digits (IBAN, codice
        fiscale), digits (card, national number, IPv4, phone), names. Does not find addresses of houses, local phone
        numbers without an area code, numbers in words, nor e-mail addresses that are written around (``at``, ``dot``).
    """
    spans_of_text: list[Span] = []
    original, text = text, to_ascii_signs(text)
    letters = _find_shapes(text, _LETTERS, _ANY_LETTERS, AT_LETTERS)
    digits = _find_shapes(text, _DIGITS, _ANY_DIGITS, AT_DIGITS)
    for spans in (_find_emails(text), _find_ipv6(text), letters, digits):
        spans_of_text = _merge_spans(spans_of_text, spans)
    return _merge_spans(spans_of_text, _find_names(original, names)) if names else spans_of_text


def to_ascii_signs(text: str) -> str:
    """Return a text of the same length in which digits, spaces and hyphens of other scripts are those of ASCII."""
    return text if text.isascii() else _VARIANTS.sub(lambda match: _ASCII_OF[match[0]], text)


def open_address_start(text: str) -> int:
    """Return where an e-mail address begins that further text may complete; the length if there is none."""
    match = _OPEN_ADDRESS.match(to_ascii_signs(text)[::-1])
    return len(text) - (match.end() if match else 0)


def _merge_spans(kept: list[Span], spans: Iterator[Span]) -> list[Span]:
    """Add the spans that meet none of those kept; both are in order."""
    merged, index = [], 0
    for span in spans:
        while index < len(kept) and kept[index].end <= span.start:
            merged.append(kept[index])
            index += 1
        if index == len(kept) or span.end <= kept[index].start:
            merged.append(span)
    return merged + kept[index:]


def _find_emails(text: str) -> Iterator[Span]:
    position, last = text.find("@"), 0
    while position >= 0:
        before = text[max(position - _LOCAL_CHARACTERS, last) : position]
        # in C where it can be: a mail has many
        match = None if before.isascii() else _LAST_LOCAL.search(before)
        local = (match[0] if match else before[len(before.rstrip(_LOCAL)) :]).lstrip("!#$%&'*+/=?^`{|}~.-")
        size = _domain_size(text, position + 1) if local and not local.endswith(".") else 0
        if size:
            last = position + 1 + size
            yield Span(position - len(local), last, "email")
        position = text.find("@", position + 1)


def _domain_size(text: str, start: int) -> int:
    """Return how many characters the domain at a place has; 0 where there is none."""
    match = _DOMAIN.match(text, start)
    if match and _is_top_level(match[0]):
        return len(match[0])
    # of other scripts: what is written there without a border belongs to it
    possible = text[start : start + _DOMAIN_CHARACTERS]
    signs = (at for at, sign in enumerate(possible) if not (sign in ".-" or sign.isalnum() or _is_mark(sign)))
    domain = possible[: next(signs, len(possible))].rstrip(".-")
    return 0 if domain.isascii() or "." not in domain or not _is_top_level(domain) else len(domain)


def _is_top_level(domain: str) -> bool:
    top = domain.rpartition(".")[2]
    is_word = top.isalpha() or all(sign.isalpha() or _is_mark(sign) for sign in top)
    return (is_word or top.startswith("xn--")) and len(top) > 1


def _is_mark(character: str) -> bool:
    return unicodedata.category(character)[0] == "M"


def _find_ipv6(text: str) -> Iterator[Span]:
    last = 0
    for match in _COLONS.finditer(text):
        if match.start() < last:
            continue
        before = text[max(match.start() - _ADDRESS_CHARACTERS, last) : match.start()]
        start = match.start() - (len(before) - len(before.rstrip(_HEX)))
        after = text[match.start() : match.start() + _ADDRESS_CHARACTERS]
        stop = match.start() + len(after) - len(after.lstrip(_HEX))
        while stop > start and text[stop - 1] == ":" and text[stop - 2 : stop] != "::":
            stop -= 1
        last = stop
        if not _touches_word(text, start, stop) and _is_global_ipv6(text[start:stop]):
            yield Span(start, stop, "ip")


def _touches_word(text: str, start: int, end: int) -> bool:
    return any(re.match(_JOINED, text[at : at + 1]) for at in (start - 1, end) if at >= 0)


def _is_global_ipv6(text: str) -> bool:
    groups = [group for group in text.split(":") if group]
    # `cafe::face` is an address as well, and much more often a name in a program
    if len(groups) < 2 or (len(groups) < 3 and len(groups[0]) < 4) or not any(map(str.isdigit, text)):
        return False
    try:
        return ipaddress.IPv6Address(text).is_global
    except ValueError:
        return False


def _find_shapes(
    text: str, starts: re.Pattern[str], any_shape: re.Pattern[str], shapes: tuple[NumberShape, ...]
) -> Iterator[Span]:
    last = 0
    for start in starts.finditer(text):
        position = start.start()
        # one match in C sees whether it is worth asking the shapes one by one
        if position < last or not any_shape.match(text, position):
            continue
        for shape in shapes:
            stop = shape.end_at(text, position)
            if stop:
                last = stop
                yield Span(position, stop, shape.kind)
                break


def _find_names(text: str, names: list[str]) -> Iterator[Span]:
    forms = dict.fromkeys(unicodedata.normalize(form, name) for name in names for form in ("NFC", "NFD"))
    pattern = re.compile("|".join(map(_name_pattern, forms)))
    return (Span(match.start(), match.end(), "name") for match in pattern.finditer(text))


def _name_pattern(name: str) -> str:
    """Return a pattern of a name as a word by itself, with any white space between its parts."""
    spaced = r"\s+".join(map(re.escape, name.split()))
    before = "" if re.match(f"[{_BORDERLESS}]", name[0]) else f"(?<!{_JOINED})"
    after = "" if re.match(f"[{_BORDERLESS}]", name[-1]) else rf"(?!{_JOINED}|[\u0300-\u036f])"
    return f"{before}{spaced}{after}"
