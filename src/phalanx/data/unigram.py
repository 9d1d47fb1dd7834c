"""The yardstick: what a model that knows only how often each token occurs would reach."""

import math

import numpy as np

from phalanx.data.batch import IGNORE
from phalanx.data.corpus import Corpus
from phalanx.data.loader import validation_batches

_CHUNK_TOKENS = 1 << 22
_BATCH_SIZE = 64


def unigram_perplexity(corpus: Corpus) -> float:
    """Perplexity of an add-one smoothed unigram model of the training tokens, on the validation labels.

    ``exp(-mean(log((count + 1) / (tokens + vocab_size))))`` over all labels that count, in float64.

    Raises:
        DataError: Nothing is held out.
    """
    counts = np.ones(corpus.vocab_size, dtype=np.int64)
    for tokens in corpus.train_tokens:
        for start in range(0, len(tokens), _CHUNK_TOKENS):
            counts += np.bincount(tokens[start : start + _CHUNK_TOKENS], minlength=corpus.vocab_size)
    log_share = np.log(counts) - math.log(int(counts.sum()))
    total, num_labels = 0.0, 0
    for batch in validation_batches(corpus, _BATCH_SIZE):
        labels = batch.labels[batch.labels != IGNORE].numpy()
        total += float(log_share[labels].sum())
        num_labels += len(labels)
    return math.exp(-total / num_labels)
