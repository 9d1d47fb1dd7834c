"""Routers that choose between nearly equal experts: which other choices an honest writer may have made by rounding.

A text is off where a writer's rounding chose an expert that the checker's did not. So before a worker is accused, the
text is read with the other choice of every near tie before the fault, and of the ties that then come up, until the
claims fit or no choice is left.
"""

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from phalanx.rollouts.judgement import first_fault
from phalanx.rollouts.policy import PolicyModel
from phalanx.rollouts.prefill import RereadRollout, compare_text, read_texts
from phalanx.rollouts.request import RolloutRequest
from phalanx.rollouts.rollout import Rollout

MAX_READINGS = 64
"""Readings of one text; beyond them the search ends, and the worker is not convicted."""

Choice = tuple[int, int, int, int]
"""Number of the router, position in the text, the expert that is left out, and its replacement."""


class RouterWatch:
    """Records near ties of a model's routers while it reads one text, and replaces experts; a context manager.

    Args:
        tolerance: Router logits that are nearer than this are nearly equal.

    Attributes:
        ties: Exchanges that rounding could have made beside `choices`, with the distance of the logits.
    """

    def __init__(self, model: PolicyModel, tolerance: float, choices: frozenset[Choice]) -> None:
        self._routers, self._tolerance = model.expert_routers, tolerance
        self._choices: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for router, position, out, instead in sorted(choices):
            self._choices.setdefault((router, position), []).append((out, instead))
        self._seen = [0] * len(self._routers)
        self._hooks: list[RemovableHandle] = []
        self.ties: dict[Choice, float] = {}

    def __enter__(self) -> Self:
        for number, router in enumerate(self._routers):
            self._hooks.append(router.register_forward_hook(self._hook_of(number)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()

    def _hook_of(self, number: int) -> Any:
        def look(router: nn.Module, _inputs: object, outputs: tuple[Tensor, Tensor, Tensor]) -> Any:
            return self._watch_router(number, router, *outputs)

        return look

    def _watch_router(self, number: int, router: nn.Module, logits: Tensor, scores: Tensor, experts: Tensor) -> Any:
        begin = self._seen[number]
        self._seen[number] += len(logits)
        scores, experts = scores.clone(), experts.clone()
        exchanged = [token for token in range(len(logits)) if (number, begin + token) in self._choices]
        for token in exchanged:
            for out, instead in self._choices[number, begin + token]:
                experts[token][experts[token] == out] = instead
            shares = logits[token].float().softmax(-1)[experts[token]]
            # a router of Mixtral always divides, and so has no word for it
            divides = getattr(router, "norm_topk_prob", True)
            scores[token] = (shares / shares.sum() if divides else shares).to(scores.dtype)
        chosen = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, experts, value=True)
        least = logits.masked_fill(~chosen, torch.inf).amin(dim=-1)
        best = logits.masked_fill(chosen, -torch.inf).amax(dim=-1)
        near = ((least - best).abs() <= self._tolerance).nonzero()[:, 0].tolist()
        for token in sorted({*near, *exchanged}):
            self._note_ties(number, begin + token, logits[token].tolist(), set(experts[token].tolist()))
        return logits, scores, experts

    def _note_ties(self, number: int, position: int, logits: Sequence[float], chosen: set[int]) -> None:
        for out, instead in itertools.product(chosen, set(range(len(logits))) - chosen):
            gap = logits[out] - logits[instead]
            # an exchange that was made is not taken back
            is_made = (instead, out) in self._choices.get((number, position), ())
            if 0.0 <= gap <= self._tolerance and not is_made:
                self.ties[number, position, out, instead] = gap


@dataclass(frozen=True)
class TieSearch:
    """The outcome of a search.

    Attributes:
        outcome: ``fits``: a choice that rounding may have made gives the claims. ``excluded``: none does.
            ``open``: there are more choices than were tried.
        reread: Reading that fits the claims; None otherwise.
    """

    outcome: Literal["fits", "excluded", "open"]
    reread: RereadRollout | None = None


def search_near_ties(model: PolicyModel, request: RolloutRequest, text: Rollout) -> TieSearch:
    """Search for choices of experts, each within rounding, under which the claims of a text are true.

    Guarantees:
        ``excluded`` says that no such choices exist: an honest writer's choices are near ties of a reading that agrees
        with it up to the first difference, and each of these is tried.
    """
    numbers = itertools.count()
    queue: list[tuple[int, float, int, frozenset[Choice]]] = [(0, 0.0, next(numbers), frozenset())]
    seen = {frozenset[Choice]()}
    for _ in range(MAX_READINGS):
        if not queue:
            return TieSearch("excluded")
        _, distance, _, choices = heapq.heappop(queue)
        with RouterWatch(model, request.tolerance.router, choices) as watch:
            (read,) = read_texts(model, [text])
        reread, ties = compare_text(request, text, read, request.tolerance.margin), watch.ties
        fault = first_fault(request, reread)
        if fault is None:
            return TieSearch("fits", reread)
        for tie, gap in ties.items():
            more = choices | {tie}
            # what comes behind the fault cannot be its cause
            if tie[1] < len(text.prompt_ids) + fault and more not in seen:
                seen.add(more)
                heapq.heappush(queue, (-fault, distance + gap, next(numbers), more))
    return TieSearch("open") if queue else TieSearch("excluded")
