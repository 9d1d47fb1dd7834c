"""Scalars for TensorBoard, when the ``tensorboard`` extra is installed; torch is not needed for it."""

import importlib.util
import itertools
import logging
import math
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx.closing import Closeable
from phalanx.telemetry.histogram import Histogram

logger = logging.getLogger(__name__)
_STRING = 7
"""Of ``DataType`` in TensorFlow's protocol: bytes."""


class TensorBoardWriter(Closeable):
    """A writer of scalar curves to an event file in `directory`.

    Without the extra, or when the event file cannot be made, nothing is written, `note` says so in one
    line and the line is logged as a warning: a missing picture is no reason to stop a run.
    """

    def __init__(self, directory: Path) -> None:
        self.note: str | None = None
        self._protos: tuple[Any, Any] | None = None
        self._writer: Any = None
        if importlib.util.find_spec("tensorboard") is None:
            self._switch_off("not installed; pip install 'phalanx-train[tensorboard]' for its curves")
            return
        try:
            self._load_writer(directory)
        except (ImportError, OSError) as exc:
            self._switch_off(f"off ({exc})")

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """Add one point of one curve; NaN and infinity are left out, TensorBoard has no place for them."""
        self.add_scalars({name: value}, step)

    def add_scalars(self, values: Mapping[str, float], step: int) -> None:
        """Add one point to each named curve at `step`."""
        if self._writer is None or self._protos is None:
            return
        event, summary = self._protos
        points = [
            summary.Summary.Value(tag=name, simple_value=value)
            for name, value in values.items()
            if math.isfinite(value)
        ]
        if points:
            self._writer.add_event(event.Event(wall_time=time.time(), step=step, summary=summary.Summary(value=points)))

    def add_histograms(self, drawn: Sequence[Histogram], step: int) -> None:
        """Add a histogram of each tensor at `step`."""
        if self._writer is None or self._protos is None or not drawn:
            return
        event, summary = self._protos
        values = [
            summary.Summary.Value(tag=histogram.tag, histo=summary.HistogramProto(**_histogram_fields(histogram)))
            for histogram in drawn
        ]
        self._writer.add_event(event.Event(wall_time=time.time(), step=step, summary=summary.Summary(value=values)))

    def add_text(self, name: str, value: str, step: int) -> None:
        """Add one text at `step`; TensorBoard shows it as Markdown, so it is quoted as code."""
        if self._writer is None or self._protos is None:
            return
        event, summary = self._protos
        indented = "\n".join(f"    {row}" for row in value.splitlines())
        value_summary = summary.Summary.Value(tag=name)
        value_summary.metadata.plugin_data.plugin_name = "text"
        value_summary.tensor.dtype = _STRING
        value_summary.tensor.string_val.append(indented.encode("utf-8", "replace"))
        value_summary.tensor.tensor_shape.dim.add(size=1)
        self._writer.add_event(
            event.Event(wall_time=time.time(), step=step, summary=summary.Summary(value=[value_summary]))
        )

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _load_writer(self, directory: Path) -> None:
        with warnings.catch_warnings():
            # deprecations inside TensorBoard and protobuf say nothing about this run
            warnings.simplefilter("ignore")
            from tensorboard.compat.proto import event_pb2, summary_pb2  # noqa: PLC0415 - an extra
            from tensorboard.summary.writer.event_file_writer import EventFileWriter  # noqa: PLC0415

            directory.mkdir(parents=True, exist_ok=True)
            self._writer = EventFileWriter(str(directory), flush_secs=10)
        self._protos = event_pb2, summary_pb2

    def _switch_off(self, reason: str) -> None:
        self.note = f"TensorBoard: {reason}"
        logger.warning(self.note)


def _histogram_fields(drawn: Histogram) -> dict[str, Any]:
    """The fields of TensorFlow's ``HistogramProto``; sums are of the middles of bins."""
    edges = drawn.edges
    middles = [(low + right) / 2 for low, right in itertools.pairwise(edges)]
    pairs = list(zip(middles, drawn.counts, strict=True))
    return {
        "min": drawn.low,
        "max": drawn.high,
        "num": sum(drawn.counts),
        "sum": sum(middle * number for middle, number in pairs),
        "sum_squares": sum(middle * middle * number for middle, number in pairs),
        "bucket_limit": edges[1:],
        "bucket": drawn.counts,
    }
