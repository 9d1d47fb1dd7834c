"""How much of a page's own text do the two extractors give, and how much of what is around it?

``python -m phalanx.lab.bench.alone.extraction OUT.json``

24 pages of Debian's documentation packages, of three generators and eight languages: the nine, eight and seven of 5 to
60 kB with the smallest SHA-256 of their path below the package's folder (pages of an index left out). Which lines are
the text was marked while reading them: headings, notes, code and tables are; navigation, side bars, footers and tables
of contents are not. ``extraction_labels.json`` has these lines, counted in what `lines_of` makes of the page, and the
SHA-256 of each page, and no text. Compared are runs of four words, each as often as it is there.
"""

import hashlib
import json
import re
import statistics
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from phalanx.data.sources.extraction import Extractor, PageSettings, TextExtractor
from phalanx.lab.bench.measure.harness import run_program

LABELS = Path(__file__).with_name("extraction_labels.json")
EXTRACTORS: dict[str, tuple[Extractor, bool]] = {
    "resiliparse": ("resiliparse", True),
    "trafilatura": ("trafilatura", True),
    "resiliparse, whole page": ("resiliparse", False),
}
Scores = tuple[float, float, float]
RUN, KEYS = 4, ("f1", "precision", "recall")
BLOCKS = frozenset(
    "address article aside blockquote body br caption dd details div dl dt fieldset figcaption figure footer "  # noqa: SIM905
    "form h1 h2 h3 h4 h5 h6 header hr li main nav ol p pre section summary table tbody td tfoot th thead tr ul "
    "option title".split()
)
SILENT = ("script", "style", "template")


def measure() -> dict[str, Any]:
    """Compare all extractors; exits if the pages differ from the labelled ones."""
    pages = [(label, Path(label["page"]).read_bytes()) for label in json.loads(LABELS.read_text(encoding="utf-8"))]
    other = [label["page"] for label, content in pages if hashlib.sha256(content).hexdigest() != label["sha256"]]
    if other:
        sys.exit(f"{other[0]}: is another version than the one that was labelled; {len(other)} such pages")
    rows = [row for name, settings in EXTRACTORS.items() for row in rows_of(name, *settings, pages)]
    return {"pages": len(pages), "rows": rows}


def rows_of(name: str, kind: Extractor, main_content: bool, pages: list[Any]) -> list[dict[str, Any]]:
    """Return a row over all pages, and one for each package."""
    extractor = TextExtractor("html", PageSettings(extractor=kind, main_content=main_content))
    scores_of: dict[str, list[Scores]] = {}
    for label, content in pages:
        text = extractor.extract_text(content, None, label["page"])
        scores_of.setdefault(label["package"], []).append(score_text(text, labelled(content.decode(), label)))
    every = {"all": [score for scores in scores_of.values() for score in scores], **scores_of}
    return [summarize(name, package, scores) for package, scores in every.items()]


def summarize(name: str, package: str, scores: list[Scores]) -> dict[str, Any]:
    """Return the means over some pages, and the lowest F1 of one."""
    means = {key: statistics.mean(values) for key, values in zip(KEYS, zip(*scores, strict=True), strict=True)}
    lowest = min(score[0] for score in scores)
    return {"extractor": name, "package": package, "pages": len(scores), **means, "lowest_f1": lowest}


def score_text(text: str, expected: str) -> Scores:
    """Return F1, precision and recall of a text's runs of words."""
    actual, labelled = runs(text), runs(expected)
    num_common = sum((actual & labelled).values())
    precision, recall = num_common / max(1, actual.total()), num_common / max(1, labelled.total())
    return 2 * precision * recall / max(1e-9, precision + recall), precision, recall


def runs(text: str) -> Counter[tuple[str, ...]]:
    """Return all runs of words."""
    words = re.findall(r"\w+", text)
    return Counter(zip(*(words[at:] for at in range(RUN)), strict=False))


def labelled(page: str, label: dict[str, Any]) -> str:
    """Return the text that a person marked."""
    lines = lines_of(page)
    if len(lines) != label["lines"]:
        sys.exit(
            f"{label['page']}: has {len(lines)} lines, {label['lines']} were labelled; this Python parses otherwise"
        )
    return "\n".join(line for start, stop in label["main"] for line in lines[start:stop])


def lines_of(page: str) -> list[str]:
    """Return the lines of a page: what stands between two borders of blocks."""
    reader = _Lines()
    reader.feed(page)
    reader.close()
    return [text for parts in reader.lines if (text := " ".join("".join(parts).split()))]


class _Lines(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.lines: list[list[str]] = [[]]
        self._silent = 0

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self._silent += tag in SILENT
        self._border(tag)

    def handle_endtag(self, tag: str) -> None:
        self._silent = max(0, self._silent - (tag in SILENT))
        self._border(tag)

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self.lines[-1].append(data)

    def _border(self, tag: str) -> None:
        if tag in BLOCKS:
            self.lines.append([])


if __name__ == "__main__":
    run_program("extraction", measure)
