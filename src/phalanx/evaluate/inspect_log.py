"""An evaluation as a log that the viewer of inspect reads: its JSON form, one log a suite.

Source: inspect-ai 0.3, ``inspect_ai.log.EvalLog``, version 2.
"""

import hashlib
from datetime import UTC, datetime
from typing import Any

from phalanx.config import escape_controls
from phalanx.evaluate.evaluation import EvaluationResult, SuiteResult


def inspect_log(result: EvaluationResult, suite: SuiteResult, moment: datetime | None = None) -> dict[str, Any]:
    """Return the log of one suite; text of a model is shown with its control characters escaped.

    Args:
        moment: Time of the evaluation; now where left out.
    """
    time = (moment or datetime.now(tz=UTC)).isoformat(timespec="seconds")
    identity = hashlib.sha256(f"{result.model}{suite.suite_digest}{result.seed}".encode()).hexdigest()[:22]
    by_id: dict[str, list[Any]] = {}
    for sample in suite.samples:
        by_id.setdefault(sample.id, []).append(sample)
    metrics = {
        figure.metric: {
            "name": figure.metric,
            "value": figure.value,
            "params": {"low": figure.low, "high": figure.high, "n": figure.n, "method": figure.method},
        }
        for figure in suite.figures
        if figure.value is not None
    }
    dataset = {"name": suite.name, "samples": suite.num_rows, "sample_ids": list(by_id), "shuffled": False}
    facts = {name: value for name, value in result.model.items() if value is not None}
    digests = {"suite_digest": suite.suite_digest, "data_digest": suite.data_digest}
    return {
        "version": 2,
        "status": "success",
        "eval": {
            "eval_id": identity,
            "run_id": identity,
            "task_id": identity,
            "created": time,
            "task": suite.name,
            "task_version": suite.version,
            "dataset": dataset,
            "model": escape_controls(result.subject),
            "config": {},
            "packages": result.versions,
            "metadata": {**facts, **digests, "seed": result.seed, "notes": list(suite.notes)},
        },
        "plan": {"name": "plan", "steps": [], "config": {}},
        "results": {
            "total_samples": len(by_id),
            "completed_samples": len(by_id),
            "scores": [{"name": suite.name, "scorer": suite.kind, "params": {}, "metrics": metrics}],
        },
        "stats": {"started_at": time, "completed_at": time, "model_usage": {}},
        "samples": [_sample_log(identity, samples) for identity, samples in by_id.items()],
    }


def log_name(log: dict[str, Any]) -> str:
    """Return the file name of a log; inspect's viewer lists JSON files only where their name begins with a time."""
    moment = log["eval"]["created"].replace(":", "-")
    return f"{moment}_{log['eval']['task']}_{log['eval']['task_id']}.json"


def _sample_log(identity: str, samples: list[Any]) -> dict[str, Any]:
    shown = next((escape_controls(sample.shown) for sample in samples if sample.shown), "")
    scores = {sample.metric: {"value": sample.value, "answer": shown or None} for sample in samples}
    message = {"role": "assistant", "content": shown, "source": "generate"}
    choices = [{"message": message, "stop_reason": "stop"}] if shown else []
    return {
        "id": identity,
        "epoch": 1,
        "input": identity,
        "target": "",
        "messages": [message] if shown else [],
        "output": {"model": "", "choices": choices},
        "scores": scores,
        "metadata": {"cluster": samples[0].cluster},
    }
