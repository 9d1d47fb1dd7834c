"""The process of one metrics sink: ``python -m phalanx.telemetry.sinks.process FILE``, points as lines on its input.

A library that hangs, raises, leaves threads behind or asks at the terminal does so here, where the run does not wait.
"""

import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from phalanx.config import StrictModel, canonical_json, is_own, open_own_code, users_traceback
from phalanx.errors import ConfigError
from phalanx.telemetry.histogram import Histogram
from phalanx.telemetry.sinks import Sink, SinkConfig, TrackedRun, open_sink
from phalanx.telemetry.sinks.sink import HistogramSink


class SinkOrder(StrictModel):
    """The file that says which sink a process is.

    Attributes:
        home: The run file's directory, for a sink of the user's own.
        run: Facts of the run, as `TrackedRun`.
    """

    sink: dict[str, Any]
    home: str
    run: dict[str, Any]


def feed_sink(order: SinkOrder, lines: Any) -> int:
    """Hand points to a sink until the lines end; return how many it took."""
    config: SinkConfig = TypeAdapter[Any](SinkConfig).validate_json(canonical_json(order.sink))
    if is_own(config.kind):
        open_own_code(config.kind, Path(order.home))
    sink: Sink = open_sink(config)
    sink.begin(TrackedRun(**order.run))
    taken, status = 0, "failed"
    for text in lines:
        message = json.loads(text)
        status = message.get("status", status)
        if "values" in message:
            sink.scalars(message["values"], message["step"])
            taken += 1
        if "histogram" in message and isinstance(sink, HistogramSink):
            histogram = message["histogram"]
            sink.histogram(Histogram(**{**histogram, "counts": tuple(histogram["counts"])}), message["step"])
            taken += 1
    sink.end(status)  # type: ignore[arg-type] # our own starter wrote it
    return taken


def main(arguments: Sequence[str]) -> int:
    """Be one sink; the last line of the output says how many points it took."""
    order = SinkOrder.model_validate_json(Path(arguments[0]).read_bytes())
    # libraries that ask or print meet neither the points nor the answer
    lines = os.fdopen(os.dup(0), encoding="utf-8")
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    try:
        taken = feed_sink(order, lines)
    except ConfigError as exc:
        sys.stderr.write(f"{exc}\n")
        return 1
    except Exception as exc:  # noqa: BLE001 - whatever a library or the user's own code raises ends this process alone
        sys.stderr.write(users_traceback(exc) if is_own(order.sink["kind"]) else traceback.format_exc())
        sys.stderr.write(f"\n{type(exc).__name__}: {str(exc)[:300]}\n")
        return 1
    answer.write(json.dumps({"taken": taken}))
    answer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
