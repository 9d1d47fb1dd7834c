"""``phalanx bench``: measure on this machine; the figures are one JSON object."""

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import print_figures, print_rows, write_json
from phalanx.errors import ConfigError


def bench(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the bench; an unknown name lists them.")],
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes: at most 10 minutes on 2 cores.")] = False,
    finished: Annotated[bool, typer.Option("--finished", help="Measure nothing; print finished rows.")] = False,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Also write JSON to this file.")] = None,
) -> Answer:
    """Run one bench and print its rows."""
    from phalanx.lab.bench import BENCHES, KEEPING_ROWS

    if name not in BENCHES:
        raise ConfigError(f"bench: unknown name {name!r}; choices: {', '.join(sorted(BENCHES))}").with_facts(
            code="PHX-C002", key="NAME", found=name, expected=", ".join(sorted(BENCHES))
        )
    if finished and name not in KEEPING_ROWS:
        raise ConfigError(
            f"bench: {name} saves no rows; remove --finished, or choose {', '.join(KEEPING_ROWS)}"
        ).with_facts(code="PHX-C002", key="--finished")
    result = KEEPING_ROWS[name](quick, True) if finished else BENCHES[name](quick)
    if out is not None:
        write_json(out, result)
    print_rows(result["rows"])
    print_figures({key: value for key, value in result.items() if key != "rows"})
    return Answer(result)
