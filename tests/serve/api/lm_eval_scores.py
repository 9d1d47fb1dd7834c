"""Scores of lm-eval's own adapters: ``python lm_eval_scores.py URL MODEL_DIR FOLDER``; prints JSON.

``PHALANX_LM_EVAL`` is a folder with lm_eval where the environment has none; ``OPENAI_API_KEY`` is the key.
"""

import json
import os
import random
import sys
from pathlib import Path

WORDS = ["the", "end", "of", "a", "day", "and", "in", "an", "inn", "he", "made", "it", "to", "be", "thin", "men", "hat"]
CHOICES = """task: tiny_choices
dataset_path: json
dataset_kwargs: {{data_files: {rows}}}
test_split: train
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
ROLLING = """task: tiny_rolling
dataset_path: json
dataset_kwargs: {{data_files: {rows}}}
test_split: train
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: bits_per_byte}}]
"""
WRITTEN = """task: tiny_written
dataset_path: json
dataset_kwargs: {{data_files: {rows}}}
test_split: train
output_type: generate_until
doc_to_text: "{{{{context}}}}"
doc_to_target: "the"
generation_kwargs: {{until: ["zzz"], max_gen_toks: 12, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""


def write_tasks(folder: Path) -> None:
    """Write three tasks with their rows."""
    rng = random.Random(7)

    def text(count: int) -> str:
        return " ".join(rng.choices(WORDS, k=count))

    rows = [
        {
            "context": text(rng.randrange(1, 20)),
            "choices": [text(rng.randrange(1, 5)) for _ in range(4)],
            "answer": rng.randrange(4),
            "text": text(rng.randrange(5, 120)),
        }
        for _ in range(25)
    ]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, task in (("choices", CHOICES), ("rolling", ROLLING), ("written", WRITTEN)):
        (folder / f"{name}.yaml").write_text(task.format(rows=path))


def main(url: str, model: str, folder: str) -> None:
    """Score by the API, one by one and in batches, and by transformers here."""
    if "PHALANX_LM_EVAL" in os.environ:
        sys.path.append(os.environ["PHALANX_LM_EVAL"])
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    from lm_eval.tasks import TaskManager

    write_tasks(Path(folder))
    served = {"model": "tiny", "base_url": f"{url}/v1/completions", "tokenizer": model, "max_length": 256}
    served |= {"tokenizer_backend": "huggingface", "max_gen_toks": 12}
    adapters = {
        # rolling windows of the API adapter are two tokens shorter than its max_length
        "here": lambda: HFLM(pretrained=model, dtype="float32", device="cpu", batch_size=1, max_length=254),
        "api, one by one": lambda: LocalCompletionsAPI(**served),
        "api, eight at once": lambda: LocalCompletionsAPI(**served, batch_size=8),
    }
    scores = {}
    for name, make_adapter in adapters.items():
        result = lm_eval.simple_evaluate(
            model=make_adapter(),
            tasks=["tiny_choices", "tiny_rolling", "tiny_written"],
            task_manager=TaskManager(include_path=folder, include_defaults=False),
            bootstrap_iters=0,
        )
        samples = {
            task: [[sample["doc_id"], sample["filtered_resps"]] for sample in rows]
            for task, rows in result["samples"].items()
        }
        numbers = {
            task: {key: value for key, value in row.items() if isinstance(value, float)}
            for task, row in result["results"].items()
        }
        scores[name] = {"samples": samples, "results": numbers}
    sys.stdout.write("\n" + json.dumps({"version": lm_eval.__version__, "scores": scores}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
