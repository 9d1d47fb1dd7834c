"""The steps that a recipe may name: every rule and every scan."""

from phalanx.data.rules import RULES, RuleLine
from phalanx.data.scan import SCANS

STEPS: dict[str, RuleLine] = {**RULES, **SCANS}
