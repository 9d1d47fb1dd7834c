"""A layout that cannot work is refused with its figures, and the nearest one that works is named."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import ConfigError, ModelError
from phalanx.planner import SCHEDULES, Layout, describe_refusal, nearest_valid_layout, shape_of
from phalanx.planner.layout import all_layouts, parse_layout
from phalanx.planner.model.recipe import Recipe
from phalanx.planner.validity import layout_distance

TINY = {"model_type": "gpt2", "n_embd": 64, "n_layer": 8, "n_head": 8, "vocab_size": 128, "n_positions": 64}
GROUPED = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}
STEADY = {**TINY, "attn_pdrop": 0.0}
WORKING = Recipe(sequences=16, sequence_length=64, microbatches=4)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(dp=4, zero=3),
        Layout(tp=8),
        Layout(pp=4, schedule="gpipe"),
        Layout(pp=4, schedule="interleaved"),
        Layout(dp=2, tp=2, pp=2, cp=2, zero=2),
        Layout(tp=2, pp=4, schedule="zero-bubble"),
        Layout(dp=2, pp=2, zero=2, schedule="zero-bubble"),
        Layout(dp=2, pp=4, zero=2, schedule="interleaved-zero-bubble"),
    ],
)
def test_a_layout_that_works_has_no_reason_against_it(layout: Layout) -> None:
    assert describe_refusal(layout, shape_of(TINY), WORKING) is None
    assert nearest_valid_layout(layout, shape_of(TINY), WORKING) == layout


@pytest.mark.parametrize(
    ("layout", "changes", "reason"),
    [
        (Layout(dp=0), {}, "dp=0: expected a whole number of at least 1"),
        (Layout(zero=4), {}, "zero=4: expected 0, 1, 2 or 3"),
        (Layout(pp=2, schedule="dualpipe"), {}, "schedule=dualpipe: expected one of gpipe"),
        (Layout(), {"microbatches": 0}, "microbatches=0: expected a whole number of at least 1"),
        (Layout(dp=3), {}, "dp=3 * 4 microbatches does not divide 16 sequences a step"),
        (Layout(), {"microbatches": 5}, "dp=1 * 5 microbatches does not divide 16 sequences"),
        (Layout(tp=3), {}, "tp=3 does not divide 8 attention heads; lower tp"),
        (Layout(tp=16), {}, "tp=16 does not divide 8 attention heads"),
        (Layout(tp=4, cp=4), {}, "tp=4 * cp=4 does not divide 8 attention heads; lower cp"),
        (Layout(cp=8), {"sequence_length": 60}, "cp=8 does not divide a sequence of 60 tokens"),
        (Layout(), {"sequence_length": 65}, "a sequence of 65 tokens is longer than the model's 64 positions"),
        (Layout(pp=9), {}, "pp=9 with 1 stages a rank needs 9 layers, the model has 8; lower pp"),
        (Layout(pp=8, schedule="interleaved"), {}, "pp=8 with 2 stages a rank needs 16 layers"),
        (Layout(pp=8), {}, "schedule=1f1b needs at least pp=8 microbatches, got 4"),
        (Layout(dp=2, pp=2, zero=3, schedule="zero-bubble"), {}, "schedule=zero-bubble with zero=3"),
        (Layout(pp=3, schedule="zero-bubble"), {"microbatches": 16}, "goes round in 5 turns"),
        (Layout(pp=4, schedule="zero-bubble"), {"microbatches": 2}, "schedule=zero-bubble needs at least pp=4"),
        (Layout(pp=3, schedule="interleaved"), {}, "schedule=interleaved needs a multiple of pp=3 microbatches"),
        (Layout(pp=2, schedule="interleaved", chunks=1), {}, "interleaved with one stage a rank is 1f1b"),
        (Layout(pp=2, schedule="interleaved-zero-bubble", chunks=1), {}, "bubble with one stage a rank is zero-bubble"),
        (Layout(dp=2, pp=2, zero=3, schedule="interleaved-zero-bubble"), {}, "interleaved-zero-bubble with zero=3"),
    ],
)
def test_a_layout_that_cannot_work_is_refused_with_its_figures(
    layout: Layout, changes: dict[str, int], reason: str
) -> None:
    found = describe_refusal(layout, shape_of(TINY), replace(WORKING, **changes))

    assert found is not None
    assert reason in found


@pytest.mark.parametrize("layout", [Layout(cp=16, context="ring"), Layout(tp=4, cp=4, context="ring", zero=3)])
def test_a_ring_asks_for_no_heads_that_its_ranks_divide(layout: Layout) -> None:
    assert describe_refusal(layout, shape_of(STEADY), WORKING) is None
    assert "attention heads" in str(describe_refusal(replace(layout, context="ulysses"), shape_of(STEADY), WORKING))


@pytest.mark.parametrize(
    ("layout", "changes", "reason"),
    [
        (Layout(cp=4, context="ring"), {"sequence_length": 60}, "2 * cp=8 chunks, which do not divide 60 tokens"),
        (Layout(context="ring"), {}, "context=ring is for context parallel ranks, and cp=1"),
        (Layout(cp=2, context="star"), {}, "context=star: expected one of ulysses, ring"),
    ],
)
def test_a_ring_that_cannot_close_is_refused(layout: Layout, changes: dict[str, int], reason: str) -> None:
    assert reason in str(describe_refusal(layout, shape_of(STEADY), replace(WORKING, **changes)))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attn_pdrop": 0.25}, "drops nothing in attention, and the model's config asks for 0.25"),
        # transformers' own default
        ({"attn_pdrop": None}, "asks for 0.1"),
        ({"model_type": "bloom", "hidden_size": 64}, "bloom adds a bias to its scores"),
    ],
)
def test_what_a_ring_cannot_attend_with_is_refused_and_the_other_way_named(
    changes: dict[str, object], reason: str
) -> None:
    asked, shape = Layout(cp=2, context="ring"), shape_of({**STEADY, **changes})

    assert reason in str(describe_refusal(asked, shape, WORKING))
    assert nearest_valid_layout(asked, shape, WORKING) == Layout(cp=2)


def test_a_share_of_dropout_that_is_none_is_refused() -> None:
    with pytest.raises(ModelError, match=r"attn_pdrop: found 1\.5; expected a number from 0 to 1"):
        shape_of({**TINY, "attn_pdrop": 1.5})


def test_heads_that_share_keys_limit_tensor_parallel() -> None:
    assert describe_refusal(Layout(tp=4), shape_of(GROUPED), WORKING) == (
        "tp=4 does not divide 2 key and value heads; lower tp"
    )


@settings(max_examples=25, deadline=None)
@given(
    axes=st.tuples(*[st.integers(1, 3)] * 4),
    zero=st.integers(0, 3),
    schedule=st.sampled_from(sorted(SCHEDULES)),
    microbatches=st.integers(1, 8),
)
def test_the_nearest_layout_works_and_none_is_nearer(
    axes: tuple[int, int, int, int], zero: int, schedule: str, microbatches: int
) -> None:
    asked, shape = Layout(*axes, zero=zero, schedule=schedule), shape_of(TINY)
    recipe = Recipe(sequences=24, sequence_length=64, microbatches=microbatches)

    found = nearest_valid_layout(asked, shape, recipe)

    if 24 % microbatches:
        assert found is None
        return
    assert found is not None
    assert describe_refusal(found, shape, recipe) is None
    assert found.num_ranks <= asked.num_ranks
    for world in range(1, asked.num_ranks + 1):
        for other in all_layouts(world, (zero,)):
            if describe_refusal(other, shape, recipe) is None:
                assert layout_distance(found, asked) <= layout_distance(other, asked)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (Layout(tp=5), Layout(tp=4)),
        (Layout(tp=16), Layout(dp=2, tp=8)),
        (Layout(dp=3, tp=2), Layout(dp=2, tp=2)),
        (Layout(pp=9, schedule="gpipe"), Layout(pp=8, schedule="gpipe")),
        (Layout(dp=0), Layout()),
        (Layout(context="ring"), Layout()),
    ],
)
def test_the_nearest_layout_is_the_one_that_a_person_would_take(asked: Layout, found: Layout) -> None:
    assert nearest_valid_layout(asked, shape_of(TINY), WORKING) == found


@pytest.mark.parametrize(
    ("changes", "is_refused"),
    [
        ({"model_type": "mistral", "sliding_window": 8}, True),
        # transformers' own default is a window
        ({"model_type": "mistral"}, True),
        ({"model_type": "mistral", "sliding_window": None}, False),
        ({"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]}, True),
        ({"model_type": "qwen3"}, True),
        ({"model_type": "qwen3", "layer_types": ["full_attention"] * 2}, False),
        ({"model_type": "olmo2"}, False),
    ],
)
def test_windows_go_by_ulysses_and_not_by_ring(changes: dict[str, object], is_refused: bool) -> None:
    shape = shape_of({**GROUPED, **changes})

    found = describe_refusal(Layout(cp=2, context="ring"), shape, WORKING)

    assert ("may have sliding windows" in str(found)) is is_refused
    assert (found is None) is not is_refused
    assert describe_refusal(Layout(cp=2), shape, WORKING) is None


def test_a_family_whose_attention_is_its_own_code_is_shared_along_no_sequence() -> None:
    shape = shape_of({**GROUPED, "model_type": "gemma2"})

    assert "cp=2: ranks cannot share a block of gemma2 yet" in str(describe_refusal(Layout(cp=2), shape, WORKING))


def test_heads_that_ulysses_cannot_deal_out_go_by_ring() -> None:
    assert nearest_valid_layout(Layout(tp=4, cp=4), shape_of(STEADY), WORKING) == Layout(tp=4, cp=4, context="ring")


def test_every_way_to_share_the_ranks_is_listed_once() -> None:
    found = list(all_layouts(8, (0,)))

    assert len(found) == len(set(found))
    assert {layout.num_ranks for layout in found} == {8}
    assert len({(layout.dp, layout.tp, layout.pp, layout.cp) for layout in found}) == 20


def test_a_layout_is_read_as_it_is_written() -> None:
    assert parse_layout("dp=2, tp=4,zero=3") == Layout(dp=2, tp=4, zero=3)
    assert parse_layout("pp=4,schedule=interleaved,chunks=3") == Layout(pp=4, schedule="interleaved", chunks=3)
    assert parse_layout("cp=2,context=ring") == Layout(cp=2, context="ring")
    assert str(Layout(cp=2, zero=1, context="ring")) == "cp=2 context=ring zero=1"
    assert str(Layout(dp=2, pp=4, zero=1)) == "dp=2 pp=4 zero=1 1f1b"
    assert Layout(dp=2, cp=2, zero=2).parallel_section() == {
        "dp": 2,
        "tp": 1,
        "pp": 1,
        "cp": 2,
        "context": "ulysses",
        "zero": 2,
        "schedule": "1f1b",
    }


@pytest.mark.parametrize("text", ["ep=2", "dp", "dp=two", "dp=-1"])
def test_a_layout_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="layout"):
        parse_layout(text)
