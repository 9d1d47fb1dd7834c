"""The curves of a run on their way to TensorBoard and to the sinks that the run file names; no step waits for any."""

import contextlib
import fcntl
import json
import math
import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from phalanx.child import PythonProcess, last_lines
from phalanx.closing import Closeable
from phalanx.config import canonical_json, printable_text
from phalanx.telemetry.histogram import Histogram
from phalanx.telemetry.sinks import RunStatus, SinkConfig, TrackedRun
from phalanx.telemetry.tensorboard import TensorBoardWriter

_MODULE = "phalanx.telemetry.sinks.process"
_PIPE_BYTES = 1 << 20
"""Bytes on their way to one sink; beyond it points are dropped and counted."""
_LONGEST_NAME = 200

Say = Callable[[str], None]


class SinkProcess:
    """A metrics sink in a process of its own, behind a bounded pipe."""

    def __init__(self, config: SinkConfig, run: TrackedRun, home: Path, say: Say) -> None:
        self.kind = config.kind.partition("@")[0]
        self.dropped = 0
        self.error: str | None = None
        self._flush_s = config.flush_s
        self._say = say
        folder = Path(run.directory)
        folder.mkdir(parents=True, exist_ok=True)
        order = {"sink": config.model_dump(mode="json"), "home": str(home.resolve()), "run": asdict(run)}
        self._log = folder / "sink.log"
        (folder / "sink.json").write_bytes(canonical_json(order))
        self._process = PythonProcess(
            (_MODULE, str(folder / "sink.json")), {"DO_NOT_TRACK": "true"}, self._log, piped=True
        )
        self._pipe = -1 if self._process.popen.stdin is None else self._process.popen.stdin.fileno()
        os.set_blocking(self._pipe, False)
        with contextlib.suppress(OSError, AttributeError):
            fcntl.fcntl(self._pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    def send_values(self, values: Mapping[str, float], step: int) -> None:
        """Send one point of each curve, or count them as dropped; never waits."""
        for message in _value_lines(values, step):
            self._write_line(message)

    def send_histogram(self, drawn: Histogram, step: int) -> None:
        """Send one histogram, or count it as dropped; never waits."""
        message = json.dumps(
            {"step": step, "histogram": {**drawn.metrics_row(), "name": printable_text(drawn.name, _LONGEST_NAME)}}
        )
        if len(message) < select.PIPE_BUF:
            self._write_line(message.encode() + b"\n")
        else:
            self.dropped += 1

    def close_input(self, status: RunStatus, deadline: float) -> None:
        """Say that nothing more comes, as soon as there is room for it before a moment of the monotonic clock."""
        with contextlib.suppress(OSError):
            select.select([], [self._pipe], [], max(0.0, deadline - time.monotonic()))
        self._write_line(json.dumps({"status": status}).encode() + b"\n")
        if self._process.popen.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.popen.stdin.close()

    def wait_for_end(self, deadline: float) -> dict[str, Any]:
        """Wait for its end until a moment of the monotonic clock, then kill it; return its entry of the summary."""
        code = self._process.wait(max(0.0, deadline - time.monotonic()))
        if code is None:
            self._give_up(f"had not taken everything after {self._flush_s:g} s and was ended")
            self._process.kill()
            # what the library has started itself
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
        elif code:
            self._give_up(self._last_words())
        return {"kind": self.kind, "taken": self._lines_taken(code), "dropped": self.dropped, "error": self.error}

    @property
    def flush_s(self) -> float:
        """Seconds that its end may take."""
        return self._flush_s

    def _write_line(self, line: bytes) -> None:
        if self.error is not None:
            self.dropped += 1
            return
        try:
            # as a whole or not at all: it is no longer than the system writes at once
            os.write(self._pipe, line)
        except BlockingIOError:
            self.dropped += 1
        except OSError:
            self.dropped += 1
            self._give_up(self._last_words())

    def _give_up(self, reason: str) -> None:
        if self.error is None:
            self.error = printable_text(reason)
            self._say(f"tracking: {self.kind} has ended, the run goes on: {self.error}")

    def _last_words(self) -> str:
        return last_lines(self._log, otherwise=self._process.how_it_ended())

    def _lines_taken(self, code: int | None) -> int | None:
        """Return the number of lines that it took; None of a process that did not end in good order."""
        output = self._process.popen.stdout
        if output is None:
            return None
        with output:
            if code != 0:
                return None
            taken: int = json.loads(output.read())["taken"]
            return taken


class CurveWriter(Closeable):
    """Every place beside the run's own files that gets its curves."""

    def __init__(self, board: TensorBoardWriter, sinks: Sequence[SinkProcess] = ()) -> None:
        self.report: list[dict[str, Any]] = []
        self._board = board
        self._sinks = list(sinks)
        self._status: RunStatus = "completed"

    def add_scalars(self, values: Mapping[str, float], step: int) -> None:
        """Add one point to each named curve; a NaN or an infinity is left out. Never waits for a sink."""
        self._board.add_scalars(values, step)
        for sink in self._sinks:
            sink.send_values(values, step)

    def add_histograms(self, drawn: Sequence[Histogram], step: int) -> None:
        """Add histograms; sinks that have none leave them out. Never waits for a sink."""
        self._board.add_histograms(drawn, step)
        for sink in self._sinks:
            for histogram in drawn:
                sink.send_histogram(histogram, step)

    def add_text(self, name: str, value: str, step: int) -> None:
        """Add one text to TensorBoard; trackers get figures alone."""
        self._board.add_text(name, value, step)

    def close(self) -> None:
        """End all sinks at once, each within its time."""
        self._board.close()
        began = time.monotonic()
        for sink in self._sinks:
            sink.close_input(self._status, began + sink.flush_s)
        self.report += [sink.wait_for_end(began + sink.flush_s) for sink in self._sinks]
        self._sinks = []

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._status = "interrupted" if issubclass(kind, KeyboardInterrupt) else "failed"
        self.close()


def open_tracking(
    board: TensorBoardWriter, sinks: Sequence[SinkConfig], run: TrackedRun, home: Path, say: Say
) -> CurveWriter:
    """Start the sinks of a run, each with a folder of its own; one that cannot be started is named and left out.

    Args:
        run: Facts for the sinks; `directory` is the run's.
    """
    started = []
    for number, config in enumerate(sinks):
        name = config.kind if config.kind.isidentifier() else "own"
        folder = Path(run.directory) / "tracking" / f"{number}-{name}"
        sink_run = TrackedRun(run.id, run.name, str(folder), run.config)
        try:
            started.append(SinkProcess(config, sink_run, home, say))
        except OSError as exc:
            say(f"tracking: {name} is left out: {exc.strerror or exc}")
    return CurveWriter(board, started)


def _value_lines(values: Mapping[str, float], step: int) -> Iterator[bytes]:
    clean = {
        printable_text(name, _LONGEST_NAME): float(value) for name, value in values.items() if math.isfinite(value)
    }
    if not clean:
        return
    message = json.dumps({"step": step, "values": clean}).encode() + b"\n"
    if len(message) <= select.PIPE_BUF or len(clean) == 1:
        yield message
        return
    names = list(clean)
    for half in (names[: len(names) // 2], names[len(names) // 2 :]):
        yield from _value_lines({name: clean[name] for name in half}, step)
