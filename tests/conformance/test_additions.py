"""One addition of each kind: a piece of code and one line of its table, and everything else follows from the table.

Run files accept it, it runs, and planner, benches and commands know of it; without the line it is refused by name.
"""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from phalanx.data import IGNORE, BpeConfig, DataConfig, prepare_corpus
from phalanx.data.sources import SOURCES, Document, PythonManualConfig, SourceEntry, SourceSettings, source_union
from phalanx.errors import ConfigError, ModelError
from phalanx.lab.attacks import ATTACKS, AttackEntry, MessageAttack, check_attack, make_actor
from phalanx.lab.bench.detection.cells import detection_cells, honest_cells
from phalanx.lab.bench.detection.drills import list_attacks
from phalanx.models import FAMILIES, LoraConfig, ModelConfig, StageSpec, build_stage, open_model
from phalanx.models.planned import FamilyByPlan
from phalanx.objectives import OBJECTIVES, Objective, causal_lm_loss
from phalanx.optimizers import OptimizerConfig, torch_optimizer
from phalanx.parallel import ParallelConfig, RankRecipe
from phalanx.parallel.control.rank_trainer import check_objective
from phalanx.parallel.tensor.tensor_plans import plan_of
from phalanx.pipeline import AttackConfig, GuardConfig, PipelineConfig
from phalanx.planner import Layout, Recipe, describe_refusal, shape_of
from phalanx.planner.cost.memory import in_flight
from phalanx.planner.cost.schedule import StageTimes, simulate_step
from phalanx.planner.layout import all_layouts
from phalanx.planner.model.adapter import linears_of
from phalanx.planner.model.families import FAMILIES as FACTS
from phalanx.planner.model.families import SlicingRule
from phalanx.planner.model.families.planned import PlannedFamily
from phalanx.planner.model.optimizers import OPTIMIZERS, OptimizerFacts, moment_shapes
from phalanx.planner.schedules import SCHEDULES, Schedule, Work
from phalanx.split import task_of
from phalanx.testing import MemoryCompany, tiny_run
from phalanx.train import TrainConfig

RECIPE = Recipe(sequences=32, sequence_length=16, microbatches=4)


class Halve(MessageAttack):
    """Sends half of what was computed."""

    def lie(self, work, generator):
        del generator
        return work.result / 2


def test_an_attack_is_played_by_command_and_bench_and_its_party_is_named(tmp_path, monkeypatch):
    config = AttackConfig(kind="halve", stages=(1,), from_step=1)
    with pytest.raises(ConfigError, match=r"attack\.kind: found 'halve'; choices: none, adaptive"):
        check_attack(config)

    monkeypatch.setitem(ATTACKS, "halve", AttackEntry(Halve, "audit", "both"))

    check_attack(config)
    assert {"attack": "halve", "what it does": "Sends half of what was computed."}.items() <= list_attacks()[-1].items()
    assert {cell.run.attack.direction for cell in detection_cells(quick=False) if cell.run.attack.kind == "halve"} == {
        "forward",
        "backward",
    }
    run = tiny_run(guard=GuardConfig(audit_rate=1.0, step_audit_rate=0.0, owner_audit_rate=0.0))
    with MemoryCompany(run, tmp_path / "run", {"worker-1": make_actor(config, "worker-1")}) as company:
        company.run(2)
        assert [verdict.party for verdict in company.verdicts] == ["worker-1"]


def in_pairs(rank, num_ranks, num_microbatches, chunks):
    """Two forwards, then their backwards, and so on."""
    del num_ranks, chunks
    order = []
    for first in range(0, num_microbatches, 2):
        pair = range(first, min(first + 2, num_microbatches))
        order += [Work(kind, rank, m) for kind in ("forward", "backward") for m in pair]
    return tuple(order)


def test_a_schedule_is_run_by_verified_stages_and_known_to_ranks_planner_and_bench(tmp_path, monkeypatch):
    with pytest.raises(ValidationError, match="Input should be 'gpipe' or '1f1b'"):
        PipelineConfig(schedule="pairs")

    monkeypatch.setitem(SCHEDULES, "pairs", Schedule(in_pairs, "ScheduleGPipe"))

    digests = set()
    for schedule in ("1f1b", "pairs"):
        pipeline = PipelineConfig(stages=3, schedule=schedule, step_timeout_s=30.0)
        with MemoryCompany(tiny_run(pipeline=pipeline), tmp_path / schedule, cache=tmp_path / "models") as company:
            company.run(2)
            assert company.verdicts == []
            digests.add(company.weights_digest())
    assert len(digests) == 1
    assert ParallelConfig(pp=2, schedule="pairs").planned_layout.schedule == "pairs"
    assert Layout(pp=2, schedule="pairs") in list(all_layouts(2))
    assert in_flight(Layout(pp=4, schedule="pairs"), 16, rank=0) == 2
    assert simulate_step("pairs", 2, 4, [StageTimes(1.0, 1.0, 1.0)] * 2).length_s > 0
    assert "pairs" in {cell.run.pipeline.schedule for cell in honest_cells(quick=False)}


CWM = {
    "model_type": "cwm",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 32,
    "sliding_window": 4,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}


def test_a_model_family_with_a_plan_is_cut_and_planned_by_its_line(tmp_path, monkeypatch):
    with pytest.raises(ModelError, match="'cwm'; expected one of arcee, bert"):
        shape_of(CWM)

    line = PlannedFamily(SlicingRule(windows="layers"), shared_axes=frozenset({"tp"}), defaults={"head_dim": 128})
    monkeypatch.setitem(FACTS, "cwm", line.family_facts)
    monkeypatch.setitem(FAMILIES, "cwm", FamilyByPlan("cwm"))

    source = open_model(ModelConfig(from_scratch=True, architecture=CWM), tmp_path, seed=1)

    def build(spec, adapter=None):
        return build_stage(source, spec, adapter=adapter, activation_checkpointing=False, attention="sdpa", seed=1)

    whole, ids = build(StageSpec(0, 1, 0, 2)), torch.arange(8).view(1, 8)
    first, last = (build(StageSpec(i, 2, i, i + 1)) for i in range(2))
    assert torch.equal(last(first(ids)), whole(ids))
    adapted = build(StageSpec(1, 2, 1, 2), LoraConfig(rank=2))
    trained = [name for name, weight in adapted.named_parameters() if weight.requires_grad]
    assert len(trained) == 4
    assert all("q_proj" in name or "v_proj" in name for name in trained)
    shape = shape_of(CWM)
    assert shape.family == "cwm"
    assert shape.num_parameters == sum(weight.numel() for weight in whole.parameters())
    assert describe_refusal(Layout(tp=2), shape, RECIPE) is None
    assert {one.name for one in linears_of(shape)} == {*plan_of("cwm").columns, *plan_of("cwm").rows}


def test_an_optimizer_is_told_its_own_settings_and_planned_by_what_it_keeps(monkeypatch):
    with pytest.raises(ValidationError, match=r"Input should be 'adamw', .* or 'adamw8bit'"):
        OptimizerConfig(kind="rmsprop", lr=0.1)

    line = OptimizerFacts(
        torch_class="RMSprop",
        settings=("lr", "eps", "momentum"),
        names=("square_avg", "momentum_buffer"),
        moments=lambda shape: dict.fromkeys(("square_avg", "momentum_buffer"), shape),
        fused="never",
    )
    monkeypatch.setitem(OPTIMIZERS, "rmsprop", line)

    config = OptimizerConfig(kind="rmsprop", lr=0.1, momentum=0.5)
    with pytest.raises(ValidationError, match='betas has no meaning with kind = "rmsprop"'):
        OptimizerConfig(kind="rmsprop", lr=0.1, betas=(0.5, 0.5))
    weight = torch.nn.Parameter(torch.ones(3, 2))
    kind, said = torch_optimizer(config)
    optimizer = kind([weight], **said)
    weight.sum().backward()
    optimizer.step()
    assert bool((weight < 1).all())
    kept = {name: tuple(value.shape) for name, value in optimizer.state[weight].items() if name != "step"}
    assert kept == moment_shapes("rmsprop", (3, 2))
    assert (replace(RECIPE, optimizer="rmsprop").state_bytes, RECIPE.state_bytes) == (8, 8)
    assert replace(RECIPE, optimizer="sgd").state_bytes == 4


def smoothed(logits, labels, /):
    """Half of the loss on the labels, half on every token alike."""
    total, targets = causal_lm_loss(logits, labels)
    even = -torch.log_softmax(logits, dim=-1).mean(-1)[labels != IGNORE].sum()
    return (total + even) / 2, targets


def test_an_objective_over_the_models_own_head_is_learned_by_every_engine(tmp_path, monkeypatch):
    with pytest.raises(ValidationError, match=r"Input should be 'causal_lm', .* or 'module:object'"):
        TrainConfig(steps=1, batch_size=8, objective="smoothed")

    monkeypatch.setitem(OBJECTIVES, "smoothed", Objective(smoothed))

    assert TrainConfig(steps=1, batch_size=8, objective="smoothed").objective == "smoothed"
    logits = torch.zeros(1, 2, 4)
    loss, targets = task_of("smoothed", 0).compute_loss(torch.nn.Identity(), logits, torch.tensor([[1, 2]]))
    assert (float(loss), targets) == (pytest.approx(2 * torch.tensor(4.0).log().item()), 2)
    run = tiny_run()
    smooth = run.train.model_copy(update={"objective": "smoothed"})
    run = type(run)(**{name: getattr(run, name) for name in run.model_fields_set} | {"train": smooth})
    with MemoryCompany(run, tmp_path / "smoothed") as company:
        losses = [result.loss for result in company.run(2)]
        assert company.verdicts == []
    with MemoryCompany(tiny_run(), tmp_path / "plain") as company:
        assert all(mine > theirs.loss for mine, theirs in zip(losses, company.run(2), strict=True))
    recipe = RankRecipe(ParallelConfig(dp=2), OptimizerConfig(lr=1e-3), 8, 4, 16, 1, objective="smoothed")
    check_objective(recipe)
    with pytest.raises(ConfigError, match=r"tp=2 shares the vocabulary.*not smoothed"):
        check_objective(replace(recipe, parallel=ParallelConfig(tp=2)))


class CountingConfig(SourceSettings):
    """Numbers in words' places."""

    kind: Literal["counting"] = "counting"
    documents: int


class Counting:
    """A document of some numbers each."""

    def __init__(self, config):
        self._number = config.documents

    def fingerprint(self):
        return hashlib.sha256(f"counting {self._number}".encode()).hexdigest()

    def documents(self):
        for number in range(self._number):
            yield Document(f"document {number}", " ".join(map(str, range(number, number + 200))))


def test_a_source_is_read_by_its_kind_and_prepared(tmp_path: Path, monkeypatch):
    said = {"kind": "counting", "documents": 30}
    with pytest.raises(ValidationError, match="'python_manual', 'python_docstrings', 'text', 'jsonl', 'html'"):
        TypeAdapter(source_union(SOURCES)).validate_python(said)

    monkeypatch.setitem(SOURCES, "counting", SourceEntry(CountingConfig, Counting))

    found = TypeAdapter(source_union(SOURCES)).validate_python(said)
    assert found == CountingConfig(documents=30)
    tokenizer = BpeConfig(vocab_size=260)
    config = DataConfig(sources=(PythonManualConfig(),), tokenizer=tokenizer, sequence_length=16, validation_share=0.2)
    # the type of a run file is made from the table once, when the program starts
    corpus = prepare_corpus(config.model_copy(update={"sources": (found,)}), tmp_path, seed=1)
    assert corpus.vocab_size == 260
