"""The bench harness: arms are processes that answer each order with one line and take turns; a program is one bench."""

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

from pydantic import ValidationError

from phalanx.child import PythonProcess, die_with_parent
from phalanx.closing import Closeable
from phalanx.config import StrictModel
from phalanx.errors import ConfigError, TrainingError
from phalanx.lab.bench.measure.machine import load_average, result_context
from phalanx.models import ModelSource
from phalanx.pipeline import PipelineEngine
from phalanx.train import PipelineRun
from phalanx.train.records.run_directory import RunDirectory
from phalanx.train.sessions.cluster import open_company
from phalanx.train.setup.layout import make_plan
from phalanx.train.setup.stage_source import StageLibrary

_SECONDS_TO_END = 15.0
Message = TypeVar("Message", bound=StrictModel)
Order = TypeVar("Order", bound=StrictModel)
Item = TypeVar("Item")


class LineProcess(Closeable):
    """A module in its own process; its log is kept, and the last log line is in the error when it fails.

    Args:
        program: Program that runs the command; this interpreter, which is given a module, by default.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        program: Sequence[str] = (sys.executable, "-m"),
    ) -> None:
        self._name = name
        self._process = PythonProcess(command, environment, log, piped=True, program=program)

    @property
    def process_id(self) -> int:
        """Its process id."""
        return self._process.pid

    def send_text(self, line: str) -> None:
        """Send it a line."""
        stdin = self._process.popen.stdin
        try:
            if stdin is not None:
                stdin.write(line + "\n")
                stdin.flush()
        except BrokenPipeError as exc:
            raise self._make_failure() from exc

    def read_text(self) -> str:
        """Wait for its next line."""
        stdout = self._process.popen.stdout
        reply = "" if stdout is None else stdout.readline()
        if not reply:
            raise self._make_failure()
        return reply

    def ask(self, order: StrictModel, kind: type[Message]) -> Message:
        """Send an order and wait for the answer, which is of this kind."""
        self.send_text(order.model_dump_json())
        return kind.model_validate_json(self.read_text())

    def close(self) -> None:
        """Let it end by itself, or end it."""
        stdin, stdout = self._process.popen.stdin, self._process.popen.stdout
        # that of a process that has ended is broken
        with contextlib.suppress(BrokenPipeError):
            if stdin is not None:
                stdin.close()
        self._process.end_or_kill(_SECONDS_TO_END)
        if stdout is not None:
            stdout.close()

    def _make_failure(self) -> TrainingError:
        return TrainingError(f"bench: {self._name} ended: {self._process.last_output()}")


def start_peer(
    name: str, python: str, program: Sequence[str], environment: Mapping[str, str], log: Path
) -> LineProcess:
    """Start a peer's program by the Python of an environment of its own, which has no modules of this package."""
    return LineProcess(name, program, {**environment, "PYTHONPATH": ""}, log, (python, "-P"))


def parse_message(kind: type[Message], text: str) -> Message:
    """Parse one line of an arm's input."""
    try:
        return kind.model_validate_json(text)
    except ValidationError as exc:
        raise ConfigError(f"bench: a malformed {kind.__name__}: {exc}") from exc


def send_message(answers: IO[str], message: StrictModel) -> None:
    """Write one line to the bench."""
    answers.write(message.model_dump_json() + "\n")
    answers.flush()


def serve_orders(
    kind: type[Order], orders: Iterable[str], answers: IO[str], act: Callable[[Order], StrictModel]
) -> None:
    """Answer orders until there are no more."""
    for line in orders:
        send_message(answers, act(parse_message(kind, line)))


@contextlib.contextmanager
def serve_bench() -> Iterator[tuple[IO[str], IO[str]]]:
    """Be an arm's process: end with the bench, and keep output of libraries out of the answers; yield both pipes."""
    die_with_parent()
    answers = sys.__stdout__ or sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        yield sys.stdin, answers


@contextlib.contextmanager
def open_engine(
    run: PipelineRun, source: ModelSource, directory: Path
) -> Iterator[tuple[PipelineEngine, RunDirectory]]:
    """Start a run's engine with its worker processes, at step 0."""
    home, plan = RunDirectory(directory, run, resume=False), make_plan(run, source)
    library = StageLibrary(source, plan, None)
    with open_company(run, home, plan, library, lambda kind, body: None) as engine:
        engine.start_parties(0, library.stage_digests() if run.guard.is_enabled else {})
        yield engine, home


def rotate(items: Iterable[Item], turn: int) -> list[Item]:
    """Return the items of one turn, so that each is first in some turn: what drifts within a turn favours none."""
    arms = list(items)
    first = turn % len(arms)
    return arms[first:] + arms[:first]


def print_progress(text: str) -> None:
    """Print one line to standard error."""
    sys.stderr.write(f"bench: {text}\n")
    sys.stderr.flush()


def cache_directory() -> Path:
    """Return the directory of models and prepared texts."""
    return Path(os.environ.get("PHALANX_CACHE", Path("runs") / ".cache"))


@contextlib.contextmanager
def scratch_directory() -> Iterator[Path]:
    """Yield a directory that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as directory:
        yield Path(directory).resolve()


def program_parser(description: str | None) -> argparse.ArgumentParser:
    """Return the command line of a bench that is a program: its first argument is the file of the result."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    return parser


def run_program(
    name: str, parser: argparse.ArgumentParser, measure: Callable[[argparse.Namespace], dict[str, Any]]
) -> None:
    """Measure, and write one JSON object with name, command, machine, commit, load and what was measured."""
    options, load = parser.parse_args(), load_average()
    figures = measure(options)
    result = {"name": name, "command": _command(options), **result_context([load, load_average()]), **figures}
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _command(options: argparse.Namespace) -> str:
    """Return the call with all options; a path is named by its option, for it is another one elsewhere."""
    spec = sys.modules["__main__"].__spec__
    words = [f"python -m {spec.name if spec else Path(sys.argv[0]).name} OUT.json"]
    for option, value in vars(options).items():
        if option != "out" and value is not None and value != "":
            values = value if isinstance(value, list) else [value]
            texts = (option.upper() if isinstance(one, Path) else str(one) for one in values)
            words.append(f"--{option.replace('_', '-')} {' '.join(texts)}")
    return " ".join(words)
