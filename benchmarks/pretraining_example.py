"""What do the examples of encoders learn, beside a model that knows only how often each token is to be predicted?

``python benchmarks/pretraining_example.py EXAMPLE RUN_DIR MODEL OUT.json`` reads a finished run of
``examples/EXAMPLE.toml``.

Words are targets that are neither sentinels nor ends. Unigrams are counted, plus one each, over the words that the
run's own first batches predict; model and unigrams are measured on the words of the same held-out rows.
"""

import argparse
import math
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from finished_run import FinishedRun, write_result
from torch import Tensor
from torch.nn.functional import cross_entropy

from phalanx.data import IGNORE, Batch, prepare
from phalanx.data.loader import BatchLoader, validation_batches
from phalanx.models import ModelSource, StageSpec, build_stage, with_marks
from phalanx.train.batches.rewriting import measured, rewriting_of

BATCHES = 300


def main() -> None:
    """Write one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("example")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("model", type=Path, help="what `phalanx checkpoint export RUN_DIR MODEL` wrote")
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    file = Path("examples") / f"{arguments.example}.toml"
    run = FinishedRun(file, arguments.run_dir)
    name = run.config.name
    facts = run.facts(
        f"{arguments.example}-example",
        f"phalanx checkpoint export runs/{name} models/{name}; "
        f"python benchmarks/pretraining_example.py {arguments.example} runs/{name} models/{name} OUT.json",
    )
    result = facts | {
        "audits": run.summary["audits"],
        "detections": run.summary["detections"],
        "false_accusations": run.summary["false_accusations"],
        "held_out_perplexity": run.perplexities(),
        "on_words": on_words(run.config, arguments.model),
    }
    write_result(arguments.out, result)


def on_words(run: Any, model: Path) -> dict[str, float]:
    """Perplexity of the exported model, and of unigrams, on the words of held-out rows."""
    with tempfile.TemporaryDirectory() as cache:
        corpus = prepare(run.data, Path(cache), run.train.seed)
        rewriting = rewriting_of(run, corpus)
        if rewriting is None:
            sys.exit(f"{run.name}: its objective makes no rows of its own")
        special = torch.from_numpy(rewriting.rows.table.special)  # type: ignore[attr-defined]
        loader = BatchLoader(corpus, run.train.draws, run.train.seed, rewrite=rewriting)
        counts = np.ones(corpus.vocab_size)
        for _ in range(BATCHES):
            counts += np.bincount(words(loader.next(), special)[1].numpy(), minlength=corpus.vocab_size)
        share = torch.from_numpy(np.log(counts / counts.sum()))
        held = list(validation_batches(measured(corpus, rewriting), 16))
    targets = [words(batch, special)[1] for batch in held]
    number = sum(len(one) for one in targets)
    return {
        "targets": number,
        "model": math.exp(sum(losses(model, held, special)) / number),
        "unigrams": math.exp(-sum(float(share[one].sum()) for one in targets) / number),
    }


def words(batch: Batch, special: Tensor) -> tuple[Tensor, Tensor]:
    """Where the words of a batch are, bool ``[batch, seq]``, and which."""
    labels = batch.labels
    where = (labels != IGNORE) & ~special[labels.clamp(min=0)]
    return where, labels[where]


@torch.no_grad()
def losses(model: Path, batches: list[Batch], special: Tensor) -> Iterator[float]:
    """Summed loss of each batch's words."""
    source = ModelSource(model)
    whole = StageSpec(0, 1, 0, source.num_layers)
    stage = build_stage(source, whole, adapter=None, activation_checkpointing=False, attention="sdpa", seed=0).eval()
    for batch in batches:
        where, wanted = words(batch, special)
        yield float(cross_entropy(stage(with_marks(batch.input_ids, batch.extras))[where], wanted, reduction="sum"))


if __name__ == "__main__":
    main()
