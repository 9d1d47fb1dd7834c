"""Lines that are no sentences are cut out, and what then is no text is dropped: C4's rule."""

import re
from typing import Literal

from pydantic import Field

from phalanx.data.rules.page import Page
from phalanx.data.rules.rule import Drop, Edit, Outcome, RuleReason, RuleSettings
from phalanx.data.rules.term_table import TermTable

_CITATION = re.compile(r"\[(?:\d*|edit|citation needed)\]")
_ENDS = (".", "?", "!", '"', "'")
_POLICIES = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")


class C4Config(RuleSettings):
    """Which lines stay, and how many sentences must be in them."""

    kind: Literal["c4"] = "c4"
    min_sentences: int = Field(default=5, ge=0, alias="least_sentences")
    min_line_words: int = Field(default=3, ge=0, alias="least_line_words")
    max_word_length: int = Field(default=1000, ge=1, alias="longest_word")
    remove_citations: bool = True
    drop_braces: bool = True


class C4:
    """Keeps lines that end like a sentence; drops a document with a brace, lorem ipsum or too few sentences in these.

    Cut out are lines without a mark at their end, with few words or a word of enormous length, and lines about
    JavaScript or cookies; of the rest ``[1]``, ``[edit]`` and ``[citation needed]``.

    Source: Raffel et al. 2020, section 2.2; the lines about policies and citations are in its code only.
    """

    def __init__(self, config: C4Config) -> None:
        self._config = config

    def judge_page(self, page: Page) -> Outcome:
        """Cut lines, or drop the document."""
        lines: list[str] = []
        signs = _signs_in(page.text)
        for raw_line in page.lines:
            sentence = self._sentence_line(raw_line.strip())
            if sentence is None:
                continue
            if signs:
                lower = sentence.lower()
                if "lorem ipsum" in lower:
                    return Drop(RuleReason("lorem_ipsum", 1, 0))
                if "javascript" in lower:
                    continue
                if self._config.drop_braces and "{" in sentence:
                    return Drop(RuleReason("braces", sentence.count("{"), 0))
                if any(policy in lower for policy in _POLICIES):
                    continue
            lines.append(sentence)
        sentences = self._count_sentences(lines, page.term_table)
        if sentences < self._config.min_sentences:
            return Drop(RuleReason("sentences", sentences, self._config.min_sentences))
        text = "\n".join(lines).strip()
        if text == page.text:
            return None
        cut = len(page.lines) - len(lines)
        return Edit(text, max(1, cut), RuleReason("lines_cut", cut))

    def _sentence_line(self, line: str) -> str | None:
        """Return a line that may stay, without citations; None for one that may not."""
        if not line:
            return None
        config, plain = self._config, line
        if config.remove_citations and "[" in line:
            plain = _CITATION.sub("", line)
        if not plain.endswith(_ENDS) or plain.endswith("..."):
            return None
        first_words = line.split(None, config.min_line_words)
        if len(first_words) < config.min_line_words:
            return None
        # words are looked at one by one only where one of them can be that long
        if len(line) > config.max_word_length and any(len(word) > config.max_word_length for word in line.split()):
            return None
        return plain

    def _count_sentences(self, lines: list[str], table: TermTable) -> int:
        """Count sentences until there are enough."""
        num_sentences = 0
        for row in lines:
            if num_sentences >= self._config.min_sentences:
                break
            kinds = table.look_up_kinds(table.number_terms(row.split())).tobytes()
            # one more wherever a word stands behind an end, with nothing but ends and further marks between
            num_sentences += 1 + kinds.translate(None, b"P").count(b"EW")
        return num_sentences


def _signs_in(text: str) -> bool:
    """Whether any line can hold a word that lines are cut for; cutting citations may join such a word."""
    lower = text.lower()
    return (
        "{" in text
        or "lorem ipsum" in lower
        or "javascript" in lower
        or any(policy in lower for policy in _POLICIES)
        or bool(_CITATION.search(text))
    )
