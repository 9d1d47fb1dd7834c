"""``phalanx laptop``: from your own texts to a chat, on this machine alone."""

import shlex
import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.answers.answer import Answer, for_programs
from phalanx.cli.console import print_error, print_figures, print_line, print_rows

if TYPE_CHECKING:
    from phalanx.laptop import LaptopPlan, LaptopRequest
    from phalanx.laptop.folder import MadeRows
    from phalanx.laptop.texts import CutTexts

EXIT_CODE_OF = {"failed": 6, "interrupted": 130}
LAPTOP_EPILOG = (
    "Example: phalanx laptop my_texts --minutes 30\n\n"
    "Example: phalanx laptop notes.jsonl --minutes 5 --dry-run\n\n"
    "Example: phalanx laptop my_texts --data-sft chats.jsonl --data-preferences pairs.jsonl --yes --chat"
)


class PhaseName(StrEnum):
    """Phases that can be repeated."""

    TOKENIZER = "tokenizer"
    PRETRAIN = "pretrain"
    CHAT = "chat"
    PREFERENCES = "preferences"
    EVALUATE = "evaluate"
    REPORT = "report"


def laptop(
    texts: Annotated[list[Path], typer.Argument(metavar="TEXTS", help="Files or folders of text.")],
    *,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of all results.")] = Path("laptop"),
    minutes: Annotated[float, typer.Option("--minutes", min=0.1, help="Time for everything; sets the sizes.")] = 30.0,
    data_sft: Annotated[
        Path | None, typer.Option("--data-sft", metavar="FILE", help="Chats; default: made of the texts.")
    ] = None,
    data_preferences: Annotated[
        Path | None, typer.Option("--data-preferences", metavar="FILE", help="Pairs; default: made of the texts.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of weights and order.")] = 0,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before the start.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Measure and print the plan; write nothing.")] = False,
    prepare: Annotated[
        bool, typer.Option("--prepare", help="Write texts, plan and run files, to be changed; train nothing.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Refuse to begin anew; the same command resumes without it too.")
    ] = False,
    redo: Annotated[
        PhaseName | None, typer.Option("--redo", help="Repeat this phase and those behind it, by their run files.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Serve the model at the end, for a browser.")] = False,
) -> Answer:
    """Train a vocabulary, a model, chats and preferences on your own texts; then chat with it. Needs no network.

    Sizes follow from the time and from the speed of this machine. The same command resumes after an interruption.
    """
    from phalanx.laptop import make_folder, open_plan, read_texts

    question, cut = _ask(texts, (data_sft, data_preferences), minutes, seed, read_texts)
    if chat and not dry_run:
        from phalanx.cli.serving.options import require_server

        require_server()
    plan = open_plan(out, question)
    if plan is None and (resume or redo is not None):
        raise _nothing_there(out)
    is_new = plan is None
    made_rows = None
    if plan is None:
        plan, made_rows = _plan(question, cut)
    _show_plan(plan, cut)
    facts = {"folder": out, "plan": plan.model_dump(mode="json"), "estimates_s": plan.estimates_s}
    if dry_run:
        return Answer({"dry_run": True, **facts})
    if is_new and not yes and sys.stdin.isatty():
        typer.confirm("Start?", default=True, abort=True)
    if made_rows is not None:
        make_folder(out, plan, cut, made_rows)
    if prepare:
        print_line(f"{out}: prepared; the same command without --prepare begins")
        return Answer({"prepared": True, **facts})
    return _run(out, plan, redo, serves=chat)


def _nothing_there(out: Path) -> Exception:
    from phalanx.errors import CheckpointError

    return CheckpointError(f"{out}: nothing to resume or repeat; start without --resume and --redo").with_facts(
        code="PHX-I051", key="--resume", file=str(out), found="no plan.toml", do="start without --resume and --redo"
    )


def _ask(
    texts: list[Path], rows: tuple[Path | None, Path | None], minutes: float, seed: int, read_texts: Any
) -> "tuple[LaptopRequest, CutTexts]":
    """Read the texts, and look at the rows that the user gives."""
    from phalanx.errors import ConfigError
    from phalanx.laptop import LaptopRequest
    from phalanx.train.starter_sources import starter_rows

    names: list[str | None] = []
    for option, path, layout in zip(("--data-sft", "--data-preferences"), rows, ("chat", "pairs"), strict=True):
        seen = None if path is None else starter_rows([path])
        if path is not None and (seen is None or seen.layout != layout):
            expected = {
                "chat": "JSON lines with messages, conversations, instruction and output, or prompt and completion",
                "pairs": "JSON lines with prompt, chosen and rejected",
            }[layout]
            actual = "text" if seen is None else seen.layout
            raise ConfigError(f"{option} {path}: holds {actual}; expected {expected}").with_facts(
                key=option, file=str(path), found=actual, expected=expected
            )
        names.append(None if path is None else str(path.resolve()))
    cut: CutTexts = read_texts(texts)
    question = LaptopRequest(texts=cut.digest, minutes=minutes, seed=seed, data_sft=names[0], data_preferences=names[1])
    return question, cut


def _plan(question: "LaptopRequest", cut: "CutTexts") -> "tuple[LaptopPlan, MadeRows]":
    """Measure this machine and plan."""
    from phalanx.laptop import (
        PlanGrounds,
        RowCounts,
        choose_threads,
        choose_vocabulary,
        fit_vocabulary,
        make_plan,
        make_rows,
        measure_costs,
    )

    made = make_rows(question, cut)
    chats, chat_bytes = _count(question.data_sft, made.chats)
    pairs, _ = _count(question.data_preferences, made.preferences)
    if not for_programs():
        print_line("measuring this machine for some seconds ...")
    vocabulary, threads = fit_vocabulary(cut, choose_vocabulary(cut.train_bytes)), choose_threads()
    text_tokens = vocabulary.count_tokens(cut.train_bytes)
    costs = measure_costs(vocabulary.size, text_tokens, question.minutes * 60, threads)
    rows = RowCounts(chats, chat_bytes, pairs)
    return make_plan(PlanGrounds(question, cut, rows, vocabulary, threads), costs), made


def _count(path: str | None, made: Any) -> tuple[int, int]:
    """Return the number of rows and their bytes."""
    from phalanx.data.row_layout import iterate_lines

    if path is None:
        return len(made), sum(len(str(row)) for row in made)
    sizes = [len(line) for line in iterate_lines(Path(path)) if line.strip()]
    return len(sizes), sum(sizes)


def _show_plan(plan: "LaptopPlan", cut: "CutTexts") -> None:
    from phalanx.laptop import in_words
    from phalanx.report.figures import format_size

    shape = plan.shape
    threads = "1 thread" if plan.threads == 1 else f"{plan.threads} threads"
    whole = "" if cut.is_whole else " (the first part; the rest is not read)"
    print_figures(
        {
            "text": f"{format_size(cut.num_bytes)}, {format_size(plan.held_out_bytes)} of it held out{whole}",
            "model": f"{plan.num_parameters:,} parameters",
            "shape": f"{shape.layers} layers, width {shape.hidden}, window {shape.tokens}",
            "vocabulary": f"{plan.vocab_size:,} tokens",
            "speed": f"{1 / plan.seconds_per_token:,.0f} tokens/s, {threads}",
            "whole time": f"about {in_words(sum(plan.estimates_s.values()))}",
        }
    )
    print_rows([{"phase": phase, "planned": in_words(seconds)} for phase, seconds in plan.estimates_s.items()])
    if plan.is_limited_by_text and not for_programs():
        print_line("the text ends before the time: more text, a better model")


def _run(out: Path, plan: "LaptopPlan", redo: PhaseName | None, *, serves: bool) -> Answer:
    from rich.console import Console

    from phalanx.laptop import Interrupted, LaptopRun

    run = LaptopRun(out, plan, Console(stderr=for_programs()))
    results = run.run_phases(None if redo is None else redo.value)
    if isinstance(results, Interrupted):
        print_error(f"{results.phase}: {results.status}; the same command goes on from there")
        return Answer({"folder": out, "status": results.status, "phase": results.phase}, EXIT_CODE_OF[results.status])
    _show_results(results)
    commands = chat_commands(out)
    if not serves:
        for command in commands:
            print_line(f"  {command}")
        return Answer({"folder": out, "status": "completed", "next": commands, **results})
    return _serve(out)


def chat_commands(out: Path) -> list[str]:
    """Return the commands that open the chat, to be copied."""
    model, access = shlex.quote(str(out / "model")), shlex.quote(str(out / "access"))
    return [
        f"phalanx generate {model} --chat",
        f"phalanx keys create --owner me --access {access}",
        f"phalanx serve {model} --access {access} --chat-link me",
    ]


def _show_results(results: Mapping[str, Any]) -> None:
    from phalanx.laptop import in_words

    print_rows(
        [
            {
                "phase": row["phase"] + (" *" if row["interrupted"] else ""),
                "planned": in_words(row["planned_s"]),
                "real": in_words(row["real_s"]),
            }
            for row in results["phases"]
        ]
    )
    if any(row["interrupted"] for row in results["phases"]) and not for_programs():
        print_line("* was interrupted; the time is that of its last start")
    print_rows(results["scores"])
    for answer in [] if for_programs() else results["answers"]:
        print_line(f"\n> {answer['question']}\n{answer['answer']}")


def _serve(out: Path) -> Answer:
    """Serve the model, with a key that is made when there is none yet."""
    from phalanx.cli.serving.keys import create
    from phalanx.cli.serving.serve import serve
    from phalanx.serve.access import KEYS_FILE

    access = out / "access"
    if not (access / KEYS_FILE).exists():
        create(owner="me", access=access)
    return serve(out / "model", access=access)
