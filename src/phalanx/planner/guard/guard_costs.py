"""What a guard's parts cost and find, as `benchmarks/results/` has it."""

import json
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True)
class GuardCosts:
    """Measured shares; a test compares each with the raw results that are named.

    Attributes:
        audited_share: Work on an audited microbatch, as a share of all work on one.
        screened_share: The same where its weight gradient screens the claimed sum.
        fixed_share: Signatures, digests, commitments and upkeep, as a share of the unguarded run.
        doubted_honest: Honest weight gradients that the screen doubts, the most of any measured model.
        found_gross: Gross lies about a weight gradient that it doubts, the least of any measured model and lie.
        sources: Raw results by figure.
    """

    audited_share: float
    screened_share: float
    fixed_share: float
    doubted_honest: float
    found_gross: float
    sources: dict[str, str]


def measured_costs() -> GuardCosts:
    """The shipped figures."""
    text = resources.files("phalanx.planner").joinpath("data", "guard_costs.json").read_text(encoding="utf-8")
    return GuardCosts(**json.loads(text))
