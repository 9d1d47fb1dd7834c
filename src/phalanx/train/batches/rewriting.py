"""The rows that an objective makes of packed text, and the tokenizer facts that it needs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import tokenizers
import torch
from numpy.typing import NDArray

from phalanx.data import PREFIX, Batch, Corpus
from phalanx.data.loader import HeldOut, RewrittenHeldOut
from phalanx.data.preferences import PairCorpus
from phalanx.objectives import Row, RowPlace, RowRewriting, TokenTable, objective_of
from phalanx.train.config import RunConfig

_CONTINUES = "##"
"""What WordPiece has before the tokens that continue a word."""
_SPACES = "\u0120\u2581"
"""How byte-level BPE and SentencePiece write the space before a word."""


@dataclass(frozen=True)
class BatchRewriting:
    """An objective's rewriting, applied to batches.

    Attributes:
        has_prefixes: Whether rows say how long their prefix is.
    """

    rows: RowRewriting
    seed: int
    has_prefixes: bool

    def __call__(self, batch: Batch, samples: Sequence[int], phases: Sequence[int], *, held_out: bool = False) -> Batch:
        packed = zip(batch.input_ids.numpy(), batch.labels.numpy(), samples, phases, strict=True)
        rewritten = [
            self.rows(Row(ids, labels), RowPlace(sample, phase, self.seed, held_out))
            for ids, labels, sample, phase in packed
        ]
        extras = dict(batch.extras)
        if self.has_prefixes:
            extras[PREFIX] = torch.tensor([row.prefix for row in rewritten], dtype=torch.int64)
        ids, labels = (np.stack([getattr(row, name) for row in rewritten]) for name in ("ids", "labels"))
        return replace(batch, input_ids=torch.from_numpy(ids), labels=torch.from_numpy(labels), extras=extras)


def rewriting_of(run: RunConfig, corpus: Corpus | PairCorpus) -> BatchRewriting | None:
    """Return the rewriting of packed rows by a run's objective; None where it learns them as they are."""
    objective = objective_of(run.train.objective)
    if objective.rewriting is None or isinstance(corpus, PairCorpus):
        return None
    rows = objective.rewriting(token_table(corpus), run.data.sequence_length)
    return BatchRewriting(rows, run.train.seed, objective.attention == "prefix")


def rewrite_held_out(sequences: HeldOut, rewriting: BatchRewriting | None) -> HeldOut:
    """Return held-out sequences as the objective makes them."""
    return sequences if rewriting is None else RewrittenHeldOut(sequences, rewriting)


def token_table(corpus: Corpus) -> TokenTable:
    """Return what objectives know of a corpus's tokenizer."""
    backend = tokenizers.Tokenizer.from_file(str(corpus.tokenizer_path))
    named = backend.get_vocab(with_added_tokens=True)
    special = np.zeros(corpus.vocab_size, dtype=np.bool_)
    marked = [number for number, token in backend.get_added_tokens_decoder().items() if token.special]
    special[[corpus.eos_id, *(number for number in marked if number < corpus.vocab_size)]] = True
    return TokenTable(named, corpus.eos_id, special, _word_starts(named, special), str(corpus.tokenizer_path))


def _word_starts(named: dict[str, int], special: NDArray[np.bool_]) -> NDArray[np.bool_] | None:
    """Return which tokens begin a word; None where no token says.

    Where some tokens continue words by their spelling, all others begin one; where some have a space before them, those
    without one continue a word as long as they are letters or digits.
    """
    tokens_by_id = {number: token for token, number in named.items() if number < len(special) and not special[number]}
    begins = np.ones(len(special), dtype=np.bool_)
    if any(token.startswith(_CONTINUES) and token != _CONTINUES for token in tokens_by_id.values()):
        for number, token in tokens_by_id.items():
            begins[number] = not token.startswith(_CONTINUES)
    elif any(token[:1] in _SPACES for token in tokens_by_id.values() if token):
        for number, token in tokens_by_id.items():
            begins[number] = not token[:1].isalnum()
    else:
        return None
    return begins
