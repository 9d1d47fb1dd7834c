"""The bench harness: arms are processes that answer each order with one line and take turns; a program is one bench."""

import argparse
import contextlib
import inspect
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import IO, Any, Literal, NamedTuple, TypeVar, get_args, get_origin

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


def print_progress(text: str, program: str = "bench") -> None:
    """Print one line to standard error."""
    sys.stderr.write(f"{program}: {text}\n")
    sys.stderr.flush()


def cache_directory() -> Path:
    """Return the directory of models and prepared texts."""
    return Path(os.environ.get("PHALANX_CACHE", Path("runs") / ".cache"))


@contextlib.contextmanager
def scratch_directory() -> Iterator[Path]:
    """Yield a directory that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as directory:
        yield Path(directory).resolve()


class CallTime(NamedTuple):
    """Seconds of one call: wall time, and CPU time of this process."""

    wall_s: float
    cpu_s: float


def time_call(action: Callable[[], object], cpu_clock: Callable[[], float] = time.process_time) -> CallTime:
    """Time one call."""
    wall, cpu = time.perf_counter(), cpu_clock()
    action()
    return CallTime(time.perf_counter() - wall, cpu_clock() - cpu)


def time_turns(
    actions: Mapping[str, Callable[[], object]],
    rounds: int,
    warm_ups: int = 1,
    before: Callable[[str], object] | None = None,
) -> dict[str, list[CallTime]]:
    """Time every action once a round, in turns, so that a machine that gets busier slows all of them.

    Args:
        warm_ups: Rounds at the beginning that do not count.
        before: Called with an action's name before each call of it, outside of what is timed.
    """
    samples: dict[str, list[CallTime]] = {name: [] for name in actions}
    for number in range(warm_ups + rounds):
        for name, action in actions.items():
            if before is not None:
                before(name)
            sample = time_call(action)
            if number >= warm_ups:
                samples[name].append(sample)
    return samples


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Return the median of the ratios of neighbours in time."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


@dataclass(frozen=True)
class ModuleRun:
    """A module that ran to its end in a process of its own: seconds with all its children, and its output."""

    wall_s: float
    cpu_s: float
    output: str

    @property
    def seconds(self) -> dict[str, float]:
        """Both times, as rows have them."""
        return {"wall_s": self.wall_s, "cpu_s": self.cpu_s}

    def last_answer(self) -> Any:
        """Parse the last line of the output as JSON."""
        return json.loads(self.output.splitlines()[-1])


def run_module(*command: str) -> ModuleRun:
    """Run ``python -m`` with these words to its end; what it prints goes to standard error as well."""
    before, start, lines = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter(), list[str]()
    with subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True) as process:  # noqa: S603 - our own command
        for line in process.stdout or ():
            sys.stderr.write(line)
            lines.append(line)
    if process.returncode != 0:
        raise TrainingError(f"bench: {' '.join(command)} ended with {process.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return ModuleRun(time.perf_counter() - start, cpu_s, "".join(lines))


def run_program(name: str, measure: Callable[..., dict[str, Any]]) -> None:
    """Measure with the options of the command line, and write the result to the file that is its first argument.

    The parameters of `measure` are the options, with their names, types and defaults; one without a default must be
    given. The result is one JSON object: name, command, machine, commit, load, and what `measure` returns.
    """
    main = sys.modules["__main__"]
    parser = argparse.ArgumentParser(description=main.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    for option in inspect.signature(measure, eval_str=True).parameters.values():
        _add_option(parser, option)
    options, load = vars(parser.parse_args()), load_average()
    out = options.pop("out").resolve()
    figures = measure(**options)
    program = main.__spec__.name if main.__spec__ else Path(sys.argv[0]).name
    command = _describe_command(f"python -m {program} OUT.json", options)
    result = {"name": name, "command": command, **result_context([load, load_average()]), **figures}
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _add_option(parser: argparse.ArgumentParser, option: inspect.Parameter) -> None:
    kinds = [kind for kind in get_args(option.annotation) if kind is not NoneType]
    kind = kinds[0] if isinstance(option.annotation, UnionType) else option.annotation
    settings: dict[str, Any] = {"type": kind}
    if get_origin(kind) is list:
        settings = {"type": get_args(kind)[0], "nargs": "+"}
    elif get_origin(kind) is Literal:
        settings = {"choices": get_args(kind)}
    if option.default is inspect.Parameter.empty:
        settings["required"] = True
    else:
        settings["default"] = option.default
    parser.add_argument(f"--{option.name.replace('_', '-')}", **settings)


def _describe_command(program: str, options: Mapping[str, Any]) -> str:
    """Return the call with all options; a path is named by its option, for it is another one elsewhere."""
    words = [program]
    for option, value in options.items():
        if value is not None and value != "":
            values = value if isinstance(value, list) else [value]
            texts = (option.upper() if isinstance(value, Path) else str(value) for value in values)
            words.append(f"--{option.replace('_', '-')} {' '.join(texts)}")
    return " ".join(words)
