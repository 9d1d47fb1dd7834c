"""How a scan tells what it found: the place, an excerpt that is safe to print, and what becomes of the document."""

import re
from typing import Literal

from phalanx.data.rules.rule import Drop, Outcome, Quarantine, RuleReason, RuleSettings, Tag

_AROUND = 24
_MOST = 96
_UNSEEN = re.compile(r"[\u00ad\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0]")
"""Characters that Python calls printable or alphanumeric, and that no font shows."""


class ScanSettings(RuleSettings):
    """The keys that every scan has: a finding sets the document aside unless a recipe says otherwise."""

    outcome: Literal["quarantine", "drop", "tag"] = "quarantine"


def place(text: str, start: int, end: int) -> str:
    """Say where a finding is, with the text around it: ``at character 120: "..."``, at most some hundred characters."""
    first, last = max(start - _AROUND, 0), min(end, start + _MOST) + _AROUND
    shown = escaped(text[first:last])
    return f'at character {start}: "{"..." if first else ""}{shown}{"..." if last < len(text) else ""}"'


def escaped(text: str) -> str:
    """Return the text with the code point in place of each character that is not plainly visible."""
    return "".join(one if _is_visible(one) else f"\\u{{{ord(one):x}}}" for one in text)


def _is_visible(one: str) -> bool:
    return one.isprintable() and not _UNSEEN.match(one)


def outcome_of(config: ScanSettings, measure: str, value: float | str, limit: float | str = "") -> Outcome:
    """Return what the settings say of a document with a finding."""
    reason = RuleReason(measure, value, limit)
    if config.outcome == "drop":
        return Drop(reason)
    if config.outcome == "tag":
        return Tag({f"scan_{config.kind}": f"{measure}: {value}"})
    return Quarantine(reason)
