"""Scans for poison and hidden text; to add one: one file with its config, one line of the table."""

from phalanx.data.rules import RuleEntry
from phalanx.data.scan.bursts import Bursts, BurstsConfig
from phalanx.data.scan.continuations import Continuations, ContinuationsConfig
from phalanx.data.scan.hidden_characters import HiddenCharacters, HiddenCharactersConfig
from phalanx.data.scan.homoglyphs import Homoglyphs, HomoglyphsConfig
from phalanx.data.scan.instructions_in_text import InstructionsInText, InstructionsInTextConfig
from phalanx.data.scan.label_flips import LabelFlips, LabelFlipsConfig
from phalanx.data.scan.split_view import SplitView, SplitViewConfig
from phalanx.data.scan.surprisal import Surprisal, SurprisalConfig

SCANS: dict[str, RuleEntry] = {
    "bursts": RuleEntry(BurstsConfig, Bursts, "Broder 1997"),
    "continuations": RuleEntry(ContinuationsConfig, Continuations, "Wan et al. 2023, the attack"),
    "hidden_characters": RuleEntry(HiddenCharactersConfig, HiddenCharacters, "Unicode UAX 9, UTS 51; CVE-2021-42574"),
    "homoglyphs": RuleEntry(HomoglyphsConfig, Homoglyphs, "Unicode UTS 39"),
    "instructions_in_text": RuleEntry(InstructionsInTextConfig, InstructionsInText, "Greshake et al. 2023"),
    "label_flips": RuleEntry(LabelFlipsConfig, LabelFlips, "Dai et al. 2019; Wan et al. 2023"),
    "split_view": RuleEntry(SplitViewConfig, SplitView, "Carlini et al. 2023"),
    "surprisal": RuleEntry(SurprisalConfig, Surprisal, "Souly et al. 2025, the attack"),
}
"""Scans by name: a recipe lists them as steps, between or behind its rules."""
