"""Suites measure a model while it trains: the figures are those of its checkpoint, and no weight changes."""

import json

import pytest

from kept_states import kept_state
from phalanx.errors import ConfigError, DataError
from phalanx.evaluate import LocalScorer, open_suite, read_result, run_suites
from phalanx.serve import open_text_model
from phalanx.telemetry import read_metrics
from phalanx.train import load_run
from tiny_run_file import tiny_run_file

SECTION = '\n[evaluate]\nevery = 2\nsuites = ["prose", "facts"]\nlimit = 3\n'
SPLIT = "[model.adapter]\nrank = 2\n[split]\ncut = 2\nclients = 2\nallow_insecure_sim = true\n"
SIZES = ("data.sequence_length=64", "model.architecture.n_positions=64", "train.steps=3", "train.validate_every=0")


@pytest.fixture
def train(train_sections):
    return lambda layout, section, name: train_sections(f"[parallel]\n{layout}\n{section}", name)


@pytest.fixture
def train_sections(quietly, tmp_path):
    def run(sections, name, *overrides):
        file, directory = tmp_path / f"{name}.toml", tmp_path / name
        file.write_text(tiny_run_file(sections, steps=3))
        summary = quietly(load_run(file, (*SIZES, *overrides)), directory)
        assert summary["status"] == "completed", summary["shown"]
        return summary, directory

    return run


@pytest.mark.parametrize(
    "layout",
    [
        "dp = 1",
        pytest.param("dp = 2", marks=pytest.mark.slow),
        pytest.param("pp = 2", marks=pytest.mark.slow),
        pytest.param("cp = 2", marks=pytest.mark.slow),
    ],
)
def test_figures_are_those_of_the_exported_model(train, layout):
    summary, directory = train(layout, SECTION, "evaluated")

    at_steps = sorted((directory / "evaluations").iterdir())
    assert [path.name for path in at_steps] == ["step-00000002.json", "step-00000003.json"]
    result = read_result(at_steps[-1])
    suites = [open_suite(name, limit=3) for name in ("prose", "facts")]
    exported = run_suites("exported", LocalScorer(open_text_model(directory), window=64), suites, 3)
    for name, figure in exported.figures.items():
        assert result.figures[name].value == pytest.approx(figure.value, rel=1e-4), name
        assert result.figures[name].n == figure.n
    assert summary["evaluation"]["step"] == 3
    assert summary["evaluation"]["figures"] == result.brief_figures
    lines = read_metrics(directory / "metrics.jsonl")
    assert ["evaluation" in line for line in lines] == [False, True, True]
    assert lines[-1]["evaluation"] == json.loads(json.dumps(result.brief_figures))


def assert_figures_of_checkpoint(directory, step):
    """Compare what a run measured on the way with `phalanx eval` of the checkpoint of the same step."""
    result = read_result(directory / "evaluations" / f"step-{step:08}.json")
    suites = [open_suite(name, limit=3) for name in ("prose", "facts")]
    saved = run_suites("saved", LocalScorer(open_text_model(directory), window=64), suites, 3)
    assert saved.figures.keys() == result.figures.keys()
    for name, figure in saved.figures.items():
        assert result.figures[name].value == pytest.approx(figure.value, rel=1e-4), name
        assert result.figures[name].n == figure.n


ENGINES = {
    "pipeline": "[pipeline]\nstages = 4\n",
    "unguarded": '[pipeline]\nstages = 3\n[guard]\nmode = "off"\n',
    "federated": '[federated]\nsites = ["north", "south"]\nlocal_steps = 2\n',
}


@pytest.mark.parametrize(
    "engine", ["unguarded", *(pytest.param(name, marks=pytest.mark.slow) for name in ("pipeline", "federated"))]
)
def test_figures_of_other_engines_are_those_of_the_checkpoint(train_sections, engine):
    summary, directory = train_sections(ENGINES[engine] + SECTION, engine)

    assert [path.name for path in sorted((directory / "evaluations").iterdir())] == [
        "step-00000002.json",
        "step-00000003.json",
    ]
    assert_figures_of_checkpoint(directory, 3)
    assert summary["evaluation"]["step"] == 3
    assert ["evaluation" in line for line in read_metrics(directory / "metrics.jsonl")] == [False, True, True]


CLEAR = SPLIT.replace("allow_insecure_sim = true", 'mode = "plaintext"\ninsecure = true')
STAGED = "workers_see_hidden_states = true\n[pipeline]\nstages = 3\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "sections", [SPLIT, CLEAR, SPLIT.replace("cut = 2", "cut = 1") + STAGED], ids=["sealed", "plaintext", "pipeline"]
)
def test_figures_of_a_split_are_those_of_ranks_with_the_same_weights(train_sections, sections):
    """Nobody can open the checkpoint of an enclave, and it trains its own part alone: so nothing is learned here."""
    still = "optimizer.lr=1e-12"
    _, directory = train_sections(sections + SECTION, "split", still)
    _, other = train_sections("[model.adapter]\nrank = 2\n[parallel]\n" + SECTION, "ranks", still)

    result, expected = (read_result(run / "evaluations" / "step-00000003.json") for run in (directory, other))
    assert {name: figure.value for name, figure in result.figures.items()} == pytest.approx(
        {name: figure.value for name, figure in expected.figures.items()}, rel=1e-5
    )


@pytest.mark.slow
def test_figures_of_a_split_are_of_what_it_has_learned_so_far(train_sections):
    _, directory = train_sections(CLEAR + SECTION, "split")

    early, late = (read_result(directory / "evaluations" / f"step-0000000{step}.json") for step in (2, 3))
    assert early.figures["prose.perplexity"].value != late.figures["prose.perplexity"].value


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["pipeline", "federated"])
def test_other_engines_with_suites_have_the_weights_of_a_run_without(train_sections, engine):
    plain, _ = train_sections(ENGINES[engine], "plain")
    evaluated, _ = train_sections(ENGINES[engine] + SECTION, "evaluated")

    assert plain["final_weights_digest"] == evaluated["final_weights_digest"]


@pytest.mark.slow
def test_a_run_with_suites_has_the_weights_of_one_without(train):
    _, plain = train("dp = 1", "", "plain")
    _, evaluated = train("dp = 1", SECTION, "evaluated")

    one, other = kept_state(plain, 3), kept_state(evaluated, 3)
    assert one.keys() == other.keys()
    assert all(tensor.equal(other[name]) for name, tensor in one.items())


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ('[parallel]\n[evaluate]\nevery = 1\nsuites = ["safety"]\n', "safety.* needs texts of the model"),
        ('[parallel]\n[evaluate]\nevery = 1\nsuites = ["pubmedqa"]\n', "pubmedqa.* needs texts of the model, or data"),
        ('[parallel]\n[evaluate]\nevery = 1\nsuites = ["glue"]\n', "glue.* is no suite"),
        ("[parallel]\n[deepspeed]\n[evaluate]\nevery = 1\n", r"\[evaluate\] excludes \[deepspeed\]"),
        ("[parallel]\n[evaluate]\nevery = 0\n", "every"),
        ("[evaluate]\nevery = 0\n", "every"),
        ('[evaluate]\nevery = 1\nsuites = ["safety"]\n', "safety.* needs texts of the model"),
        (
            f"{SPLIT}[split.admission]\nheld_out_factor = 2.0\n[evaluate]\nevery = 1\n",
            "excludes split.admission.held_out_factor",
        ),
    ],
)
def test_what_cannot_be_asked_while_a_run_trains_is_refused_by_name(tmp_path, sections, message):
    file = tmp_path / "run.toml"
    file.write_text(tiny_run_file(sections))
    with pytest.raises(ConfigError, match=message):
        load_run(file)


def test_a_row_that_does_not_fit_is_refused_before_the_first_step(quietly, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(tiny_run_file(f"[parallel]\n{SECTION.replace('limit = 3', 'limit = 50')}"))
    with pytest.raises(DataError, match="the window takes 16"):
        quietly(load_run(file), tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or not read_metrics(tmp_path / "run" / "metrics.jsonl")
