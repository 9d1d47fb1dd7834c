"""Sites as objects of the owner's process: whole runs of all that sites learn, and the bits of site processes."""

import io
import json

import pytest
from rich.console import Console
from safetensors.torch import load_file

from phalanx.config.extras import has_bitsandbytes
from phalanx.errors import ConfigError
from phalanx.train import load_run, train
from tiny_run_file import tiny_run_file

SOURCES = 'sources = [{ kind = "python_manual" }]\n'
SITES = "[federated]\nsimulated = 3\nlocal_steps = 2\n"
LORA = '[model.adapter]\nkind = "lora"\nrank = 4\nalpha = 8\n'
TALKS = [
    {"messages": [{"role": "user", "content": f"{a}+{b}?"}, {"role": "assistant", "content": str(a + b)}]}
    for a in range(8)
    for b in range(8)
]
PAIRS = [
    {"prompt": f"{a}+{b}=", "chosen": f"{a + b}.", "rejected": f"{a + b + 1}!"} for a in range(8) for b in range(8)
]


@pytest.fixture
def finish(tmp_path):
    def finish(sections, *overrides, name="run", data=SOURCES, steps=3):
        path = tmp_path / f"{name}.toml"
        text = tiny_run_file(sections, steps=steps, validate_every=steps).replace(SOURCES, data)
        path.write_text(text if data == SOURCES else text.replace("max_documents = 12\n", ""))
        console = Console(file=io.StringIO(), width=200)
        summary = train(load_run(path, overrides), tmp_path / name, console=console)
        return summary, tmp_path / name, console.file.getvalue()

    return finish


def lines_of(directory, file="rounds.jsonl"):
    return [json.loads(line) for line in (directory / file).read_text().splitlines()]


def records_of(tmp_path, records, kind):
    path = tmp_path / f"{kind}.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    return f"{kind} = {{ sources = [{{ path = {json.dumps(str(path))} }}] }}\n"


def test_a_run_says_that_its_sites_are_simulated_and_asks_a_cohort_of_them(finish):
    summary, directory, shown = finish("[federated]\nsimulated = 12\nfraction = 0.25\nmin_cohort = 3\n", steps=4)

    assert summary["status"] == "completed" and summary["loss_last"] < summary["loss_first"]
    assert summary["world"] == {"processes": 1, "stages": 1, "sites": 12}
    assert "SIMULATED SITES: NOT PRIVATE" in shown
    rounds = [row for row in lines_of(directory) if "round" in row]
    assert [len(row["asked"]) for row in rounds] == [3] * 4
    assert len({site for row in rounds for site in row["asked"]}) > 3
    # the names follow from their number, in the file that a resume reads as well
    assert "simulated = 12" in (directory / "config.toml").read_text()
    assert "site-7" not in (directory / "config.toml").read_text()


def test_masked_sums_of_simulated_sites_are_those_of_their_updates(finish):
    plain, _, _ = finish(SITES + "min_cohort = 3\n", name="plain")
    masked, directory, _ = finish(SITES + "min_cohort = 3\nsecure = true\n", name="masked")

    assert masked["loss_last"] == pytest.approx(plain["loss_last"], abs=1e-5)
    assert all(share.get("norm") is None for row in lines_of(directory) for share in row.get("sites", {}).values())


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        (SITES + 'sites = ["a", "b"]\n', "names its sites itself; remove sites"),
        (SITES + 'carrier = "bridge"\npki = "keys"\n', 'simulated: excludes carrier = "bridge"'),
        (SITES + 'min_cohort = 3\nsecure = true\nsums = "enclave"\n', 'simulated: excludes sums = "enclave"'),
        (
            SITES + "min_cohort = 3\nsecure = true\n[federated.privacy]\nepsilon = 8.0\ndelta = 1e-3\n",
            r"simulated: excludes \[federated.privacy\]",
        ),
        (
            LORA + SITES + "[privacy]\nepsilon = 8.0\ndelta = 1e-4\nclip_norm = 0.5\n",
            r"federated.simulated excludes \[privacy\]",
        ),
        (SITES + "[parallel]\ndp = 2\n", r"ranks of \[parallel\] would be some"),
        (SITES + "[pipeline]\nstages = 4\n", r"stages of \[pipeline\] would be some"),
    ],
)
def test_what_a_simulation_could_not_promise_is_refused(tmp_path, sections, words):
    path = tmp_path / "run.toml"
    # a vocabulary of the sites' own text is refused beside noise
    path.write_text(tiny_run_file(sections).replace('{ kind = "bpe", vocab_size = 300 }', '{ kind = "model" }'))

    with pytest.raises(ConfigError, match=words):
        load_run(path)


@pytest.mark.slow
def test_sites_learn_chats_with_all_that_makes_models_small_and_steps_cheap(finish, tmp_path):
    talks = records_of(tmp_path, TALKS, "conversations") + 'attention = "document"\n'
    few_bits = ("optimizer.kind=adamw8bit", "model.adapter.quantize=nf4") if has_bitsandbytes() else ()
    summary, directory, _ = finish(
        LORA + SITES,
        *("train.precision=bf16", "train.neftune_alpha=5.0", "train.histograms={bins=8}", *few_bits),
        *("train.samples={prompts=['1+1?'],tokens=4}", "data.sequence_length=48", "model.architecture.n_positions=48"),
        "data.tokenizer.vocab_size=262",
        data=talks,
        steps=4,
    )

    assert summary["loss_last"] < summary["loss_first"]
    validations = [row["validation"] for row in lines_of(directory, "metrics.jsonl") if row.get("validation")]
    assert validations or lines_of(directory, "metrics.jsonl")
    (adapter,) = sorted((directory / "checkpoints").glob("*/*.safetensors"))[-1:]
    assert all(".lora_" in name for name in load_file(adapter))


@pytest.mark.parametrize("objective", ["dpo", pytest.param("kto", marks=pytest.mark.slow)])
def test_sites_learn_pairs_and_each_computes_the_reference_of_its_own(finish, tmp_path, objective):
    pairs = records_of(tmp_path, PAIRS, "preferences")
    summary, directory, _ = finish(
        SITES + "min_cohort = 3\nsecure = true\n",
        *(f"train.objective={objective}", "data.tokenizer.vocab_size=262"),
        data=pairs,
        steps=4,
    )

    assert summary["loss_last"] < summary["loss_first"]
    # the owner has the reference of the held-out rows alone
    kept = load_file(directory / "reference.safetensors")
    assert len(kept["train"]) == 0 < len(kept["held_out"])
    measured = [row["sites"] for row in lines_of(directory) if "measured" in row]
    assert set(measured[-1]) == {"site-1", "site-2", "site-3"}


@pytest.mark.parametrize("objective", ["prefix_lm", pytest.param("masked", marks=pytest.mark.slow)])
def test_sites_learn_rows_that_an_objective_makes(finish, objective):
    summary, _, _ = finish(SITES, f"train.objective={objective}", "data.tokenizer.special_tokens=['[MASK]']", steps=4)

    assert summary["loss_last"] < summary["loss_first"]


@pytest.mark.slow
def test_virtual_tokens_and_other_optimizers_are_averaged_like_any_weights(finish):
    prompts = '[model.adapter]\nkind = "prompt_encoder"\ntokens = 4\n'
    summary, _, _ = finish(
        prompts + SITES, "model.architecture.n_positions=24", "optimizer.kind=adafactor", "optimizer.lr=0.05", steps=6
    )

    assert summary["loss_last"] < summary["loss_first"]


def test_stages_of_bf16_weights_are_refused_with_matrices_in_4_bits(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(tiny_run_file(LORA + SITES))

    with pytest.raises(ConfigError, match="unpacked matrices would be rounded twice"):
        load_run(path, ("train.precision=bf16_weights", "model.adapter.quantize=nf4"))
