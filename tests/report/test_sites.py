"""The table of sites, made of lines that sites and a crash may have spoiled."""

import json

from phalanx.report.read import read_run
from phalanx.report.tables import sites_section

ROUNDS = [
    {"step": 0, "measured": 0, "sites": {"north": {"targets": 4, "loss": 2.25}}},
    {
        "step": 0,
        "round": 1,
        "sums": [1],
        "bytes": {"owner>north": 2048, "north>owner": 1024},
        "sites": {"north": {"loss": 1.5, "norm": None}, "<b>": {"left_out": "late"}},
    },
    {"step": 0, "measured": 1, "sites": {"north": {"targets": 4, "loss": 1.125, "accuracy": 0.75}, "<b>": 7}},
    {"step": 1, "round": 2, "sites": 5},
]


def run_with(tmp_path, lines):
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_run(tmp_path)


def test_each_site_has_a_line_with_reasons_and_what_its_own_texts_say(tmp_path):
    page = str(sites_section(run_with(tmp_path, ROUNDS)))

    assert "1 secure sums; the owner saw no update" in page
    for shown in ("late (1)", ">1.5<", ">2.25<", ">1.125<", ">0.75<", ">3.0 KiB<"):
        assert shown in page
    assert "<b>" not in page


def test_a_run_without_rounds_has_no_such_section(tmp_path):
    assert sites_section(run_with(tmp_path, [])) is None


def test_a_private_run_says_what_its_sums_have_spent(tmp_path):
    page = str(sites_section(run_with(tmp_path, [row | {"epsilon": 1.23456} for row in ROUNDS])))

    assert "spent epsilon 1.235 of each site" in page


def test_a_table_of_many_sites_says_how_many_it_leaves_out(tmp_path):
    sites = {f"site-{number}": {"loss": 1.0} for number in range(1, 1235)}
    page = str(sites_section(run_with(tmp_path, [{"step": 0, "round": 1, "sites": sites}])))

    assert page.count("site-") == 200
    assert "The table has the first 200 of 1\u2009234 sites" in page
