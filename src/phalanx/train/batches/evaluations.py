"""Suites that measure a model while it trains, on the ranks that hold it: no second copy of it is made."""

from collections.abc import Callable
from pathlib import Path

import tokenizers
from torch import Tensor

from phalanx.config import digest_config
from phalanx.data import Corpus
from phalanx.data.batch import IGNORE
from phalanx.data.preferences import PairCorpus
from phalanx.evaluate import EvaluationResult, RowScorer, open_suite, result_text, run_suites
from phalanx.train.config import DomainRun, RunConfig

FOLDER = "evaluations"
"""Of a run directory: one result with its samples for each time."""
SumLoss = Callable[[Tensor, Tensor], float]


class SuiteEvaluator:
    """The suites of ``[evaluate]`` of a run file.

    Args:
        corpus: Names the vocabulary of the run.

    Raises:
        DataError: A row of a suite is malformed, or longer than the run's sequences.
    """

    def __init__(self, run: DomainRun, corpus: Corpus | PairCorpus, home: Path) -> None:
        settings = run.evaluate
        self._every = 0 if settings is None else settings.every
        names, limit = ((), None) if settings is None else (settings.suites, settings.limit)
        self._suites = [open_suite(name, limit=limit) for name in names]
        self._backend = tokenizers.Tokenizer.from_file(str(corpus.tokenizer_path))
        self._run, self._eos, self._home = run, corpus.eos_id, home
        # a row that does not fit is refused before the first step, not after hours
        self._ask_suites(0, lambda _ids, _labels: 1.0)

    @classmethod
    def from_run(cls, run: RunConfig, corpus: Corpus | PairCorpus, home: Path) -> "SuiteEvaluator | None":
        """Return the evaluator that a run file asks for; None where it asks for none."""
        return cls(run, corpus, home) if isinstance(run, DomainRun) and run.evaluate is not None else None

    def is_due(self, num_steps: int) -> bool:
        """Whether the model is evaluated after so many finished steps."""
        return num_steps % self._every == 0 or num_steps == self._run.train.steps

    def evaluate_model(self, num_steps: int, sum_loss: SumLoss) -> EvaluationResult:
        """Evaluate the model as it is, and write the result into the run directory.

        Args:
            sum_loss: From inputs and next tokens ``[1, seq]`` to the sum of nats.
        """
        result = self._ask_suites(num_steps, sum_loss)
        folder = self._home / FOLDER
        folder.mkdir(exist_ok=True)
        spare = folder / f"step-{num_steps:08}.json.tmp"
        spare.write_text(result_text(result), encoding="utf-8")
        spare.replace(spare.with_suffix(""))
        return result

    def _ask_suites(self, num_steps: int, sum_loss: SumLoss) -> EvaluationResult:
        facts = {"kind": "run", "step": num_steps, "config_digest": digest_config(self._run), "model_digest": None}
        window = self._run.data.sequence_length
        scorer = RowScorer(self._backend, self._eos, window, sum_loss, IGNORE, facts)
        return run_suites(f"{self._run.name} at step {num_steps}", scorer, self._suites, self._run.train.seed)
