"""Scans for poison and hidden text; to add one: one file with its config, one line of the table."""

import functools
import operator
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Discriminator, Tag

from phalanx.data.rules import Rule, RuleLine
from phalanx.data.scan.bursts import Bursts, BurstsConfig
from phalanx.data.scan.hidden_characters import HiddenCharacters, HiddenCharactersConfig
from phalanx.data.scan.homoglyphs import Homoglyphs, HomoglyphsConfig
from phalanx.data.scan.instructions_in_text import InstructionsInText, InstructionsInTextConfig
from phalanx.data.scan.label_flips import LabelFlips, LabelFlipsConfig
from phalanx.data.scan.split_view import SplitView, SplitViewConfig
from phalanx.data.scan.surprisal import Surprisal, SurprisalConfig
from phalanx.data.scan.word_stream import ScanSettings

SCANS: dict[str, RuleLine] = {
    "bursts": RuleLine(BurstsConfig, Bursts, "Broder 1997"),
    "hidden_characters": RuleLine(HiddenCharactersConfig, HiddenCharacters, "Unicode UAX 9, UTS 51; CVE-2021-42574"),
    "homoglyphs": RuleLine(HomoglyphsConfig, Homoglyphs, "Unicode UTS 39"),
    "instructions_in_text": RuleLine(InstructionsInTextConfig, InstructionsInText, "Greshake et al. 2023"),
    "label_flips": RuleLine(LabelFlipsConfig, LabelFlips, "Dai et al. 2019; Wan et al. 2023"),
    "split_view": RuleLine(SplitViewConfig, SplitView, "Carlini et al. 2023"),
    "surprisal": RuleLine(SurprisalConfig, Surprisal, "Souly et al. 2025, the attack"),
}
"""Scans by name: a recipe lists them as steps, between or behind its rules."""


def _kind(value: Any) -> Any:
    return value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)


if TYPE_CHECKING:
    ScanConfig = ScanSettings
else:
    # at run time the table alone says which there are
    ScanConfig = Annotated[
        functools.reduce(operator.or_, [Annotated[line.config, Tag(name)] for name, line in SCANS.items()]),
        Discriminator(_kind),
    ]


def make_scan(config: ScanConfig) -> Rule:
    """Build a scan from what a recipe says of it.

    Raises:
        DataError: An extra that it needs is missing, or a file that it names.
    """
    return SCANS[config.kind].make(config)


__all__ = ["SCANS", "ScanConfig", "ScanSettings", "make_scan"]
