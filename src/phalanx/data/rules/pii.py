"""Personal data: addresses, numbers and names, found in one pass over a document's text.

Every pattern starts at a character that is searched for in C and goes on over a bounded number of characters without
two ways to read the same ones, so that the work is linear in the text whatever the text is.
"""

import ipaddress
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, model_validator

from phalanx.data.rules.page import Page
from phalanx.data.rules.pii_shapes import AT_DIGITS, AT_LETTERS, NumberShape
from phalanx.data.rules.rule import Drop, Edit, Outcome, RuleReason, RuleSettings, Tag

PiiAction = Literal["mask", "drop", "tag", "leave"]

_DIGITS = re.compile(r"[0-9+(XYZ](?<!\w.)(?<![0-9][-.].)(?=[0-9 ().\-/A]{6})")
_LETTERS = re.compile(r"[A-Z](?<!\w.)(?=[A-Z][0-9]{2}|[A-Z]{5}[0-9])")
_ANY_DIGITS, _ANY_LETTERS = (
    re.compile("|".join(f"(?:{shape.pattern.pattern})" for shape in shapes)) for shapes in (AT_DIGITS, AT_LETTERS)
)
_COLONS = re.compile(r":[0-9A-Fa-f]{0,4}:")
_LOCAL = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.!#$%&'*+/=?^_`{|}~-"
_LOCAL_CHARACTERS = 64
_DOMAIN = re.compile(
    r"(?=[^\s@]{4})[A-Za-z0-9][A-Za-z0-9-]{0,62}(?:\.[A-Za-z0-9][A-Za-z0-9-]{0,62}){1,8}(?![A-Za-z0-9])"
)
_HEX = "0123456789abcdefABCDEF:"
_ADDRESS_CHARACTERS = 45


class PiiConfig(RuleSettings):
    """Personal data; each kind is masked, tagged or left, or a document that has it is dropped.

    A mask is the kind in angle brackets: ``<email>``, ``<phone>``, ``<ip>``, ``<card>``, ``<iban>``,
    ``<national_number>``, ``<name>``. Names take a model, and none is carried here: let one run beforehand write the
    names that it found in a record, separated by semicolons, into the field that `names_field` says.
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
        names_value = page.fields.get(self._names_field) if self._names_field is not None else None
        names = {name.strip() for name in names_value.split(";")} if isinstance(names_value, str) else set()
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

    Guarantees:
        The earlier kind in this order has a place that two could have: e-mail, IPv6, letters and digits (IBAN, codice
        fiscale), digits (card, national number, IPv4, phone), names. Does not find addresses of houses, local phone
        numbers without an area code, numbers in words, nor e-mail addresses that are written around (``at``, ``dot``).
    """
    spans_of_text: list[Span] = []
    letters = _find_shapes(text, _LETTERS, _ANY_LETTERS, AT_LETTERS)
    digits = _find_shapes(text, _DIGITS, _ANY_DIGITS, AT_DIGITS)
    for spans in (_find_emails(text), _find_ipv6(text), letters, digits):
        spans_of_text = _merge_spans(spans_of_text, spans)
    return _merge_spans(spans_of_text, _find_names(text, names)) if names else spans_of_text


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
        local = before[len(before.rstrip(_LOCAL)) :].lstrip("!#$%&'*+/=?^`{|}~.-")
        domain = _DOMAIN.match(text, position + 1) if local and not local.endswith(".") else None
        if domain and _is_top_level(domain[0]):
            last = domain.end()
            yield Span(position - len(local), last, "email")
        position = text.find("@", position + 1)


def _is_top_level(domain: str) -> bool:
    top = domain.rpartition(".")[2]
    return (top.isalpha() or top.startswith("xn--")) and len(top) > 1


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
    before, after = text[start - 1 : start] if start else "", text[end : end + 1]
    return any(character.isalnum() or character == "_" for character in (before, after))


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
    pattern = re.compile("|".join(rf"(?<!\w){re.escape(name)}(?!\w)" for name in names))
    return (Span(match.start(), match.end(), "name") for match in pattern.finditer(text))
