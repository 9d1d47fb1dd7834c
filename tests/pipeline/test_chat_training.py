"""Conversations on a guarded pipeline: packed, masked, weighted and with noise, liars at rate 0.3 change no bit."""

import json
import math

import pytest
import torch

from phalanx.data import BatchLoader, BpeConfig, DataConfig, prepare_corpus
from phalanx.data.chat.settings import ConversationsConfig, ConversationSource
from phalanx.lab.attacks import make_actor
from phalanx.models import StageSpec, add_embedding_noise, build_stage
from phalanx.pipeline import AttackConfig, GuardConfig
from phalanx.testing import tiny_run
from phalanx.train import PipelineRun, step_inputs
from phalanx.train.batches.validation import measure_perplexities

STEPS, LENGTH, VOCAB = 4, 48, 259
AUDITED = GuardConfig(audit_rate=1.0, step_audit_rate=0.0, owner_audit_rate=0.0)


@pytest.fixture(scope="module")
def corpus_of(tmp_path_factory):
    """Prepare the same conversations with other settings."""
    home = tmp_path_factory.mktemp("chats")
    lines = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": str(n + 1)}], "weight": w}
        for n, w in zip(range(60), [1.0, 0.5] * 30, strict=True)
    ]
    (home / "talks.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))

    def prepared(run):
        return prepare_corpus(run.data, home / "cache", run.train.seed)

    prepared.path = home / "talks.jsonl"
    return prepared


@pytest.fixture
def chat_run(corpus_of):
    """A tiny run of conversations."""

    def make(guard=AUDITED, **train) -> PipelineRun:
        run = tiny_run(guard=guard)
        talks = ConversationsConfig(sources=(ConversationSource(path=corpus_of.path),), weighted=True)
        architecture = {**run.model.architecture, "n_positions": LENGTH, "vocab_size": VOCAB}
        sections = {
            "data": DataConfig(
                conversations=talks,
                tokenizer=BpeConfig(vocab_size=VOCAB),
                sequence_length=LENGTH,
                validation_share=0.2,
                attention="document",
            ),
            "model": run.model.model_copy(update={"architecture": architecture}),
            "train": type(run.train)(
                **{**run.train.model_dump(), "objective": "weighted_causal_lm", "neftune_alpha": 5.0, **train}
            ),
        }
        return run.with_sections(sections)

    return make


def trained(company, corpus, run):
    """The results of all steps."""
    loader = BatchLoader(corpus, run.train.batch_size, run.train.seed)
    batches = (step_inputs(loader.next_batch(), run.train.microbatches) for _ in range(STEPS))
    return [company.engine.train_turn(step, inputs) for step, inputs in enumerate(batches)]


@pytest.fixture(scope="module")
def honest():
    """Final weights of the run without liars, once it was trained."""
    return {}


@pytest.mark.parametrize("attack", ["sign_flip", pytest.param("gaussian", marks=pytest.mark.slow)])
def test_a_liar_at_rate_03_is_named_and_no_bit_of_what_was_learned_is_lost(
    make_company, corpus_of, chat_run, honest, tmp_path, attack
):
    run = chat_run()
    corpus = corpus_of(run)
    if not honest:
        clean = make_company(run)
        trained(clean, corpus, run)
        honest["digest"] = clean.weights_digest()
        assert clean.verdicts == []
    liar = make_actor(AttackConfig(kind=attack, stages=(2,), rate=0.3, seed=3), "worker-2", tmp_path / "attack.jsonl")
    company = make_company(run, {2: liar})

    trained(company, corpus, run)

    assert (tmp_path / "attack.jsonl").read_text().splitlines(), "the attacker has lied"
    assert [verdict.party for verdict in company.verdicts] == ["worker-2"]
    assert company.weights_digest() == honest["digest"]


@pytest.mark.slow
def test_without_the_guard_the_same_liar_changes_what_is_learned(make_company, corpus_of, chat_run, tmp_path):
    run = chat_run(GuardConfig(mode="off"))
    corpus = corpus_of(run)
    liar = make_actor(
        AttackConfig(kind="sign_flip", stages=(2,), rate=0.3, seed=3), "worker-2", tmp_path / "attack.jsonl"
    )
    company, clean = make_company(run, {2: liar}), make_company(run)

    trained(company, corpus, run)
    trained(clean, corpus, run)

    assert company.weights_digest() != clean.weights_digest()


def test_the_noise_of_a_step_is_that_of_the_paper_and_off_at_validation(make_company, corpus_of, chat_run):
    run = chat_run()
    corpus, company = corpus_of(run), make_company(run)
    batch = BatchLoader(corpus, run.train.batch_size, run.train.seed).next_batch()
    source = company.source
    stage = build_stage(
        source, StageSpec(0, 1, 0, source.num_layers), adapter=None, activation_checkpointing=False, seed=0,
        attention="sdpa",
    )  # fmt: skip
    table = stage.get_parameter(stage.family.embedding_weight)
    plain = torch.nn.functional.embedding(batch.input_ids, table)
    add_embedding_noise(stage, 5.0)
    embedding = stage.get_submodule(stage.family.embedding_weight.removesuffix(".weight"))

    def noise(step):
        stage.embedding_noise.begin_step(run.train.seed, step)
        return (embedding(batch.input_ids) - plain).detach()

    bound = 5.0 / math.sqrt(LENGTH * plain.shape[-1])
    first = noise(0)
    assert 0.95 * bound < float(first.abs().max()) <= bound * (1 + 1e-4)
    assert abs(float(first.mean())) < bound * 0.02
    assert torch.equal(first, noise(0))
    assert not torch.equal(first, noise(1))
    stage.eval()
    assert not noise(0).any()
    stage.attends = "documents"
    quiet = measure_perplexities([stage.train()], [[batch]])
    stage.embedding_noise.begin_step(run.train.seed, 9)
    assert quiet == measure_perplexities([stage], [[batch]])


def test_the_loss_of_a_step_is_that_of_the_weighted_targets_alone(make_company, corpus_of, chat_run):
    run = chat_run(neftune_alpha=None)
    corpus, company = corpus_of(run), make_company(run)
    batch = BatchLoader(corpus, run.train.batch_size, run.train.seed).next_batch()

    result = company.engine.train_turn(0, step_inputs(batch, run.train.microbatches))

    assert result.num_targets == int((batch.labels != -100).sum())
    # an untrained model knows nothing of any target
    mean_weight = float(batch.extras["weights"].sum()) / result.num_targets
    assert result.loss == pytest.approx(math.log(VOCAB) * mean_weight, rel=0.03)
