"""One task and seed as tensors: who has which training texts, and what is tested on."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from phalanx.data.tasks import Example, Labelled, dirichlet_clients, silo_clients, split_by_class, take_by_class
from phalanx.data.tokenizer import TextTokenizer
from phalanx.objectives import mark_classes
from phalanx.reproduce.medical.size import ALPHA, CLIENTS, SPLIT_SEED, TEST_SHARE, MedicalSize

Indices = tuple[int, ...]


@dataclass(frozen=True)
class Rows:
    """Texts as tensors.

    Attributes:
        ids: ``[texts, tokens]``, int64, padded behind.
        labels: The same shape; each text's class at its last token.
        classes: Of each text.
    """

    ids: Tensor
    labels: Tensor
    classes: tuple[int, ...]

    def pick(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Ids and labels of some texts."""
        chosen = torch.tensor(indices, dtype=torch.int64)
        return self.ids[chosen], self.labels[chosen]


@dataclass(frozen=True)
class Material:
    """What the arms of one task and seed have in common.

    Attributes:
        num_classes: Of the task.
        train: Training texts.
        test: Test texts.
        clients: Indices of each client's training texts.
        train_examples: The same as texts, for who reads words.
        test_examples: As texts.
        train_cut: Training texts as far as the model sees them.
        test_cut: Test texts as far as the model sees them.
    """

    num_classes: int
    train: Rows
    test: Rows
    clients: tuple[Indices, ...]
    train_examples: tuple[Example, ...]
    test_examples: tuple[Example, ...]
    train_cut: tuple[Example, ...]
    test_cut: tuple[Example, ...]

    @property
    def all_at_once(self) -> tuple[Indices, ...]:
        """One client that has everything."""
        return (tuple(range(len(self.train.classes))),)


def make_material(task: Labelled, tokenizer: TextTokenizer, size: MedicalSize, seed: int) -> Material:
    """Share the task's texts out to clients, and draw as many of each; the test texts are those of every seed.

    Clients give the same number of texts, for the split engine has them take turns.

    Raises:
        DataError: There are too few texts.
    """
    pool, held_out = split_by_class(task.examples, TEST_SHARE, SPLIT_SEED)
    each = size.train // CLIENTS
    if task.has_silos:
        owners = silo_clients(pool, CLIENTS)
    else:
        owners = dirichlet_clients(pool, CLIENTS, ALPHA, seed, at_least=each)
    drawn = [take_by_class([pool[index] for index in owner], each, seed) for owner in owners]
    train = tuple(example for examples in drawn for example in examples)
    ends = list(accumulate(len(examples) for examples in drawn))
    clients = tuple(tuple(range(begin, end)) for begin, end in zip([0, *ends], ends, strict=False))
    test = take_by_class(held_out, size.test, SPLIT_SEED)
    return Material(
        len(task.classes),
        rows_of(train, tokenizer, size),
        rows_of(test, tokenizer, size),
        clients,
        train,
        test,
        _cut(train, tokenizer, size),
        _cut(test, tokenizer, size),
    )


def rows_of(examples: Sequence[Example], tokenizer: TextTokenizer, size: MedicalSize) -> Rows:
    """Encode texts, cut them to the size's tokens and pad them behind."""
    encoded = [ids[: size.tokens] for ids in tokenizer.encode([example.text for example in examples])]
    ids = torch.full((len(encoded), size.tokens), tokenizer.eos_id, dtype=torch.int64)
    for row, tokens in enumerate(encoded):
        ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
    classes = tuple(example.label for example in examples)
    return Rows(ids, mark_classes(classes, [len(tokens) for tokens in encoded], size.tokens), classes)


def _cut(examples: Sequence[Example], tokenizer: TextTokenizer, size: MedicalSize) -> tuple[Example, ...]:
    encoded = tokenizer.encode([example.text for example in examples])
    texts = [str(tokenizer.backend.decode(ids[: size.tokens])) for ids in encoded]
    return tuple(Example(text, example.label) for text, example in zip(texts, examples, strict=True))


def deal(indices: Indices, rows: int, seed: int, client: int) -> Iterator[Indices]:
    """Give a client's texts in microbatches for ever, in a new order in every pass; what is left of one opens the next.

    Args:
        indices: At least `rows`.
        rows: Of a microbatch.
        seed: Decides the order, together with `client`.
        client: Its number.
    """
    generator = torch.Generator().manual_seed(1_000_003 * seed + client)
    waiting: list[int] = []
    while True:
        while len(waiting) < rows:
            order = torch.randperm(len(indices), generator=generator).tolist()
            waiting += [indices[place] for place in order]
        yield tuple(waiting[:rows])
        del waiting[:rows]
