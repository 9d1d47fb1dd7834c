"""Every attack on hidden states at one cut, under one guard, on the packaged model."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.errors import ModelError
from phalanx.lab.reproduce.leaks.size import MODEL, LeakSize
from phalanx.lab.reproduce.leaks.texts import private_ids, public_ids
from phalanx.models import ModelConfig, ModelSource, open_model
from phalanx.redteam.inversion import (
    WIRES,
    CandidateSearch,
    Front,
    Guard,
    Inverter,
    LinearMap,
    NearestNeighbour,
    TrainedInverter,
    candidate_states,
    chance_share,
    opening_states,
    recover_tokens,
    share_of_tokens,
)

Row = dict[str, Any]
Say = Callable[[str], None]
Texts = Callable[[], tuple[Tensor, Tensor]]

ATTACKS = ("nearest_neighbour", "linear_map", "trained_inverter", "candidate_search")
"""Those that have a column, as the table of attacks on privacy names them."""


@dataclass(frozen=True)
class LeakCell:
    """The parameters of a row."""

    depth: int
    guard: Guard

    @property
    def leak_label(self) -> str:
        """One line for the progress."""
        return f"cut at depth {self.depth}, {self.guard}"


class LeakLab:
    """A runner of cells; text, front and hidden states are made at their first use and stay in memory."""

    def __init__(self, size: LeakSize, source: ModelSource, texts: Texts, say: Say) -> None:
        self._size, self._source, self._read, self._say = size, source, texts, say

    def __call__(self, cell: LeakCell) -> Row:
        """Measure one cell."""
        started = time.perf_counter()
        public, private = self._public_and_private
        wire = WIRES[cell.guard]()
        seen, public_states = (
            wire.host_view(states[cell.depth].float()) for states in (self._private_states, self._public_states)
        )
        row: Row = {**asdict(cell), "tokens": private.numel(), "chance": chance_share(public, private)}
        inverters = self._make_inverters(cell.depth)
        for name, inverter in inverters.items():
            inverter.fit_states(public_states, public)
            row[name] = share_of_tokens(recover_tokens(inverter, seen), private)
        # the better of two learners proposes
        proposer = max(("linear_map", "trained_inverter"), key=lambda name: float(row[name]))
        few = slice(self._size.searched_sequences)
        search = CandidateSearch(self._front_model, cell.depth, inverters[proposer], self._opening_states[cell.depth])
        search.fit_scale(public_states, public)
        row["candidate_search"] = share_of_tokens(search.recover_tokens(seen[few]), private[few])
        row |= {"searched_tokens": private[few].numel(), "searched_chance": chance_share(public, private[few])}
        return row | {"wall_s": time.perf_counter() - started}

    def _make_inverters(self, depth: int) -> dict[str, Inverter]:
        candidates = self._common_tokens if depth else torch.arange(self._source.vocab_size)
        table = (
            self._state_tables[depth]
            if depth
            else candidate_states(self._front_model, candidates, self._commonest_token, 0)[0]
        )
        return {
            "nearest_neighbour": NearestNeighbour(self._front_model, depth, candidates, table),
            "linear_map": LinearMap(self._front_model.embedding_table),
            "trained_inverter": TrainedInverter(self._front_model.embedding_table, steps=self._size.steps),
        }

    @cached_property
    def _public_and_private(self) -> tuple[Tensor, Tensor]:
        self._say("preparing text")
        return self._read()

    @cached_property
    def _front_model(self) -> Front:
        self._say("building the front")
        return Front(self._source, (0, *self._size.depths))

    @cached_property
    def _public_states(self) -> dict[int, Tensor]:
        self._say("running public text through the front")
        # as it would cross: half of the memory, and the same numbers
        return {
            depth: states.bfloat16()
            for depth, states in self._front_model.hidden_states(self._public_and_private[0]).items()
        }

    @cached_property
    def _private_states(self) -> dict[int, Tensor]:
        return {
            depth: states.bfloat16()
            for depth, states in self._front_model.hidden_states(self._public_and_private[1]).items()
        }

    @cached_property
    def _common_tokens(self) -> Tensor:
        counts = self._public_and_private[0].flatten().bincount()
        return counts.argsort(descending=True, stable=True)[: min(self._size.candidates, int((counts > 0).sum()))]

    @cached_property
    def _opening_states(self) -> dict[int, Tensor]:
        self._say("running first tokens through the front")
        return opening_states(self._front_model, self._size.openings)

    @property
    def _commonest_token(self) -> int:
        return int(self._common_tokens[0])

    @cached_property
    def _state_tables(self) -> dict[int, Tensor]:
        self._say("running candidate tokens through the front")
        return candidate_states(self._front_model, self._common_tokens, self._commonest_token)


def open_source_and_texts(size: LeakSize, cache: Path) -> tuple[ModelSource, Texts]:
    """Open the packaged model, and text in its tokens."""
    source = open_model(ModelConfig(name=MODEL), cache / "models", 0)

    def texts() -> tuple[Tensor, Tensor]:
        if source.tokenizer_path is None:
            raise ModelError(f"{source.directory}: has no tokenizer.json; leaks needs the model's own")
        tokenizer = source.tokenizer_path
        return public_ids(tokenizer, size.public_sequences), private_ids(tokenizer, size.private_sequences)

    return source, texts
