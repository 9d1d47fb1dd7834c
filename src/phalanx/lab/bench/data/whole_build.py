"""A whole build under a clock: real pages to signed shards by every rule and scan, in one process."""

import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phalanx.data.build.recipe import DataRecipe
from phalanx.data.build.run import BuildOptions, build_recipe
from phalanx.lab.bench.data.documents import debian_pages

STEPS = (
    "unicode",
    "mojibake",
    "length",
    "language_mixing",
    "gopher_repetition",
    "gopher_quality",
    "c4",
    "fineweb",
    "pii",
    "secrets",
    "hidden_characters",
    "homoglyphs",
    "instructions_in_text",
    "exact_duplicates",
    "near_duplicates",
    "paragraph_duplicates",
    "repeated_substrings",
    "bursts",
    "surprisal",
)
"""All that need no list, evaluation set or recorded hash of a user's own, and are not for labelled texts."""


class PhaseClock:
    """A progress bar that keeps the processor time of each phase instead of showing it."""

    def __init__(self) -> None:
        self.cpu_s: dict[str, float] = {}
        self._phase, self._begun = "list", time.process_time()

    def begin_phase(self, phase: str, pieces: int, size_bytes: int) -> None:
        """End a phase, and begin the next one."""
        del pieces, size_bytes
        now = time.process_time()
        self.cpu_s[self._phase] = now - self._begun
        self._phase, self._begun = phase, now

    def finish_piece(self, size_bytes: int, left_out: dict[str, int]) -> None:
        """Pass over it."""


def measure_build(size_bytes: int, vocab_size: int = 4096, steps: Sequence[str] = STEPS) -> dict[str, Any] | None:
    """Build a dataset out of pages with so many bytes of text; None where there are not so many.

    Returns:
        `raw_mb` and `text_mb` that were read, `kept_mb` of text, `documents`, `tokens`, `cpu_s` with everything from
        the listing of files to the signature, by phase in `phases`, and megabytes of text and of raw bytes by it.
    """
    pages = debian_pages(size_bytes)
    if pages is None:
        return None
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        for page in pages:
            copy = home / "pages" / page.relative_to("/")
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(page, copy)
        recipe = DataRecipe.model_validate(
            {
                "sources": ({"kind": "html", "path": home / "pages", "name": "pages"},),
                "steps": tuple({"kind": kind} for kind in steps),
                "tokenizer": {"kind": "bpe", "vocab_size": vocab_size},
                "output": {"signer": home / "key"},
            }
        )
        clock, begun = PhaseClock(), time.process_time()
        outcome = build_recipe(recipe, home / "dataset", BuildOptions(progress=clock))
        clock.begin_phase("end", 0, 0)
        cpu_s = time.process_time() - begun
    source = outcome.report["sources"][0]
    text_mb, raw_mb = (source["read"][size] / 1e6 for size in ("text_bytes", "raw_bytes"))
    return {
        "steps": list(steps),
        "documents": source["read"]["documents"],
        "tokens": sum(group["tokens"] for group in outcome.report["groups"]),
        "raw_mb": raw_mb,
        "text_mb": text_mb,
        "kept_mb": source["kept"]["text_bytes"] / 1e6,
        "cpu_s": cpu_s,
        "phases": clock.cpu_s,
        "text_mb_per_s_core": text_mb / cpu_s,
        "raw_mb_per_s_core": raw_mb / cpu_s,
    }
