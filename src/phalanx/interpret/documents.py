"""The training documents nearest to a text, by the hidden states and by the gradients that they give.

Both are similarities, and prove no cause: a near document may have taught nothing, and a far one all of it.
Source: Pruthi et al. 2020 (gradients at one checkpoint as influence); Charpiat et al. 2019 (their cosine).
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.data.shards import Dataset
from phalanx.errors import DataError, ModelError
from phalanx.interpret.tokens import encode_text
from phalanx.serve import TextModel

TRAIN = "train"
_MAX_LENGTH = 512
"""Tokens of a document that are looked at, from its beginning."""


@dataclass(frozen=True)
class NearDocument:
    """One training document.

    Attributes:
        digest: SHA-256 of its text, by which `phalanx data where` finds the steps that saw it.
        similarity: Cosine of the mean hidden states, -1 to 1.
        gradient: Cosine of the gradients of the loss in the last block; None where it was not among the candidates.
        licence: Licence of its source; empty where the recipe names none.
    """

    digest: str
    name: str
    source: str
    licence: str
    consent: str
    tokens: int
    similarity: float
    gradient: float | None
    beginning: str

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return asdict(self)


@dataclass(frozen=True)
class _Place:
    group: str
    number: int
    start: int
    tokens: int
    similarity: float = 0.0


def find_nearest(
    model: TextModel,
    text: str,
    dataset: Dataset,
    *,
    num_shown: int = 5,
    num_candidates: int = 50,
    max_documents: int = 5000,
) -> list[NearDocument]:
    """Return the documents of a dataset that are nearest to a text, by their gradients.

    Args:
        num_candidates: Nearest documents by hidden states, whose gradients are computed.
        max_documents: Documents that are looked at, spread evenly over the dataset.

    Raises:
        DataError: The text has fewer than two tokens, or there is no document.
        ModelError: The dataset has tokens that the model lacks, or the model has no block.
    """
    if dataset.manifest.tokenizer.vocab_size > model.module.get_input_embeddings().weight.shape[0]:
        raise ModelError(f"{dataset.directory}: has tokens that the model lacks; give the dataset of the model")
    ids = encode_text(model, text)[: _window(model)]
    query = _embed(model, ids)
    places = _spread(list(_list_places(dataset)), max_documents)
    if not places:
        raise DataError(f"{dataset.directory}: has no training document of two tokens or more")
    scored = [
        _Place(place.group, place.number, place.start, place.tokens, _cosine(query, _embed(model, tokens)))
        for place in places
        for tokens in [_read(dataset, place, model)]
    ]
    scored.sort(key=lambda place: (-place.similarity, place.group, place.number))
    learned, gradient = _last_block(model.module), _gradient(model, ids)
    near = [
        (place, _cosine(gradient, _gradient(model, _read(dataset, place, model), learned)))
        for place in scored[:num_candidates]
    ]
    near.sort(key=lambda row: (-row[1], row[0].group, row[0].number))
    return [_describe(dataset, place, cosine, model) for place, cosine in near[:num_shown]]


def _list_places(dataset: Dataset) -> Iterator[_Place]:
    for group, splits in dataset.groups.items():
        if TRAIN not in splits:
            continue
        starts = [int(start) for start in dataset.document_starts(group, TRAIN)]
        for number, (start, stop) in enumerate(itertools.pairwise(starts)):
            if stop - start >= 2:
                yield _Place(group, number, start, stop - start)


def _spread(places: Sequence[_Place], most: int) -> Sequence[_Place]:
    if len(places) <= most:
        return places
    return [places[number * len(places) // most] for number in range(most)]


def _read(dataset: Dataset, place: _Place, model: TextModel) -> list[int]:
    stop = place.start + min(place.tokens, _window(model))
    return [int(token) for token in dataset.tokens(place.group, TRAIN).read_tokens(place.start, stop)]


def _window(model: TextModel) -> int:
    return min(model.context_length, _MAX_LENGTH)


@torch.no_grad()
def _embed(model: TextModel, ids: Sequence[int]) -> Tensor:
    """Return the mean hidden state of a text in the middle of the model."""
    states = model.module(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
    return torch.as_tensor(states[len(states) // 2][0].float().mean(dim=0))


def _last_block(module: Any) -> list[nn.Parameter]:
    stacks = [part for part in module.base_model.modules() if isinstance(part, nn.ModuleList) and len(part)]
    if not stacks:
        raise ModelError("the model has no stack of blocks whose gradients could be compared")
    blocks = max(stacks, key=lambda stack: sum(parameter.numel() for parameter in stack.parameters()))
    return list(blocks[-1].parameters())


@torch.enable_grad()
def _gradient(model: TextModel, ids: Sequence[int], learned: list[nn.Parameter] | None = None) -> Tensor:
    """Return the gradient of a text's mean loss in the last block, as one vector."""
    learned = _last_block(model.module) if learned is None else learned
    flags = [parameter.requires_grad for parameter in learned]
    for parameter in learned:
        parameter.requires_grad_(True)
    try:
        row = torch.tensor([ids])
        logits = model.module(input_ids=row).logits[0, :-1].float()
        loss = nn.functional.cross_entropy(logits, row[0, 1:])
        parts = torch.autograd.grad(loss, learned, allow_unused=True)
    finally:
        for parameter, flag in zip(learned, flags, strict=True):
            parameter.requires_grad_(flag)
    return torch.cat([part.flatten().float() for part in parts if part is not None])


def _cosine(a: Tensor, b: Tensor) -> float:
    return float(nn.functional.cosine_similarity(a, b, dim=0))


def _describe(dataset: Dataset, place: _Place, gradient: float, model: TextModel) -> NearDocument:
    entry = dataset.document_entry(place.group, TRAIN, place.number)
    source = dataset.manifest.sources[entry.source]
    beginning = model.tokenizer.decode(_read(dataset, place, model)[:40])
    return NearDocument(
        digest=entry.digest,
        name=entry.name,
        source=source.name,
        licence=source.licence,
        consent=source.consent,
        tokens=place.tokens,
        similarity=place.similarity,
        gradient=gradient,
        beginning=str(beginning),
    )
