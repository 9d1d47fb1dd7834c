"""Drift: lengths and refusals of recent requests beside the first ones, and perplexity on reference texts.

ACCESS_DIR/watch.json holds the baselines, by id of the model, so that a model that was exchanged under its id is found
after a restart too. Whoever can write the directory can change them.
"""

import math
from collections import Counter, deque
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from phalanx.config import StrictModel
from phalanx.errors import InputError
from phalanx.security.crypto import replace_file

BASELINE_FILE = "watch.json"
_MAX_FILE_BYTES = 8 * 1024 * 1024
_NUM_BINS = 24
_Counts = Annotated[
    tuple[Annotated[int, Field(ge=0, le=2**53)], ...], Field(min_length=_NUM_BINS, max_length=_NUM_BINS)
]


class TrafficBaseline(StrictModel):
    """The first requests of a model.

    Attributes:
        prompts: Number of requests by length of the prompt: 0 tokens, 1, 2 to 3, 4 to 7 and so on.
        completions: The same by length of the answer.
        refused: Requests that a filter refused.
    """

    prompts: _Counts
    completions: _Counts
    refused: Annotated[int, Field(ge=0, le=2**53)]

    @property
    def num_requests(self) -> int:
        """Requests that are in it."""
        return sum(self.prompts)


class ModelBaseline(StrictModel):
    """Measurements of a model when it was new.

    Attributes:
        traffic: None until there were enough requests.
        perplexity: On the reference texts; None until it was measured.
    """

    traffic: TrafficBaseline | None = None
    perplexity: Annotated[float, Field(gt=0)] | None = None
    texts_digest: str = ""


class Baselines(StrictModel):
    """The file."""

    version: Annotated[int, Field(ge=1, le=1)] = 1
    models: dict[str, ModelBaseline] = Field(default={}, max_length=1000)


def read_baselines(directory: Path) -> Baselines:
    """Read the file of an access directory; none where there is none."""
    path = directory / BASELINE_FILE
    try:
        with path.open("rb") as file:
            return Baselines.model_validate_json(file.read(_MAX_FILE_BYTES))
    except FileNotFoundError:
        return Baselines()
    except (OSError, ValidationError) as exc:
        raise InputError(f"{path}: holds no baselines; remove it, and the next requests are the baseline") from exc


def write_baselines(directory: Path, baselines: Baselines) -> None:
    """Write the file of an access directory."""
    replace_file(directory / BASELINE_FILE, baselines.model_dump_json(indent=1).encode(), 0o640)


class TrafficDrift:
    """The recent requests of one model beside its first ones.

    Args:
        baseline: First ones of an earlier process.
    """

    def __init__(self, num_requests: int, baseline: TrafficBaseline | None = None) -> None:
        self._num_requests = num_requests
        self.baseline = baseline
        self._recent: deque[tuple[int, int, bool]] = deque(maxlen=num_requests)

    def add_request(self, prompt_tokens: int, completion_tokens: int, *, is_refused: bool) -> None:
        """Take a request that is over."""
        self._recent.append((_bin_of(prompt_tokens), _bin_of(completion_tokens), is_refused))
        if self.baseline is None and len(self._recent) == self._num_requests:
            self.baseline = self._read_recent()
            self._recent.clear()

    @property
    def is_ready(self) -> bool:
        """Whether there are enough requests to compare."""
        return self.baseline is not None and len(self._recent) == self._num_requests

    def _read_recent(self) -> TrafficBaseline:
        prompts, completions = (Counter(entry[place] for entry in self._recent) for place in (0, 1))
        return TrafficBaseline(
            prompts=tuple(prompts[place] for place in range(_NUM_BINS)),
            completions=tuple(completions[place] for place in range(_NUM_BINS)),
            refused=sum(entry[2] for entry in self._recent),
        )

    def measure(self) -> tuple[float, float, float]:
        """Return the shift of prompt lengths, that of answer lengths, and the deviations between shares of refusals.

        All are 0 while there are not enough requests.
        """
        if self.baseline is None or not self.is_ready:
            return 0.0, 0.0, 0.0
        recent, first = self._read_recent(), self.baseline
        num_first, num_recent = first.num_requests, len(self._recent)
        share = (first.refused + recent.refused + 1) / (num_first + num_recent + 2)
        deviation = math.sqrt(share * (1 - share) * (1 / num_first + 1 / num_recent))
        refusals = abs(recent.refused / num_recent - first.refused / num_first) / deviation
        return _shift(first.prompts, recent.prompts), _shift(first.completions, recent.completions), refusals


def _bin_of(count: int) -> int:
    return min(_NUM_BINS - 1, count.bit_length())


def _shift(first: tuple[int, ...], recent: tuple[int, ...]) -> float:
    """Return the population stability index over the bins that either has."""
    bins = [(a + 0.5, b + 0.5) for a, b in zip(first, recent, strict=True) if a or b]
    total_first, total_recent = (sum(pair[place] for pair in bins) for place in (0, 1))
    return sum((b / total_recent - a / total_first) * math.log((b / total_recent) / (a / total_first)) for a, b in bins)
