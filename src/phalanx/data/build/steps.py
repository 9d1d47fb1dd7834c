"""The steps that a recipe may name: every rule and every scan."""

from phalanx.data.rules import RULES, RuleLine

STEPS: dict[str, RuleLine] = {**RULES}
