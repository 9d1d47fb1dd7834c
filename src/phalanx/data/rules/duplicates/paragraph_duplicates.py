"""Paragraphs or lines that stand in an earlier document, or earlier in the same one."""

import hashlib
import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from phalanx.data.rules.page import Page
from phalanx.data.rules.rule import Drop, Edit, Outcome, RuleReason, RuleSettings, Texts

_SEPARATORS = {"paragraph": re.compile(r"(\n{2,}|\r\n(?:\r\n)+)"), "line": re.compile(r"(\n)")}
_DIGEST = 16
"""Bytes: two paragraphs with one digest cannot be made, so no text can remove another that differs."""


class ParagraphDuplicatesConfig(RuleSettings):
    """What counts as a part, and how long it must be to be looked for elsewhere."""

    kind: Literal["paragraph_duplicates"] = "paragraph_duplicates"
    unit: Literal["paragraph", "line"] = "paragraph"
    min_characters: int = Field(default=100, ge=1, alias="least_characters")


class ParagraphDuplicates:
    """Cuts paragraphs that stood before, in the order of sources; the first occurrence in the build stays.

    White space around a paragraph does not count. A document of nothing else is dropped. A mark is 16 bytes a paragraph
    that is long enough, and the decision keeps all of them in memory, twice.

    Source: Wenzek et al. 2020 (CCNet), section 3.1, there with single lines.
    """

    def __init__(self, config: ParagraphDuplicatesConfig) -> None:
        self._config = config

    def mark_page(self, page: Page) -> bytes:
        """The digest of every long paragraph."""
        return b"".join(
            hashlib.blake2b(part.encode("utf-8", "surrogatepass"), digest_size=_DIGEST).digest()
            for part in map(str.strip, self._split_parts(page.text)[::2])
            if len(part) >= self._config.min_characters
        )

    def decide_outcomes(self, marks: Iterable[bytes], texts: Texts) -> Iterator[tuple[int, Outcome]]:
        """Cut the later occurrences out of each document that has any."""
        sizes = [0]
        digests = bytearray()
        for mark in marks:
            digests += mark
            sizes.append(len(digests) // _DIGEST)
        is_later = _repeated_digests(digests)
        for number, (begin, stop) in enumerate(pairwise(sizes)):
            if is_later[begin:stop].any():
                yield number, self._drop_repeated(texts.read_page(number).text, is_later[begin:stop].tolist())

    def _split_parts(self, text: str) -> list[str]:
        """Split into parts and the line feeds between them, by turns."""
        return _SEPARATORS[self._config.unit].split(text)

    def _drop_repeated(self, text: str, is_later: list[bool]) -> Outcome:
        """Leave out the parts that stood before, each with the line feeds behind it."""
        pieces = self._split_parts(text)
        remaining: list[str] = []
        cut, verdicts = 0, iter(is_later)
        for position in range(0, len(pieces), 2):
            is_long = len(pieces[position].strip()) >= self._config.min_characters
            if is_long and next(verdicts):
                cut += 1
            else:
                remaining += pieces[position : position + 2]
        edited = "".join(remaining)
        if not edited.strip():
            return Drop(RuleReason(f"repeated_{self._config.unit}s", cut))
        return Edit(edited, cut, RuleReason(f"repeated_{self._config.unit}s", cut))


def _repeated_digests(digests: bytearray) -> NDArray[np.bool_]:
    """Tell of each digest whether it stood before."""
    halves = np.frombuffer(digests, np.uint64).reshape(-1, 2)
    order = np.lexsort((halves[:, 1], halves[:, 0]))
    is_later = np.zeros(len(halves), bool)
    inorder = halves[order]
    is_later[order[1:]] = (inorder[1:] == inorder[:-1]).all(axis=1)
    return is_later
