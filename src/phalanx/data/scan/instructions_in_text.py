"""Text in a document that speaks to a model: phrases and commands that a reader of the page has no use for."""

import itertools
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from phalanx.data.rules.page import Page
from phalanx.data.rules.rule import Outcome
from phalanx.data.rules.word_files import fold_case, search_all
from phalanx.data.scan.word_stream import ScanSettings, describe_place, outcome_of

_WINDOW = 160
_MAX_HITS = 10_000


@dataclass(frozen=True)
class Instruction:
    """One way to speak to a model.

    Attributes:
        anchors: Words with which it begins, in lower case; all are searched for at once.
        pattern: Read from an anchor, over at most a window; None where the anchor says all.
        weight: A document is set aside at the recipe's `min_weight`.
    """

    anchors: tuple[str, ...]
    pattern: re.Pattern[str] | None = None
    weight: int = 2


_WINDOWS_END = re.compile("\r\n")
_BLANKS = "\r\n\t\u00a0\u2028"
_GAP = r"[\s,;:\"'-]{1,4}"
_FORMER = (
    r"(?:(?:all|any|the|your|of|my|these|those|every|and)\s{1,4}){0,4}"
    r"(?:previous|prior|above|earlier|preceding|former|foregoing)\s{1,4}"
)
_TALK = r"(?:instructions?|prompts?|messages?|directions?|directives?|rules|guidelines|commands?|constraints)\b"
_MODEL = r"(?:ai|a\.i\.|llm|llms|language\s{1,2}models?|chatbots?|chat\s{0,2}gpt|gpt|claude|gemini|copilot|bard)"

INSTRUCTIONS: tuple[Instruction, ...] = (
    Instruction(
        ("ignore ", "disregard ", "forget ", "override ", "bypass ", "discard "),
        re.compile(rf"\w{{6,9}}\s{{1,4}}(?:{_FORMER}(?:\w{{1,20}}\s{{1,4}}){{0,2}}{_TALK}|(?:your|the) system prompt)"),
    ),
    Instruction(("<|im_start|>", "<|im_end|>", "<|system|>", "<<sys>>", "<|begin_of_text|>", "<|start_header_id|>")),
    Instruction(
        (
            "attention ",
            "attention,",
            "attention:",
            "note to ",
            "dear ",
            "hey ",
            "hello ",
            "message for ",
            "instructions for ",
        ),
        re.compile(rf"\w{{3,12}}(?: (?:to|for))?{_GAP}(?:all\s|any\s|the\s)?{_MODEL}\b"),
        1,
    ),
    Instruction(
        ("if you are ", "if you're ", "as an ", "you are "),
        re.compile(rf"(?:if you(?: are|'re)|as|you are) (?:an?|the|now an?) (?:[a-z]{{1,12}} ){{0,2}}{_MODEL}\b"),
        1,
    ),
    Instruction(
        ("do not ", "don't ", "never ", "without "),
        re.compile(
            r"(?:do not|don't|never|without) (?:tell|telling|inform|informing|alert|alerting|mention this to|"
            r"reveal this to) the (?:user|human|reader)\b"
        ),
    ),
    Instruction(
        ("reveal ", "print ", "repeat ", "output ", "leak ", "show "),
        re.compile(
            r"\w{4,6} (?:me )?(?:your|the) (?:(?:full|entire|hidden|initial|original|secret) ){0,2}(?:system )?prompt\b"
        ),
    ),
    Instruction(
        ("when asked ", "when summariz", "when summaris", "when you summariz", "when answering "),
        re.compile(
            r"when [a-z ]{5,40}[,:] (?:you must|always|only|please)?\s?"
            r"(?:say|answer|reply|respond|recommend|state|include|output)\b"
        ),
        1,
    ),
    Instruction(
        ("new instructions:", "new system prompt", "begin system prompt", "end of system prompt", "jailbreak"), None, 1
    ),
)
"""Ways to speak to a model; to add one: one entry."""


class InstructionsInTextConfig(ScanSettings):
    """Instruction-like text aimed at models; English.

    Attributes:
        min_weight: Weight from which a document is set aside; a plain order counts 2, an address to a model 1.
    """

    kind: Literal["instructions_in_text"] = "instructions_in_text"
    min_weight: int = Field(default=2, ge=1, alias="least")


class InstructionsInText:
    """Sets aside pages that speak to models.

    Guarantees:
        Finds orders in the forms of `INSTRUCTIONS`, across line ends and in any case. Does not find other wordings,
        other languages, orders spelled with look-alike or hidden letters (scans of their own), or in pictures; and
        pages *about* such attacks are set aside as well, because they quote them.
    """

    def __init__(self, config: InstructionsInTextConfig) -> None:
        self._config = config
        anchors = [(anchor, instruction) for instruction in INSTRUCTIONS for anchor in instruction.anchors]
        self._kinds = [instruction for _, instruction in anchors]
        self._hits = search_all([anchor for anchor, _ in anchors], "instructions_in_text")

    def judge_page(self, page: Page) -> Outcome:
        """Tell the weight that was found, and the place of the first order."""
        weight, first = 0, None
        for kind, start, end in self.find(page.text):
            weight += kind.weight
            # the strongest one is the one to show
            if first is None or kind.weight > first[2]:
                first = (start, end, kind.weight)
        if first is None or weight < self._config.min_weight:
            return None
        location = describe_place(page.text, first[0], first[1])
        return outcome_of(self._config, "instructions", f"weight {weight} {location}", self._config.min_weight)

    def find(self, text: str) -> Iterator[tuple[Instruction, int, int]]:
        """Yield each order with its start and end, in order and without overlaps."""
        # where a line end of two characters is one below
        borders = [match.start() - number for number, match in enumerate(_WINDOWS_END.finditer(text))]
        low, last = fold_case(text).replace("\r\n", " "), 0
        for blank in _BLANKS:
            low = low.replace(blank, " ")
        for which, start, stop in itertools.islice(self._hits(low), _MAX_HITS):
            kind = self._kinds[which]
            if start < last:
                continue
            match = kind.pattern.match(low, start, start + _WINDOW) if kind.pattern else None
            if kind.pattern and not match:
                continue
            last = match.end() if match else stop
            yield kind, start + bisect_right(borders, start), last + bisect_right(borders, last - 1)
