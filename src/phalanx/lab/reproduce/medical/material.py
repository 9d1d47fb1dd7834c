"""One task and seed as tensors: the training texts of each client, and the common test texts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from phalanx.data.tasks import Example, LabelledExamples, share_out
from phalanx.data.tokenizers import TextTokenizer
from phalanx.lab.reproduce.medical.size import ALPHA, CLIENTS, MedicalSize
from phalanx.train.batches.labelled import LabelledRows, encode_rows

Indices = tuple[int, ...]


@dataclass(frozen=True)
class Material:
    """The texts that the arms of one task and seed have in common.

    Attributes:
        clients: Indices of each client's training texts.
        train_examples: The same as texts, for an arm that reads words.
        train_cut: Training texts as far as the model sees them.
        test_cut: Test texts as far as the model sees them.
    """

    num_classes: int
    train: LabelledRows
    test: LabelledRows
    clients: tuple[Indices, ...]
    train_examples: tuple[Example, ...]
    test_examples: tuple[Example, ...]
    train_cut: tuple[Example, ...]
    test_cut: tuple[Example, ...]

    @property
    def all_at_once(self) -> tuple[Indices, ...]:
        """One client that has everything."""
        return (tuple(range(len(self.train.classes))),)


def make_material(task: LabelledExamples, tokenizer: TextTokenizer, size: MedicalSize, seed: int) -> Material:
    """Share the task's texts out to clients, and draw as many of each; the test texts are equal for every seed.

    Clients give the same number of texts, for the split engine has them take turns.
    """
    shares = share_out(task, CLIENTS, size.train // CLIENTS, size.test, ALPHA, seed)
    ends = list(accumulate(len(examples) for examples in shares.clients))
    clients = tuple(tuple(range(begin, stop)) for begin, stop in zip([0, *ends], ends, strict=False))
    train, test = shares.train_examples, shares.test
    return Material(
        len(task.classes),
        encode_rows(train, tokenizer, size.tokens),
        encode_rows(test, tokenizer, size.tokens),
        clients,
        train,
        test,
        _cut_texts(train, tokenizer, size),
        _cut_texts(test, tokenizer, size),
    )


def _cut_texts(examples: Sequence[Example], tokenizer: TextTokenizer, size: MedicalSize) -> tuple[Example, ...]:
    encoded = tokenizer.encode_texts([example.text for example in examples])
    texts = [str(tokenizer.backend.decode(ids[: size.tokens])) for ids in encoded]
    return tuple(Example(text, example.label) for text, example in zip(texts, examples, strict=True))


def deal_rows(indices: Indices, rows: int, seed: int, client: int) -> Iterator[Indices]:
    """Yield a client's texts in microbatches for ever, in a new order in every pass; the rest of a pass opens the next.

    Args:
        indices: At least `rows`.
        seed: Decides the order, together with `client`.
    """
    generator = torch.Generator().manual_seed(1_000_003 * seed + client)
    waiting: list[int] = []
    while True:
        while len(waiting) < rows:
            order = torch.randperm(len(indices), generator=generator).tolist()
            waiting += [indices[place] for place in order]
        yield tuple(waiting[:rows])
        del waiting[:rows]
