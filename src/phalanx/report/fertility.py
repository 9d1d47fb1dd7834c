"""A picture of how many tokens vocabularies need for the same texts."""

from collections.abc import Sequence
from pathlib import Path

from phalanx.report.bars import name_bars
from phalanx.report.shell import write_page
from phalanx.report.svg import PlotFrame, standalone_svg


def write_fertility_svg(rows: Sequence[tuple[str, float]], out: Path) -> Path:
    """Draw one bar for each vocabulary and group of texts."""
    bars = name_bars(rows, "{:.2f} tokens in 100 bytes".format, "Tokens in 100 bytes of text, by vocabulary")
    return write_page(out, standalone_svg(PlotFrame(height=16.0 + 28.0 * len(rows)), bars))
