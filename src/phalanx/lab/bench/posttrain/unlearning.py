"""One document, unlearned and erased: results of the relearning test on each model.

``python -m phalanx.lab.bench.posttrain.unlearning OUT [--documents 400] [--copies 12] [--steps 700] [--seeds 3]``

Documents are entries of CPython's library, a few names with the first sentences of their docstrings each. One of them
stands in the text several times, as what leaks is often what was copied. A GPT-2 of three layers is trained on them by
`phalanx.train`; then the document is unlearned as ``phalanx unlearn`` does it, and erased as ``phalanx erase`` does.
"""

import io
import json
import random
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from phalanx.data.build.encoding import split_of
from phalanx.data.build.recipe import DataRecipe
from phalanx.data.build.run import build_recipe
from phalanx.data.shards import default_signing_key, document_digest, load_signer
from phalanx.data.sources import PythonDocstringsConfig, open_source
from phalanx.governance.erasure import Erasure
from phalanx.governance.relearning import RelearningFinding, RelearningPlan, TextScore, judge_relearning, score_text
from phalanx.governance.unlearning import Unlearning, UnlearningPlan, UnlearningTexts
from phalanx.lab.bench.measure.harness import print_progress, run_program
from phalanx.lab.bench.measure.workloads import dataset_run
from phalanx.serve import TextModel
from phalanx.train import PastRun, PipelineRun, export_run, train

_ENTRY = re.compile(r"(?m)^([a-z_]\w*(?:\.\w+)+)\n([A-Z][^\n]{15,90}\.)(?:\n|$)")
_VOCAB_SIZE, _LENGTH, _ENTRIES = 1024, 128, 4


def measure_document(documents: int, copies: int, steps: int, seed: int) -> list[dict[str, Any]]:
    """Train, unlearn and erase once.

    Returns:
        A row for each of the models ``before``, ``unlearned`` and ``erased``: loss of the document and the share of its
        tokens that are the model's first choice, mean loss of retained texts and of texts never seen, the same scores
        of the second half before and at the best of the steps on the first half, and the rank test.
    """
    with tempfile.TemporaryDirectory() as spare:
        home = Path(spare)
        digest = _build_dataset(home, documents, copies, seed)
        train(_make_run(home, steps, seed), home / "run", console=Console(file=io.StringIO()))
        past = PastRun(home / "run")
        unlearning, plan = Unlearning(past, digest), UnlearningPlan(seed=seed)
        result = unlearning.unlearn_document(home / "unlearned", load_signer(default_signing_key()), plan)
        Erasure(past, digest).erase_document(home / "without", home / "erased-run", Console(file=io.StringIO()))
        export_run(past, home / "before")
        export_run(PastRun(home / "erased-run"), home / "erased")
        texts, test = unlearning.choose_texts(plan), unlearning.make_test(_LENGTH)
        rows = []
        for arm in ("before", "unlearned", "erased"):
            module = TextModel(home / arm).module
            # of the unlearned model it is the command's own
            finding = (
                result.relearning
                if arm == "unlearned"
                else judge_relearning(module, texts.forgotten, texts.never_seen, test)
            )
            updates = result.steps if arm == "unlearned" else None
            rows.append({"seed": seed, "arm": arm, "updates": updates, **_describe_model(module, texts, test, finding)})
        return rows


def _describe_model(
    module: Any, texts: UnlearningTexts, test: RelearningPlan, finding: RelearningFinding
) -> dict[str, Any]:
    score = score_text(module, texts.forgotten, test.length)
    retained, never_seen = (
        [score_text(module, text, test.length).loss for text in group] for group in (texts.retained, texts.never_seen)
    )
    first, best = finding.forgotten.scores[0], finding.forgotten.best
    return {
        "tokens": len(texts.forgotten),
        **_describe_score("document", score),
        "retained_loss": _mean(retained),
        "never_seen_loss": _mean(never_seen),
        **_describe_score("half", first),
        **_describe_score("relearned_half", best),
        "gain": finding.forgotten.gain,
        "never_seen_gain_mean": _mean(finding.never_seen),
        "never_seen_gain_max": max(finding.never_seen),
        "num_never_seen": len(finding.never_seen),
        "p": finding.p,
        "is_hidden": finding.is_hidden,
    }


def _describe_score(name: str, score: TextScore) -> dict[str, float]:
    return {f"{name}_loss": score.loss, f"{name}_likeliest": score.likeliest}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _build_dataset(home: Path, documents: int, copies: int, seed: int) -> str:
    """Build the dataset; return the digest of the document that is in it several times."""
    matches = [_ENTRY.findall(document.text) for document in open_source(PythonDocstringsConfig()).documents()]
    lines = sorted({f"{name}: {sentence}" for entries in matches for name, sentence in entries})
    random.Random(seed).shuffle(lines)  # noqa: S311
    texts = ["\n".join(lines[start : start + _ENTRIES]) for start in range(0, documents * _ENTRIES, _ENTRIES)]
    recipe = DataRecipe.model_validate(
        {
            "sources": tuple(
                {"kind": "jsonl", "path": home / f"{name}.jsonl", "name": name} for name in ("texts", "copies")
            ),
            "tokenizer": {"kind": "bpe", "vocab_size": _VOCAB_SIZE},
            "output": {"signer": home / "key", "validation_share": 0.15},
        }
    )
    copied = next(text for text in texts if split_of(document_digest(text), recipe.output) == "train")
    (home / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    (home / "copies.jsonl").write_text((json.dumps({"text": copied}) + "\n") * (copies - 1), encoding="utf-8")
    build_recipe(recipe, home / "dataset")
    return document_digest(copied)


def _make_run(home: Path, steps: int, seed: int) -> PipelineRun:
    sizes = {"layers": 3, "vocab_size": _VOCAB_SIZE, "length": _LENGTH}
    return dataset_run(home / "dataset", **sizes, steps=steps, seed=seed)


def measure_seeds(documents: int = 400, copies: int = 12, steps: int = 700, seeds: int = 3) -> dict[str, Any]:
    """Measure with each seed."""
    rows: list[dict[str, Any]] = []
    for seed in range(seeds):
        rows += measure_document(documents, copies, steps, seed)
        print_progress(f"seed {seed}: {[(row['arm'], row['p']) for row in rows[-3:]]}", "unlearning")
    return {"rows": rows}


if __name__ == "__main__":
    run_program("unlearning", measure_seeds)
