"""``phalanx bench marks``: is marked text the model's, is nobody accused, what finds a mark, and what does it cost?"""

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from phalanx.lab.bench.measure.clean_documents import clean_documents, paragraphs
from phalanx.lab.bench.measure.machine import bench_head, load_average
from phalanx.lab.bench.serving.mark_theory import (
    cost_rows,
    drawn_keys,
    entropy_rows,
    false_alarm_rows,
    marginal_rows,
)
from phalanx.lab.bench.serving.marked_texts import BatchWriter, quality_rows, robustness_rows, write_all
from phalanx.models.packaged import open_packaged
from phalanx.models.quiet import quiet_transformers

MODEL = "smollm2-135m"
MODELS_VARIABLE = "PHALANX_BENCH_MODELS"
"""Names a folder that keeps the converted model between two benches."""
_PROMPT_TOKENS = 16
_MAX_DOCUMENT_TOKENS = 400


def bench_marks(quick: bool) -> dict[str, Any]:
    """Measure every claim about marked text."""
    load, writer = load_average(), open_writer()
    rows = [
        *marginal_rows(10_000 if quick else 100_000),
        *entropy_rows(20 if quick else 100, (1.0, 3.0) if quick else (0.25, 0.5, 1.0, 2.0, 3.0)),
        *cost_rows(writer.model.config.vocab_size, 20 if quick else 100),
        _model_row(writer.model, 10 if quick else 50),
        *_text_rows(writer, quick),
        *_false_alarms(writer, 200 if quick else 10_000),
    ]
    return {**bench_head("marks", load, quick=quick), "model": MODEL, "rows": rows}


def open_writer() -> BatchWriter:
    """Open the packaged model as a writer of batches."""
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as spare:
        directory = open_packaged(MODEL, Path(os.environ.get(MODELS_VARIABLE) or spare))
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
            model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True).eval()
    return BatchWriter(model, tokenizer)


def _text_rows(writer: BatchWriter, quick: bool) -> list[dict[str, Any]]:
    key = drawn_keys(1, 7)[0]
    prompts = draw_prompts(writer, 4 if quick else 32)
    texts = write_all(writer, prompts, key, 40 if quick else 120, 32)
    return [
        *quality_rows(writer, texts, key),
        *robustness_rows(writer, texts["marked, temperature 1"], key),
    ]


def draw_prompts(writer: BatchWriter, count: int) -> list[list[int]]:
    """Return the beginnings of encyclopedia paragraphs, all of one length."""
    encoded = (writer.tokenize(paragraph) for paragraph in paragraphs("wikitext2_valid.txt.gz")[:count])
    return [ids[:_PROMPT_TOKENS] for ids in encoded]


def _false_alarms(writer: BatchWriter, count: int) -> list[dict[str, Any]]:
    documents = [(kind, writer.tokenize(text)[:_MAX_DOCUMENT_TOKENS]) for kind, text in clean_documents(count)]
    return false_alarm_rows(documents, drawn_keys(32, 11))


def _model_row(model: Any, rounds: int) -> dict[str, Any]:
    """Time the model's own work for one token behind a prompt, alone."""
    inputs = torch.ones((1, _PROMPT_TOKENS), dtype=torch.int64)
    with torch.no_grad():
        cache = model(inputs, use_cache=True).past_key_values
        started = time.process_time()
        for _ in range(rounds):
            model(inputs[:, :1], past_key_values=cache, use_cache=True)
        spent = time.process_time() - started
    return {"part": "model", "model": MODEL, "ms_per_token": 1e3 * spent / rounds}
