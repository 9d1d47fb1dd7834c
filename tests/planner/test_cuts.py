"""Where to cut between clients and an enclave: every limit counts, and a refusal names what works."""

import itertools
import json
from dataclasses import replace

import pytest

from phalanx.errors import ConfigError, InputError
from phalanx.planner.cluster.catalog import known_models
from phalanx.planner.cuts import Parties, ask_cuts, read_leaks
from phalanx.planner.cuts.answer import adapter_numbers, cost_of
from phalanx.planner.cuts.leaks import LeakTable
from phalanx.planner.cuts.parties import PartyMachine
from phalanx.planner.model.recipe import Recipe

RECIPE = Recipe(sequences=32, sequence_length=64)
LARGE = PartyMachine(memory_gib=64.0, tflops=1.0)


def table(shape, depths=(0, 2, 7), sealed=0.05):
    """A leak table of a model: plaintext leaks less with each block."""
    return {
        "name": "leaks",
        "command": "phalanx reproduce leaks",
        "commit": None,
        "model": {"name": "tiny", "layers": shape.layers, "hidden": shape.hidden, "vocab": shape.vocab},
        "summary": [
            {"depth": depth, "chance": 0.05, "plaintext": 1.0 - depth / 10, "sealed": sealed, "masked": None}
            for depth in depths
        ],
    }


def leaks_of(shape, tmp_path, **changes):
    path = tmp_path / "leaks.json"
    path.write_text(json.dumps(table(shape, **changes)))
    return read_leaks(path)


@pytest.fixture
def leaks(tiny, tmp_path) -> LeakTable:
    return leaks_of(tiny, tmp_path)


def parties(**changes) -> Parties:
    return Parties(**{"client": LARGE, "enclave": LARGE, "link": "loopback", **changes})


def ask(shape, leaks, **changes):
    return ask_cuts("tiny", shape, RECIPE, parties(**changes), leaks)


def least(shape, depth):
    """What a cut costs with one sequence a microbatch."""
    return cost_of(shape, replace(RECIPE, microbatches=RECIPE.sequences), parties(), depth)


def test_every_cut_that_leaves_the_enclave_a_layer_is_judged(tiny, leaks):
    answer = ask(tiny, leaks)

    assert [cut.depth for cut in answer.cuts] == list(range(8))
    assert sorted(cut.depth for cut in answer.usable_cuts) == [1, 2, 3, 4, 5, 6, 7]
    assert answer.usable_cuts[0].cost.step_s == min(cut.cost.step_s for cut in answer.cuts)
    assert answer.require_cut() is answer.usable_cuts[0]
    with pytest.raises(ConfigError, match=r"--cut 0: the client has no block, .* works is 1"):
        answer.require_cut(0)
    with pytest.raises(ConfigError, match="give 1 to 7"):
        answer.require_cut(8)


def test_a_small_enclave_pushes_the_cut_back_and_the_refusal_names_the_nearest_that_fits(tiny, leaks):
    at_six = least(tiny, 6).enclave_bytes
    enclave = PartyMachine(memory_gib=at_six / 1024**3 * 1.0001, tflops=1.0, usable_memory=1.0)

    answer = ask(tiny, leaks, enclave=enclave)

    assert sorted(cut.depth for cut in answer.usable_cuts) == [6, 7]
    with pytest.raises(ConfigError, match=r"--cut 2: the enclave needs .* GiB, .* usable; the nearest cut .* is 6"):
        answer.require_cut(2)
    assert answer.require_cut(7).depth == 7


def test_a_small_client_pulls_the_cut_forward(tiny, leaks):
    at_three = least(tiny, 3).client_bytes
    client = PartyMachine(memory_gib=at_three / 1024**3 * 1.0001, tflops=1.0, usable_memory=1.0)

    answer = ask(tiny, leaks, client=client)

    assert {cut.depth for cut in answer.usable_cuts} == {1, 2, 3}
    with pytest.raises(ConfigError, match=r"--cut 5: the client needs .*; the nearest cut that works is 3"):
        answer.require_cut(5)


def test_where_nothing_fits_the_refusal_says_why_at_both_ends(tiny, leaks):
    nothing = PartyMachine(memory_gib=1e-6, tflops=1.0)

    with pytest.raises(ConfigError, match=r"no cut of tiny can be used: cut 1: the enclave .*; cut 7: the enclave"):
        ask(tiny, leaks, enclave=nothing).require_cut()


def test_plaintext_is_refused_for_what_was_measured_and_sealed_is_not(tiny, leaks):
    refused, sealed = ask(tiny, leaks, mode="plaintext"), ask(tiny, leaks)

    assert refused.usable_cuts == []
    with pytest.raises(
        ConfigError, match=r"the host recovers 100\.0% of the tokens \(between measured cuts\), 5\.0% by chance"
    ):
        refused.require_cut()
    with pytest.raises(ConfigError, match="no other cut works"):
        refused.require_cut(3)
    assert len(sealed.usable_cuts) == 7


def test_a_leak_that_is_allowed_decides_which_cuts_are_left(tiny, leaks):
    answer = ask(tiny, leaks, mode="plaintext", max_leak=0.8)

    # between depths 2 and 7 the worse one counts
    assert sorted(cut.depth for cut in answer.usable_cuts) == [2, 3, 4, 5, 6, 7]
    with pytest.raises(ConfigError, match="the nearest cut that works is 2"):
        answer.require_cut(1)


def test_a_seal_that_leaks_would_be_refused_as_well(tiny, tmp_path):
    leaks = leaks_of(tiny, tmp_path, sealed=0.5)

    assert ask(tiny, leaks).usable_cuts == []


def test_what_was_not_measured_is_said(tiny, leaks, gpt2):
    assert leaks.leak_at(tiny, 2, "sealed").basis == "measured"
    between = leaks.leak_at(tiny, 4, "plaintext")
    assert (between.seen, between.basis) == (0.8, "between measured cuts")
    other = leaks.leak_at(gpt2, 3, "plaintext")
    assert (other.seen, other.basis) == (0.8, "another model, same share of its layers")
    assert leaks.leak_at(tiny, 0, "sealed").opened == 1.0
    assert leaks.leak_at(tiny, 0, "sealed").beyond_chance == 0.0


def test_a_slow_link_costs_the_same_at_every_cut_and_sealing_adds_to_it(tiny, leaks):
    slow = {"latency_s": 0.03, "bytes_per_s": 1e4}
    costs = [cut.cost for cut in ask(tiny, leaks, link=slow).cuts]

    assert len({cost.wire_bytes for cost in costs}) == 1
    assert costs[0].wire_bytes == 32 * 64 * (64 * 4 + 8)
    assert ask(tiny, leaks, wire="bf16").cuts[0].cost.wire_bytes == 32 * 64 * (64 * 2 + 8)
    assert all(cost.step_s > cost.wire_bytes / 1e4 for cost in costs)
    assert parties().link_as_used().bytes_per_s < parties(mode="plaintext").link_as_used().bytes_per_s


def test_a_slow_enclave_has_few_layers_and_a_slow_client_many_left_to_it(tiny, leaks):
    slow = PartyMachine(memory_gib=64.0, tflops=0.001)

    assert ask(tiny, leaks, enclave=slow).require_cut().depth == 7
    assert ask(tiny, leaks, client=slow).require_cut().depth == 1
    one, many = (ask(tiny, leaks, client=slow, clients=number).cuts[4].cost.client_s for number in (1, 4))
    assert one == pytest.approx(4 * many)


def test_a_back_of_too_few_blocks_is_refused(tiny, leaks):
    answer = ask(tiny, leaks, min_back=3)

    assert sorted(cut.depth for cut in answer.usable_cuts) == [1, 2, 3, 4, 5]
    with pytest.raises(ConfigError, match=r"--cut 7: 1 blocks are left to adapt, .* works is 5"):
        answer.require_cut(7)


def test_the_back_holds_what_the_front_gives_up(tiny):
    costs = [cost_of(tiny, RECIPE, parties(), depth) for depth in range(8)]

    for before, behind in itertools.pairwise(costs):
        assert behind.enclave_bytes < before.enclave_bytes
        assert behind.client_bytes > before.client_bytes
        assert behind.enclave_s < before.enclave_s


def test_adapters_are_two_matrices_for_queries_and_two_for_values(tiny):
    assert adapter_numbers(tiny, 8) == 8 * (64 + 64) + 8 * (64 + 64)


def test_json_has_the_question_and_every_cut(tiny, leaks):
    found = ask(tiny, leaks, mode="plaintext", max_leak=0.8).as_json()

    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["name"] == "split-plan"
    assert [row["cut"] for row in found["refused"]] == [0, 1]
    assert {row["cut"] for row in found["rows"]} == {2, 3, 4, 5, 6, 7}
    assert found["rows"][0]["leak_if_opened"] == found["rows"][0]["leak"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not valid JSON"),
        ("[]", "is no leak table"),
        ('{"model": {}, "summary": [], "command": "x", "commit": null}', "is no leak table"),
    ],
)
def test_a_file_that_is_no_leak_table_is_refused(text, said, tmp_path):
    path = tmp_path / "leaks.json"
    path.write_text(text)

    with pytest.raises(InputError, match=said):
        read_leaks(path)


def test_a_leak_table_that_is_missing_or_was_measured_in_part_is_refused(tiny, tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        read_leaks(tmp_path / "nothing.json")
    with pytest.raises(InputError, match="measured in plaintext and sealed"):
        leaks_of(tiny, tmp_path, sealed=None)


def test_a_number_that_is_no_share_is_refused(tiny, tmp_path):
    with pytest.raises(InputError, match="is no leak table"):
        leaks_of(tiny, tmp_path, sealed=1.5)


def test_an_unknown_link_names_the_choices(tiny, leaks):
    with pytest.raises(ConfigError, match=r"unknown link 'string'; choices: .*wan"):
        ask(tiny, leaks, link="string")


def test_a_sequence_beyond_the_models_positions_is_refused(tiny, leaks):
    with pytest.raises(ConfigError, match="longer than the model's 64 positions"):
        ask_cuts("tiny", tiny, Recipe(sequences=8, sequence_length=65), parties(), leaks)


def test_the_table_that_is_shipped_is_of_a_known_model_and_says_what_measured_it():
    leaks = read_leaks(None)
    shape = known_models()[leaks.model.name]

    assert (leaks.model.layers, leaks.model.hidden, leaks.model.vocab) == (shape.layers, shape.hidden, shape.vocab)
    assert leaks.command.startswith("phalanx reproduce leaks")
    assert leaks.leak_at(shape, 0, "plaintext").seen >= 0.8
    assert leaks.leak_at(shape, 1, "sealed").beyond_chance <= 0.01
