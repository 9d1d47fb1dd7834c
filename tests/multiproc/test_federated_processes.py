"""Real site processes: killed, hung and with a killed owner, rounds end as they should and no bit shows a resume."""

import json
import os
import signal

import pytest
from real_runs import Place, children_of, descendant
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers

from tiny_run_file import tiny_run_file

SECTION = """
[federated]
sites = ["north", "south", "west", "east"]
min_cohort = 3
local_steps = 2
deadline_s = 120.0

[checkpoint]
every = 2
"""


def rounds_place(path) -> Place:
    run_file = path / "rounds.toml"
    run_file.write_text(tiny_run_file(SECTION, steps=6, validate_every=6))
    return Place(path, run_file)


def all_rows(place: Place, run_dir: str = "run") -> list[dict]:
    whole, _, _ = (place.path / run_dir / "rounds.jsonl").read_text().rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def rounds_of(place: Place, run_dir: str = "run") -> list[dict]:
    return [row for row in all_rows(place, run_dir) if "round" in row]


def tensors_of(checkpoint) -> dict:
    found = {}
    for path in sorted(checkpoint.glob("**/*.safetensors")):
        found |= load_file(path)
    return found


@pytest.mark.slow
def test_an_owner_that_is_killed_in_a_round_resumes_it_and_ends_with_the_same_bits(tmp_path):
    place = rounds_place(tmp_path)
    clean = place.finish(run_dir="clean", anew=True)
    process = place.train(anew=True)
    # round 4 is under way: one update of it is in the journal, and its checkpoint is not written
    place.wait_for(process, lambda: place.has_line("rounds/rounds.jsonl", '"header"', after='{"closed":3,'))
    process.kill()
    place.wait_until(lambda: not children_of(process.popen.pid))

    summary = place.finish(resume=True, anew=True)

    assert summary["final_weights_digest"] == clean["final_weights_digest"]
    assert summary["resumed_from"] == 2 and summary["steps"] == clean["steps"] == 6
    assert [row["round"] for row in rounds_of(place)] == [1, 2, 3, 4, 5, 6]
    logs = [(tmp_path / "run" / "sites" / f"{name}.log").read_text() for name in ("north", "south")]
    # one process a session, which stays for all rounds
    assert [log.count("joined the owner's session") for log in logs] == [2, 2]


@pytest.mark.slow
def test_scaffold_goes_on_where_a_resume_changes_the_run_file(tmp_path):
    place = rounds_place(tmp_path)
    scaffold = ('federated.algorithm={kind="scaffold"}', 'optimizer.kind="sgd"', "optimizer.momentum=0.0")
    settings = (*scaffold, 'optimizer.schedule="constant"', "train.validate_every=2")
    clean = place.finish(*settings, "train.steps=4", run_dir="clean", anew=True)
    place.finish(*settings, "train.steps=2", anew=True)

    summary = place.finish(*settings, "train.steps=4", resume=True)

    # the sites find the control variates of the rounds before, though the digest of the run file is another one
    assert summary["final_weights_digest"] == clean["final_weights_digest"]


@pytest.mark.slow
def test_sites_that_are_killed_and_hung_are_left_out_of_secure_sums_and_come_back(tmp_path):
    place = rounds_place(tmp_path)
    # longer than it takes a process to load its model again; it is ended when all has been seen
    without_end = ("train.steps=100000", "train.validate_every=0", "checkpoint.every=1000")
    process = place.train("federated.secure=true", "federated.deadline_s=20.0", *without_end, anew=True)

    def row_after(number, words):
        return lambda: any(words(row["sites"]) for row in rounds_of(place)[number:])

    place.wait_for(process, lambda: place.has_line("rounds.jsonl", '"round": 2,'))
    os.kill(descendant(process, "site_process", "north.toml"), signal.SIGKILL)
    place.wait_for(process, row_after(2, lambda sites: "north" not in sites or "left_out" in sites["north"]))
    came_back = len(rounds_of(place))
    place.wait_for(process, row_after(came_back, lambda sites: "loss" in sites.get("north", {})))
    hung = descendant(process, "site_process", "west.toml")
    os.kill(hung, signal.SIGSTOP)
    place.wait_for(process, row_after(came_back, lambda sites: sites.get("west") == {"left_out": "late"}))
    went_on = len(rounds_of(place))
    os.kill(hung, signal.SIGCONT)
    place.wait_for(process, row_after(went_on, lambda sites: "loss" in sites.get("west", {})))
    process.popen.send_signal(signal.SIGINT)

    assert process.wait() == 130, process.text
    rows = rounds_of(place)
    assert [row["round"] for row in rows] == list(range(1, len(rows) + 1))
    assert all(sum("loss" in one for one in row["sites"].values()) >= 3 for row in rows)
    sums = [number for row in rows for number in row["sums"]]
    assert sums == sorted(set(sums))


@pytest.mark.slow
def test_an_aggregator_in_a_sandbox_gives_the_bits_of_the_plain_mean_and_keepers_its_weights(tmp_path):
    place, short = rounds_place(tmp_path), ("train.steps=2", "train.validate_every=2")
    plain = place.finish(*short, run_dir="plain", anew=True)
    secure = ("federated.secure=true", *short)

    sealed = place.finish(*secure, 'federated.sums="enclave"', run_dir="enclave", anew=True)
    keepers = ('federated.sums="homomorphic"', 'federated.keepers=["north","west"]')
    kept = place.finish(*secure, *keepers, run_dir="homomorphic", anew=True)

    assert sealed["final_weights_digest"] == plain["final_weights_digest"]
    assert kept["loss_last"] == pytest.approx(plain["loss_last"], abs=1e-5)


def byte_vocabulary(tmp_path) -> str:
    """A tokenizer of single bytes, which tells of no text, as a run file names it."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({one: n for n, one in enumerate(["<|endoftext|>", *letters])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return f'{{ kind = "file", path = "{tmp_path / "tokenizer.json"}" }}'


@pytest.mark.slow
def test_a_private_run_that_is_killed_pays_for_the_sums_that_it_asks_for_again_and_ends_with_its_budget(tmp_path):
    file = byte_vocabulary(tmp_path)
    adapter = '[model.adapter]\nkind = "lora"\nrank = 2\nalpha = 4\n'
    noise = "[federated.privacy]\nepsilon = 33.5\ndelta = 1e-3\nnoise_multiplier = 0.5\n"
    text = tiny_run_file(adapter + SECTION + noise, steps=20, validate_every=0)
    run_file = tmp_path / "rounds.toml"
    text = text.replace("min_cohort = 3", "min_cohort = 3\nsecure = true\nmax_norm = 10.0")
    run_file.write_text(text.replace('{ kind = "bpe", vocab_size = 300 }', file))
    place = Place(tmp_path, run_file)
    process = place.train(anew=True)
    # round 4 is charged, and its checkpoint is not written
    place.wait_for(process, lambda: place.has_line("events.jsonl", '"privacy_charged"', after='"number":2'))
    process.kill()
    place.wait_until(lambda: not children_of(process.popen.pid))

    summary = place.finish(resume=True, anew=True)

    told = summary["privacy"]
    assert summary["status"] == "completed" and summary["steps"] < told["charges"] < 20
    assert told["epsilon_spent"] <= 33.5
    spent = [row["epsilon"] for row in rounds_of(place)]
    assert spent == sorted(spent) and spent[-1] == told["epsilon_spent"]
    assert summary["loss_last"] is None


def charged(place: Place, site: str) -> list[int]:
    ledger = place.path / "run" / "sites" / site / "privacy" / "events.jsonl"
    lines = map(json.loads, ledger.read_text().splitlines()) if ledger.exists() else ()
    return [line["body"]["number"] for line in lines if line["kind"] == "privacy_charged"]


@pytest.mark.slow
@pytest.mark.parametrize("clipping", ["hooks", "ghost"])
def test_a_site_with_private_rows_that_is_killed_has_spent_what_it_drew_and_trains_no_further_than_its_budget(
    tmp_path, clipping
):
    pytest.importorskip("opacus", reason="needs the extra `dp`")
    adapter = '[model.adapter]\nkind = "lora"\nrank = 2\nalpha = 4\n'
    rows = f'[privacy]\nepsilon = 8.0\ndelta = 1e-4\nclip_norm = 0.5\nclipping = "{clipping}"\n'
    text = tiny_run_file(adapter + SECTION + rows, steps=6, validate_every=6)
    run_file = tmp_path / "rounds.toml"
    run_file.write_text(text.replace('{ kind = "bpe", vocab_size = 300 }', byte_vocabulary(tmp_path)))
    place = Place(tmp_path, run_file)
    process = place.train(anew=True)

    # two local steps a round: north is killed in its second round, which it has been charged for
    place.wait_for(process, lambda: len(charged(place, "north")) >= 3)
    os.kill(descendant(process, "site_process", "north.toml"), signal.SIGKILL)
    assert process.wait() == 0, process.text

    told = {site: [row["sites"].get(site, {}) for row in rounds_of(place)] for site in ("north", "south")}
    assert charged(place, "north") == list(range(len(charged(place, "north"))))
    # its noise was made for the steps of six rounds, and one round has been paid for without an update
    trained = sum("epsilon" in one for one in told["north"])
    assert trained < 6 and sum("epsilon" in one for one in told["south"]) == 6
    assert len(charged(place, "north")) <= 12 == len(charged(place, "south"))
    epsilons = [one["epsilon"] for one in told["north"] if "epsilon" in one]
    assert epsilons == sorted(epsilons) and 0 < epsilons[-1] <= 8.0
    assert all(one["loss"] is None for one in told["south"])
    privacy = place.summary()["privacy"]
    assert set(privacy["sites"]) >= {"north", "south"} and privacy["epsilon_spent"] <= 8.0
    assert "Epsilon" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp = 2", "dp = 1\npp = 2"])
def test_sites_of_two_ranks_each_come_to_the_weights_of_sites_of_one_process(tmp_path, layout):
    """SGD: AdamW's first steps turn rounding into signs."""
    section = SECTION.replace('"south", "west", "east"', '"south"').replace("min_cohort = 3", "min_cohort = 2")
    plain = ("optimizer.kind=sgd", "optimizer.momentum=0.5", "optimizer.lr=0.1")
    one, ranked = (tmp_path / name for name in ("one.toml", "ranked.toml"))
    for path, text in ((one, section), (ranked, f"{section}[parallel]\n{layout}\n")):
        path.write_text(tiny_run_file(text, steps=3, validate_every=3))

    alone = Place(tmp_path, one).finish(*plain, run_dir="one", anew=True)
    place = Place(tmp_path, ranked)
    process = place.train(*plain, anew=True)
    place.wait_for(process, lambda: place.has_line("rounds.jsonl", '"round": 1,'))
    # a rank of a site is a child of the site, and stays for all rounds
    assert descendant(process, "site_ranks", "run/config.toml")
    assert process.wait() == 0, process.text
    summary = place.summary()

    assert (summary["world"]["processes"], alone["world"]["processes"]) == (5, 3)
    for name in ("loss_first", "loss_last", "validation_perplexity"):
        assert summary[name] == pytest.approx(alone[name], rel=1e-6)
    (first,), (second,) = (sorted((tmp_path / run / "checkpoints").glob("*2")) for run in ("one", "run"))
    weights = [tensors_of(path) for path in (first, second)]
    assert weights[0].keys() == weights[1].keys() and weights[0]
    for tensor, other in zip(weights[0].values(), weights[1].values(), strict=True):
        assert (tensor - other).abs().max() <= 1e-6
    own = [row["sites"] for row in all_rows(place, "run") + all_rows(place, "one") if row.get("measured") == 3]
    for site in ("north", "south"):
        assert own[0][site]["loss"] == pytest.approx(own[1][site]["loss"], rel=1e-6)


CHATS = [
    {"messages": [{"role": "user", "content": f"{a}+{b}?"}, {"role": "assistant", "content": str(a + b)}]}
    for a in range(8)
    for b in range(8)
]
PAIRS = [
    {"prompt": f"{a}+{b}=", "chosen": f"{a + b}.", "rejected": f"{a + b + 1}!"} for a in range(8) for b in range(8)
]
NAMED = SECTION.replace('"north", "south", "west", "east"', '"site-1", "site-2", "site-3"')


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("conversations", ("data.attention=document", "train.precision=bf16", "train.neftune_alpha=5.0")),
        # masked sums round by chance, so their last bits are not compared
        ("preferences", ("train.objective=dpo",)),
    ],
)
def test_chats_and_pairs_at_site_processes_have_the_bits_of_simulated_sites(tmp_path, kind, settings):
    records = tmp_path / f"{kind}.jsonl"
    records.write_text("".join(json.dumps(one) + "\n" for one in (CHATS if kind == "conversations" else PAIRS)))
    more = (*settings, "data.tokenizer.vocab_size=262", "data.sequence_length=48", "model.architecture.n_positions=48")
    for name, sites in (("processes", NAMED), ("simulated", NAMED.replace(NAMED.split("\n")[2], "simulated = 3"))):
        text = tiny_run_file(f'[model.adapter]\nkind = "lora"\nrank = 4\nalpha = 8\n{sites}', steps=4, validate_every=4)
        text = text.replace(
            'sources = [{ kind = "python_manual" }]', f'{kind} = {{ sources = [{{ path = "{records}" }}] }}'
        )
        (tmp_path / f"{name}.toml").write_text(text.replace("max_documents = 12\n", ""))

    real, simulated = (
        Place(tmp_path, tmp_path / f"{name}.toml").finish(*more, run_dir=name, anew=True)
        for name in ("processes", "simulated")
    )

    assert real["final_weights_digest"] == simulated["final_weights_digest"]
    assert real["loss_last"] < real["loss_first"]
    assert (real["world"]["processes"], simulated["world"]["processes"]) == (4, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", ["[parallel]\ndp = 2\n", "[pipeline]\nstages = 4\n[guard]\npreset = 'light'\n"], ids=["ranks", "stages"]
)
@pytest.mark.parametrize("objective", ["dpo", "causal_lm"])
def test_ranks_and_stages_of_sites_learn_pairs_and_documents_as_one_process_does(tmp_path, layout, objective):
    """SGD where ranks have it; stages have AdamW, with an eps that hides rounding."""
    records = tmp_path / "records.jsonl"
    is_pairs = objective == "dpo"
    records.write_text("".join(json.dumps(one) + "\n" for one in (PAIRS if is_pairs else CHATS)))
    kind = "preferences" if is_pairs else "conversations"
    # two rows of a pair, in each of four microbatches of each of two ranks
    more = (
        f"train.objective={objective}",
        "data.tokenizer.vocab_size=262",
        "optimizer.eps=1e-2",
        "train.batch_size=16",
    )
    more += ("data.sequence_length=32", "model.architecture.n_positions=32")
    if not is_pairs:
        more += ("data.attention=document", "train.precision=bf16" if "stages" in layout else "train.neftune_alpha=2.0")
    two = NAMED.replace('"site-1", "site-2", "site-3"', '"site-1", "site-2"').replace(
        "min_cohort = 3", "min_cohort = 2"
    )
    for name, section in (("one", two), ("many", two + layout)):
        text = tiny_run_file(section, steps=2, validate_every=2)
        text = text.replace(
            'sources = [{ kind = "python_manual" }]', f'{kind} = {{ sources = [{{ path = "{records}" }}] }}'
        )
        (tmp_path / f"{name}.toml").write_text(text.replace("max_documents = 12\n", ""))

    alone, many = (
        Place(tmp_path, tmp_path / f"{name}.toml").finish(*more, run_dir=name, anew=True) for name in ("one", "many")
    )

    tolerance = 1e-2 if "train.precision=bf16" in more else 1e-5
    for name in ("loss_first", "loss_last"):
        assert many[name] == pytest.approx(alone[name], rel=tolerance)
    own = [
        next(row["sites"] for row in all_rows(Place(tmp_path, tmp_path / "one.toml"), run) if row.get("measured") == 2)
        for run in ("one", "many")
    ]
    for site, scores in own[0].items():
        assert own[1][site]["loss"] == pytest.approx(scores["loss"], rel=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1])
def test_ranks_of_a_site_with_private_rows_charge_each_step_once_and_tell_no_loss(tmp_path, zero):
    pytest.importorskip("opacus", reason="needs the extra `dp`")
    adapter = '[model.adapter]\nkind = "lora"\nrank = 2\nalpha = 4\n'
    rows = f"[privacy]\nepsilon = 8.0\ndelta = 1e-4\nclip_norm = 0.5\n[parallel]\ndp = 2\nzero = {zero}\n"
    two = SECTION.replace('"south", "west", "east"', '"south"').replace("min_cohort = 3", "min_cohort = 2")
    text = tiny_run_file(adapter + two + rows, steps=3, validate_every=3)
    run_file = tmp_path / "rounds.toml"
    run_file.write_text(text.replace('{ kind = "bpe", vocab_size = 300 }', byte_vocabulary(tmp_path)))
    place = Place(tmp_path, run_file)

    summary = place.finish(anew=True)

    # two local steps in each of three rounds, whatever the number of ranks
    assert charged(place, "north") == charged(place, "south") == list(range(6))
    assert 0 < summary["privacy"]["epsilon_spent"] <= 8.0
    told = [share for row in rounds_of(place) for share in row["sites"].values()]
    assert len(told) == 6 and all(share["loss"] is None for share in told)
