"""``phalanx attack``: let attackers loose on a run file, and see whether its guard holds."""

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import print_figures, print_rows, write_json
from phalanx.cli.options import Sets, Unsets, overrides_of
from phalanx.errors import ConfigError, VerificationError

NOT_HELD = VerificationError.exit_code
SHOWN = ("attack", "detected", "blamed", "steps_to_detection", "evicted", "bit_identical", "perplexity")


def attack(
    run_file: Annotated[Path | None, typer.Argument(metavar="RUN.toml", help="Run file.")] = None,
    *,
    kinds: Annotated[
        str | None,
        typer.Option(
            "--kinds",
            metavar="A,B",
            help="Attacks, one run for each; default: [attack] of the run file, or "
            "forward_sign_flip,backward_gaussian.",
        ),
    ] = None,
    together: Annotated[
        list[str] | None,
        typer.Option(
            "--attack",
            metavar="KIND:KEY=VALUE:...",
            help="An attacker, such as scale:stages=[2]:strength=3; repeat for several attackers in one run.",
        ),
    ] = None,
    rate: Annotated[float | None, typer.Option("--rate", min=0.0, max=1.0, help="Share of steps with lies.")] = None,
    steps: Annotated[
        int, typer.Option("--steps", min=2, help="Steps of each run; the lies begin after a quarter of them.")
    ] = 16,
    from_step: Annotated[int | None, typer.Option("--from-step", min=0, help="First step with lies.")] = None,
    stages: Annotated[
        str | None,
        typer.Option("--stages", metavar="1,2", help="Stages of the attackers; default: the first middle stage."),
    ] = None,
    sets: Sets = None,
    unsets: Unsets = None,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", metavar="DIR", help="Directory for the run directories.")
    ] = None,
    list_them: Annotated[bool, typer.Option("--list", help="Print the table of attacks and stop.")] = False,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Also write JSON to this file.")] = None,
) -> Answer:
    """Train a shortened run once undisturbed and once with each attacker, in real processes.

    [attack] of the run file applies; options override it. With remote workers it prints the keys for their files.

    Exits with 5 when an attack went undetected or never took place, an innocent party was blamed, or a run failed.
    """
    from phalanx.train import load_run

    # a mistake in the file is said before torch is imported
    run = None if run_file is None else load_run(run_file, overrides_of(sets, unsets))
    from phalanx.lab.bench.detection.drill_plan import Drill
    from phalanx.lab.bench.detection.drills import list_attacks, run_drill

    if list_them:
        listed = list_attacks()
        print_rows(listed)
        return Answer({"attacks": listed})
    if run is None:
        raise ConfigError("attack: the run file is missing; give one, or --list for the table of attacks").with_facts(
            code="PHX-C002"
        )
    drill = Drill(
        kinds=None if kinds is None else tuple(filter(None, kinds.split(","))),
        together=tuple(together or ()),
        steps=steps,
        from_step=from_step,
        rate=rate,
        stages=None if stages is None else _parse_stage_counts(stages),
    )
    result = run_drill(run, drill, run_dir)
    if out is not None:
        write_json(out, result)
    print_rows([{key.replace("_", " "): row.get(key) for key in SHOWN} for row in result["rows"]])
    print_figures({f"{row['attack']} did not finish": row["error"] for row in result["rows"] if row.get("error")})
    return Answer(result, 0 if result["passed"] else NOT_HELD)


def _parse_stage_counts(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError as exc:
        raise ConfigError(f"attack: --stages {text!r}: expected stage numbers such as 1,2").with_facts(
            code="PHX-C002", key="--stages", found=text
        ) from exc
