"""Characters that no person sees and every model reads: zero-width, bidirectional, tag and variation characters."""

import re
from collections.abc import Callable, Iterator
from typing import Literal

from pydantic import Field

from phalanx.data.rules.page import Page
from phalanx.data.rules.rule import Outcome
from phalanx.data.scan.word_stream import ScanSettings, describe_place, escape_invisible, outcome_of

_ZERO_WIDTH = "\u034f\u115f\u1160\u17b4\u17b5\u180e\u200b-\u200d\u2060-\u2064\u2065\u206a-\u206f\u3164\ufeff\uffa0"
_BIDI = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
_VARIATION = "\ufe00-\ufe0f\U000e0100-\U000e01ef"
_TAGS = "\U000e0000-\U000e007f"

_RUNS = re.compile(f"[{_ZERO_WIDTH}]+|[{_BIDI}]+|[{_VARIATION}]+|[{_TAGS}]+|[\ufff9-\ufffb]+|\u00ad(?=.\u00ad)")
_ANY = re.compile(f"[\u00ad{_ZERO_WIDTH}{_BIDI}{_VARIATION}{_TAGS}\ufff9-\ufffb]")
_RIGHT_TO_LEFT = re.compile("[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc\U00010800-\U00010fff\U0001e800-\U0001efff]")
_JOINED_SCRIPTS = re.compile(
    "[\u0600-\u06ff\u0700-\u08ff\u0900-\u0dff\u1000-\u109f\u1780-\u17ff\u1800-\u18af\ua840-\ua87f\ufb50-\ufefc]"
)
_UNSPACED_SCRIPTS = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u9fff\uac00-\ud7af\uff00-\uffef\U00020000-\U0003ffff]"
)
_HANGUL = re.compile("[\u1100-\u11ff\u3130-\u318f\uac00-\ud7af\uffa1-\uffdc]")
_EMOJI = re.compile("[#*0-9\u00a9\u00ae\u200d\u203c-\u3299\ufe0f\U0001f000-\U0001faff]")
_IDEOGRAPH = re.compile("[\u2e80-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
_STANDARD_BASE = re.compile(
    "[0-9\u2000-\u2bff\u1000-\u109f\u1800-\u18af\ua840-\ua87f\u2e80-\u9fff\uf900-\ufaff\uff00-\uffef]"
)
_FLAG = re.compile("\U0001f3f4[\U000e0030-\U000e0039\U000e0061-\U000e007a]{3,6}\U000e007f")

_BIDI_MARKS = "\u061c\u200e\u200f"
_OPEN, _CLOSE = "\u202a\u202b\u202d\u202e", "\u202c"
_ISOLATES, _CLOSE_ISOLATE, _FIRST_STRONG = "\u2066\u2067\u2068", "\u2069", "\u2068"
_OVERRIDES = "\u202d\u202e"
_CONTROL_OR_LINE_END = re.compile("[\u202a-\u202e\u2066-\u2069\n\u2029]")
_MAX_DEPTH = 125
"""Of embeddings in each other (UAX 9)."""
_TOLD_CHARACTERS = 160
_DATA_RUN = 4
"""So many zero-width characters in a row are no line-break hint any more; they spell bits."""


class HiddenCharactersConfig(ScanSettings):
    """Characters that no person sees, outside of the uses that writing has for them.

    Allowed are joiners of emoji and of Persian and Indic scripts, marks of right-to-left text, flags, glyph variants
    and break hints in scripts without spaces.

    Attributes:
        max_zero_width: Lone zero-width characters that a document may have; pages have strays by mistake.
    """

    kind: Literal["hidden_characters"] = "hidden_characters"
    max_zero_width: int = Field(default=8, ge=0, alias="most_zero_width")


class HiddenCharacters:
    """Sets aside documents with text that only a model would read.

    Guarantees:
        Finds every tag character outside of a flag, every variation selector that selects nothing, every override of
        direction, unbalanced embeddings, and more lone zero-width characters than are allowed. Does not find text
        hidden by layout (white on white, size zero), by spaces at line ends, or by the choice of visible synonyms.
    """

    def __init__(self, config: HiddenCharactersConfig) -> None:
        self._config = config

    def judge_page(self, page: Page) -> Outcome:
        """Name the kind of the first finding, its place, and its hidden text where that can be decoded."""
        text = page.text
        lone, first_lone = 0, 0
        for measure, start, end in find_hidden(text):
            if measure != "zero_width":
                return self._report_finding(measure, text, start, end)
            lone, first_lone = lone + 1, first_lone or start
        if lone > self._config.max_zero_width:
            location = describe_place(text, first_lone, first_lone + 1)
            return outcome_of(self._config, "zero_width", f"{lone}; first {location}", self._config.max_zero_width)
        return None

    def _report_finding(self, measure: str, text: str, start: int, end: int) -> Outcome:
        spelled = _decode_hidden(text[start : min(end, start + _TOLD_CHARACTERS)])
        spelling = f'; spells "{escape_invisible(spelled)}"' if spelled else ""
        return outcome_of(self._config, measure, f"{end - start} {describe_place(text, start, end)}{spelling}", 0)


def find_hidden(text: str, *, balance: bool = True) -> Iterator[tuple[str, int, int]]:
    """Yield measure, start and end of each run of characters that writing has no use for there.

    Args:
        text: A whole text, or a piece of one.
        balance: Compare the beginnings and ends of embeddings as well, which takes whole lines; the first fault comes
            behind all runs.
    """
    if text.isascii() or not _ANY.search(text):
        return
    for match in _RUNS.finditer(text):
        measure = _choose_judge(match[0][0])(text, match.start(), match.end())
        if measure:
            yield measure, match.start(), match.end()
    control = _find_useless_control(text) if balance else None
    if control is not None:
        yield "bidirectional", control, control + 1


def _judge_zero_width(text: str, start: int, end: int) -> str:
    before, after = text[start - 1 : start], text[end : end + 1]
    if end - start >= _DATA_RUN:
        return "zero_width_run"
    if text[start:end] == "\ufeff" and start == 0:
        return ""
    if text[start] in "\u200c\u200d":
        neighbours = before + after
        joined = _JOINED_SCRIPTS.search(neighbours) or (len(neighbours) == 2 and all(map(_EMOJI.match, neighbours)))
        return "" if joined else "zero_width"
    if text[start] in "\u115f\u1160\u3164\uffa0":
        return "" if _HANGUL.search(before + after) else "zero_width"
    return "" if _UNSPACED_SCRIPTS.search(before + after) else "zero_width"


def _judge_bidirectional(text: str, start: int, end: int) -> str:
    run = text[start:end]
    if any(character in _OVERRIDES for character in run):
        return "bidirectional_override"
    if end - start >= 2 * _DATA_RUN:
        return "bidirectional_run"
    around = text[start - 1 : start] + text[end : end + 1]
    return "zero_width" if len(around) == 2 and around.isascii() and around.isalpha() else ""


def _judge_variation(text: str, start: int, end: int) -> str:
    before, selector = text[start - 1 : start] if start else "", text[start]
    if end - start > 1:
        return "variation_run"
    if selector >= "\U000e0100":
        return "" if _IDEOGRAPH.match(before) else "variation"
    base = _EMOJI if selector >= "\ufe0e" else _STANDARD_BASE
    return "" if base.match(before) else "variation"


def _judge_tags(text: str, start: int, end: int) -> str:
    flag = _FLAG.match(text, start - 1) if start else None
    return "" if flag and flag.end() == end else "tag_characters"


def _judge_annotation(text: str, start: int, end: int) -> str:
    del text, start, end
    return "annotation"


def _judge_soft_hyphen(text: str, start: int, end: int) -> str:
    """A hyphen behind each letter cuts a word into pieces that no filter of words puts together again."""
    del text, start, end
    return "zero_width"


def _choose_judge(first: str) -> Callable[[str, int, int], str]:
    if "\U000e0000" <= first <= "\U000e007f":
        return _judge_tags
    if "\ufe00" <= first <= "\ufe0f" or first >= "\U000e0100":
        return _judge_variation
    if first in _BIDI_MARKS or first in _OPEN + _CLOSE + _ISOLATES + _CLOSE_ISOLATE:
        return _judge_bidirectional
    if first == "\u00ad":
        return _judge_soft_hyphen
    return _judge_annotation if "\ufff9" <= first <= "\ufffb" else _judge_zero_width


def _find_useless_control(text: str) -> int | None:
    """Return the place of a control of direction without a use.

    Its partner is missing in its line, or the text has no letter that is written from right to left.
    """
    foreign = not _RIGHT_TO_LEFT.search(text)
    pending: list[tuple[str, int]] = []
    for match in _CONTROL_OR_LINE_END.finditer(text):
        character, position = match[0], match.start()
        if character in _OPEN + _ISOLATES:
            # an isolate of the first strong direction is put around inserted names in any language
            if (foreign and character != _FIRST_STRONG) or len(pending) == _MAX_DEPTH:
                return position
            pending.append((character, position))
        elif character in _CLOSE + _CLOSE_ISOLATE:
            if not pending or (pending.pop()[0] in _ISOLATES) != (character == _CLOSE_ISOLATE):
                return position
        elif pending:
            return pending[-1][1]
    return pending[-1][1] if pending else None


def _decode_hidden(run: str) -> str:
    """Return the text that tag characters or variation selectors stand for; empty for others."""
    if "\U000e0000" <= run[0] <= "\U000e007f":
        return "".join(chr(ord(character) - 0xE0000) for character in run)
    if "\ufe00" <= run[0] <= "\ufe0f" or run[0] >= "\U000e0100":
        values = bytes(
            ord(character) - 0xFE00 if character <= "\ufe0f" else ord(character) - 0xE0100 + 16 for character in run
        )
        return values.decode("utf-8", "replace")
    return ""
