"""A run file with a split: what it excludes, which parties take part, and how clients share the text."""

from types import SimpleNamespace

import pytest
import torch

from phalanx.data import BatchLoader, prepare_corpus
from phalanx.errors import CheckpointError, ConfigError
from phalanx.objectives import OBJECTIVES
from phalanx.train import load_run
from phalanx.train.batches.client_loader import ClientLoader
from phalanx.train.sessions.split_cluster import kinds_of
from tiny_run_file import tiny_run_file

SPLIT = ("split={cut=2,clients=2,allow_insecure_sim=true}", "model.adapter={rank=2}")
TEXT = tiny_run_file()


@pytest.fixture
def make_split(tmp_path):
    path = tmp_path / "split.toml"
    path.write_text(TEXT)
    return lambda *overrides: load_run(path, [*SPLIT, *overrides])


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["parallel.dp=2"], ["parallel", "split"]),
        (["pipeline.stages=3"], ["[split] and [pipeline]"]),
        (["guard.audit_rate=0.5"], ["[split] and [guard]"]),
        (["split.clients=5"], ["split.clients = 5", "microbatches = 4"]),
        (["train.precision='fp16'"], ["fp16"]),
        (["checkpoint.asynchronous=true"], ["asynchronous"]),
        (["optimizer.kind='sgd'", "optimizer.betas=[0.9,0.95]"], ["optimizer.kind"]),
        (["split.mode='plaintext'"], ["insecure = true"]),
    ],
)
def test_what_a_split_excludes_is_named(make_split, overrides, named):
    with pytest.raises(ConfigError) as refusal:
        make_split(*overrides)

    assert [word for word in named if word not in str(refusal.value)] == []


def test_a_split_needs_an_adapter(tmp_path):
    path = tmp_path / "split.toml"
    path.write_text(TEXT)

    with pytest.raises(ConfigError, match=r"\[model.adapter\]"):
        load_run(path, SPLIT[:1])


def test_the_parties_are_the_enclave_and_the_clients_and_no_other_section_is_written(make_split):
    run = make_split()

    assert run.workers == ("enclave", "client-0", "client-1")
    assert run.world == {"processes": 2, "stages": 2, "clients": 2}
    assert not run.journals
    assert {"pipeline", "guard", "attack", "parallel"}.isdisjoint(run.model_dump())


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("file") / "split.toml"
    path.write_text(TEXT)
    return prepare_corpus(load_run(path).data, tmp_path_factory.mktemp("data"), 3, None, lambda *_: None)


def test_every_client_draws_from_its_own_share_and_all_shares_are_the_whole(corpus):
    loader = ClientLoader(corpus, ("a", "b", "c"), 6, 3, seed=5)

    drawn = [loader.next_batch().indices for _ in range(corpus.num_train_sequences // 6 + 1)]

    for number in range(3):
        mine = {index for batch in drawn for index in batch[2 * number : 2 * number + 2]}
        assert {index % 3 for index in mine} == {number}
    whole = {index for batch in drawn for index in batch}
    assert len(whole) > corpus.num_train_sequences * 0.9


def test_microbatches_of_clients_take_turns(corpus):
    loader = ClientLoader(corpus, ("a", "b"), 8, 4, seed=5)

    batch = loader.next_batch()

    assert [index % 2 for index in batch.indices] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert torch.equal(batch.input_ids, corpus.train_batch(batch.indices).input_ids)


def test_a_loader_goes_on_where_it_was_and_refuses_another_ones_state(corpus):
    loader = ClientLoader(corpus, ("a", "b"), 8, 4, seed=5)
    loader.next_batch()
    state = loader.position_state()
    expected = loader.next_batch().indices
    again = ClientLoader(corpus, ("a", "b"), 8, 4, seed=5)

    again.load_position(state)

    assert again.next_batch().indices == expected
    with pytest.raises(CheckpointError):
        ClientLoader(corpus, ("a", "c"), 8, 4, seed=5).load_position(state)
    swapped = {"a": state["b"], "b": state["a"]}
    with pytest.raises(CheckpointError, match="share"):
        again.load_position(swapped)


def test_one_client_draws_what_anybody_would_and_too_many_are_refused(corpus):
    alone, plain = ClientLoader(corpus, ("a",), 8, 4, seed=5), BatchLoader(corpus, 8, 5)

    assert alone.next_batch().indices == plain.next_batch().indices
    with pytest.raises(ConfigError, match="cannot be divided among"):
        BatchLoader(corpus, 1, 5, (10**6, 10**6 + 1))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_says_what_crosses(make_split, objective):
    run = make_split()
    run = run.model_copy(update={"train": run.train.model_copy(update={"objective": objective})})

    kinds = kinds_of(run, SimpleNamespace(hidden_size=32), num_classes=4)

    assert (kinds.label_shape(2, 16), kinds.seq) == ((2, 16), 16)
