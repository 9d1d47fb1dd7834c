"""Classes of texts by a model that a run trained and `export` wrote."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, ValidationError
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForTokenClassification

from phalanx.config import StrictModel
from phalanx.data.config import ModelTokenizerConfig
from phalanx.data.tokenizers import load_tokenizer
from phalanx.errors import DataError, ModelError
from phalanx.models.classifier import CLASSIFIER_KEY
from phalanx.models.directory import read_config
from phalanx.models.families import TRANSFORMERS_REFUSALS
from phalanx.models.quiet import quiet_transformers
from phalanx.models.weights import check_claims
from phalanx.serve.batch import count_finished_rows, read_rows
from phalanx.telemetry import RowsTold

_BATCH = 32


class TextClass(StrictModel):
    """The class of a text.

    Attributes:
        label: Name of the likeliest class.
        probability: Probability that the model gives this class.
        is_cut: Whether the text has more tokens than count, so that the rest was left out.
    """

    label: str
    probability: float
    is_cut: bool


class _ClassifierKeys(StrictModel):
    """What an exported classifier says of itself in config.json."""

    max_tokens: int = Field(ge=1, le=1 << 20)
    pooling: str = Field(pattern="^mean$")


class ClassifierModel:
    """A model that classifies texts.

    Args:
        directory: Directory that `export_run` wrote of a classification, with the adapter merged.
    """

    def __init__(self, directory: Path, device: str = "cpu") -> None:
        config = read_config(directory)
        if CLASSIFIER_KEY not in config:
            raise ModelError(
                f"{directory / 'config.json'}: has no {CLASSIFIER_KEY}; give a run that learned to classify, or what "
                "`phalanx checkpoint export RUN_DIR DIR --merge` wrote of it"
            )
        try:
            keys = _ClassifierKeys.model_validate(config[CLASSIFIER_KEY])
        except ValidationError as exc:
            fault = exc.errors()[0]
            key = ".".join(map(str, (CLASSIFIER_KEY, *fault["loc"])))
            raise ModelError(
                f"{directory / 'config.json'}: {key}: found {fault['input']!r:.60}: {fault['msg']}; "
                "export the run again"
            ) from exc
        self._max_tokens = keys.max_tokens
        self._tokenizer = load_tokenizer(ModelTokenizerConfig(), directory)
        check_claims(directory, AutoModelForTokenClassification)
        try:
            with quiet_transformers():
                self._model: Any
                self._model, report = AutoModelForTokenClassification.from_pretrained(
                    directory,
                    local_files_only=True,
                    trust_remote_code=False,
                    use_safetensors=True,
                    output_loading_info=True,
                )
        except (OSError, SafetensorError, *TRANSFORMERS_REFUSALS) as exc:
            raise ModelError(f"{directory}: no model that classifies texts ({exc!s:.300})") from exc
        if report["missing_keys"]:
            raise ModelError(f"{directory}: lacks the tensors {', '.join(sorted(report['missing_keys']))[:300]}")
        window = getattr(self._model.config, "max_position_embeddings", None)
        if window is not None and self._max_tokens > window:
            raise ModelError(
                f"{directory / 'config.json'}: {CLASSIFIER_KEY}.max_tokens: found {self._max_tokens}; expected at most "
                f"the model's window of {window}; export the run again"
            )
        rows = self._model.get_input_embeddings().weight.shape[0]
        if self._tokenizer.vocab_size > rows:
            raise ModelError(
                f"{directory}: the tokenizer has {self._tokenizer.vocab_size} tokens, the model embeddings for {rows}; "
                "give the tokenizer that the model was trained with"
            )
        self._model.to(device).eval()
        names: Mapping[int, str] = self._model.config.id2label
        if set(names) != set(range(self._model.num_labels)):
            raise ModelError(f"{directory / 'config.json'}: id2label: expected a name for each number from 0")
        self.classes = tuple(str(names[number]) for number in range(len(names)))

    def classify_texts(self, texts: Sequence[str]) -> list[TextClass]:
        """Return the class of each text, from the mean of its tokens' logits.

        Raises:
            DataError: A text has no tokens.
            ModelError: A logit is no finite number.
        """
        starts = range(0, len(texts), _BATCH)
        return [result for start in starts for result in self._classify_batch(texts[start : start + _BATCH])]

    @torch.no_grad()
    def _classify_batch(self, texts: Sequence[str]) -> list[TextClass]:
        rows = self._tokenizer.encode_whole(texts, self._max_tokens)
        ids = torch.full((len(rows), max(map(len, rows))), self._tokenizer.eos_id, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, token_ids in enumerate(rows):
            ids[row, : len(token_ids)] = torch.tensor(token_ids)
            mask[row, : len(token_ids)] = 1
        device = self._model.device
        logits = self._model(ids.to(device), attention_mask=mask.to(device)).logits.float().cpu()
        inside = mask.bool().unsqueeze(2)
        pooled: Tensor = logits.where(inside, torch.zeros(())).sum(dim=1) / mask.sum(dim=1, keepdim=True)
        if not pooled.isfinite().all():
            raise ModelError("a logit is no finite number; the weights are damaged or training had diverged")
        shares = pooled.softmax(dim=1).max(dim=1)
        return [
            TextClass(label=self.classes[int(number)], probability=float(share), is_cut=self._is_cut(text, len(ids)))
            for number, share, text, ids in zip(shares.indices, shares.values, texts, rows, strict=True)
        ]

    def _is_cut(self, text: str, num_tokens: int) -> bool:
        if num_tokens < self._max_tokens:
            return False
        return len(self._tokenizer.encode_whole([text], self._max_tokens + 1)[0]) > self._max_tokens


def classify_file(model: ClassifierModel, source: Path, target: Path, report: RowsTold) -> tuple[int, int]:
    """Classify the `text` of every line of a file; lines that `target` has already are not done again.

    Args:
        target: File for the same lines with ``label``, ``probability`` and ``is_cut``.
        report: Function to call after each batch.

    Returns:
        Lines that this call classified, and how many of their texts were cut.

    Raises:
        DataError: A line of the source has no text, or `target` holds the results of other lines.
    """
    records = _read_texts(source)
    done = count_finished_rows(target, records)
    first, num_cut = done, 0
    report(done, len(records))
    try:
        with target.open("a", encoding="utf-8") as stream:
            while done < len(records):
                batch = records[done : done + _BATCH]
                for record, result in zip(batch, model.classify_texts([one["text"] for one in batch]), strict=True):
                    stream.write(json.dumps({**record, **result.model_dump()}, ensure_ascii=False) + "\n")
                    num_cut += result.is_cut
                stream.flush()
                done += len(batch)
                report(done, len(records))
    except OSError as exc:
        raise DataError(f"{target}: cannot be written ({exc.strerror})") from exc
    return done - first, num_cut


def _read_texts(source: Path) -> list[dict[str, Any]]:
    rows = list(read_rows(source, TextClass))
    for place, record in rows:
        if not isinstance(record.get("text"), str) or not record["text"].strip():
            raise DataError(f"{place}: expected text: a string that is not empty")
    return [record for _, record in rows]
