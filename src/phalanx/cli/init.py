"""``phalanx init``: a few questions, or flags, and a commented run file."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import print_warnings
from phalanx.cli.files import write_text


def init(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="Run file to write.")] = Path("run.toml"),
    *,
    kind: Annotated[
        str | None,
        typer.Option(
            "--kind",
            help="scratch, finetune, chat, preferences, remote, cluster, split or federated; default: ask.",
        ),
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            "--data",
            metavar="PATH",
            help="Texts, conversations, preferences or a dataset; for split and federated: labelled texts, one file "
            "for each client.",
        ),
    ] = None,
    model: Annotated[
        Path | None, typer.Option("--model", metavar="DIR", help="Model directory in the hub's layout, to fine-tune.")
    ] = None,
    workers: Annotated[
        str, typer.Option("--workers", metavar="A,B", help="With kind remote: names of the remote parties.")
    ] = "alice,bob",
    ranks: Annotated[int, typer.Option("--ranks", min=1, help="With kind cluster: number of processes.")] = 2,
    task: Annotated[str, typer.Option("--task", help="With kind split: the labelled texts to classify.")] = "icd10",
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing run file.")] = False,
) -> Answer:
    """Write a commented run file; in a terminal, ask for missing options."""
    from phalanx.errors import ConfigError
    from phalanx.train import load_run, text_warnings
    from phalanx.train.starter import STARTERS, Answers
    from phalanx.train.starter import run_file as text_of

    if run_file.exists() and not force:
        raise ConfigError(f"{run_file}: already exists; give another name, or --force to overwrite it").with_facts(
            code="PHX-C021", file=str(run_file), do="give another name, or --force"
        )
    asks = sys.stdin.isatty() and kind is None
    if kind is None and not asks:
        raise ConfigError(f"--kind is missing; choose one of {', '.join(STARTERS)}").with_facts(
            code="PHX-C002", key="--kind"
        )
    if kind is None:
        for name, starter in STARTERS.items():
            typer.echo(f"  {name:<11} {starter.purpose}")
        kind = typer.prompt("Kind of run", default="scratch")
    if asks and not data:
        what = _ASKED.get(kind, "text (empty: Python's documentation)")
        path_text = typer.prompt(f"A file or directory of {what}", default="")
        data = [Path(path_text)] if path_text else None
    if asks and kind in ("finetune", "chat", "preferences") and model is None:
        model = Path(typer.prompt("Model directory"))
    names = [name for name in (part.strip() for part in workers.split(",")) if name]
    texts_directory = run_file.parent / f"{run_file.stem}-texts"
    text = text_of(kind, Answers(tuple(data or ()), model, names, ranks, task, texts_directory)).replace(
        "THIS_FILE", shlex.quote(str(run_file))
    )
    write_text(run_file, text)
    run = load_run(run_file)
    typer.echo(f"wrote {run_file}")
    print_warnings(text_warnings(run))
    following = _next_commands(kind, run_file, names)
    for hint in following:
        typer.echo(f"  {hint}")
    return Answer({"run_file": run_file, "kind": kind, "next": following})


_LABELLED = "labelled texts (empty: codes of ICD-10)"
_ASKED = {
    "split": _LABELLED,
    "federated": _LABELLED,
    "chat": "conversations, JSON lines",
    "preferences": "preferences, JSON lines",
}


def _next_commands(kind: str, run_file: Path, workers: list[str]) -> list[str]:
    file, chosen = shlex.quote(str(run_file)), " ".join(f"--name {name}" for name in workers)
    before = [f"phalanx invite {file} {chosen}  # prints a command for each; --host: your address"]
    return [
        *(before if kind == "remote" else ()),
        f"phalanx train {file} --dry-run",
        f"phalanx train {file}",
    ]
