"""``phalanx plan`` answers about a model or a run file, in a table, JSON, a page and a run file."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from phalanx.cli import run_command
from phalanx.planner.layout import Layout
from phalanx.planner.search.answer import refusal_causes
from phalanx.planner.search.rank import RefusedLayout

RUN = """
[model]
from_scratch = true
[model.architecture]
model_type = "gpt2"
vocab_size = 512
n_positions = 64
n_embd = 64
n_layer = 4
n_head = 4

[data]
sources = [{ kind = "python_manual" }]
tokenizer = { kind = "bpe", vocab_size = 512 }
sequence_length = 64

[train]
steps = 10
batch_size = 8
microbatches = 8

[optimizer]
lr = 1e-3
"""
MODEL = ["--model", "gpt2", "--cluster", "a100-nodes", "--gpus", "4", "--sequences", "32", "--sequence-length", "1024"]


@pytest.fixture(autouse=True)
def a_wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")


def test_a_known_model_is_planned_for_a_known_cluster(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page, out = tmp_path / "plan.html", tmp_path / "run.toml"

    code = run_command(["plan", *MODEL, "--tokens", "1e10", "--html", str(page), "--out", str(out)])

    shown = capsys.readouterr().out
    assert code == 0
    assert "dp=4" in shown
    assert "Estimates" in shown
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    written = tomllib.loads(out.read_text(encoding="utf-8"))
    assert written["parallel"]["dp"] * written["parallel"]["tp"] * written["parallel"]["pp"] >= 1
    assert written["model"]["architecture"]["model_type"] == "gpt2"


def test_json_is_one_object_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["plan", *MODEL, "--json"]) == 0

    answer = json.loads(capsys.readouterr().out)
    assert answer["name"] == "plan"
    assert answer["devices"] == [4]
    assert answer["rows"][0]["days"] is None


def test_a_run_file_is_planned_and_its_best_layout_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run_file, out = tmp_path / "run.toml", tmp_path / "parallel.toml"
    run_file.write_text(RUN)

    code = run_command(["plan", str(run_file), "--gpus", "2", "--json", "--set", "train.steps=20", "--out", str(out)])

    shown = capsys.readouterr()
    assert code == 0, shown.err
    answer = json.loads(shown.out)
    assert answer["model"]["layers"] == 4
    assert answer["tokens"] == 20 * 8 * 64
    assert answer["guard"]["audit_rate"] == 0.125
    assert answer["assumptions"]["pools"] == {"core": 2}
    written = tomllib.loads(out.read_text(encoding="utf-8"))
    assert written["train"]["steps"] == 20
    assert set(written["parallel"]) >= {"dp", "tp", "pp", "cp", "zero", "schedule"}


def planned(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, *more: str) -> dict[str, Any]:
    """The answer as JSON about a run file."""
    run_file = tmp_path / "run.toml"
    run_file.write_text(text)
    assert run_command(["plan", str(run_file), "--cluster", "a100-nodes", "--json", *more]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_adapters_of_a_run_file_are_all_that_is_trained(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    given = ("--layout", "dp=2,zero=1")

    full = planned(capsys, tmp_path, RUN, *given)
    thin = planned(capsys, tmp_path, RUN + "[model.adapter]\nrank = 4\n", *given)

    trained = 4 * 4 * (64 + 3 * 64)
    said = {"rank": 4, "targets": [], "drops": False, "dora": False, "virtual_tokens": 0, "prompt": None}
    assert thin["recipe"]["adapter"] == said
    assert thin["rows"][0]["gradients_gib"] * 2**30 == 4 * trained
    assert thin["rows"][0]["sent_copies_bytes"] == 3 / 2 * 4 * trained
    assert thin["rows"][0]["step_s"] < full["rows"][0]["step_s"]
    assert thin["model"]["flops_per_token"] < full["model"]["flops_per_token"]


def test_parties_of_several_ranks_are_planned_stage_by_stage(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    stages = RUN.replace("batch_size = 8", "batch_size = 16") + "\n[guard]\nclasses = 'mixed'\n[pipeline]\nstages = 4\n"
    layouts = "layout = { dp = 2, zero = 2 }\nlayouts = { worker-2 = { tp = 4 } }\n"

    plain = planned(capsys, tmp_path, stages, "--gpus", "2")
    answer = planned(capsys, tmp_path, stages + layouts, "--gpus", "2")

    rows = answer["parties"]["rows"]
    parties = [("owner", 1), ("worker-1", 2), ("worker-2", 4), ("owner", 1)]
    assert [(row["party"], row["ranks"]) for row in rows] == parties
    assert (rows[1]["dp"], rows[1]["zero"], rows[2]["tp"]) == (2, 2, 4)
    assert answer["parties"]["tokens_per_s"] * answer["parties"]["step_s"] == pytest.approx(16 * 64)
    assert plain["parties"] is None
    # a table for people too, beside the layouts of one domain
    assert run_command(["plan", str(tmp_path / "run.toml"), "--cluster", "a100-nodes", "--gpus", "2"]) == 0
    assert "worker-2" in capsys.readouterr().out


def test_islands_of_a_run_file_are_planned_and_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "parallel.toml"
    outer = '[parallel]\ndp = 4\n[parallel.outer]\nevery = 5\nislands = 2\ncompression = "int8"\n'

    answer = planned(capsys, tmp_path, RUN, "--gpus", "4", "--set", "train.microbatches=2")
    apart = planned(capsys, tmp_path, RUN + outer, "--gpus", "4", "--set", "train.microbatches=2", "--out", str(out))

    assert {row["islands"] for row in answer["rows"]} == {1}
    assert {row["islands"] for row in apart["rows"]} == {2}
    assert all(row["outer_s"] > 0 for row in apart["rows"])
    assert all("islands=2" in row["layout"] for row in apart["rows"])
    written = tomllib.loads(out.read_text(encoding="utf-8"))
    assert written["parallel"]["outer"] == {"every": 5, "islands": 2, "compression": "int8"}


def test_the_groups_of_a_run_file_are_judged_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    own = "[parallel]\ndp = 4\nzero = 3\nreplicas = 2\n"

    found = planned(capsys, tmp_path, RUN + own, "--gpus", "4", "--set", "train.microbatches=2")

    assert "dp=4 zero=3 replicas=2" in {row["layout"] for row in found["rows"]}


def test_an_adapter_that_no_matrix_has_exits_2_with_the_choices(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(RUN + '[model.adapter]\ntargets = ["q_proj"]\n')

    assert run_command(["plan", str(run_file), "--cluster", "a100-nodes"]) == 2
    assert "found 'q_proj'; the matrices of gpt2 are attn.c_attn" in capsys.readouterr().err


def test_a_layout_that_cannot_work_exits_2_with_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    code = run_command(["plan", *MODEL[:4], *MODEL[6:], "--layout", "tp=5"])

    assert code == 2
    assert "tp=5 does not divide 12 attention heads; lower tp; the nearest that can work is" in capsys.readouterr().err


def test_a_model_that_fits_nowhere_exits_2_and_still_leaves_its_page(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "plan.html"

    code = run_command(["plan", "--model", "gpt3-175b", "--cluster", "a100-nodes", "--gpus", "1", "--html", str(page)])

    assert code == 2
    assert "GiB are usable" in capsys.readouterr().err
    assert "No usable layout" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ([], 2),
        (["run.toml", "--model", "gpt2"], 2),
        (["--model", "nothing", "--cluster", "a100-nodes"], 2),
        (["--model", "gpt2", "--cluster", "nowhere"], 2),
        (["--model", "gpt2", "--cluster", "v100-nodes"], 2),
        (["--model", "gpt2", "--cluster", "a100-nodes", "--probe", "missing.json"], 3),
    ],
)
def test_a_wrong_question_has_the_exit_code_of_its_error(arguments: list[str], code: int) -> None:
    assert run_command(["plan", *arguments]) == code


def test_a_probe_takes_the_place_of_both_links(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    probe = tmp_path / "probe.json"
    rows = [{"op": "all_reduce", "ranks": 2, "bytes": size, "seconds": 1e-4 + size / 1e9} for size in (1e3, 1e8)]
    probe.write_text(json.dumps({"rows": rows}))

    assert run_command(["plan", *MODEL, "--json", "--probe", str(probe)]) == 0

    links = json.loads(capsys.readouterr().out)["assumptions"]["links"]
    assert links["inside"] == links["between"]
    assert links["inside"]["bytes_per_s"] == pytest.approx(1e9)


def test_planning_for_a_model_loads_no_torch() -> None:
    code = (
        "import sys; from phalanx.cli import run_command; run_command(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    )

    found = subprocess.run([sys.executable, "-c", code, "plan", *MODEL], capture_output=True, timeout=60, check=False)

    assert found.returncode == 0


PARTIES = """
title = "a clinic and a rented enclave"
link = "wan"
clients = 4
client = { memory_gib = 8.0, tflops = 0.05 }
enclave = { memory_gib = 4.0, tflops = 0.2 }
"""
SPLIT = ["plan", "--model", "gpt2", "--split", "--sequences", "8", "--sequence-length", "128", "--precision", "fp32"]


@pytest.fixture
def split(tmp_path: Path) -> list[str]:
    """A command line with a parties file and a leak table."""
    parties, leaks = tmp_path / "parties.toml", tmp_path / "leaks.json"
    parties.write_text(PARTIES)
    lines = [{"depth": depth, "chance": 0.04, "plaintext": 0.99, "sealed": 0.04} for depth in (0, 6, 11)]
    model = {"name": "gpt2", "layers": 12, "hidden": 768, "vocab": 50257}
    table = {"model": model, "command": "phalanx reproduce leaks", "commit": None, "summary": lines}
    leaks.write_text(json.dumps(table))
    return [*SPLIT, "--parties", str(parties), "--leaks", str(leaks)]


def test_a_cut_is_proposed_in_a_table(split: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(split) == 0

    shown = capsys.readouterr().out
    assert "if opened" in shown
    assert "99.0 %" in shown
    assert "leaks measured on  gpt2, by phalanx reproduce leaks" in shown


def test_a_split_plan_is_one_json_object_on_stdout(split: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command([*split, "--json"]) == 0

    answer = json.loads(capsys.readouterr().out)
    assert answer["name"] == "split-plan"
    assert answer["parties"]["clients"] == 4
    assert len(answer["rows"]) + len(answer["refused"]) == 12


def test_a_cut_that_does_not_fit_exits_2_with_the_nearest_one(
    split: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "parties.toml").write_text(PARTIES.replace("memory_gib = 4.0", "memory_gib = 0.5"))

    assert run_command([*split, "--cut", "1"]) == 2

    assert "--cut 1: the enclave needs" in (said := capsys.readouterr().err)
    assert "the nearest cut that works is" in said


def test_a_run_file_can_be_split_on_this_machine(
    split: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(RUN)

    assert run_command(["plan", str(run_file), "--split", "--leaks", split[-1], "--json"]) == 0

    answer = json.loads(capsys.readouterr().out)
    assert {row["leak_basis"] for row in answer["rows"]} == {"another model, same share of its layers"}
    assert answer["recipe"]["sequences"] == 8


SPLIT_RUN = (
    RUN
    + """
[model.adapter]
rank = 2

[split]
cut = 2
allow_insecure_sim = true
"""
)


def test_a_run_file_with_a_split_is_planned_as_one_and_says_so(
    split: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(SPLIT_RUN)

    assert run_command(["plan", str(run_file), "--leaks", split[-1], "--json"]) == 0

    out, err = capsys.readouterr()
    assert json.loads(out)["name"] == "split-plan"
    assert "has [split]: the plan is for its cut" in err


@pytest.mark.parametrize(
    "option", [["--html", "plan.html"], ["--gpus", "2"], ["--layout", "dp=2"], ["--out", "x.toml"]], ids=" ".join
)
def test_an_option_of_layouts_is_refused_where_a_cut_is_planned(
    split: list[str], option: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(SPLIT_RUN)

    assert run_command(["plan", str(run_file), *option]) == 2
    assert (
        f"plan: {option[0]}: only valid for layouts of ranks, but {run_file} has [split]; remove"
        in capsys.readouterr().err
    )
    assert run_command([*split, *option]) == 2
    assert "but --split is given" in capsys.readouterr().err


def test_where_no_layout_works_every_cause_is_named_with_its_number(capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--sequences", "7", "--sequence-length", "100"]  # 13 divides nothing of it

    assert run_command(["plan", "--model", "gpt2", "--cluster", "a100-nodes", "--gpus", "13", *size]) == 2

    first, *lines = capsys.readouterr().err.splitlines()
    total = int(re.search(r"none of ([\d,]+) layouts of 13 devices can be used:$", first)[1].replace(",", ""))
    counts = [int(re.match(r"  ([\d,]+): ", line)[1].replace(",", "")) for line in lines]
    assert len(lines) > 1
    assert sum(counts) == total
    assert counts == sorted(counts, reverse=True)


def test_reasons_that_differ_in_numbers_alone_are_one_cause() -> None:
    refused = [RefusedLayout(Layout(tp=size), f"tp={size} does not divide 12 heads") for size in (5, 7, 8)]
    refused.append(RefusedLayout(Layout(cp=3), "cp=3 does not divide 1,024 tokens"))

    assert refusal_causes(refused) == [
        "  3: tp=5 does not divide 12 heads (tp=5)",
        "  1: cp=3 does not divide 1,024 tokens (cp=3)",
    ]


def test_where_nothing_fits_the_cause_that_lacks_least_memory_comes_first() -> None:
    refused = [RefusedLayout(Layout(tp=size), f"tp={size} does not divide 12 heads") for size in (5, 7, 8)]
    refused += [
        RefusedLayout(Layout(dp=4), "needs 90 GiB a rank, 40 GiB are usable; most is optimizer, 60 GiB", 2.25),
        RefusedLayout(Layout(pp=4), "needs 44 GiB a rank, 40 GiB are usable; most is optimizer, 20 GiB", 1.1),
        RefusedLayout(Layout(pp=2), "needs 80 GiB a rank, 40 GiB are usable; most is activations, 70 GiB", 2.0),
    ]

    assert refusal_causes(refused, by_nearness=True) == [
        "  2: 1.1 times the memory: needs 44 GiB a rank, 40 GiB are usable; most is optimizer, 20 GiB (pp=4 1f1b)",
        "  1: 2 times the memory: needs 80 GiB a rank, 40 GiB are usable; most is activations, 70 GiB (pp=2 1f1b)",
        "  3: tp=5 does not divide 12 heads (tp=5)",
    ]
    assert refusal_causes(refused)[0] == "  3: tp=5 does not divide 12 heads (tp=5)"


def test_a_model_that_fits_nowhere_says_how_much_is_missing_at_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--sequences", "8", "--sequence-length", "1024"]

    assert run_command(["plan", "--model", "gpt3-175b", "--cluster", "v100-nodes", "--gpus", "8", *size]) == 2

    first, nearest, *_ = capsys.readouterr().err.splitlines()
    assert "can be used:" in first
    assert re.search(r"^  [\d,]+: \d[\d.]* times the memory: needs ", nearest)


def test_causes_beyond_the_first_six_are_counted_together() -> None:
    refused = [RefusedLayout(Layout(tp=2), f"{word}: is wrong") for word in "abcdefghi"]

    assert refusal_causes(refused)[-1] == "  3: other causes"


def test_options_of_a_split_alone_are_refused_without_it(split: list[str]) -> None:
    assert run_command([argument for argument in split if argument != "--split"]) == 2


# --- leaks of the stages of a pipeline ---------------------------------------------------------------------


def test_the_expected_leak_of_each_stage_is_shown_for_a_pipeline(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run_file, leaks = tmp_path / "run.toml", tmp_path / "stage-leaks.json"
    run_file.write_text(f"{RUN}\n[pipeline]\nstages = 4\n")
    row = {"guard": "plaintext", "model": "tiny", "regime": "scratch", "first_layer": 1, "end_layer": 3}
    shares = {"tokens": 0.9, "tokens_chance": 0.1, "labels": 0.4, "labels_chance": 0.1}
    kinds: dict[str, Any] = {"properties": {"domain": 0.8}, "properties_chance": {"domain": 0.5}}
    sizes = {"tiny": {"layers": 4, "hidden": 64, "vocab": 512}}
    table = {"command": "phalanx reproduce stage-leaks", "commit": None, "models": sizes}
    leaks.write_text(json.dumps({**table, "summary": [{**row, **shares, **kinds}]}))

    assert run_command(["plan", str(run_file), "--leaks", str(leaks), "--json"]) == 0

    answer = json.loads(capsys.readouterr().out)
    stages = answer["stage_leaks"]["stages"]
    assert [(stage["stage"], stage["tokens"]) for stage in stages] == [(1, 0.9), (2, 0.9)]
    assert stages[0]["basis"].startswith("tiny, scratch: ")


def test_leaks_of_stages_are_refused_where_nobody_else_has_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run_file, leaks = tmp_path / "run.toml", tmp_path / "stage-leaks.json"
    run_file.write_text(f"{RUN}\n[pipeline]\nstages = 2\n")
    leaks.write_text("{}")

    assert run_command(["plan", str(run_file), "--leaks", str(leaks)]) == 2

    assert f"plan: --leaks {leaks} has no stage of {run_file}: expected --split" in capsys.readouterr().err.replace(
        "\n", " "
    )
