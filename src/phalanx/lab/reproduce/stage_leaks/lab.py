"""One training of a pipeline, and every attack at each of its middle stages."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from phalanx.errors import ModelError
from phalanx.lab.reproduce.pretrain import pretrained_directory
from phalanx.lab.reproduce.stage_leaks.size import REAL, PipelineSize, Regime, StageLeakSize
from phalanx.lab.reproduce.stage_leaks.texts import LeakTexts, read_leak_texts
from phalanx.lab.reproduce.stage_leaks.trained_pipeline import OwnerNoise, TrainedPipeline
from phalanx.lab.reproduce.texts import pretraining_corpus
from phalanx.lab.reproduce.workload import SMALL as SMALL_TABLE
from phalanx.lab.reproduce.workload import architecture_of
from phalanx.models import ModelConfig, ModelSource, open_model
from phalanx.redteam.inversion import (
    WIRES,
    CandidateSearch,
    Front,
    GradientSearch,
    Inverter,
    LinearMap,
    NearestNeighbour,
    TextProperty,
    TrainedInverter,
    candidate_states,
    chance_share,
    opening_states,
    recover_tokens,
    share_of_tokens,
)

Row = dict[str, Any]
Say = Callable[[str], None]
StageGuard = Literal["plaintext", "noise", "sealed"]

TOKEN_ATTACKS = ("nearest_neighbour", "linear_map", "trained_inverter", "gradient_search", "candidate_search")
"""Attacks on the activations of a stage, in the order in which they are tried."""
_ATTACKER_SEED = 1_000


@dataclass(frozen=True)
class StageLeakCell:
    """One training and all attacks on it; `noise` is the owner's, in deviations of a column."""

    model: str
    regime: Regime
    guard: StageGuard
    noise: float
    seed: int

    @property
    def stage_label(self) -> str:
        """One line for the progress."""
        guard = f"noise {self.noise}" if self.noise else self.guard
        return f"{self.model}, {self.regime}, {guard}, seed {self.seed}"


@dataclass(frozen=True)
class AttackedPipeline:
    """Everything about a model and a regime that all guards have in common."""

    source: ModelSource
    texts: LeakTexts
    size: PipelineSize
    regime: Regime

    @property
    def front_is_public(self) -> bool:
        """Whether the attackers have the weights from which the run began, and they are of use."""
        return self.regime != "scratch"


class StageLeakLab:
    """A runner of cells; models and texts are made at their first use."""

    def __init__(self, size: StageLeakSize, cache: Path, say: Say) -> None:
        self._size, self._cache, self._say = size, cache, say
        self._pipelines: dict[tuple[str, Regime], AttackedPipeline] = {}

    def __call__(self, cell: StageLeakCell) -> Row:
        """Train, attack, and return the row."""
        key = cell.model, cell.regime
        if key not in self._pipelines:
            self._say(f"preparing {cell.model} and its texts")
            self._pipelines = {key: self._open_pipeline(*key)}
        started = time.perf_counter()
        row = attack_pipeline(self._pipelines[key], cell)
        return {**asdict(cell), **row, "wall_s": time.perf_counter() - started}

    def _open_pipeline(self, model: str, regime: Regime) -> AttackedPipeline:
        size = self._size.pipelines[model]
        if model == REAL:
            source = open_model(ModelConfig(name=model), self._cache / "models", 0)
            tokenizer = source.tokenizer_path
        else:
            corpus = pretraining_corpus(self._cache, SMALL_TABLE)
            tokenizer = corpus.tokenizer_path
            config = ModelConfig(from_scratch=True, architecture=architecture_of("gpt2", SMALL_TABLE.width))
            if regime != "scratch":
                place = pretrained_directory("gpt2", corpus, SMALL_TABLE, self._cache, self._say)
                config = ModelConfig(path=str(place))
            source = open_model(config, self._cache / "models", 0)
        if tokenizer is None:
            raise ModelError(f"{source.directory}: has no tokenizer.json; stage-leaks needs the model's own")
        return AttackedPipeline(source, read_leak_texts(size, regime, tokenizer), size, regime)


def attack_pipeline(attacked: AttackedPipeline, cell: StageLeakCell) -> Row:
    """Train under one guard, and attack the messages of further passes over the text that was trained on."""
    size, texts = attacked.size, attacked.texts
    noise = OwnerNoise(cell.noise, cell.seed)
    run = TrainedPipeline.build(attacked.source, size, attacked.regime, noise, cell.seed)
    before = run.held_out_loss(texts.held_out)
    run.train(texts.owned, cell.seed)
    cpu_s = run.cpu_seconds
    row: Row = {"loss_before": before, "loss": run.held_out_loss(texts.held_out), "stage_cpu_s": cpu_s}
    attackers_noise = OwnerNoise(cell.noise, _ATTACKER_SEED + cell.seed)
    if attacked.front_is_public:
        # new adapters change nothing, so this is the public model at the price of adapters' gradients
        rehearsal = TrainedPipeline.build(attacked.source, size, _cheapest(attacked), attackers_noise, cell.seed)
    else:
        # known pairs: messages of the run itself, for text that is known to be in it
        rehearsal = run
    seen = _GuardedViews(cell.guard, run, texts.owned[: size.attacked], texts.labelled, (size.labelled, None))
    del run
    learned = _GuardedViews(cell.guard, rehearsal, texts.known, texts.labelled, (0, size.labelled))
    del rehearsal
    starts = [size.first_layer(stage) for stage in size.middle_stages]
    front = Front(attacked.source, (0, *starts)) if attacked.front_is_public else None
    tables = _FrontTables.make(front, texts.known[:, :-1], size) if front is not None else None
    table = Front(attacked.source, (0,)).embedding_table if front is None else front.embedding_table
    row["stages"] = [
        {
            "stage": stage,
            "first_layer": size.first_layer(stage),
            "end_layer": size.first_layer(stage + 1),
            **_attack_tokens(stage, attacked, learned, seen, (front, tables, table)),
            **_attack_labels(stage, attacked, learned, seen, table),
            **_attack_properties(stage, learned, seen),
        }
        for stage in size.middle_stages
    ]
    return row


def _cheapest(attacked: AttackedPipeline) -> Regime:
    return "lora" if "lora" in attacked.size.rates else attacked.regime


class _GuardedViews:
    """What one side of a measurement reads at each middle stage, under one guard.

    Args:
        rows: Text with every token known to whoever keeps the score.
        labelled: By property, a tensor of texts for each kind.
        part: First text of each kind that is used, and the one behind the last.
    """

    def __init__(
        self,
        guard: StageGuard,
        pipeline: TrainedPipeline,
        rows: Tensor,
        labelled: Mapping[str, tuple[Tensor, ...]],
        part: tuple[int, int | None],
    ) -> None:
        wire = WIRES["sealed" if guard == "sealed" else "plaintext"]()
        self.ids, self.labels = rows[:, :-1], rows[:, 1:]
        sent = pipeline.messages_of(rows)
        self.activations = {stage: wire.host_view(x.float()).bfloat16() for stage, x in sent.activations.items()}
        self.gradients = {stage: wire.host_view(x.float()).bfloat16() for stage, x in sent.gradients.items()}
        self.kinds: dict[str, tuple[Tensor, dict[int, Tensor]]] = {}
        for name, kinds in labelled.items():
            chosen = [kind[slice(*part)] for kind in kinds]
            answers = torch.cat([torch.full((len(kind),), number) for number, kind in enumerate(chosen)])
            sent = pipeline.messages_of(torch.cat(chosen), forward_only=True)
            views = {stage: wire.host_view(x.float()).bfloat16() for stage, x in sent.activations.items()}
            self.kinds[name] = answers, views


@dataclass(frozen=True)
class _FrontTables:
    """States of single tokens in the public front, for the attacks that look tokens up."""

    candidates: Tensor
    states: Mapping[int, Tensor]
    openings: Mapping[int, Tensor]

    @classmethod
    def make(cls, front: Front, known: Tensor, size: PipelineSize) -> "_FrontTables":
        counts = known.flatten().bincount()
        common = counts.argsort(descending=True, stable=True)[: min(size.candidates, int((counts > 0).sum()))]
        openings = opening_states(front, size.openings) if size.widths else {}
        return cls(common, candidate_states(front, common, int(common[0])), openings)


def _attack_tokens(
    stage: int,
    attacked: AttackedPipeline,
    learned: _GuardedViews,
    seen: _GuardedViews,
    public: tuple[Front | None, _FrontTables | None, Tensor],
) -> Row:
    """Recover the owner's tokens from the activations that arrive; None where an attack needs a secret front."""
    (front, tables, table), size = public, attacked.size
    depth = size.first_layer(stage)
    states, private = learned.activations[stage].float(), seen.activations[stage].float()
    few = slice(size.searched)
    shares: dict[str, float | None] = dict.fromkeys(TOKEN_ATTACKS)
    inverters: dict[str, Inverter] = {
        "linear_map": LinearMap(table),
        "trained_inverter": TrainedInverter(table, steps=size.inverter_steps),
    }
    if front is not None and tables is not None:
        inverters["nearest_neighbour"] = NearestNeighbour(front, depth, tables.candidates, tables.states[depth])
    for name, inverter in inverters.items():
        inverter.fit_states(states, learned.ids)
        shares[name] = share_of_tokens(recover_tokens(inverter, private), seen.ids)
    if front is not None and tables is not None:
        best = max(("linear_map", "trained_inverter"), key=lambda name: shares[name] or 0.0)
        proposer = inverters[best]
        by_gradient = GradientSearch(front, depth, proposer, steps=size.search_steps)
        by_gradient.fit_states(states, learned.ids)
        shares["gradient_search"] = share_of_tokens(recover_tokens(by_gradient, private[few]), seen.ids[few])
        if size.widths:
            search = CandidateSearch(front, depth, proposer, tables.openings[depth], widths=size.widths)
            search.fit_scale(states, learned.ids)
            shares["candidate_search"] = share_of_tokens(search.recover_tokens(private[few]), seen.ids[few])
    return {
        "tokens": shares,
        "tokens_chance": max(chance_share(learned.ids, seen.ids), chance_share(learned.ids, seen.ids[few])),
        "tokens_tried": seen.ids.numel(),
        "tokens_searched": seen.ids[few].numel(),
    }


def _attack_labels(
    stage: int, attacked: AttackedPipeline, learned: _GuardedViews, seen: _GuardedViews, table: Tensor
) -> Row:
    """Recover the next tokens, the labels of a language model, from the gradients that arrive."""
    shares = {}
    states, private = (_directions(view.gradients[stage].float()) for view in (learned, seen))
    maps: dict[str, Inverter] = {
        "linear_map": LinearMap(table),
        "trained_inverter": TrainedInverter(table, steps=attacked.size.inverter_steps),
    }
    for name, inverter in maps.items():
        inverter.fit_states(states, learned.labels)
        shares[name] = share_of_tokens(recover_tokens(inverter, private), seen.labels)
    return {"labels": shares, "labels_chance": chance_share(learned.labels, seen.labels)}


def _attack_properties(stage: int, learned: _GuardedViews, seen: _GuardedViews) -> Row:
    """Tell kinds of text apart by the activations that arrive; every kind has as many texts."""
    shares = {}
    for name, (answers, views) in learned.kinds.items():
        probe = TextProperty(int(answers.max()) + 1)
        probe.fit_texts(views[stage].float(), answers)
        hidden, private = seen.kinds[name]
        shares[name] = float((probe.recover_labels(private[stage].float()) == hidden).double().mean())
    return {
        "properties": shares,
        "properties_chance": {name: 1 / (int(answers.max()) + 1) for name, (answers, _) in seen.kinds.items()},
        "properties_tried": {name: len(answers) for name, (answers, _) in seen.kinds.items()},
    }


def _directions(gradients: Tensor) -> Tensor:
    """Return unit vectors: the length of a token's gradient depends on its probability and does not name it."""
    return functional.normalize(gradients, dim=-1)
