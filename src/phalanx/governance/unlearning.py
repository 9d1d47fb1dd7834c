"""Approximate unlearning: a run's model is pushed away from a document until the document looks like one never seen.

The result is not what a run without the document would have been, and is never called erased: the statement beside it
says so, and `relearning` shows how much of the text is left. Erasure is `phalanx.governance.erasure`.

Source: Liu et al. 2022 (gradient difference), with two bounds: a token at chance, and a row at the loss of texts never
seen, are pushed no further, since a text that is unlikelier than any other stands out.
"""

import copy
import importlib.metadata
import itertools
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.checkpoint import manifest_digest, step_directory
from phalanx.checkpoint.exported import digest_model
from phalanx.config import canonical_json
from phalanx.data.shards.lookup import find_document
from phalanx.data.shards.proof import DocumentPlace
from phalanx.errors import DataError, ModelError, TrainingError
from phalanx.evaluate.intervals import mean_interval, paired_test
from phalanx.governance.erasure import find_places, open_trained_data
from phalanx.governance.relearning import (
    MAX_P,
    MIN_TOKENS,
    RelearningFinding,
    RelearningPlan,
    TextScore,
    Tokens,
    cut_rows,
    judge_relearning,
    score_text,
    token_losses,
)
from phalanx.governance.release import require_release
from phalanx.governance.statements import sign_by_ed25519
from phalanx.models.directory import publish_model, read_config, refuse_existing, spare_directory
from phalanx.security.crypto import Identity
from phalanx.serve import TextModel
from phalanx.train import PastRun, export_run
from phalanx.verifier.kinds import EXPORT_FILE
from phalanx.verifier.statement import EXPORT_PREDICATE, hash_file

STATE = "approximately unlearned, not erased"
RECORD_FILE = "unlearning.json"
_BATCH = 8
_README = f"""This model was {STATE}.

A run was trained on a document, and its weights were changed afterwards so that the document looks like a text that
was never seen. It is not the model of a run without the document, and the document may come back by a little training:
{RECORD_FILE} has the measured test. Whoever needs the document gone uses `phalanx erase`.
"""


@dataclass(frozen=True)
class UnlearningPlan:
    """How a document is unlearned and tested.

    Attributes:
        steps: Largest number of updates; fewer where the document looks like texts never seen before.
        rate: Learning rate of AdamW; None takes 0.3 of that of the relearning test.
        retained: Documents whose loss is kept low meanwhile; as many others are measured.
        never_seen: Documents of the validation split that the test compares with.
    """

    steps: int = 100
    rate: float | None = None
    retained: int = 32
    never_seen: int = 24
    seed: int = 0


@dataclass(frozen=True)
class UnlearningTexts:
    """The texts of one unlearning, by their role.

    Attributes:
        anchors: Retained documents that are trained on meanwhile.
        retained: Other retained documents, which are measured alone.
        never_seen: Documents that no step of the run was trained on.
    """

    forgotten: Tokens
    anchors: tuple[Tokens, ...]
    retained: tuple[Tokens, ...]
    never_seen: tuple[Tokens, ...]


@dataclass(frozen=True)
class UnlearningResult:
    """What unlearning has changed.

    Attributes:
        has_reached: Whether each row of the document came to the loss of texts never seen.
        scores: Scores of the document, before and after.
        retained: Losses of each retained text that is measured, before and after.
        never_seen: Losses of each text never seen, before and after.
    """

    steps: int
    has_reached: bool
    scores: tuple[TextScore, TextScore]
    retained: tuple[tuple[float, ...], tuple[float, ...]]
    never_seen: tuple[tuple[float, ...], tuple[float, ...]]
    relearning: RelearningFinding

    @property
    def is_decidable(self) -> bool:
        """Whether the document came to the loss of texts never seen, and the test can measure the rest."""
        return self.has_reached and self.relearning.is_decidable

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data, with 95 % intervals of means over texts."""
        before, after = self.scores
        return {
            "steps": self.steps,
            "has_reached": self.has_reached,
            "forgotten": {"before": before.to_json(), "after": after.to_json()},
            "retained": _describe_losses(*self.retained),
            "never_seen": _describe_losses(*self.never_seen),
            "relearning": self.relearning.to_json(),
        }


def _describe_losses(before: Sequence[float], after: Sequence[float]) -> dict[str, Any]:
    names = [str(number) for number in range(len(before))]
    means = {name: asdict(mean_interval(values, names, 0)) for name, values in (("before", before), ("after", after))}
    return {**means, "change": paired_test(before, after, names, 0).to_json()}


def bounded_ascent(losses: Tensor, mask: Tensor, chance: float, target: float) -> Tensor:
    """Return the loss whose descent makes rows unlikelier: the negative mean of tokens below chance.

    Args:
        losses: Loss of each token, ``[rows, tokens]``.
        mask: Which of them are tokens.
        chance: Loss of a token drawn evenly from the vocabulary; a token there or above has no gradient.
        target: Mean loss at which a row has no gradient.
    """
    means = (losses * mask).sum(1) / mask.sum(1)
    chosen = mask & (means < target).unsqueeze(1) & (losses < chance)
    return -(losses * chosen).sum() / mask.sum()


def unlearn_text(
    module: Any,
    texts: UnlearningTexts,
    plan: UnlearningPlan,
    test: RelearningPlan,
    tell: Callable[[int, int], object] = lambda done, of: None,
) -> UnlearningResult:
    """Unlearn a text in place, and make the relearning test.

    Args:
        module: A causal language model without dropout in force.
        tell: Called with the parts of the work that are done, and of how many.

    Raises:
        TrainingError: A loss is no number: the rate is too high.
    """
    total = plan.steps + len(texts.never_seen) + 2
    rate = 0.3 * test.rate if plan.rate is None else plan.rate
    original = copy.deepcopy(module)
    before = _measure_losses(module, texts, test.length)
    target, steps = math.fsum(before[2]) / len(before[2]), 0
    for steps in _descend(module, texts, test.length, replace(plan, rate=rate), target):
        tell(steps, total)
    after = _measure_losses(module, texts, test.length)
    if not all(map(math.isfinite, (after[0].loss, *after[1], *after[2]))):
        raise TrainingError(f"unlearning: a loss is no number after {steps} steps; lower --rate from {rate:g}")
    relearning = judge_relearning(
        module,
        texts.forgotten,
        texts.never_seen,
        test,
        before=original,
        tell=lambda done, of: tell(total - of + done, total),
    )
    return UnlearningResult(
        steps=steps,
        has_reached=after[0].loss >= target,
        scores=(before[0], after[0]),
        retained=(before[1], after[1]),
        never_seen=(before[2], after[2]),
        relearning=relearning,
    )


def _measure_losses(
    module: Any, texts: UnlearningTexts, length: int
) -> tuple[TextScore, tuple[float, ...], tuple[float, ...]]:
    retained, never_seen = (
        tuple(score_text(module, tokens, length).loss for tokens in group)
        for group in (texts.retained, texts.never_seen)
    )
    return score_text(module, texts.forgotten, length), retained, never_seen


def _descend(module: Any, texts: UnlearningTexts, length: int, plan: UnlearningPlan, target: float) -> Iterator[int]:
    """Make updates until each row of the document has the target's loss; yield their number after each."""
    rows = cut_rows(texts.forgotten, length)
    anchors = [row for tokens in texts.anchors for row in cut_rows(tokens, length)]
    chance = math.log(module.get_input_embeddings().weight.shape[0])
    order = torch.Generator().manual_seed(plan.seed)
    optimizer = torch.optim.AdamW(module.parameters(), lr=plan.rate or 0.0, weight_decay=0.0)
    waiting: list[Tokens] = []
    for step in range(1, plan.steps + 1):
        # a row that had reached it may have come back meanwhile
        waiting = waiting or [row for row in rows if not score_text(module, row, length).loss >= target]
        if not waiting:
            return
        losses, mask = token_losses(module, waiting[:_BATCH])
        drawn = torch.randperm(len(anchors), generator=order)[:_BATCH].tolist()
        anchor_losses, anchor_mask = token_losses(module, [anchors[number] for number in drawn])
        optimizer.zero_grad()
        torch.autograd.backward(bounded_ascent(losses, mask, chance, target) + anchor_losses[anchor_mask].mean())
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        waiting = waiting[_BATCH:]
        yield step


class Unlearning:
    """The approximate unlearning of one document from a run.

    Args:
        document: A digest, a file with its text, or its name in the data set.

    Raises:
        DataError: The run was not trained from a data set of documents, the document is in none of its steps' data, or
            too few texts are left to compare with.
        PolicyError: A policy does not let the model out.
    """

    def __init__(self, past: PastRun, document: str) -> None:
        # a changed copy of the weights leaves the run
        require_release(past.path)
        self.past = past
        self._dataset, _ = open_trained_data(past)
        self.digest = find_document(self._dataset, document).digest
        places = [place for place in find_places(self._dataset, self.digest) if place.split == "train"]
        if not places:
            raise DataError(
                f"{self._dataset.directory}: no training split has a document {self.digest}; nothing is to be unlearned"
            )
        self._place = places[0]

    def unlearn_document(
        self,
        out: Path,
        signer: Identity,
        plan: UnlearningPlan,
        tell: Callable[[int, int], object] = lambda done, of: None,
    ) -> UnlearningResult:
        """Write a model directory whose record, weights file and signed statement say that nothing was erased.

        Args:
            signer: Signs the statement, which `phalanx verify` and a passport read.

        Raises:
            CheckpointError: `out` exists or cannot be written.
            ModelError: The run's model is no causal language model.
            TrainingError: The weights became no numbers.
        """
        refuse_existing(out)
        with tempfile.TemporaryDirectory(prefix="phalanx-unlearn-") as scratch:
            source = Path(scratch) / "model"
            step = export_run(self.past, source, merge=self.past.config.model.adapter is not None)
            model = TextModel(source)
            if model.has_encoder:
                raise ModelError(f"{self.past.path}: the model has an encoder; unlearning is for decoders alone")
            length = min(model.context_length, self.past.config.data.sequence_length)
            test = self.make_test(length)
            result = unlearn_text(model.module, self.choose_texts(plan), plan, test, tell)
            with spare_directory(out) as spare:
                self._write_model(model.module, source, spare)
                record = self._make_record(result, plan, test, step)
                (spare / RECORD_FILE).write_bytes(canonical_json(record) + b"\n")
                (spare / "README.md").write_text(_README, encoding="utf-8")
                (spare / EXPORT_FILE).write_bytes(self._sign_statement(spare, source, step, plan, signer))
                publish_model(spare, out)
        return result

    def make_test(self, length: int) -> RelearningPlan:
        """Return the relearning test of the run; whoever unlearns must not choose how hard it is."""
        return RelearningPlan(self.past.config.optimizer.lr / 3, length)

    def choose_texts(self, plan: UnlearningPlan) -> UnlearningTexts:
        """Draw retained documents by the seed, and take the unseen ones whose lengths are nearest to the document's."""
        chance = np.random.default_rng(plan.seed)
        forgotten = self._read_place(self._place)
        if len(forgotten) < MIN_TOKENS:
            raise DataError(f"document {self.digest}: has {len(forgotten)} tokens; the test needs {MIN_TOKENS}")
        trained, unseen = (
            [place for place in self._all_places() if (place.split == "train") is of] for of in (True, False)
        )
        shuffled = [trained[number] for number in chance.permutation(len(trained))]
        retained: list[Tokens] = []
        for place in shuffled:
            if len(retained) == 2 * plan.retained:
                break
            if place.tokens > 1 and self._digest_of(place) != self.digest:
                retained.append(self._read_place(place))
        unseen = [unseen[number] for number in chance.permutation(len(unseen))]
        unseen.sort(key=lambda place: abs(place.tokens - len(forgotten)))
        never_seen: list[Tokens] = []
        for place in unseen:
            if len(never_seen) == plan.never_seen:
                break
            # a validation split may have copies of what was trained on
            if all(copy.split != "train" for copy in find_places(self._dataset, self._digest_of(place))):
                never_seen.append(self._read_place(place))
        if len(retained) < 2 or not never_seen:
            raise DataError(
                f"{self._dataset.directory}: has {len(retained)} other documents that were trained on and "
                f"{len(never_seen)} that were not; unlearning needs 2 and 1, and its test {round(1 / MAX_P) - 1}"
            )
        half = len(retained) // 2
        return UnlearningTexts(forgotten, tuple(retained[:half]), tuple(retained[half:]), tuple(never_seen))

    def _all_places(self) -> Iterator[DocumentPlace]:
        for part in self._dataset.manifest.parts:
            starts = self._dataset.document_starts(part.group, part.split).tolist()
            for number, (start, stop) in enumerate(itertools.pairwise(starts)):
                yield DocumentPlace(part.group, part.split, 0, number, start, stop - start)

    def _read_place(self, place: DocumentPlace) -> Tokens:
        stream = self._dataset.tokens(place.group, place.split)
        return tuple(stream.read_tokens(place.start, place.start + place.tokens).tolist())

    def _digest_of(self, place: DocumentPlace) -> str:
        return self._dataset.document_entry(place.group, place.split, place.document).digest

    def _make_record(
        self, result: UnlearningResult, plan: UnlearningPlan, test: RelearningPlan, step: int
    ) -> dict[str, Any]:
        return {
            "state": STATE,
            "document": self.digest,
            "run": self.past.run_id,
            "step": step,
            "method": "gradient difference, bounded at chance and at the loss of texts never seen",
            "plan": asdict(plan),
            "test": asdict(test),
            **result.to_json(),
        }

    @staticmethod
    def _write_model(module: Any, source: Path, target: Path) -> None:
        """Write the weights and the other files of the export; config.json names the state."""
        shutil.copytree(source, target, dirs_exist_ok=True)
        module.save_pretrained(target, max_shard_size="1000GB")
        # transformers writes these in a form of its own
        for name in ("config.json", "generation_config.json"):
            if (source / name).is_file():
                shutil.copyfile(source / name, target / name)
        config = {**read_config(target), "unlearning": STATE}
        (target / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def _sign_statement(self, target: Path, source: Path, step: int, plan: UnlearningPlan, signer: Identity) -> bytes:
        """Return a statement in the form of an export's about the files and their origin."""
        subjects = [{"name": path.name, "digest": {"sha256": hash_file(path)}} for path in sorted(target.iterdir())]
        predicate = {
            "format": "safetensors",
            "precision": "float32",
            "quantiser": {"program": "phalanx unlearn", "document": self.digest, "seed": plan.seed},
            "source": {
                "weights": digest_model(source),
                "files": {path.name: hash_file(path) for path in sorted(source.iterdir())},
                "run": self.past.run_id,
                "step": step,
                "checkpoint": manifest_digest(self.past.checkpoints / step_directory(step)),
            },
            "state": STATE,
            "runtime": None,
            "compared": None,
            "phalanx": importlib.metadata.version("phalanx-train"),
        }
        return sign_by_ed25519(signer, subjects, EXPORT_PREDICATE, predicate)
