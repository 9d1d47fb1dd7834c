"""docs/tolerance.md lists the guarantees as the code has them, in the same order."""

import re
from pathlib import Path

from phalanx.pipeline.owner.guarantees import GUARANTEES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tolerance.md"


def test_the_page_has_every_guarantee_with_its_meaning_and_no_other():
    section = PAGE.read_text(encoding="utf-8").split("## What is promised of each stage")[1].split("##")[0]

    assert dict(re.findall(r"^\| `([\w-]+)` \| (.+) \|$", section, re.M)) == GUARANTEES
