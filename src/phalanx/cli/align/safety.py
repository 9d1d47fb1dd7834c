"""``phalanx align safety``: measure refusals of harmful and of harmless prompts."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.align.options import (
    Batch,
    Best,
    JudgePath,
    MaxNewTokens,
    OwnCode,
    Seed,
    Temperature,
    Where,
    open_asked_judge,
    open_writer,
    print_found_figures,
)
from phalanx.cli.answers.answer import Answer

if TYPE_CHECKING:
    from phalanx.align import AskedPrompt
    from phalanx.serve import ChatWriter

SetPath = Annotated[Path | None, typer.Option("--set", metavar="FILE.jsonl", help='Prompts, each with "harmful".')]
Hook = Annotated[str | None, typer.Option("--hook", metavar="FILE.py:NAME", help="Code that searches for prompts.")]
Refusals = Annotated[list[str] | None, typer.Option("--refusal", metavar="REGEX", help="Pattern of a refusal.")]
Violation = Annotated[
    str | None, typer.Option("--violation", metavar="REGEX", help="Pattern that no answer may match.")
]
OutFile = Annotated[Path | None, typer.Option("--out", metavar="FILE.jsonl", help="Output file of the outcomes.")]


def safety(
    where: Where,
    *,
    prompts: SetPath = None,
    hook: Hook = None,
    refusal: Refusals = None,
    violation: Violation = None,
    judge: JudgePath = None,
    out: OutFile = None,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    batch: Batch = 8,
    best: Best = False,
    own_code: OwnCode = False,
) -> Answer:
    """Measure how often a model refuses harmful prompts, refuses harmless ones, and violates; with 95 % intervals."""
    import tempfile

    from phalanx.align import ResumableRows, SafetyCheck
    from phalanx.align.safety import refusal_by_judge, refusal_by_patterns, safety_figures
    from phalanx.telemetry import row_bar

    writer = open_writer(where, max_new_tokens, temperature, best=best, own_code=own_code)
    asked = _read_asked_prompts(prompts, hook, writer, seed)
    decides = refusal_by_patterns(refusal or ()) if judge is None else refusal_by_judge(open_asked_judge(judge, writer))
    loop = SafetyCheck(writer, asked, decides, violation, seed)
    with tempfile.TemporaryDirectory(prefix="phalanx-safety-") as spare, row_bar("prompts") as print_progress:
        by = {"refusal": refusal or "usual", "judge": None if judge is None else judge.read_text(encoding="utf-8")}
        file = ResumableRows(out or Path(spare) / "outcomes.jsonl", {**loop.safety_lineage, **by}, batch)
        figures: Any = file.read_lineage()
        if figures is None:
            rows = file.make_all(len(asked), loop.make_rows, print_progress)
            figures = file.finish_file(rows, safety_figures(rows))
    print_found_figures(out, figures)
    return Answer({"file": out, **figures})


def _read_asked_prompts(prompts: Path | None, hook: str | None, writer: "ChatWriter", seed: int) -> "list[AskedPrompt]":
    from phalanx.align import safety_prompts
    from phalanx.align.safety import hook_prompts
    from phalanx.config import open_own_code, pin_reference, resolve_kind, unfit_code_error

    if hook is None:
        return safety_prompts(prompts)
    reference = pin_reference(hook, Path.cwd())
    open_own_code(reference, Path.cwd())
    hook_function: Any = resolve_kind(reference, {}, lambda _kind, code: code)
    if not callable(hook_function):
        raise unfit_code_error(
            hook, f"a {type(hook_function).__name__}", "a function that takes ask and returns objects with a prompt"
        )
    return [*(safety_prompts(prompts) if prompts else ()), *hook_prompts(hook_function, writer, seed, hook)]
