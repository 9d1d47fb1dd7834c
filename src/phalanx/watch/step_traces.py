"""A trace for each step, sent to a collector by OTLP over HTTP; made from ``metrics.jsonl``, beside the run.

The id of a step's trace is a digest of the run's name and the step: every party can add spans of its own to the same
trace, and no message needs a field for it.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from opentelemetry.context import Context
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from phalanx.closing import Closeable
from phalanx.config import printable_text
from phalanx.serve.observe.config import TraceConfig
from phalanx.serve.observe.traces import open_provider

_MAX_LINKS, _MAX_PHASES, _MAX_PARTIES = 64, 64, 256


def step_trace_id(run_id: str, step: int) -> int:
    """Return the id of a step's trace: 128 bits, the same for everybody who knows the run's random name."""
    return _derive_ids(run_id, step)[0]


def _derive_ids(run_id: str, step: int) -> tuple[int, int]:
    """Return the ids of a step's trace and of the span that is its root."""
    digest = hashlib.sha256(f"phalanx step {run_id} {step}".encode()).digest()
    return int.from_bytes(digest[:16], "big"), int.from_bytes(digest[16:24], "big")


class _StepIds(RandomIdGenerator):
    """Ids that everybody can derive for the root of a step, random ones for all other spans."""

    trace_id = 0
    root_id: int | None = None

    def generate_trace_id(self) -> int:
        return self.trace_id

    def generate_span_id(self) -> int:
        root_id, self.root_id = self.root_id, None
        return super().generate_span_id() if root_id is None else root_id


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
        self._last = (-1, 0, 0)
        self._has_ended = False
        self._provider = open_provider(config, count_lost, self._ids)
        self._tracer = self._provider.get_tracer("phalanx.train")

    def send_steps(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Queue the spans of applied steps, as ``metrics.jsonl`` has them."""
        for row in rows:
            if isinstance(row.get("time"), float) and _is_duration(row.get("wall_s")):
                # workers report a step after it was applied, so with the line of the next one
                self._send_parties(row.get("party_phases"))
                self._send_step(row, row["time"], row["wall_s"])
                # times of sites and clients are of the round itself
                self._send_parties(row.get("party_phases"))

    def send_last_parties(self, summary: Mapping[str, Any]) -> None:
        """Queue, once, the workers' spans of the last step, which the summary has."""
        if not self._has_ended:
            self._has_ended = True
            self._send_parties(summary.get("party_phases"))

    def _send_parties(self, parties: Any) -> None:
        """Send a span for each worker in the trace of the last step that was sent, with one for each of its phases."""
        step, start, stop = self._last
        ids = SpanContext(*_derive_ids(self._run_id, step), is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
        context = set_span_in_context(NonRecordingSpan(ids))
        for name, report in list(parties.items())[:_MAX_PARTIES] if isinstance(parties, dict) else ():
            phases = report.get("seconds") if isinstance(report, dict) and report.get("step") == step else None
            if isinstance(phases, dict):
                party = printable_text(str(name), 80)
                attributes: dict[str, str | int | bool] = {"phalanx.party": party, "phalanx.step": step}
                span = self._tracer.start_span(
                    "phalanx.party",
                    context=context,
                    attributes=attributes | {"phalanx.claimed": report.get("measured") is not True},
                    start_time=start,
                )
                # a worker also waits between two steps: its own time counts first, and waiting fills the rest
                wait = phases.get("wait")
                rest = (stop - start) / 1e9 - sum(s for name, s in phases.items() if name != "wait" and _is_duration(s))
                if _is_duration(wait):
                    phases = {**phases, "wait": max(0.0, min(wait, rest))}
                span.end(self._send_phases(phases, set_span_in_context(span), start, party))

    def _send_step(self, row: Mapping[str, Any], end_s: float, wall_s: float) -> None:
        step = row["step"]
        self._ids.trace_id, self._ids.root_id = _derive_ids(self._run_id, step)
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
        root = self._tracer.start_span(
            "phalanx.step", context=Context(), kind=SpanKind.INTERNAL, attributes=attributes, start_time=start
        )
        self._last = (step, start, stop)
        if row.get("non_finite"):
            root.set_status(Status(StatusCode.ERROR, "a figure of the step is no number"))
        self._send_phases(row.get("phases"), set_span_in_context(root), start, "")
        root.end(stop)

    def _send_phases(self, phases: Any, context: Any, start: int, party: str) -> int:
        """Send a span for each phase, one behind the other, and return when the last one ended.

        Durations are measured, the order is that of first use.
        """
        for name, value in list(phases.items())[:_MAX_PHASES] if isinstance(phases, dict) else ():
            if isinstance(value, dict):
                self._send_phases(value, context, start, printable_text(str(name), 80))
            elif _is_duration(value):
                phase = printable_text(str(name), 80)
                attributes = {"phalanx.phase": phase, **({"phalanx.party": party} if party else {})}
                span = self._tracer.start_span(
                    f"phalanx.phase.{phase}", context=context, attributes=attributes, start_time=start
                )
                start += int(value * 1e9)
                span.end(start)
        return start

    def close(self) -> None:
        """Send what waits, for some seconds at most; closing twice is harmless."""
        self._provider.shutdown()


def _is_duration(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e7
