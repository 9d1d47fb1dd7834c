"""``phalanx eval``: measure a model by suites, with intervals, gates and comparisons."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import print_line, print_rows
from phalanx.cli.files import write_text

if TYPE_CHECKING:
    from phalanx.evaluate import EvaluationResult, Scorer
    from phalanx.evaluate.suite import Suite

EVAL_EPILOG = (
    "Example: phalanx eval runs/first --suite prose --suite facts --out evaluation.json --page evaluation.html\n\n"
    "Example: phalanx eval models/new --against models/old --suite facts --fail-below facts.accuracy=0.4\n\n"
    "Example: phalanx eval https://models.example.org/v1 --model mine --tokenizer models/mine --suite needle\n\n"
    "Example: phalanx eval runs/first --tasks my_task --include tasks --text notes=notes.txt"
)
_ADDRESSES = ("http://", "https://")
DEFAULT_SUITES = ("prose", "facts")


def evaluate(
    where: Annotated[
        str | None, typer.Argument(metavar="RUN|CHECKPOINT|DIR|URL", help="A run, a checkpoint, a model, a server.")
    ] = None,
    *,
    suite: Annotated[
        list[str] | None, typer.Option("--suite", metavar="NAME|FILE.toml", help="Suite; default: prose, facts.")
    ] = None,
    text: Annotated[
        list[str] | None, typer.Option("--text", metavar="NAME=FILE", help="Text of your own, for its perplexity.")
    ] = None,
    tasks: Annotated[str | None, typer.Option("--tasks", metavar="A,B", help="Tasks of lm-eval in --include.")] = None,
    include: Annotated[Path | None, typer.Option("--include", metavar="DIR", help="Folder of task files.")] = None,
    apply_template: Annotated[
        bool, typer.Option("--apply-template", help="Put prompts of --tasks into the model's chat template.")
    ] = False,
    data: Annotated[
        Path | None, typer.Option("--data", metavar="DIR", help="Folder of the medical files; default: PHALANX_DATA.")
    ] = None,
    against: Annotated[
        str | None, typer.Option("--against", metavar="MODEL|FILE.json", help="A model, or a result, to compare with.")
    ] = None,
    fail_below: Annotated[
        list[str] | None,
        typer.Option("--fail-below", metavar="SUITE.METRIC=X", help="Exit with code 5 if the metric is below X."),
    ] = None,
    fail_above: Annotated[
        list[str] | None,
        typer.Option("--fail-above", metavar="SUITE.METRIC=X", help="Exit with code 5 if the metric is above X."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE.json", help="Result with every sample.")] = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE.md", help="Output file of the tables, in Markdown.")
    ] = None,
    page: Annotated[Path | None, typer.Option("--page", metavar="FILE.html", help="Page that opens offline.")] = None,
    inspect: Annotated[
        Path | None, typer.Option("--inspect", metavar="DIR", help="Logs for the viewer of inspect, one a suite.")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Rows of a suite, at most.")] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of draws, disturbances and resamples.")] = 0,
    batch: Annotated[int, typer.Option("--batch", min=1, max=1024, help="Rows at once; changes no figure.")] = 8,
    window: Annotated[int | None, typer.Option("--window", min=8, help="Tokens read at once; default: all.")] = None,
    step: Annotated[int | None, typer.Option("--step", metavar="STEP", help="Checkpoint; default: the newest.")] = None,
    best: Annotated[bool, typer.Option("--best", help="Take the run's checkpoint with the best validation.")] = False,
    device: Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1 ...")] = "cpu",
    own_code: Annotated[bool, typer.Option("--own-code", help="Run code of run or tasks; read it first.")] = False,
    model: Annotated[str | None, typer.Option("--model", help="Model's name on a server.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", metavar="DIR", help="Tokenizer of a server's model, to score it.")
    ] = None,
    key_file: Annotated[
        Path | None, typer.Option("--key-file", metavar="FILE", help="Access key of the server.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask a server by chats where a suite asks questions.")] = False,
    show_suites: Annotated[bool, typer.Option("--list", help="List the suites of this package.")] = False,
) -> Answer:
    """Measure a model: perplexity, bias, robustness, calibration, needle, instructions, refusals, lm-eval tasks.

    Every figure has its interval; the result names weights, template, suites, data and seed by their digests.
    """
    from phalanx.errors import ConfigError
    from phalanx.evaluate.evaluation import parse_gates
    from phalanx.evaluate.suite import list_suites

    if show_suites:
        listed = [
            {"suite": name, "kind": header.kind, "version": header.version, "about": header.about}
            for name, header in list_suites().items()
        ]
        print_rows(listed)
        return Answer({"suites": listed})
    if where is None:
        raise ConfigError("give a run, a checkpoint, a model or the address of a server, or --list")
    if (tasks is None) != (include is None):
        raise ConfigError("--tasks and --include belong together; give both or neither")
    below = parse_gates(fail_below or (), "--fail-below")
    above = parse_gates(fail_above or (), "--fail-above")
    from phalanx.evaluate import compare_results, result_text
    from phalanx.evaluate.comparison import comparison_rows

    names = suite or ([] if text or tasks else list(DEFAULT_SUITES))
    suites = _open_suites(names, text or [], data, limit)
    opening = _Opening(step, best, own_code, device, batch, window, model, tokenizer, key_file, chat)
    request = _EvaluationRequest(suites, tasks, include, apply_template, seed, limit, own_code)
    # a mistake is told before hours of measuring, and what was measured outlives a comparison that fails
    other = None if against is None else _read_other(against)
    result = _evaluate_model(where, opening, request)
    if out is not None:
        write_text(out, result_text(result))
    rows = []
    if against is not None:
        rows = comparison_rows(compare_results(result, other or _evaluate_model(against, opening, request)))
    return _finish(result, rows, (below, above), (out, markdown, page, inspect))


class _Opening:
    """How a model is opened."""

    def __init__(self, *parts: Any) -> None:
        (self.step, self.best, self.own_code, self.device, self.batch, self.window) = parts[:6]
        (self.model, self.tokenizer, self.key_file, self.chat) = parts[6:]

    def open_scorer(self, where: str) -> "Scorer":
        """Open the model at a path or an address."""
        if where.startswith(_ADDRESSES):
            return self._open_server(where)
        from phalanx.serve.place import check_place

        check_place(Path(where))
        from phalanx.evaluate import LocalScorer
        from phalanx.serve import open_text_model

        opened = open_text_model(
            Path(where), step=self.step, best=self.best, own_code=self.own_code, device=self.device
        )
        return LocalScorer(opened, batch=self.batch, window=self.window)

    def _open_server(self, where: str) -> "Scorer":
        from pydantic import ValidationError

        from phalanx.errors import ConfigError
        from phalanx.evaluate.server_scorer import ServerScorer, ServerWriter
        from phalanx.rewards.server import ServerSettings

        if self.model is None:
            raise ConfigError(f"{where}: name the model on the server: --model NAME")
        try:
            settings = ServerSettings(url=where, model=self.model, key_file=self.key_file)
        except ValidationError as exc:
            raise ConfigError(f"{where!r:.200}: {exc.errors()[0]['msg']}") from exc
        writer = ServerWriter(settings, is_chat=self.chat)
        if self.tokenizer is None:
            return writer
        from phalanx.evaluate.server_scorer import open_tokenizer

        backend, prefix, length = open_tokenizer(self.tokenizer)
        return ServerScorer(writer, backend, prefix, self.window or length, self.batch)


class _EvaluationRequest:
    """What is measured."""

    def __init__(self, *parts: Any) -> None:
        self.suites, self.tasks, self.include, self.applies, self.seed, self.limit, self.own_code = parts


def _open_suites(names: list[str], texts: list[str], data: Path | None, limit: int | None) -> "list[Suite]":
    from phalanx.errors import ConfigError
    from phalanx.evaluate import open_suite, text_suite

    suites = [open_suite(name, data, limit) for name in names]
    for text in texts:
        name, equals, path = text.partition("=")
        if not equals or not name or "." in name:
            raise ConfigError(f"--text {text!r:.80}: expected NAME=FILE, with no dot in the name")
        suites.append(text_suite(name, Path(path), limit))
    return suites


@contextmanager
def _suite_bar(name: str) -> Iterator[Any]:
    from phalanx.telemetry import row_bar

    with row_bar(name) as show:
        yield show


def _evaluate_model(where: str, opening: _Opening, request: _EvaluationRequest) -> "EvaluationResult":
    from phalanx.evaluate import run_suites

    scorer = opening.open_scorer(where)
    result = run_suites(where, scorer, request.suites, request.seed, _suite_bar)
    if request.tasks is None:
        return result
    tasks = _run_tasks(where, scorer, request)
    return result.model_copy(update={"suites": (*result.suites, *tasks)})


def _run_tasks(where: str, scorer: Any, request: _EvaluationRequest) -> list[Any]:
    from phalanx.errors import ConfigError, PhalanxError

    try:
        from phalanx.evaluate.harness_tasks import HarnessModel, check_task_files, run_tasks
    except ImportError as exc:
        raise ConfigError("--tasks: lm-eval is not installed; install phalanx-train[eval]") from exc
    check_task_files(request.include, own_code=request.own_code)
    if not scorer.can_score:
        raise ConfigError("--tasks: a served model is scored by tokens; give its tokenizer: --tokenizer DIR")
    harness = HarnessModel(scorer, scorer.full_backend, where, getattr(scorer, "render_chat", None))
    names = [name.strip() for name in request.tasks.split(",") if name.strip()]
    try:
        return run_tasks(harness, names, request.include, request.seed, request.limit, chat=request.applies)
    except PhalanxError:
        raise
    except (ValueError, KeyError, TypeError, OSError, AttributeError) as exc:
        raise ConfigError(f"--tasks {request.tasks}: lm-eval cannot run it ({type(exc).__name__}: {exc})") from exc


def _read_other(against: str) -> "EvaluationResult | None":
    """Read a result to compare with; return None of a model, which has to be measured."""
    from phalanx.evaluate import read_result
    from phalanx.serve.place import check_place

    if against.endswith(".json"):
        return read_result(Path(against))
    if not against.startswith(_ADDRESSES):
        check_place(Path(against))
    return None


def _finish(
    result: "EvaluationResult",
    rows: list[dict[str, str]],
    gates: tuple[dict[str, float], dict[str, float]],
    files: tuple[Path | None, Path | None, Path | None, Path | None],
) -> Answer:
    """Print and write the result; the exit code is that of the gates."""
    import json

    from phalanx.evaluate.evaluation import figure_rows, gate_error, render_markdown

    print_rows(figure_rows(result))
    if rows:
        print_rows(rows)
    for suite in result.suites:
        for note in suite.notes:
            print_line(f"{suite.name}: {note}")
    out, markdown, page, inspect = files
    if markdown is not None:
        write_text(markdown, render_markdown(result, rows))
    if page is not None:
        from phalanx.report import write_evaluation_page

        write_evaluation_page(page, result, rows)
    if inspect is not None:
        from phalanx.evaluate.inspect_log import inspect_log, log_name

        for log in (inspect_log(result, suite) for suite in result.suites):
            write_text(inspect / log_name(log), json.dumps(log, allow_nan=False))
    facts = {**result.without_samples(), "comparison": rows, "file": out}
    return Answer(facts, error=gate_error(result, *gates))
