"""The pattern of extraction: one key that walks a model with many prompts that have nothing in common.

Against a client with one key who asks for as much of the model as possible: scores of many places, or much text to
train a copy on. Does not find several keys that share the work, a walk below the bounds, or one that makes each prompt
look like an earlier one. An evaluation looks the same; its key is exempted.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from phalanx.serve.access.request_notes import PromptSketch
from phalanx.serve.observe.config import ExtractionRule

_BUCKETS = 30
_KEY_PROMPTS, _ALL_PROMPTS = 512, 16_384
_MIN_COMMON = 8
"""Prompts from which on a run that most of them have counts as part of an instruction."""


class WindowCounts:
    """Counts of named things in the last seconds, in thirty steps."""

    def __init__(self, window_s: int) -> None:
        self._step_s = window_s / _BUCKETS
        self._steps: deque[tuple[int, Counter[str]]] = deque()

    def add_count(self, now: float, name: str, number: int = 1) -> None:
        """Count something."""
        step = int(now / self._step_s)
        if not self._steps or self._steps[-1][0] < step:
            self._drop_steps(step)
            self._steps.append((step, Counter()))
        self._steps[-1][1][name] += number

    def read_counts(self, now: float) -> Counter[str]:
        """Return the counts of the window that ends now."""
        self._drop_steps(int(now / self._step_s))
        return sum((counts for _, counts in self._steps), Counter())

    def _drop_steps(self, step: int) -> None:
        while self._steps and self._steps[0][0] <= step - _BUCKETS:
            self._steps.popleft()


@dataclass
class _KeyPrompts:
    """The latest prompts of one key, by their sketches."""

    recent: deque[PromptSketch] = field(default_factory=deque)
    wholes: Counter[int] = field(default_factory=Counter)
    runs: Counter[int] = field(default_factory=Counter)

    def add_prompt(self, sketch: PromptSketch) -> None:
        self.recent.append(sketch)
        self.wholes[sketch.whole] += 1
        self.runs.update(sketch.runs)
        if len(self.recent) > _KEY_PROMPTS:
            oldest = self.recent.popleft()
            self.wholes -= Counter([oldest.whole])
            for run in oldest.runs:
                self.runs[run] -= 1
                if not self.runs[run]:
                    del self.runs[run]

    def is_new(self, sketch: PromptSketch, max_overlap: float) -> bool:
        """Whether a prompt goes on with none of the earlier ones, but for what most of them have."""
        if self.wholes[sketch.whole]:
            return False
        num_prompts = len(self.recent)
        rest = [run for run in sketch.runs if num_prompts < _MIN_COMMON or self.runs[run] * 2 <= num_prompts]
        num_seen = sum(self.runs[run] > 0 for run in rest)
        return num_seen <= max_overlap * len(rest)


@dataclass(frozen=True)
class KeyWalk:
    """The counts of one key in the window.

    Attributes:
        num_new: Prompts that go on with no earlier one.
        num_scored: Those of them that asked for log-probabilities.
        output_tokens: Tokens that were written for it.
    """

    num_new: int
    num_scored: int
    output_tokens: int

    def is_extraction(self, rule: ExtractionRule) -> bool:
        """Whether the rule calls it extraction."""
        is_for_text = self.num_new >= rule.min_prompts and self.output_tokens >= rule.min_output_tokens
        return is_for_text or self.num_scored >= rule.min_scored_prompts


class PromptWalks:
    """The walks of all keys, in bounded memory: of 16,384 prompts at most, the latest 512 of a key."""

    def __init__(self, rule: ExtractionRule) -> None:
        self._rule = rule
        self._prompts: OrderedDict[str, _KeyPrompts] = OrderedDict()
        self._num_prompts = 0
        self._counts: dict[str, WindowCounts] = {}

    def add_request(
        self, now: float, key: str, sketches: Sequence[PromptSketch], *, has_logprobs: bool, output_tokens: int
    ) -> None:
        """Take a request that is over."""
        if key in self._rule.exempt_keys:
            return
        counts = self._counts.setdefault(key, WindowCounts(self._rule.window_s))
        counts.add_count(now, "tokens", output_tokens)
        prompts = self._prompts.setdefault(key, _KeyPrompts())
        self._prompts.move_to_end(key)
        for sketch in sketches:
            if prompts.is_new(sketch, self._rule.max_overlap):
                counts.add_count(now, "new")
                counts.add_count(now, "scored", int(has_logprobs))
            self._num_prompts -= len(prompts.recent)
            prompts.add_prompt(sketch)
            self._num_prompts += len(prompts.recent)
        while self._num_prompts > _ALL_PROMPTS and len(self._prompts) > 1:
            _, oldest = self._prompts.popitem(last=False)
            self._num_prompts -= len(oldest.recent)

    def read_walks(self, now: float) -> dict[str, KeyWalk]:
        """Return the walk of each key in the window; idle keys are forgotten."""
        walks = {}
        for key, window in list(self._counts.items()):
            counts = window.read_counts(now)
            if not counts:
                del self._counts[key]
                continue
            walks[key] = KeyWalk(counts["new"], counts["scored"], counts["tokens"])
        return walks
