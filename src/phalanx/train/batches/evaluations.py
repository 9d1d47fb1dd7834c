"""Suites that measure a model while it trains, by the losses that its engine measures: no second copy of it is made."""

from collections.abc import Callable, Sequence
from pathlib import Path

import tokenizers
from torch import Tensor

from phalanx.config import digest_config
from phalanx.data import Batch
from phalanx.evaluate import EvaluationResult, RowScorer, open_suite, result_text, run_suites
from phalanx.train.config import DomainRun, RunConfig, SplitRun

FOLDER = "evaluations"
"""Of a run directory: one result with its samples for each time."""
MeasureRows = Callable[[Sequence[Batch]], Sequence[float]]
"""From batches of one row each to the sum of nats of each of them."""
_STEP_OF_LENGTH = 8


class SuiteEvaluator:
    """The suites of ``[evaluate]`` of a run file.

    Their rows are the same at every step, so all of them are measured at once: the weights of each stage of a pipeline
    are fetched once an evaluation.
    """

    def __init__(self, run: RunConfig, tokenizer_path: Path, eos_id: int, home: Path) -> None:
        settings = run.evaluate
        self._every = 0 if settings is None else settings.every
        names, limit = ((), None) if settings is None else (settings.suites, settings.limit)
        self._suites = [open_suite(name, limit=limit) for name in names]
        self._backend = tokenizers.Tokenizer.from_file(str(tokenizer_path))
        self._run, self._eos, self._home = run, eos_id, home
        self._rows: dict[str, Batch] = {}
        # a row that does not fit is refused before the first step, not after hours
        self._ask_suites(0, self._collect_row)

    @classmethod
    def from_run(cls, run: RunConfig, tokenizer_path: Path, eos_id: int, home: Path) -> "SuiteEvaluator | None":
        """Return the evaluator that a run file asks for; None where it asks for none."""
        return None if run.evaluate is None else cls(run, tokenizer_path, eos_id, home)

    def is_due(self, num_steps: int) -> bool:
        """Whether the model is evaluated after so many finished steps."""
        return num_steps % self._every == 0 or num_steps == self._run.train.steps

    def evaluate_model(self, num_steps: int, measure_rows: MeasureRows) -> EvaluationResult:
        """Evaluate the model as it is, and write the result into the run directory."""
        losses = dict(zip(self._rows, measure_rows(tuple(self._rows.values())), strict=True))
        result = self._ask_suites(num_steps, lambda ids, labels: losses[_row_key(ids, labels)])
        folder = self._home / FOLDER
        folder.mkdir(exist_ok=True)
        spare = folder / f"step-{num_steps:08}.json.tmp"
        spare.write_text(result_text(result), encoding="utf-8")
        spare.replace(spare.with_suffix(""))
        return result

    def _collect_row(self, ids: Tensor, labels: Tensor) -> float:
        self._rows[_row_key(ids, labels)] = Batch(ids, labels, (0,))
        return 1.0

    def _ask_suites(self, num_steps: int, sum_loss: Callable[[Tensor, Tensor], float]) -> EvaluationResult:
        run = self._run
        facts = {"kind": "run", "step": num_steps, "config_digest": digest_config(run), "model_digest": None}
        window = run.data.sequence_length
        # ranks that share a row have buffers of one shape, as have parties with masks
        has_one_shape = isinstance(run, SplitRun) or (
            isinstance(run, DomainRun) and run.parallel.num_ranks != run.parallel.dp
        )
        multiple = window if has_one_shape else _STEP_OF_LENGTH
        scorer = RowScorer(self._backend, self._eos, window, sum_loss, facts, multiple)
        return run_suites(f"{run.name} at step {num_steps}", scorer, self._suites, run.train.seed)


def _row_key(ids: Tensor, labels: Tensor) -> str:
    return f"{ids.tolist()} {labels.tolist()}"
