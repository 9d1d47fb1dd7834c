"""``phalanx bench filters``: the cost of each filter, and its false alarms on clean text."""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phalanx.lab.bench.measure.clean_documents import clean_documents, paragraphs
from phalanx.lab.bench.measure.machine import bench_head, load_average
from phalanx.serve.filters import FiltersConfig, InputFilters, OutputFilters, TextFilters, TextRefused, VerbatimIndex
from phalanx.serve.filters.table import INPUTS, OUTPUTS

Row = dict[str, Any]

_PIECE_CHARACTERS = 4
"""About a token's."""
_STREAMED_DOCUMENTS = 300
_TOPICS = ("nerve agent", "pipe bomb", "project blue heron")
_WEIGHTS = "0.4\tnerve\n0.4\tagent\n0.4\tprecursor\n0.5\tbomb\n0.3\tpipe\n0.3\tfuse\n"
_CANARIES = ("the canary sings 4711 times at dawn", "my locker code is 93-17-55-28")


def bench_filters(quick: bool) -> Row:
    """Measure every filter alone and all together, on whole texts and on streams."""
    load = load_average()
    documents = clean_documents(200 if quick else 5_000)
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as directory:
        trained = paragraphs("wikitext2_valid.txt.gz")
        lists = _write_lists(Path(directory), trained)
        clean = [text for _, text in documents]
        rows = [_input_row(name, clean) for name in (*INPUTS, "all")]
        rows += [_output_row(name, lists, clean) for name in (*OUTPUTS, "all")]
        rows.append(_attack_row(lists, trained[: 50 if quick else 300]))
    return {**bench_head("filters", load, quick=quick), "piece_characters": _PIECE_CHARACTERS, "rows": rows}


def _write_lists(home: Path, trained: Sequence[str]) -> OutputFilters:
    (home / "topics.txt").write_text("\n".join(_TOPICS) + "\n", encoding="utf-8")
    (home / "canaries.txt").write_text("\n".join(_CANARIES) + "\n", encoding="utf-8")
    (home / "weights.tsv").write_text(_WEIGHTS, encoding="utf-8")
    VerbatimIndex.write(home / "trained.npy", trained)
    return OutputFilters(
        topic_files=(home / "topics.txt",),
        canary_files=(home / "canaries.txt",),
        topic_weights=home / "weights.tsv",
        verbatim_index=home / "trained.npy",
    )


def _input_row(name: str, texts: Sequence[str]) -> Row:
    noting = {other: "note" if name in (other, "all") else "off" for other in INPUTS}
    actions = InputFilters().model_copy(update=noting)
    filters = TextFilters(FiltersConfig(input=actions))
    started = time.process_time()
    touched = sum(bool(filters.check_input(text)) for text in texts)
    return _row("input", name, texts, time.process_time() - started, touched)


def _output_row(name: str, lists: OutputFilters, texts: Sequence[str]) -> Row:
    noting = {other: "note" if name in (other, "all") else "off" for other in OUTPUTS}
    filters = TextFilters(FiltersConfig(output=lists.model_copy(update=noting)))
    started = time.process_time()
    touched = sum(bool(filters.check_output(text)) for text in texts)
    row = _row("output", name, texts, time.process_time() - started, touched)
    refusing = {other: "refuse" if name in (other, "all") else "off" for other in OUTPUTS}
    return row | _stream(TextFilters(FiltersConfig(output=lists.model_copy(update=refusing))), texts)


def _row(way: str, name: str, texts: Sequence[str], cpu_s: float, touched: int) -> Row:
    size = sum(len(text.encode()) for text in texts) / 1e6
    row = {"way": way, "filter": name, "documents": len(texts), "mb": size, "mb_per_cpu_s": size / cpu_s}
    return row | {"touched": touched}


def _stream(filters: TextFilters, texts: Sequence[str]) -> Row:
    """Feed texts piece by piece, with the filter refusing: cost of a piece, and characters held back."""
    pieces, held, max_held, spent = 0, 0, 0, 0.0
    for text in texts[:_STREAMED_DOCUMENTS]:
        stream, waiting = filters.open_stream(), 0
        started = time.process_time()
        try:
            for start in range(0, len(text), _PIECE_CHARACTERS):
                piece = text[start : start + _PIECE_CHARACTERS]
                waiting += len(piece) - len(stream.feed(piece))
                pieces, held, max_held = pieces + 1, held + waiting, max(max_held, waiting)
            stream.close()
        except TextRefused:
            pass
        spent += time.process_time() - started
    return {"us_per_piece": 1e6 * spent / pieces, "held_characters": held / pieces, "max_held_characters": max_held}


def _attack_row(lists: OutputFilters, trained: Sequence[str]) -> Row:
    """Play a model that recites its training text: how often it is stopped, and how much of it goes out before."""
    filters = TextFilters(FiltersConfig(output=lists))
    stopped, max_out = 0, 0
    for text in trained:
        stream, out = filters.open_stream(), 0
        try:
            for start in range(0, len(text), _PIECE_CHARACTERS):
                out += len(stream.feed(text[start : start + _PIECE_CHARACTERS]))
            stream.close()
        except TextRefused:
            stopped, max_out = stopped + 1, max(max_out, out)
    return {"way": "attack", "filter": "verbatim", "documents": len(trained), "stopped": stopped, "max_out": max_out}
