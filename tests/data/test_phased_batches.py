"""Phases, skipped batches and resumed loaders over a corpus of several groups."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.data import DOCUMENTS, BatchLoader, Corpus, DataConfig, SequenceLayout
from phalanx.data.corpus import CorpusFacts, TokenGroup
from phalanx.data.packing import TokenSplit
from phalanx.data.phases import CurriculumConfig, PhaseConfig, UntilConfig
from phalanx.errors import CheckpointError, ConfigError, DataError

LENGTH = 4


def group(name: str, size: int, first: int, content: str = "1") -> TokenGroup:
    """A group of so many sequences of tokens of its own."""
    tokens = np.arange(first, first + size * LENGTH + 1, dtype=np.uint32)
    starts = np.array([0, len(tokens)])
    split = TokenSplit(tokens, 0, lambda: starts, lambda field: np.ones(1))
    return TokenGroup(name, content * 64, split, split)


GROUPS = [group("web", 10, 1000), group("code", 6, 2000)]


def corpus(groups=GROUPS, **layout) -> Corpus:
    return Corpus(CorpusFacts("a" * 64, 5000, 0, Path("tokenizer.json")), groups, SequenceLayout(LENGTH, **layout))


def phase(until: int | None = None, **weights: float) -> PhaseConfig:
    return PhaseConfig(until=None if until is None else UntilConfig(samples=until), weights=weights)


def taken(loader: BatchLoader, batches: int) -> list[int]:
    return [index for _ in range(batches) for index in loader.next_batch().indices]


def test_phases_take_from_groups_by_weight_and_the_counts_are_told():
    phases = (phase(20, web=1.0), phase(None, web=0.5, code=0.5))
    loader = BatchLoader(corpus(phases=phases), 4, seed=1)

    indices = taken(loader, 10)

    assert sum(index >= 10 for index in indices[:20]) == 0
    assert sum(index >= 10 for index in indices[20:]) == 10
    assert loader.consumed_samples == {"web": 30, "code": 10}


def test_a_row_is_of_the_group_that_its_number_says():
    batch = corpus().train_batch([12, 3, 0, 15])

    assert batch.input_ids[:, 0].tolist() == [2008, 1012, 1000, 2020]
    assert batch.indices == (12, 3, 0, 15)


@settings(deadline=None)
@given(sizes=st.lists(st.integers(3, 9), min_size=1, max_size=3), shares=st.integers(1, 3), seed=st.integers(0, 99))
def test_loaders_that_share_groups_have_each_sequence_once_an_epoch_and_their_own_mixture(sizes, shares, seed):
    groups = [group(f"group-{number}", size, 1000 * number) for number, size in enumerate(sizes)]
    edges = np.cumsum([0, *sizes]).tolist()
    found = {name: [] for name in range(len(sizes))}
    for number in range(shares):
        loader = BatchLoader(corpus(groups), 1, seed, (number, shares))
        own = [len(range(number, size, shares)) for size in sizes]

        seen = taken(loader, sum(own))

        by_group = [[index for index in seen if edges[at] <= index < edges[at + 1]] for at in range(len(sizes))]
        assert [len(one) for one in by_group] == own
        for at, indices in enumerate(by_group):
            found[at] += indices
        again = BatchLoader(corpus(groups), 1, seed, (number, shares))
        again.load_position(json.loads(json.dumps(loader.position_state())))
        assert taken(again, 3) == taken(loader, 3)

    assert [sorted(found[at]) for at in found] == [list(range(edges[at], edges[at + 1])) for at in found]


def test_a_group_without_a_sequence_for_every_share_is_refused_by_name():
    with pytest.raises(ConfigError, match=r'training sequences of group "code" cannot be divided among 7'):
        BatchLoader(corpus([group("web", 10, 1000), group("code", 6, 2000)]), 1, 0, (6, 7))


def test_a_state_of_another_share_is_refused():
    state = BatchLoader(corpus(), 2, 0, (0, 2)).position_state()

    with pytest.raises(CheckpointError, match="share"):
        BatchLoader(corpus(), 2, 0, (1, 2)).load_position(state)


@settings(deadline=None)
@given(
    size=st.integers(1, 5),
    skip=st.lists(st.integers(0, 25), min_size=2, max_size=6, unique=True).filter(lambda ends: len(ends) % 2 == 0),
    stop=st.integers(0, 8),
)
def test_skipped_batches_are_left_out_and_no_other_sample_is(size, skip, stop):
    ends = sorted(skip)
    ranges = tuple(zip(ends[::2], ends[1::2], strict=True))
    whole = taken(BatchLoader(corpus(), size, seed=3), 40)
    kept = [
        whole[number * size + row]
        for number in range(40)
        for row in range(size)
        if not any(first <= number < behind for first, behind in ranges)
    ]
    loader = BatchLoader(corpus(skip=ranges), size, seed=3)

    seen = taken(loader, stop)
    resumed = BatchLoader(corpus(skip=ranges), size, seed=3)
    resumed.load_position(loader.position_state())
    seen += taken(resumed, 10 - stop)

    assert seen == kept[: 10 * size]


def test_a_phase_that_is_added_at_the_end_of_what_is_done_goes_on_without_loss():
    before = BatchLoader(corpus(phases=(phase(None, web=0.75, code=0.25),)), 4, seed=1)
    seen = taken(before, 4)
    after = BatchLoader(corpus(phases=(phase(16, web=0.75, code=0.25), phase(None, code=1.0))), 4, seed=1)

    after.load_position(before.position_state())
    seen += taken(after, 2)

    code = [index for index in seen if index >= 10]
    assert len(code) == 4 + 8
    assert sorted(code[:6]) == sorted(code[6:]) == list(range(10, 16))


def test_a_new_group_joins_in_the_middle_and_the_old_ones_go_on_where_they_were():
    before = BatchLoader(corpus(phases=(phase(None, web=0.5, code=0.5),)), 4, seed=1)
    seen = taken(before, 3)
    more = [*GROUPS, group("mail", 5, 3000)]
    after = BatchLoader(corpus(more, phases=(phase(12, web=1.0, code=1.0), phase(None, web=1.0, mail=1.0))), 4, seed=1)

    after.load_position(before.position_state())
    seen += taken(after, 2)

    assert sorted(index for index in seen if index < 10) == list(range(10))
    assert len({index for index in seen if index >= 16}) == 4
    assert after.consumed_samples == {"web": 10, "code": 6, "mail": 4}


@pytest.mark.parametrize(
    ("groups", "phases", "message"),
    [
        (GROUPS, (phase(None, web=0.75, code=0.25),), 'group "code": it gave 6 of the first 12 .* have given 3'),
        ([GROUPS[0], group("code", 6, 2000, "2")], (phase(None, web=1.0, code=1.0),), 'group "code".* has changed'),
        ([GROUPS[0], group("code", 7, 2000)], (phase(None, web=1.0, code=1.0),), 'group "code".* has changed'),
        ([GROUPS[0], group("mail", 6, 2000)], (phase(None, web=1.0, mail=1.0),), 'group "code": it gave 6'),
        (
            GROUPS,
            (PhaseConfig(weights={"web": 1.0, "code": 1.0}, curriculum=CurriculumConfig(by="length")),),
            "another curriculum",
        ),
        (GROUPS, (PhaseConfig(weights={"web": 1.0, "code": 1.0}, amount=0.5),), "another curriculum or amount"),
    ],
)
def test_a_resume_that_would_change_what_is_over_is_refused_by_name(groups, phases, message):
    before = BatchLoader(corpus(phases=(phase(None, web=0.5, code=0.5),)), 4, seed=1)
    taken(before, 3)

    with pytest.raises(CheckpointError, match=message):
        BatchLoader(corpus(groups, phases=phases), 4, seed=1).load_position(before.position_state())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"groups": 3}, "groups is 3, expected an object"),
        ({"groups": {"web": 3}}, "group 'web' is 3"),
        ({"groups": {"web": {"samples": []}}}, "group 'web' is"),
        ({"groups": {"\n": None}}, "group"),
        ({"num_samples": -1}, "num_samples is -1"),
        ({"seed": 2}, "seed is 2, but this run has 1"),
        ({"extra": 1}, "found keys"),
    ],
)
def test_a_malformed_state_is_refused(change, message):
    loader = BatchLoader(corpus(), 4, seed=1)
    taken(loader, 2)

    with pytest.raises(CheckpointError, match=message):
        loader.load_position(loader.position_state() | change)


def test_an_older_state_without_groups_goes_on_with_a_curriculum_for_what_is_left():
    plain = [group("", 10, 1000)]
    before = BatchLoader(corpus(plain), 3, seed=1)
    assert set(before.position_state()) == {"num_samples", "seed", "num_sequences", "corpus", "corpus_digest"}
    seen = taken(before, 2)
    phases = (phase(6), PhaseConfig(curriculum=CurriculumConfig(by="length", buckets=2)))
    after = BatchLoader(corpus([group("", 10, 1000, "a")], phases=phases), 2, seed=1)

    # states from before the whole digest was written lack it
    after.load_position({name: value for name, value in before.position_state().items() if name != "corpus_digest"})

    assert sorted(seen + taken(after, 2)) == list(range(10))


def amounts(*shares: float) -> tuple[PhaseConfig, ...]:
    """Phases of ten samples each, the last without an end."""
    ends = [UntilConfig(samples=10 * number) for number in range(1, len(shares))]
    return tuple(PhaseConfig(until=end, amount=share) for end, share in zip([*ends, None], shares, strict=True))


def test_a_run_on_growing_amounts_of_data_draws_nested_shares_and_goes_on_in_the_middle():
    groups = [group("", 40, 1000)]
    loader = BatchLoader(corpus(groups, phases=amounts(0.1, 0.25, 1.0)), 5, seed=1)

    seen = taken(loader, 3)
    resumed = BatchLoader(corpus(groups, phases=amounts(0.1, 0.25, 1.0)), 5, seed=1)
    resumed.load_position(json.loads(json.dumps(loader.position_state())))
    seen += taken(resumed, 9)

    few, more = set(seen[:10]), set(seen[10:20])
    assert (len(few), len(more)) == (4, 10)
    assert few < more
    assert set(seen[20:60]) == set(range(40))
    assert [
        (count.amount, count.num_sequences, count.num_samples)
        for count in corpus(groups, phases=amounts(0.1, 0.25, 1.0)).sample_order(1, 5).count_phases(30)
    ] == [(0.1, 4, 10), (0.25, 10, 10), (1.0, 40, 10)]
    other = BatchLoader(corpus(groups, phases=amounts(0.1, 0.25)), 5, seed=2)
    assert set(taken(other, 2)) != few


def test_limits_of_repeats_end_the_data_by_name():
    loader = BatchLoader(corpus(repeats={"web": 1.0, "code": 0.5}), 4, seed=1)
    seen = taken(loader, 3)

    with pytest.raises(DataError, match=r"data\.repeats allows 13"):
        loader.next_batch()
    assert len(set(seen)) == 12


@pytest.mark.parametrize(
    "layout", [{"weights": {"mail": 1.0}}, {"repeats": {"mail": 1.0}}, {"phases": (phase(mail=1.0),)}]
)
def test_a_group_that_is_not_there_is_refused_by_name(layout):
    with pytest.raises(ConfigError, match='unknown group "mail"; the dataset has web, code'):
        BatchLoader(corpus(**layout), 4, seed=1)


def test_a_phase_of_shorter_attention_cuts_rows_and_keeps_their_shape():
    phases = (PhaseConfig(until=UntilConfig(samples=2), sequence_length=2), PhaseConfig())
    loader = BatchLoader(corpus(attention="document", phases=phases), 4, seed=1)

    first, second = loader.next_batch(), loader.next_batch()

    assert first.extras[DOCUMENTS].tolist() == [[0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert torch.equal(second.extras[DOCUMENTS], torch.zeros(4, LENGTH, dtype=torch.int64))


def data_config(**changes: object) -> DataConfig:
    return DataConfig.model_validate_json(json.dumps({"dataset": {"path": "shards"}, "sequence_length": 8} | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"phases": [{}, {}]}, r"phases\.0: has no end: set until"),
        ({"phases": [{"until": {"steps": 3}}]}, r"phases\.0: is the last phase"),
        ({"phases": [{"until": {"steps": 3, "tokens": 9}}, {}]}, "set one of steps, samples and tokens"),
        ({"phases": [{"weights": {"web": 0.0}}]}, "all are 0"),
        ({"phases": [{"amount": 0.0}]}, r"phases\.0\.amount"),
        ({"phases": [{"amount": 1.5}]}, r"phases\.0\.amount"),
        ({"phases": [{"sequence_length": 4}]}, 'set data.attention = "document"'),
        ({"phases": [{"sequence_length": 3}], "attention": "document"}, "does not divide"),
        ({"skip": [[3, 3]]}, r"skip: \[3, 3\] is empty"),
        ({"skip": [[3, 9], [8, 10]]}, r"skip: \[8, 10\] is empty, or overlaps"),
        ({"sources": [{"kind": "python_manual"}]}, "expected either sources, labelled, dataset"),
        ({"validation_share": 0.2}, "a dataset was split when it was built"),
        ({"tokenizer": {"kind": "bpe"}}, "a dataset has its own"),
        ({"dataset": None}, "expected either"),
        (
            {"dataset": None, "sources": [{"kind": "python_manual"}]},
            "only a dataset has its own tokenizer",
        ),
        (
            {
                "dataset": None,
                "sources": [{"kind": "python_manual"}],
                "tokenizer": {"kind": "bpe"},
                "repeats": {"web": 2.0},
            },
            "sources are one group",
        ),
        ({"dataset": {"path": "shards", "groups": ["a"], "weights": {"b": 1.0}}}, '"b" is not among groups a'),
        ({"dataset": {"path": "shards", "groups": ["a", "a"]}}, "a name appears twice"),
    ],
)
def test_a_run_file_that_cannot_be_meant_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        data_config(**changes)


def test_what_is_left_out_is_not_written_so_older_run_files_keep_their_digest():
    config = DataConfig.model_validate_json(
        '{"sources": [{"kind": "python_manual"}], "tokenizer": {"kind": "bpe"}, "sequence_length": 8}'
    )

    assert set(config.model_dump(mode="json")) == {
        "sources", "labelled", "tokenizer", "sequence_length", "validation_share", "max_documents",
        "max_validation_sequences", "validation",
    }  # fmt: skip
    assert "dataset" in data_config().model_dump(mode="json")
