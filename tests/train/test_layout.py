"""What --dry-run says: the stages add up to the model, and the memory is of the right order."""

import io

import pytest
from rich.console import Console
from transformers import AutoModelForCausalLM

from phalanx.errors import ConfigError
from phalanx.models import open_model
from phalanx.parallel import ParallelConfig
from phalanx.pipeline import PartyLayout
from phalanx.pipeline.assignment.stage_memory import rank_bytes
from phalanx.train import describe_run
from phalanx.train.sessions.domain import recipe_of
from phalanx.train.setup.layout import make_plan
from phalanx.train.setup.stage_table import describe_stages, estimate_stages, memory_by_party, stages_of


@pytest.fixture
def open_source(cache):
    return lambda run: open_model(run.model, cache / "models", run.train.seed)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_layers_and_parameters_add_up_to_the_model(make_run, open_source, stages):
    run = make_run(f"pipeline.stages={stages}")
    source = open_source(run)
    whole = AutoModelForCausalLM.from_pretrained(source.directory, local_files_only=True)

    rows = estimate_stages(run, source)

    spans = [tuple(int(end) for end in row.layers.split("-")) for row in rows]
    assert [layer for first, last in spans for layer in range(first, last + 1)] == [0, 1, 2, 3]
    # a tied head is counted once, with the embedding
    assert sum(row.parameters for row in rows) == sum(p.numel() for p in whole.parameters())
    assert all(row.size_bytes == 4 * row.parameters and row.trainable == row.parameters for row in rows)


VIRTUAL = pytest.mark.parametrize("kind", ["ptuning", "prompt_encoder"])


@VIRTUAL
def test_virtual_tokens_that_a_table_of_positions_has_no_room_for_are_refused_before_a_step(
    make_run, open_source, kind
):
    adapter = f"model.adapter={{kind='{kind}', tokens=4}}"
    long, short = (make_run(adapter, f"data.sequence_length={n}") for n in (13, 12))
    source = open_source(long)

    said = r"model\.adapter\.tokens = 4: .* data\.sequence_length = 13 leaves 3 of the model's 16; lower one of the two"
    with pytest.raises(ConfigError, match=said):
        make_plan(long, source)
    with pytest.raises(ConfigError, match=said):
        recipe_of(long, ParallelConfig(), source)
    make_plan(short, source)


@VIRTUAL
def test_virtual_tokens_before_rows_that_are_not_causal_are_refused_before_a_step(make_run, open_source, kind):
    run = make_run(f"model.adapter={{kind='{kind}', tokens=4}}", "data.attention='document'", "data.sequence_length=12")

    with pytest.raises(ConfigError, match=f'kind = "{kind}": virtual tokens need causal rows'):
        make_plan(run, open_source(run))


def test_noise_on_virtual_tokens_of_a_prompt_is_refused(make_run, open_source):
    run = make_run(
        "model.adapter={kind='prompt_encoder', tokens=4}", "train.neftune_alpha=5.0", "data.sequence_length=12"
    )

    with pytest.raises(ConfigError, match=r"train\.neftune_alpha: the noise applies to tokens of a text"):
        make_plan(run, open_source(run))


def test_each_middle_stage_has_its_worker_and_its_shadow(make_run, open_source):
    run = make_run("pipeline.stages=4")

    rows = estimate_stages(run, open_source(run))

    assert [row.holder for row in rows] == ["owner", "worker-1", "worker-2", "owner"]
    assert [row.shadows for row in rows] == [(), ("worker-2",), ("worker-1",), ()]


def test_without_a_convicted_worker_the_rest_and_the_owner_serve(make_run, open_source):
    run = make_run("pipeline.stages=4")

    rows = estimate_stages(run, open_source(run), ["worker-2"])

    assert {row.holder for row in rows} == {"owner", "worker-2"}


def test_adapters_train_little_and_need_little(make_run, open_source):
    whole, adapted = make_run("pipeline.stages=4"), make_run("pipeline.stages=4", "model.adapter={rank=2}")

    full, small = (estimate_stages(run, open_source(run)) for run in (whole, adapted))

    assert all(0 < row.trainable < row.parameters / 10 for row in small)
    assert sum(row.memory_bytes for row in small) < sum(row.memory_bytes for row in full)


def test_gpipe_keeps_more_activations_than_1f1b(make_run, open_source):
    one, other = make_run("pipeline.stages=4"), make_run("pipeline.stages=4", "pipeline.schedule='gpipe'")

    assert (
        estimate_stages(other, open_source(other))[2].memory_bytes
        > estimate_stages(one, open_source(one))[2].memory_bytes
    )


def test_the_plan_says_what_the_run_says(make_run, open_source):
    run = make_run("pipeline.stages=3")

    plan = make_plan(run, open_source(run))

    assert plan.hidden_shape == (2, 16, 32)
    assert (len(plan.stages), plan.total_steps, plan.seed) == (3, 6, 3)


def test_a_dry_run_shows_config_stages_and_memory_and_makes_no_run(make_run, tmp_path):
    text = io.StringIO()

    Console(file=text, width=160).print(describe_run(make_run("pipeline.stages=4"), tmp_path / "runs" / "x"))

    shown = text.getvalue()
    for word in ("microbatches = 4", "worker-2", "memory", "4 stages", "expected memory"):
        assert word in shown
    assert "they share about 290.0 MiB of it" in " ".join(shown.split())
    assert not (tmp_path / "runs" / "x").exists()


def test_workers_of_other_machines_share_no_memory(make_run, open_source):
    text = io.StringIO()
    run = make_run('pipeline={stages=3,pki="pki",remote_workers=["alice"]}')

    Console(file=text, width=160).print(stages_of(run, open_source(run)))

    assert "expected memory" in text.getvalue() and "share about" not in text.getvalue()


def test_the_table_of_a_wide_terminal_is_whole(make_run, open_source):
    text = io.StringIO()
    run = make_run("pipeline.stages=3")

    Console(file=text, width=160).print(describe_stages(run, open_source(run)))

    assert "…" not in text.getvalue()


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("overrides", [(), ("model.adapter.rank=2",)], ids=["all trained", "adapters"])
def test_on_no_terminal_a_number_or_a_name_is_cut_or_broken(make_run, open_source, overrides, width):
    text, run = io.StringIO(), make_run("pipeline.stages=4", *overrides)
    source = open_source(run)

    Console(file=text, width=width).print(stages_of(run, source))

    assert "…" not in text.getvalue()
    assert all(len(line) <= width for line in text.getvalue().splitlines())
    for row in estimate_stages(run, source):
        for word in (f"{row.parameters:,}", row.holder, f"{row.size_bytes / 2**20:,.1f} MiB", "memory, expected"):
            assert any(word in line for line in text.getvalue().splitlines()), word


def test_each_process_is_told_what_it_needs_its_shadows_included(make_run, open_source):
    run = make_run("pipeline.stages=4")
    rows = estimate_stages(run, open_source(run))

    needs = memory_by_party(rows)

    assert set(needs) == {"owner", "worker-1", "worker-2"}
    assert needs["worker-1"] - needs["worker-2"] == (rows[1].memory_bytes + rows[2].shadow_bytes) - (
        rows[2].memory_bytes + rows[1].shadow_bytes
    )
    # weights, moments and the undo copy of all three
    assert all(row.shadow_bytes > row.size_bytes + 20 * row.trainable for row in rows[1:3])


DOMAINS = (
    "pipeline.stages=4",
    "guard.classes='mixed'",
    "pipeline.layout={dp=2,zero=2}",
    "pipeline.layouts={worker-2={tp=2}}",
)


def test_parties_of_several_ranks_are_shown_with_their_processes_and_memory(make_run, open_source):
    text, run = io.StringIO(), make_run(*DOMAINS)

    Console(file=text, width=160).print(describe_stages(run, open_source(run)))

    shown = text.getvalue()
    assert run.world == {"processes": 5, "stages": 4}
    for word in ("5 processes; parties of several ranks", "dp=2 zero=2", "tp=2", "memory of rank 0"):
        assert word in shown


def test_ranks_that_share_more_need_less(make_run, open_source):
    run = make_run(*DOMAINS)
    plan = make_plan(run, open_source(run))
    layouts = [PartyLayout(dp=2), PartyLayout(dp=2, zero=1), PartyLayout(dp=2, zero=2), PartyLayout(dp=4, zero=2)]

    needs = [rank_bytes(plan, 1, layout) for layout in layouts]

    first = [one.first for one in needs]
    assert sorted(first, reverse=True) == first
    # with zero = 0 rank 0 alone has moments and what undoes steps
    assert needs[0].other < needs[1].other < needs[0].first
    assert needs[2].other < needs[1].other
