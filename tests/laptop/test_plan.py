"""The plan fits the time: the size by measured speed, and an estimate for each phase."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_texts import write_texts

from phalanx.errors import ConfigError
from phalanx.laptop.plan import (
    PHASES,
    SHAPES,
    LaptopRequest,
    PlanGrounds,
    RowCounts,
    choose_vocabulary,
    is_larger_worth_probing,
    make_plan,
    predict_loss,
)
from phalanx.laptop.probe import Measured, choose_threads, measure_costs, measure_shape
from phalanx.laptop.texts import CutTexts, read_texts
from phalanx.laptop.vocabulary import Vocabulary, fit_vocabulary

ROWS = RowCounts(chats=4000, chat_bytes=1_000_000, preferences=4000)
TEXTS = CutTexts(("x" * 1_900_000,), ("y" * 100_000,), "0" * 64, 2_000_000, is_whole=True)


def costs_of(tokens_per_s=20_000.0, shapes=SHAPES):
    """Costs in proportion to the parameters, with the smallest shape at so many tokens a second."""
    smallest = SHAPES[0].num_parameters(2048)
    return {shape: shape.num_parameters(2048) / smallest / tokens_per_s for shape in shapes}


def plan_of(minutes=30.0, costs=None, texts=TEXTS, rows=ROWS):
    question, vocabulary = LaptopRequest(texts=texts.digest, minutes=minutes), Vocabulary(2048, 2.8)
    return make_plan(PlanGrounds(question, texts, rows, vocabulary, 1), costs or costs_of())


@given(st.floats(3, 600), st.floats(500, 200_000))
def test_the_estimates_are_the_time_that_was_asked_for_or_less(minutes, tokens_per_s):
    try:
        plan = plan_of(minutes, costs_of(tokens_per_s))
    except ConfigError:
        return

    total_s = sum(plan.estimates_s.values())
    assert list(plan.estimates_s) == list(PHASES)
    assert total_s <= minutes * 60 * 1.1


def test_more_time_buys_a_larger_model_or_more_tokens():
    short, long = plan_of(5), plan_of(120)

    assert long.num_parameters > short.num_parameters
    assert long.pretrain.steps * long.pretrain.batch > short.pretrain.steps * short.pretrain.batch


def test_a_slower_machine_gets_a_smaller_model():
    assert plan_of(30, costs_of(2_000)).num_parameters < plan_of(30, costs_of(100_000)).num_parameters


def test_little_text_ends_pre_training_before_the_time_does():
    few = CutTexts(("x" * 40_000,), ("y" * 4_000,), "0" * 64, 44_000, is_whole=True)

    plan = plan_of(600, texts=few)

    assert plan.is_limited_by_text
    assert sum(plan.estimates_s.values()) < 600 * 60


def test_too_little_time_is_refused_with_what_is_needed():
    with pytest.raises(ConfigError, match=r"--minutes 0.2: too short on this machine"):
        plan_of(0.2)


@pytest.mark.parametrize(
    ("rows", "option"), [(RowCounts(5, 500, 500), "--data-sft"), (RowCounts(500, 9, 5), "--data-pref")]
)
def test_too_few_rows_are_refused_by_the_option_that_gives_more(rows, option):
    with pytest.raises(ConfigError, match=option):
        plan_of(rows=rows)


def test_pairs_are_limited_to_the_time_that_there_is():
    few, many = plan_of(3, costs_of(2_000)).preferences, plan_of(120, costs_of(2_000)).preferences

    assert few.max_documents < many.max_documents <= ROWS.preferences
    assert few.steps == max(8, int(0.9 * 2 * few.max_documents / 16))


def test_the_vocabulary_grows_with_the_text():
    sizes = [choose_vocabulary(size) for size in (20_000, 500_000, 5_000_000, 20_000_000, 100_000_000)]

    assert sizes == [512, 1024, 2048, 4096, 8192]


def test_repeated_tokens_are_worth_less_than_new_ones():
    assert predict_loss(10**6, 10**6, 4 * 10**6) > predict_loss(10**6, 4 * 10**6, 4 * 10**6)
    assert predict_loss(10**6, 10**6, 4 * 10**6) < predict_loss(10**6, 10**6, 10**6)


def test_a_model_that_is_far_too_large_for_the_text_is_not_taken():
    few = CutTexts(("x" * 40_000,), ("y" * 4_000,), "0" * 64, 44_000, is_whole=True)

    assert plan_of(600, costs_of(10**6), few).num_parameters < 500_000


def test_probing_ends_with_the_first_shape_that_would_see_too_little():
    probed = []

    def measure(shape, vocab_size, threads):
        probed.append(shape)
        # the clock of a busy machine jumps; the processor's does not
        cost = costs_of(2_000)[shape] / 2
        return Measured(cost * (3 if len(probed) % 2 else 1), cost)

    costs = measure_costs(2048, 700_000, 300.0, 1, measure)

    assert list(costs) == probed
    small, large = probed[0], probed[-1]
    assert costs[large] / costs[small] == pytest.approx(costs_of()[large] / costs_of()[small])
    assert 2 <= len(probed) < len(SHAPES)
    assert not is_larger_worth_probing(costs, 2048, 700_000, 300.0)


def test_the_speed_is_that_of_the_steps_behind_the_first():
    wall, processor = iter([0.0, 10.0, 14.0]), iter([0.0, 5.0, 7.0])

    # two steps of 2,048 tokens took 4 seconds by this clock; the first one took 10
    measured = measure_shape(SHAPES[0], 512, 1, (lambda: next(wall), lambda: next(processor)))

    assert (measured.wall_s, measured.cpu_s) == (pytest.approx(4 / 4096), pytest.approx(2 / 4096))


@pytest.mark.parametrize(("fast", "cores", "chosen"), [(1, 2, 1), (2, 2, 2), (4, 4, 4), (1, 1, 1)])
def test_one_thread_is_taken_where_all_of_them_are_slower(fast, cores, chosen, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(cores)))

    assert choose_threads(lambda _shape, _size, threads: Measured(1.0 if threads == fast else 2.0, 1.0)) == chosen


def test_parameters_are_those_of_the_model_that_is_trained():
    from phalanx.laptop.probe import _build

    for shape in SHAPES[:4]:
        assert _build(shape, 512).num_parameters() == shape.num_parameters(512)


def test_texts_of_few_words_get_as_many_tokens_as_they_support(tmp_path):
    texts = read_texts([write_texts(tmp_path / "texts")])

    vocabulary = fit_vocabulary(texts, 4096)

    assert 260 <= vocabulary.size < 512
    # what was found is what a recipe with this size makes
    assert fit_vocabulary(texts, vocabulary.size) == vocabulary


def test_the_vocabulary_that_suits_is_kept_where_the_texts_support_it(tmp_path):
    texts = read_texts([write_texts(tmp_path / "texts")])

    assert fit_vocabulary(texts, 280).size == 280
    assert 1.0 < fit_vocabulary(texts, 280).bytes_per_token < 10.0
