"""Tables of commands at 60, 80 and 120 columns: no word is cut or broken, and what names a row is whole in one line."""

import io

import pytest
from rich.console import Console

import phalanx.cli.console as cli_console
from phalanx.cli import run_command
from phalanx.lab.bench.detection.drills import list_attacks
from phalanx.train import describe_run, load_run
from tiny_run_file import tiny_run_file

WIDTHS = [60, 80, 120]


@pytest.fixture(params=WIDTHS)
def width(request, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(request.param))
    return request.param


def lines_of(capsys):
    return capsys.readouterr().out.splitlines()


def test_the_table_of_attacks_names_each_attack_in_one_line(width, capsys):
    assert run_command(["attack", "--list"]) == 0

    lines = lines_of(capsys)
    assert all(len(line) <= width for line in lines)
    assert "…" not in "".join(lines)
    for row in list_attacks():
        assert any(row["attack"] in line for line in lines)


def test_a_plan_names_each_layout_in_one_line_with_whole_figures(width, capsys, monkeypatch):
    rows = [
        {"layout": f"dp=2 cp=2 tp=2 pp={pp} zero=3 context=ring", "m": 16, "tokens/s": "1.99e+03", "hours": "0.0458"}
        for pp in (2, 4)
    ]

    cli_console.print_rows(rows)

    lines = lines_of(capsys)
    assert all(len(line) <= width for line in lines)
    for row in rows:
        for cell in ("layout", "tokens/s"):
            assert any(str(row[cell]) in line for line in lines)


def test_rows_of_a_drill_keep_names_of_attacks_and_parties(width, capsys):
    parties = [f"university-hospital-{city}" for city in ("north", "south")]
    rows = [
        {
            "attack": "forward_sign_flip@1,2+framing@2",
            "detected": True,
            "blamed": parties,
            "steps to detection": 1,
            "evicted": parties,
            "bit identical": True,
            "perplexity": 213.63361,
        }
    ]

    cli_console.print_rows(rows)

    text = "\n".join(lines_of(capsys))
    assert "…" not in text and rows[0]["attack"] in text
    assert all(any(party in line for line in text.splitlines()) for party in parties)


def test_nothing_is_no_table(capsys):
    cli_console.print_rows([])

    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("columns", WIDTHS)
def test_the_odds_of_a_guard_are_whole_sentences(columns):
    from phalanx.telemetry import FittedTable

    lie = "weight gradient, gross (sign, largest numbers, ten times)"
    part = FittedTable(
        ("a lie about", "found after", "99.9 % within", "then undone"), [(lie, "1.3 steps", "5 steps", "yes")]
    )
    text = io.StringIO()
    Console(file=text, width=columns).print(part)

    assert "1.3 steps" in text.getvalue() and "5 steps" in text.getvalue()
    assert lie in " ".join(text.getvalue().split())


CITIES = ("university-hospital-north", "university-hospital-south")
LONG_PATH = "a folder with a long name/and another one below it/texts.jsonl"


def printed(part, columns):
    text = io.StringIO()
    Console(file=text, width=columns).print(part)
    return text.getvalue()


@pytest.mark.parametrize("columns", WIDTHS)
def test_a_dry_run_cuts_no_line_of_its_config_and_no_name_of_a_party(columns, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    remote = f"[pipeline]\nstages = 4\npki = 'keys'\nremote_workers = {list(CITIES)}\n"
    text = (
        tiny_run_file(remote)
        .replace('"bpe", vocab_size = 300', '"bpe", vocab_size = 260')
        .replace('{ kind = "python_manual" }', f'{{ kind = "jsonl", path = "{LONG_PATH}" }}')
    )
    (tmp_path / "run.toml").write_text(text)
    (tmp_path / LONG_PATH).parent.mkdir(parents=True)
    (tmp_path / LONG_PATH).write_text("".join(f'{{"text": "shield {n} of {n * n}"}}\n' for n in range(99)))

    lines = printed(describe_run(load_run(tmp_path / "run.toml")), columns).splitlines()

    assert all(len(line) <= columns for line in lines)
    shown = " ".join(" ".join(lines).split())
    assert "…" not in shown and LONG_PATH.replace(" ", "") in shown.replace(" ", "")
    assert "# every other key has its default: docs/configuration.md;" in [line.rstrip() for line in lines]
    assert all(any(city in line for line in lines) for city in CITIES)


def test_a_plan_of_a_model_fits_and_keeps_what_it_says_below(width, capsys):
    words = ["--model", "gpt2-xl", "--cluster", "h100-nodes", "--gpus", "8", "--sequence-length", "1024"]
    assert run_command(["plan", *words]) == 0

    lines = lines_of(capsys)
    first = next(number for number, line in enumerate(lines) if line.startswith("best"))
    assert all(len(line) <= width for line in lines[:first])
    assert "…" not in "".join(lines)
    best = lines[first].split(maxsplit=1)[1].strip()
    assert any(best in line for line in lines[:first])
