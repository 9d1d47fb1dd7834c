"""``phalanx unlearn``: push a model away from a document, and test how fast the document comes back; no erasure."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import print_figures, print_line

if TYPE_CHECKING:
    from phalanx.governance.unlearning import UnlearningResult

_UNDECIDED = 7
UNLEARN_EPILOG = (
    "Example: phalanx unlearn letters/17 --run runs/first --out models/unlearned\n\n"
    "Example: phalanx unlearn letter.txt --run runs/first --out models/unlearned --steps 200 --rate 1e-4 --json\n\n"
    "Exit codes: 0 written and tested, 2 wrong command line, 3 no such document or run, 5 a policy or the log refuses, "
    f"6 the weights became no numbers, {_UNDECIDED} written, but the document is still likelier than texts that were "
    "never seen, or too few of these are there to tell what is left."
)


def unlearn(
    document: Annotated[str, typer.Argument(metavar="DOC", help="A digest, a text file, or a document name.")],
    run_dir: Annotated[Path, typer.Option("--run", metavar="RUN_DIR", help="Run that was trained on it.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="New directory of the changed model.")],
    *,
    steps: Annotated[int, typer.Option("--steps", min=1, max=100_000, help="Maximum number of updates.")] = 100,
    rate: Annotated[
        float | None, typer.Option("--rate", min=1e-12, max=1.0, help="Learning rate; default: a tenth of the run's.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**31, help="Seed of the draw of the other texts.")] = 0,
    signing_key: Annotated[
        Path | None,
        typer.Option("--signing-key", metavar="FILE", help="Signs the statement; default: your key for datasets."),
    ] = None,
    certificate: Annotated[
        Path | None, typer.Option("--certificate", metavar="FILE", help="Copy of the owner's certificate.")
    ] = None,
) -> Answer:
    """Make a document as unlikely to a copy of the model as texts never seen, and test how fast it comes back.

    This is no erasure: the result is not the model of a run without the document, and its files say so. The test trains
    on the first half of the document and on that of texts never seen, and compares the second halves. To have the
    document gone, use phalanx erase.
    """
    from phalanx.train.records.run_directory import run_name

    # a mistake is told before torch is imported
    run_name(run_dir)
    from phalanx.data.shards import default_signing_key, fingerprint_of, load_signer
    from phalanx.governance.unlearning import STATE, Unlearning, UnlearningPlan
    from phalanx.telemetry.progress import row_bar
    from phalanx.train import PastRun

    unlearning = Unlearning(PastRun(run_dir, certificate), document)
    signer = load_signer(signing_key or default_signing_key())
    plan = UnlearningPlan(steps=steps, rate=rate, seed=seed)
    with row_bar("updates and texts") as tell:
        result = unlearning.unlearn_document(out, signer, plan, tell)
    print_figures({"document": unlearning.digest, **_result_rows(result)})
    print_line(f"{out}: {STATE}; statement signed by {fingerprint_of(signer)}")
    facts = {"state": STATE, "document": unlearning.digest, "directory": out, **result.to_json()}
    return Answer(facts, exit_code=0 if result.is_decidable else _UNDECIDED)


def _result_rows(result: "UnlearningResult") -> dict[str, Any]:
    facts = result.to_json()
    (before, after), relearning = result.scores, result.relearning
    comebacks = {"unlearned": relearning.forgotten, "before": relearning.before}
    reach = "now" if result.has_reached else "NOT"
    rows: dict[str, Any] = {
        "updates": f"{result.steps}; the document is {reach} as unlikely as texts never seen",
        "loss on the document": f"{before.loss:.3f} before, {after.loss:.3f} after",
    }
    for title, group in {"on retained texts": "retained", "on texts never seen": "never_seen"}.items():
        rows[f"loss {title}"] = ", ".join(
            f"{_show_interval(facts[group][name])} {name}" for name in ("before", "after")
        )
    for name, comeback in comebacks.items():
        if comeback is not None:
            first, best = comeback.scores[0], comeback.best
            rows[f"second half, {name}"] = (
                f"{first.loss:.3f}, in {len(comeback.scores) - 1} steps on the first half {best.loss:.3f}; tokens that "
                f"are the model's first choice {first.likeliest:.0%}, then {best.likeliest:.0%}"
            )
    gains = sorted(relearning.never_seen)
    rows["gain on the second half"] = (
        f"{relearning.forgotten.gain:.3f} of the document; of {len(gains)} texts never seen {gains[0]:.3f} to "
        f"{gains[-1]:.3f}; p = {relearning.p:.3f}"
    )
    return {**rows, "meaning": relearning.meaning}


def _show_interval(interval: dict[str, Any]) -> str:
    value, low, high = (interval[name] for name in ("value", "low", "high"))
    return f"{value:.3f}" if low is None or high is None else f"{value:.3f} ({low:.3f} to {high:.3f})"
