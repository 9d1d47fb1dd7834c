"""TF-IDF with logistic regression, the baseline of every task. Needs scikit-learn."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from phalanx.data.tasks.task import Example
from phalanx.errors import DataError


def tfidf_predictions(train: Sequence[Example], test: Sequence[Example], seed: int) -> list[int]:
    """Predict the test labels from words and pairs of words of the training texts."""
    vectorizer, model = _import_scikit(seed)
    features = vectorizer.fit_transform([example.text for example in train])
    model.fit(features, [example.label for example in train])
    predictions = model.predict(vectorizer.transform([example.text for example in test]))
    return [int(label) for label in predictions]


def majority_share(train: Sequence[Example], test: Sequence[Example]) -> float:
    """Return the test accuracy of always saying the most frequent class of the training examples."""
    label, _ = min(Counter(example.label for example in train).items(), key=lambda item: (-item[1], item[0]))
    return sum(example.label == label for example in test) / len(test)


def _import_scikit(seed: int) -> tuple[Any, Any]:
    try:
        # seconds to import, and needed only for the baseline
        from sklearn.feature_extraction.text import TfidfVectorizer  # noqa: PLC0415
        from sklearn.linear_model import LogisticRegression  # noqa: PLC0415
    except ImportError as exc:
        raise DataError("tfidf: needs scikit-learn, which is not installed; install phalanx-train[tasks]") from exc
    return (
        TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True),
        LogisticRegression(C=10.0, max_iter=1000, random_state=seed),
    )
