"""A dataset of token shards as the text of a run: every leaf of it is verified before a token of it is used."""

import hashlib
import tomllib
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phalanx.config import canonical_json
from phalanx.data.config import DataConfig
from phalanx.data.corpus import Corpus, CorpusFacts, SequenceLayout, TokenGroup
from phalanx.data.packing import TokenSplit
from phalanx.data.phases import DatasetConfig
from phalanx.data.run_dataset import TRAIN, VALIDATION, open_groups
from phalanx.data.shards import Dataset
from phalanx.data.sources import CanarySettings
from phalanx.data.tokenizers.tokenizer import TOKENIZER_FILE, TextTokenizer
from phalanx.errors import DataError


def open_shards(
    config: DataConfig, dataset: DatasetConfig, directory: Path, tokenizer: TextTokenizer | None = None
) -> Corpus:
    """Open a dataset as a run file names it.

    Args:
        tokenizer: The one that the run file names; None for that of the dataset.

    Raises:
        DataError: The dataset is altered, signed by another key or encoded with another tokenizer, a group has no
            training sequence, or nothing is there to validate on.
    """
    dataset_view, names = open_groups(config, dataset, directory, tokenizer)
    record = dataset_view.manifest.tokenizer
    groups = [
        TokenGroup(
            name,
            _group_digest(dataset_view, name),
            _group_split(dataset_view, name, TRAIN),
            _group_split(dataset_view, name, VALIDATION),
        )
        for name in names
    ]
    path = directory / TOKENIZER_FILE
    facts = CorpusFacts(
        dataset_view.digest,
        record.vocab_size,
        record.eos_id,
        path,
        dataset_view.trust_statement,
        recipe_canaries(dataset_view),
        dataset_view,
    )
    layout = SequenceLayout.from_config(config)
    hints = recipe_weights(dataset_view.manifest.recipe.content)
    if not layout.weights and hints.keys() >= set(names):
        layout = replace(layout, weights={name: hints[name] for name in names})
    corpus = Corpus(facts, groups, layout)
    if not (corpus.num_validation_sequences or config.validation):
        raise DataError(
            f"{dataset.path}: its validation split has no sequence of {config.sequence_length} tokens; build it "
            "with a larger output.validation_share or from more documents, or set data.validation in the run file"
        ).with_facts(code="PHX-I012", file=str(dataset.path), do="build it with a larger output.validation_share")
    return corpus


def recipe_weights(recipe: str) -> dict[str, float]:
    """Return the weights that a recipe's sources give their groups; of a group with a source that gives none, nothing.

    Args:
        recipe: The text in a verified manifest; a dataset that no recipe made has another one, or none.
    """
    try:
        sources = tomllib.loads(recipe).get("sources", [])
    except tomllib.TOMLDecodeError:
        return {}
    weights_of_group: dict[str, list[float | None]] = {}
    for source in sources if isinstance(sources, list) else ():
        if source.get("kind") == "canaries":
            # planted in a group of others, whose weight it has
            continue
        group = source.get("group") or source.get("name") or source.get("kind")
        weights_of_group.setdefault(str(group), []).append(source.get("weight"))
    return {
        group: float(sum(weight for weight in weights if weight is not None))
        for group, weights in weights_of_group.items()
        if None not in weights
    }


def recipe_canaries(dataset: Dataset) -> CanarySettings | None:
    """Return the canaries that the recipe of a verified dataset has planted."""
    try:
        sources = tomllib.loads(dataset.manifest.recipe.content).get("sources", [])
    except tomllib.TOMLDecodeError:
        return None
    for source in sources if isinstance(sources, list) else ():
        if source.get("kind") == "canaries":
            return CanarySettings(**{name: source[name] for name in CanarySettings.model_fields if name in source})
    return None


def _group_split(dataset: Dataset, group: str, split: str) -> TokenSplit:
    eos_id = dataset.manifest.tokenizer.eos_id
    if split not in dataset.groups[group]:
        return TokenSplit(np.empty(0, dtype=np.uint32), eos_id, _no_documents, _no_score)
    tokens = dataset.tokens(group, split)
    return TokenSplit(
        tokens,
        eos_id,
        partial(_document_starts, dataset, group, split),
        partial(_document_field, dataset, group, split),
    )


def _document_starts(dataset: Dataset, group: str, split: str) -> NDArray[np.int64]:
    return dataset.document_starts(group, split).astype(np.int64)


def _document_field(dataset: Dataset, group: str, split: str, name: str) -> NDArray[np.float64]:
    values = []
    for document in dataset.document_entries(group, split):
        value = document.fields.get(name)
        if not isinstance(value, int | float):
            raise DataError(
                f'data.phases: curriculum by "{name}": document {document.name[:80]!r} of group {group} has '
                f"{'no such field' if value is None else 'no number there'}; it has "
                f"{', '.join(sorted(document.fields)[:10]) or 'no fields'}"
            )
        values.append(float(value))
    return np.array(values, dtype=np.float64)


def _group_digest(dataset: Dataset, group: str) -> str:
    part = dataset.part_record(group, TRAIN)
    files = [file.model_dump(mode="json") for file in (*part.shards, part.starts)]
    return hashlib.sha256(canonical_json(files)).hexdigest()


def _no_documents() -> NDArray[np.int64]:
    return np.zeros(1, dtype=np.int64)


def _no_score(name: str) -> NDArray[np.float64]:
    return np.empty(0, dtype=np.float64)
