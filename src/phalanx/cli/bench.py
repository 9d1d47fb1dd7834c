"""``phalanx bench``: measure on this machine; the figures are one JSON object."""

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import say_figures, say_rows, write_json
from phalanx.errors import ConfigError


def bench(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Which bench; a wrong name lists them all.")],
    quick: Annotated[bool, typer.Option("--quick", help="Ends within 10 minutes on 2 cores.")] = False,
    finished: Annotated[bool, typer.Option("--finished", help="Measure nothing; show what is finished.")] = False,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Also write the JSON.")] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write a page; with collectives.")
    ] = None,
) -> Answer:
    """Run one bench and print its rows."""
    from phalanx.lab.bench import BENCHES, KEEPING_ROWS

    if name not in BENCHES:
        raise ConfigError(f"bench: unknown name {name!r}; choices: {', '.join(sorted(BENCHES))}").about(
            code="PHX-C002", key="NAME", found=name, expected=", ".join(sorted(BENCHES))
        )
    if finished and name not in KEEPING_ROWS:
        raise ConfigError(
            f"bench: {name} keeps no rows; leave --finished out, or choose {', '.join(KEEPING_ROWS)}"
        ).about(code="PHX-C002", key="--finished")
    if html is not None and name != "collectives":
        raise ConfigError(f"bench: {name} has no page; leave --html out").about(code="PHX-C002", key="--html")
    result = KEEPING_ROWS[name](quick, True) if finished else BENCHES[name](quick)
    if out is not None:
        write_json(out, result)
    if html is not None:
        from phalanx.report.exchange_page import write_exchanges

        write_exchanges(html, result)
    say_rows(result["rows"])
    say_figures({key: value for key, value in result.items() if key != "rows"})
    return Answer(result)
