"""A trace for each step, sent to a collector by OTLP over HTTP; made from ``metrics.jsonl``, beside the run.

The id of a step's trace is a digest of the run's name and the step: every party can add spans of its own to the same
trace, and no message needs a field for it.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

from phalanx.closing import Closeable
from phalanx.serve.observe.config import TraceConfig
from phalanx.serve.observe.traces import open_provider

_MAX_LINKS, _MAX_PHASES = 64, 64


def step_trace_id(run_id: str, step: int) -> int:
    """Return the id of a step's trace: 128 bits, the same for everybody who knows the run's random name."""
    return int.from_bytes(hashlib.sha256(f"phalanx step {run_id} {step}".encode()).digest()[:16], "big")


class _StepIds(RandomIdGenerator):
    trace_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id


class StepTraces(Closeable):
    """The traces of one run's steps.

    Args:
        count_lost: Is told how many spans a collector did not take.

    Guarantees:
        Sending waits for no collector: spans stand in a queue of bounded length; a span that finds no place in it, or
        that the collector refuses, is lost.
    """

    def __init__(self, config: TraceConfig, run_id: str, count_lost: Callable[[int], None]) -> None:
        self._run_id, self._ids = run_id, _StepIds()
        self._provider = open_provider(config, count_lost, self._ids)
        self._tracer = self._provider.get_tracer("phalanx.train")

    def send_steps(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Queue the spans of applied steps, as ``metrics.jsonl`` has them."""
        for row in rows:
            if isinstance(row.get("time"), float) and _is_duration(row.get("wall_s")):
                self._send_step(row, row["time"], row["wall_s"])

    def _send_step(self, row: Mapping[str, Any], end_s: float, wall_s: float) -> None:
        step = row["step"]
        self._ids.trace_id = step_trace_id(self._run_id, step)
        stop, start = int(end_s * 1e9), int((end_s - wall_s) * 1e9)
        figures = {
            "loss": "phalanx.loss",
            "tokens": "phalanx.tokens",
            "audits": "phalanx.audits",
            "alarms": "phalanx.alarms",
        }
        attributes: dict[str, str | int | float] = {"phalanx.run": self._run_id, "phalanx.step": step}
        attributes |= {key: row[name] for name, key in figures.items() if isinstance(row.get(name), int | float)}
        links = row.get("bytes")
        for link, size in list(links.items())[:_MAX_LINKS] if isinstance(links, dict) else ():
            if isinstance(size, int):
                attributes[f"phalanx.link.{link}"[:120]] = size
        root = self._tracer.start_span("phalanx.step", kind=SpanKind.INTERNAL, attributes=attributes, start_time=start)
        if row.get("non_finite"):
            root.set_status(Status(StatusCode.ERROR, "a figure of the step is no number"))
        self._send_phases(row.get("phases"), set_span_in_context(root), start, "")
        root.end(stop)

    def _send_phases(self, phases: Any, context: Any, start: int, party: str) -> None:
        """Send a span for each phase, one behind the other: durations are measured, the order is that of first use."""
        for name, value in list(phases.items())[:_MAX_PHASES] if isinstance(phases, dict) else ():
            if isinstance(value, dict):
                self._send_phases(value, context, start, str(name)[:80])
            elif _is_duration(value):
                attributes = {"phalanx.phase": str(name)[:80], **({"phalanx.party": party} if party else {})}
                span = self._tracer.start_span(
                    f"phalanx.phase.{name}"[:120], context=context, attributes=attributes, start_time=start
                )
                start += int(value * 1e9)
                span.end(start)

    def close(self) -> None:
        """Send what waits, for some seconds at most; closing twice is harmless."""
        self._provider.shutdown()


def _is_duration(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e7
