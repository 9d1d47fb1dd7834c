"""``phalanx align values``: pairs on which the values of a run file disagree."""

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import print_figures, print_rows

File = Annotated[Path, typer.Argument(metavar="RUN.toml", help="A run file with [rewards]: one reward for each value.")]
Pairs = Annotated[Path, typer.Argument(metavar="PAIRS.jsonl", help="Pairs of `phalanx align choose`.")]
Show = Annotated[int, typer.Option("--show", min=0, help="Number of conflicts to show, largest gaps first.")]
Smallest = Annotated[float, typer.Option("--smallest", min=0.0, help="Smaller gaps count as no preference.")]


def values(file: File, pairs: Pairs, *, show: Show = 10, smallest: Smallest = 0.0) -> Answer:
    """Show by how much each value, a reward of its own, prefers the chosen answers, and where values disagree."""
    import tempfile

    from phalanx.align import value_gaps
    from phalanx.align.values import read_pairs
    from phalanx.errors import ConfigError
    from phalanx.rewards import RewardScorer
    from phalanx.train import DomainRun, PipelineRun, load_run

    asked, run = read_pairs(pairs), load_run(file)
    rewards = run.rewards if isinstance(run, PipelineRun | DomainRun) else None
    if rewards is None:
        raise ConfigError(f"{file}: [rewards] is missing; add one reward for each value, with its weight")
    with (
        tempfile.TemporaryDirectory(prefix="phalanx-values-") as spare,
        RewardScorer(rewards, file.resolve().parent, Path(spare) / "rewards.log") as scorer,
    ):
        gaps = value_gaps(asked, scorer, smallest)
    conflicts = gaps["conflicts"]
    print_figures({"pairs": gaps["pairs"], "conflicts": len(conflicts)})
    print_figures({f"prefers the chosen: {name}": share for name, share in gaps["accuracy"].items()})
    print_figures({f"disagree: {names}": share for names, share in gaps["disagreement"].items()})
    print_rows(
        [{"where": conflict["where"], **conflict["gaps"], "sum": conflict["sum"]} for conflict in conflicts[:show]]
    )
    return Answer({**gaps, "conflicts": conflicts[:show], "num_conflicts": len(conflicts)})
