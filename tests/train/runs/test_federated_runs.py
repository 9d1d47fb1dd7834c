"""What a federated run refuses when its file is read: keys of other sections that its rounds could not keep to."""

import pytest
from rich.console import Console

from phalanx.errors import ConfigError
from phalanx.models import open_model
from phalanx.optimizers import learning_rate
from phalanx.train import load_run
from phalanx.train.config import DomainRun, FederatedPipelineRun, FederatedRankRun, FederatedRun
from phalanx.train.entry import describe_run
from phalanx.train.parties.site_process import plan_of
from tiny_run_file import tiny_run_file

SITES = '[federated]\nsites = ["a", "b"]\n'
LORA = '[model.adapter]\nkind = "lora"\nrank = 4\nalpha = 8\n'
RANKS = "[parallel]\ndp = 2\n"
STAGES = "[pipeline]\nstages = 4\n"
ROWS = "[privacy]\nepsilon = 8.0\ndelta = 1e-4\nclip_norm = 0.5\n"
SUMS = (
    '[federated]\nsites = ["a", "b", "c"]\nmin_cohort = 3\nsecure = true\nmax_norm = 1.0\n'
    "[federated.privacy]\nepsilon = 8.0\ndelta = 1e-3\n"
)


@pytest.fixture
def read(tmp_path):
    def read(sections, *overrides):
        path = tmp_path / "tiny.toml"
        path.write_text(tiny_run_file(sections))
        return load_run(path, overrides)

    return read


@pytest.mark.parametrize("exchange", ["product", "frozen_a"])
def test_exact_means_are_taken_of_plain_adapters(read, exchange):
    run = read(LORA + SITES + f'exchange = "{exchange}"\n')

    assert run.federated.exchange == exchange


def test_sites_may_be_ranks_and_are_no_domain_of_the_run_itself(read):
    run = read(SITES + RANKS)

    assert isinstance(run, FederatedRankRun) and not isinstance(run, DomainRun)
    assert (run.parallel.dp, run.steps_a_rate) == (2, run.federated.local_steps)
    assert run.world == {"processes": 5, "stages": 1, "sites": 2}


def test_sites_may_own_pipelines_and_the_run_itself_has_no_stage_and_no_worker(read):
    run = read(SITES + STAGES, "guard.audit_rate=0.5")

    assert isinstance(run, FederatedPipelineRun)
    assert (run.stage_guard, run.stage_workers) == (None, ())
    assert (run.workers, run.guard.audit_rate) == (("a", "b"), 0.5)
    assert run.world == {"processes": 7, "stages": 4, "sites": 2}
    assert type(read(SITES)) is FederatedRun and "pipeline" not in read(SITES).model_dump()


def test_a_sites_pipeline_is_a_run_of_its_local_steps_with_the_learning_rates_of_rounds(read, tmp_path):
    run = read(SITES + "local_steps = 3\n" + STAGES, "train.steps=4", "optimizer.warmup_steps=2")
    plan = plan_of(run, open_model(run.model, tmp_path, run.train.seed))

    assert (run.site_pipeline.train.steps, run.site_pipeline.journals, plan.total_steps) == (12, False, 12)
    rates = [learning_rate(run.optimizer, number, 4) for number in range(4)]
    assert [plan.learning_rate(step) for step in range(12)] == [rate for rate in rates for _ in range(3)]
    assert rates[0] < rates[1] and rates[3] < rates[2]


def test_a_look_at_a_run_shows_the_stages_of_a_site_and_what_its_guard_finds(read, tmp_path, capsys):
    console = Console(width=200)

    console.print(describe_run(read(SITES + STAGES), tmp_path / "run"))

    shown = capsys.readouterr().out
    assert "4 stages, 4 microbatches, 1f1b" in shown and "worker-2" in shown
    assert "one worker's stage that lies in every step" in shown


def test_factors_of_dora_may_be_averaged_one_by_one(read):
    assert read(LORA + "dora = true\n" + SITES).model.adapter.dora


@pytest.mark.parametrize(
    ("sections", "overrides", "words"),
    [
        (SITES + 'exchange = "product"\n', (), "needs the two factors of LoRA"),
        (LORA + "dora = true\n" + SITES + 'exchange = "frozen_a"\n', (), "but not DoRA's magnitudes"),
        (SITES + 'algorithm = { kind = "scaffold" }\n', (), 'set optimizer.kind = "sgd"'),
        (
            SITES + 'algorithm = { kind = "scaffold" }\n',
            ("optimizer.kind=sgd", "optimizer.momentum=0.9"),
            "corrects plain gradients",
        ),
        (SUMS, (), 'excludes data.tokenizer.kind = "bpe"'),
        (SITES + ROWS, (), r"\[privacy\] excludes data.tokenizer.kind"),
        (LORA + "dora = true\n" + SITES + ROWS, (), r"\[privacy\] excludes model.adapter.dora"),
        (
            LORA + SITES + ROWS + "[parallel]\npp = 2\n",
            ("data.tokenizer={kind='model'}",),
            r"\[privacy\] excludes parallel.pp = 2: each rank would see a part of a row's gradient",
        ),
        (
            SITES + 'algorithm = { kind = "fedprox", mu = 0.1 }\n' + RANKS,
            (),
            r"corrects each gradient of a site, but ranks of \[parallel\] make whole steps",
        ),
        (LORA + SITES + 'exchange = "frozen_a"\n' + RANKS, (), r"ranks of \[parallel\] train both"),
        (SITES + 'personal = ["*.wte.*"]\n' + RANKS, (), r"ranks of \[parallel\] send all trained weights"),
        (SITES + RANKS + "max_dp = 4\n", (), "a site has a fixed number of ranks"),
        (SITES + RANKS + "[deepspeed]\n", (), r"\[federated\] and \[deepspeed\] exclude each other"),
        (SITES + "[guard]\n", (), r"add \[pipeline\], or remove \[guard\]"),
        (SITES + STAGES + '[attack]\nkind = "none"\n', (), "starts honest workers only"),
        (SITES + STAGES + RANKS, (), r"\[parallel\] and \[pipeline\] exclude each other"),
        (SITES + STAGES, ("pipeline.stages=2",), "workers need one between them; set it to 3 or more"),
        (SITES + STAGES, ("optimizer.kind=sgd",), r'\[pipeline\] excludes optimizer.kind = "sgd"'),
        (SITES + 'personal = ["*.wte.*"]\n' + STAGES, (), r"stages of \[pipeline\] send all trained weights"),
        (LORA + SITES + 'exchange = "frozen_a"\n' + STAGES, (), r"stages of \[pipeline\] train both"),
        (
            SITES + 'algorithm = { kind = "fedprox", mu = 0.1 }\n' + STAGES,
            (),
            r"corrects each gradient of a site, but stages of \[pipeline\] make whole steps",
        ),
        (
            LORA + SITES + ROWS + STAGES,
            (),
            r"\[privacy\] excludes \[pipeline\] with \[federated\]: stages with a site's own budget",
        ),
        (SUMS + ROWS, (), r"\[privacy\] excludes federated.privacy: a site would have two budgets"),
    ],
)
def test_what_rounds_could_not_keep_to_is_refused_by_name(read, sections, overrides, words):
    with pytest.raises(ConfigError, match=words):
        read(sections, *overrides)
