"""A section that is written is kept or refused, and a value that an engine lacks is refused with the reason."""

import functools
import operator
import tomllib
from itertools import combinations

import pytest

from phalanx.config import digest_config, dump_toml
from phalanx.errors import ConfigError
from phalanx.lab.bench.detection.drill_plan import Drill, drill_scenes
from phalanx.train import RUN_TYPES, DomainRun, load_run
from phalanx.train.config import PipelineRun
from phalanx.train.runs.support import ABSENT_SECTIONS, SECTIONS, limits, sections_of
from tiny_run_file import tiny_run_file

# each as one would write it who relies on the defaults and says so
ASKED_FOR = {
    "parallel": "[parallel]\ndp = 1\n",
    "deepspeed": "[deepspeed]\nzero = 3\n",
    "split": "[split]\ncut = 2\nallow_insecure_sim = true\n",
    "federated": '[federated]\nsites = ["a", "b"]\n',
    "pipeline": "[pipeline]\nstages = 4\n",
    "guard": '[guard]\nmode = "phalanx"\n',
    "attack": '[attack]\nkind = "none"\n',
    "objectives": (
        '[[objectives]]\nname = "more"\nmicrobatches = 1\ndata = { sources = [{ kind = "python_manual" }] }\n'
    ),
}
JOINED = (
    "[model.adapter]\nrank = 2\n" + ASKED_FOR["split"] + "workers_see_hidden_states = true\n" + ASKED_FOR["pipeline"]
)
ENGINES = {
    "pipeline": ASKED_FOR["pipeline"] + ASKED_FOR["guard"],
    "parallel": "[parallel]\ndp = 2\n",
    "deepspeed": "[parallel]\ndp = 2\n" + ASKED_FOR["deepspeed"],
    "split": "[model.adapter]\nrank = 2\n" + ASKED_FOR["split"],
    "federated": ASKED_FOR["federated"],
    "federated with pipeline": ASKED_FOR["federated"] + ASKED_FOR["pipeline"] + ASKED_FOR["guard"],
    "split with pipeline": JOINED + ASKED_FOR["guard"] + ASKED_FOR["attack"],
}


@pytest.fixture
def load(tmp_path):
    path = tmp_path / "run.toml"

    def read(sections, *overrides):
        path.write_text(tiny_run_file(sections))
        return load_run(path, overrides)

    return read


EXCLUSIONS = {
    (engine, section): reason
    for engine, absent in ABSENT_SECTIONS.items()
    if "+" not in engine
    for section, reason in absent.items()
    if section in ASKED_FOR
}


@pytest.mark.parametrize("pair", EXCLUSIONS)
def test_two_sections_that_exclude_each_other_are_refused_whatever_they_hold(load, pair):
    one, other = pair

    with pytest.raises(ConfigError) as refusal:
        load(ASKED_FOR[one] + ASKED_FOR[other])

    assert f"[{one}] and [{other}] exclude each other: {EXCLUSIONS[pair]}; remove one" in str(refusal.value)


TOGETHER = {
    ("parallel", "deepspeed"),
    ("parallel", "federated"),
    ("federated", "pipeline"),
    ("federated", "guard"),
    ("pipeline", "guard"),
    ("pipeline", "attack"),
    ("guard", "attack"),
    ("pipeline", "objectives"),
    ("guard", "objectives"),
    ("attack", "objectives"),
    ("parallel", "objectives"),
}
SET = {
    "parallel": "parallel.dp=1",
    "deepspeed": "deepspeed.zero=3",
    "split": "split={cut=2,allow_insecure_sim=true}",
    "federated": "federated={sites=['a','b']}",
    "pipeline": "pipeline.stages=4",
    "guard": "guard.mode=phalanx",
    "attack": "attack.kind=none",
    "objectives": "objectives=[{name='more',microbatches=1,data={sources=[{kind='python_manual'}]}}]",
}


def test_every_pair_of_sections_is_either_refused_or_known_to_go_together():
    pairs = {frozenset(pair) for pair in combinations(ASKED_FOR, 2)}
    refused, together = ({frozenset(pair) for pair in found} for found in (EXCLUSIONS, TOGETHER))

    assert refused | together == pairs
    assert not refused & together


@pytest.mark.parametrize("pair", EXCLUSIONS)
def test_a_section_that_came_by_override_is_refused_beside_one_that_is_written(load, pair):
    for written, by_override in (pair, pair[::-1]):
        with pytest.raises(ConfigError, match=r"exclude each other: .*; remove one"):
            load(ASKED_FOR[written], SET[by_override])


@pytest.mark.parametrize("pair", [pair for pair in TOGETHER - {("federated", "guard")} if "parallel" not in pair])
def test_sections_that_go_together_are_both_kept(load, pair):
    kept = dump_toml(load("".join(ASKED_FOR[name] for name in pair)))

    assert all(f"[{name}]" in kept for name in pair)


@pytest.mark.parametrize(
    ("sections", "override"),
    [
        ("[parallel]\n", "guard.mode=phalanx"),
        ("[guard]\n", "parallel.dp=2"),
        ("[parallel]\n[guard]\n", "train.steps=6"),
        ("[parallel]\n", "pipeline.stages=4"),
        (ENGINES["split"], "guard.mode=off"),
        (ENGINES["split"], "attack.kind=none"),
        ("[parallel.outer]\nevery = 3\n[attack]\n", "parallel.dp=2"),
    ],
)
def test_however_a_section_came_into_the_run_it_is_there(load, sections, override):
    with pytest.raises(ConfigError, match="exclude each other"):
        load(sections, override)


@pytest.mark.parametrize("engine", ENGINES)
def test_what_a_run_directory_keeps_is_the_same_run_when_it_is_read_again(load, tmp_path, engine):
    run = load(ENGINES[engine])
    kept = tmp_path / "config.toml"
    kept.write_text(dump_toml(run))

    again = load_run(kept)

    assert digest_config(again) == digest_config(run)
    assert dump_toml(again) == dump_toml(run)


KINDS = {kind.__name__: kind for kind in RUN_TYPES.members}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_section_that_a_kind_of_run_lacks_has_a_reason_or_makes_another_kind_of_it(kind):
    """A section of the run file that is neither would be an unknown key, with no word of why."""
    first, _, beside = kind.engine.partition("+")
    absent = set(SECTIONS) - kind.model_fields.keys()
    others = {"parallel", "deepspeed", "split", "federated"} if kind is PipelineRun else set()
    others |= {"split", "federated"} if kind is DomainRun else set()
    others |= {"federated"} if first == "split" else set()
    # these beside [federated] are of another kind of federated run, or are refused as it
    others |= {"parallel", "pipeline", "guard"} if first == "federated" and beside != "pipeline" else set()

    assert absent == (ABSENT_SECTIONS[first].keys() | ABSENT_SECTIONS.get(kind.engine, {}).keys() | others) - (
        kind.model_fields.keys()
    )


def test_a_kind_of_run_has_no_section_beyond_the_list():
    assert set(SECTIONS) == {name for kind in KINDS.values() for name in kind.model_fields}


@pytest.mark.parametrize(
    ("sections", "kind"),
    [
        ("", "PipelineRun"),
        (ENGINES["pipeline"], "PipelineRun"),
        (ENGINES["parallel"], "DomainRun"),
        (ENGINES["deepspeed"], "DomainRun"),
        (ENGINES["split"], "SplitRun"),
        (ENGINES["split with pipeline"], "SplitPipelineRun"),
        (ENGINES["federated"], "FederatedRun"),
        (ENGINES["federated"] + ENGINES["parallel"], "FederatedRankRun"),
        (ENGINES["federated with pipeline"], "FederatedPipelineRun"),
    ],
)
def test_the_sections_say_which_kind_of_run_it_is(load, sections, kind):
    run = load(sections)

    assert type(run) is KINDS[kind]
    assert list(run.model_dump()) == [name for name in SECTIONS if name in run.model_dump()]


def test_a_run_has_no_attribute_for_a_section_of_another_engine(load):
    run = load(ENGINES["parallel"])

    assert not hasattr(run, "guard") and not hasattr(run, "pipeline")
    assert run.stage_guard is None
    with pytest.raises(ValueError, match="Extra inputs are not permitted"):
        DomainRun(**run.written, guard={"mode": "phalanx"})


def test_a_misspelled_section_of_any_engine_is_recognised(load):
    with pytest.raises(ConfigError, match=r"paralel: unknown key; did you mean 'parallel'\?"):
        load("[paralel]\ndp = 2\n")


@pytest.mark.parametrize("section", ["rewards", "rollouts"])
@pytest.mark.parametrize("engine", ["split", "federated"])
def test_a_section_for_texts_of_the_model_is_refused_where_none_are_written(load, engine, section):
    with pytest.raises(ConfigError, match=rf"\[{engine}\] and \[{section}\] exclude each other: .*; remove one"):
        load(ENGINES[engine] + f"[{section}]\n")


def test_other_sections_of_a_run_are_checked_as_those_of_its_file_are(load):
    run = load(ENGINES["parallel"])

    assert run.with_sections({"tracking": None}).name == run.name
    with pytest.raises(ValueError, match=r"\[parallel\] and \[guard\] exclude each other"):
        run.with_sections({"guard": {"mode": "phalanx"}})


def test_a_value_that_is_refused_is_named_for_programs_too(load):
    with pytest.raises(ConfigError) as refusal:
        load(ENGINES["split"], "train.precision=fp16")

    facts = refusal.value.error_facts
    instead = 'set it to "bf16" or "fp32"'
    assert (facts["key"], facts["found"], facts["do"]) == ("train.precision", '"fp16"', instead)


def test_a_drill_of_a_run_without_stages_is_refused(load):
    with pytest.raises(ConfigError, match=r"\[parallel\] and \[attack\] exclude each other"):
        drill_scenes(load(ENGINES["parallel"]), Drill(kinds=("zero",)))


ENGINE = {name: text for name, text in ENGINES.items() if name != "pipeline"} | {"pipeline": ""}
LABELLED = "data={labelled={task='medquad'},tokenizer={kind='bpe',vocab_size=300},sequence_length=16}"
WANTED = {
    "model.adapter.dora": "true",
    "model.adapter.quantize": "'nf4'",
    "model.adapter.path": "'adapters/one'",
    "train.objective": f"'mine.py:loss@{'0' * 64}'",
    "model.family": f"'mine.py:cwm@{'0' * 64}'",
    "optimizer.kind": "'sgd'",
    "train.precision": "'fp16'",
    "train.numerics": "'exact'",
    "train.device": "'cuda'",
    "model.layers": "2",
    "model.activation_checkpointing": "true",
    "checkpoint.journal": "true",
    "checkpoint.asynchronous": "true",
    "checkpoint.sharded": "true",
    "checkpoint.best": "'validation'",
    "train.samples": "{prompts=['a']}",
    "train.histograms": "{bins=8}",
    "train.stability": "{threshold=8.0}",
    "train.neftune_alpha": "5.0",
    "data.dataset": "{path='shards'}",
    "data.phases": "[{curriculum={by='length'}}]",
    "data.skip": "[[1,2]]",
    "data.attention": "'document'",
    "train.epochs": "2.0",
    "parallel.tp": "2",
    "parallel.pp": "2",
    "parallel.cp": "2",
    "parallel.zero": "1",
    "parallel.gradient_compression": "'fp16'",
    "parallel.outer": "{every=2}",
    "parallel.compile": "true",
    "split.mode": "'masked'",
    "split.tier": "'process'",
    "guard.mode": "'off'",
    "guard.commit_lag": "1",
    "pipeline.remote_workers": "['w']",
    "pipeline.pki": "'keys'",
    "pipeline.layout": "{tp=2}",
    "pipeline.layouts": "{worker-1={tp=2}}",
}
SECTIONS_OF_ONE = ("parallel.", "split.", "guard.", "pipeline.")
MORE = {
    "data.dataset": ("data={dataset={path='shards'},sequence_length=16}",),
    "checkpoint.best": ("train.validate_every=2",),
    "parallel.outer": ("train.validate_every=2", "checkpoint.every=2"),
    "split.tier": ("split.allow_insecure_sim=false",),
    "pipeline.remote_workers": ("pipeline.pki='keys'",),
    "optimizer.kind": ("optimizer.betas=[0.9,0.95]",),
    "train.epochs": ("train.steps=0",),
}


@pytest.mark.parametrize(("engine", "key", "limit"), list(limits()), ids=lambda part: getattr(part, "lacking", part))
def test_a_value_that_an_engine_lacks_is_refused_with_the_reason(load, engine, key, limit):
    value = f"'{limit.never[0]}'" if limit.never else WANTED[key]
    override = f"model.adapter={{kind={value}}}" if key == "model.adapter.kind" else f"{key}={value}"
    more = (LABELLED,) if limit.never == ("classification",) else MORE.get(key, ())

    with pytest.raises(ConfigError) as refusal:
        load(ENGINE[engine.replace("+", " with ")], override, *more)

    assert f"{sections_of(engine)} excludes {key}" in str(refusal.value)
    assert f": {limit.reason}; {limit.instead}" in str(refusal.value)


@pytest.mark.parametrize("engine", ENGINE)
def test_an_engine_has_every_value_that_no_line_takes_from_it(load, engine):
    run = load(ENGINE[engine])
    taken = {key for column, key, _ in limits() if column in run.engines}
    for key, value in WANTED.items():
        if key not in taken and key != "train.device" and not key.startswith(SECTIONS_OF_ONE):
            found = load(ENGINE[engine], f"{key}={value}", *MORE.get(key, ()))

            kept = functools.reduce(operator.getitem, key.split("."), found.model_dump(mode="json", exclude_unset=True))
            assert kept == tomllib.loads(f"value = {value}")["value"]


def test_a_split_has_a_pipeline_once_it_says_what_workers_see_and_not_before(load):
    run = load(ENGINES["split with pipeline"])

    assert run.stage_workers == ("worker-1", "worker-2")
    assert run.workers == ("enclave", "client-0")
    assert {"pipeline", "guard", "attack", "split"} <= run.model_dump().keys()
    with pytest.raises(ConfigError, match=r"split.workers_see_hidden_states = true gives workers the middle ones"):
        load(ENGINES["split with pipeline"], "split.workers_see_hidden_states=false")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.precision=bf16", "masked products are of integers, which stand for float32"),
        ("model.adapter.quantize=nf4", "a worker multiplies whole matrices as integers"),
        ("model.adapter.dora=true", "it reads the frozen matrices, which workers have"),
    ],
)
def test_what_masked_products_lack_a_sealed_split_has(load, override, words):
    assert load(ENGINES["split"], override).split.mode == "sealed"
    with pytest.raises(ConfigError, match=words):
        load(ENGINES["split"], override, "split.mode=masked")


def test_an_acknowledgement_without_workers_is_refused(load):
    with pytest.raises(ConfigError, match=r"workers_see_hidden_states = true needs workers .* add \[pipeline\]"):
        load(ENGINES["split"], "split.workers_see_hidden_states=true")


@pytest.mark.parametrize("stages", [1, 2])
def test_a_pipeline_of_an_enclave_has_a_stage_between_its_own(load, stages):
    with pytest.raises(ConfigError, match=rf"pipeline.stages = {stages} beside \[split\]"):
        load(ENGINES["split with pipeline"], f"pipeline.stages={stages}", "attack.stages=[]")


def test_the_digest_of_a_split_without_workers_is_that_of_the_version_before(load):
    assert "workers_see_hidden_states" not in load(ENGINES["split"]).model_dump()["split"]
