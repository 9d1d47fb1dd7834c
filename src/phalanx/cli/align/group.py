"""``phalanx align``: all its verbs."""

import json
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.align.choose import choose
from phalanx.cli.align.options import (
    Batch,
    Best,
    MaxNewTokens,
    Out,
    OwnCode,
    Principles,
    Prompts,
    Rounds,
    Seed,
    Temperature,
    Where,
    open_writer,
    print_found_figures,
)
from phalanx.cli.align.safety import safety
from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import print_figures, print_rows
from phalanx.cli.files import write_text

Outcomes = Annotated[Path, typer.Argument(metavar="OUTCOMES.jsonl", help="Output of `phalanx align safety --out`.")]
As = Annotated[
    str, typer.Option("--as", metavar="pairs|conversations", help="Rows for preferences, or for fine-tuning.")
]
Refusal = Annotated[str, typer.Option("--answer", help='Answer to learn where a line has no "better".')]
PairsOut = Annotated[Path, typer.Option("--out", metavar="FILE.jsonl", help="Output file.")]


def feedback(
    outcomes: Outcomes, *, out: PairsOut, shape: As = "pairs", answer: Refusal = "I'm sorry, I can't help with that."
) -> Answer:
    """Turn prompts that a model failed at into rows to train on: the better answer, before the one it gave."""
    from typing import cast

    from phalanx.align import feedback_rows, read_outcomes
    from phalanx.align.outcomes import Shape
    from phalanx.errors import DataError

    if shape not in ("pairs", "conversations"):
        raise typer.BadParameter(f"--as {shape}: expected pairs or conversations")
    rows, counts = feedback_rows(read_outcomes(outcomes), cast(Shape, shape), answer)
    if not rows:
        raise DataError(f"{outcomes}: has no outcome to learn from: {json.dumps(counts)}")
    write_text(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    facts = {"file": out, "rows": len(rows), **counts}
    print_figures(facts)
    return Answer(facts)


def revise(
    where: Where,
    *,
    principles: Principles,
    prompts: Prompts,
    out: Out,
    rounds: Rounds = 1,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.8,
    seed: Seed = 0,
    batch: Batch = 8,
    best: Best = False,
    own_code: OwnCode = False,
) -> Answer:
    """Have a model answer prompts, criticise each answer by a drawn principle and write it again: conversations."""
    from phalanx.align import ResumableRows, Revision, load_constitution, read_prompts
    from phalanx.align.revision import revised_figures
    from phalanx.telemetry import row_bar

    constitution, asked = load_constitution(principles), read_prompts(prompts)
    writer = open_writer(where, max_new_tokens, temperature, best=best, own_code=own_code)
    loop = Revision(writer, constitution, asked, rounds=rounds, seed=seed)
    file = ResumableRows(out, loop.revision_lineage, batch)
    figures = file.read_lineage()
    if figures is None:
        with row_bar("prompts") as print_progress:
            rows = file.make_all(len(asked), loop.make_rows, print_progress)
        figures = file.finish_file(*revised_figures(rows))
    print_found_figures(out, figures)
    return Answer({"file": out, **figures})


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


align_app = typer.Typer(
    no_args_is_help=True,
    help="Make training data of a model's own answers by written principles; measure refusals; compare values.",
)
align_app.command(
    epilog="Example: phalanx align revise runs/base --principles principles.toml --prompts prompts.jsonl "
    "--out revised.jsonl"
)(revise)
align_app.command(
    epilog="Example: phalanx align choose runs/sft --principles principles.toml --prompts prompts.jsonl "
    "--out pairs.jsonl\n\n"
    "Example: phalanx align choose runs/sft --principles principles.toml --principle honest --judge judge.toml "
    "--prompts prompts.jsonl --out honest.jsonl\n\n"
    "Example: phalanx align choose runs/sft --demonstrations --prompts shown.jsonl --out pairs.jsonl"
)(choose)
align_app.command(
    epilog="Example: phalanx align safety runs/sft --json\n\n"
    'Example: phalanx align safety models/mine --set mine.jsonl --violation "[0-9]" --out outcomes.jsonl\n\n'
    "Example: phalanx align safety runs/sft --hook attacks.py:attack --out outcomes.jsonl"
)(safety)
align_app.command(epilog="Example: phalanx align feedback outcomes.jsonl --as pairs --out pairs.jsonl")(feedback)
align_app.command(epilog="Example: phalanx align values run.toml pairs.jsonl --show 5")(values)
