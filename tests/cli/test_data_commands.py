"""``phalanx data``: a folder of files to a dataset that is looked at, checked and compared, in words and in JSON."""

import json

import pytest

from phalanx.cli import run_command
from phalanx.data.build.finish import DatasetFinisher

RECIPE = """
[[sources]]
kind = "text"
path = "{home}/texts"
licence = "CC-BY-4.0"

[[steps]]
kind = "length"
min_characters = 40

[tokenizer]
kind = "bpe"
vocab_size = 300

[output]
validation_share = 0.3
signer = "{home}/signer.key"
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with texts, a recipe, and the dataset made of them."""
    home = tmp_path_factory.mktemp("data")
    (home / "texts").mkdir()
    for number in range(12):
        text = f"Text number {number} speaks of number {number * 7} and of nothing else. " * 3
        (home / "texts" / f"{number}.txt").write_text(text if number else "<b>short</b>")
    (home / "recipe.toml").write_text(RECIPE.format(home=home))
    assert run_command(["data", "build", str(home / "recipe.toml"), "--out", str(home / "out"), "--workers", "1"]) == 0
    return home


def asked(capsys, *words, code=0):
    """Run a verb with --json and return its answer."""
    capsys.readouterr()
    assert run_command(["data", *map(str, words), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_a_build_tells_what_it_made_and_a_second_one_that_it_is_there(home, capsys):
    answer = asked(capsys, "build", home / "recipe.toml", "--out", home / "out", "--workers", "1")

    assert answer["was_there_already"] is True
    assert answer["documents"] == 11
    assert answer["raw_bytes"] > answer["kept_bytes"] > 0
    assert answer["report"].endswith("report.html")


def test_a_build_that_is_interrupted_says_how_to_go_on_and_does(home, tmp_path, capsys, monkeypatch):
    words = ["data", "build", str(home / "recipe.toml"), "--out", str(tmp_path / "out"), "--workers", "1"]

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(DatasetFinisher, "write_dataset", interrupted)
        assert run_command(words) == 130
    assert f"{tmp_path / 'out'}: interrupted; repeat the same command to continue" in (
        " ".join(capsys.readouterr().err.split())
    )

    assert run_command(words) == 0
    assert (tmp_path / "out" / "dataset.json").read_bytes() == (home / "out" / "dataset.json").read_bytes()


@pytest.mark.parametrize(("share", "is_told"), [("0.0", True), ("0.3", False)])
def test_a_dataset_without_held_out_text_is_told_at_the_end_of_its_build(home, tmp_path, capsys, share, is_told):
    found = asked(
        capsys, "build", home / "recipe.toml", "--out", tmp_path / "out", "--workers", 1,
        "--set", f"output.validation_share={share}",
    )  # fmt: skip

    assert ("held_out" in found) == is_told


def test_a_dry_run_shows_kept_and_dropped_texts_with_rule_and_value_and_writes_nothing(home, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert run_command(["data", "build", str(home / "recipe.toml"), "--out", str(home / "dry"), "--dry-run"]) == 0

    said = capsys.readouterr().out
    assert "length: characters 12, limit 40" in " ".join(said.replace("│", " ").split())
    assert "speaks of number" in " ".join(said.split())
    assert not (home / "dry").exists()


def test_a_dry_run_in_json_has_the_texts_and_the_counts(home, capsys):
    answer = asked(capsys, "build", home / "recipe.toml", "--dry-run", "--documents", "12")

    assert answer["counts"] == {"kept": 11, "dropped by length": 1}
    (dropped,) = answer["left_out"]
    assert (dropped["step"], dropped["value"], dropped["excerpt"]) == ("length", 12, "<b>short</b>")


def test_inspect_says_what_became_of_a_document(home, capsys):
    name = asked(capsys, "build", home / "recipe.toml", "--dry-run")["left_out"][0]["document"]

    (found,) = asked(capsys, "inspect", home / "out", "--document", name)["documents"]

    assert (found["fate"], found["step"], found["value"], found["limit"]) == ("dropped", "length", 12, 40)
    answer = asked(capsys, "inspect", home / "out", "--document", "no such name", code=3)
    assert "found no document 'no such name'" in answer["error"]["message"]


def test_inspect_lists_sources_groups_and_the_quarantine(home, capsys):
    answer = asked(capsys, "inspect", home / "out")

    assert [one["licence"] for one in answer["sources"]] == ["CC-BY-4.0"]
    assert sum(group["documents"] for group in answer["groups"]) == 11
    assert asked(capsys, "inspect", home / "out", "--quarantine") == {"quarantine": []}
    assert run_command(["data", "inspect", str(home / "out")]) == 0
    assert "CC-BY-4.0" in capsys.readouterr().out


def test_verify_checks_every_file_and_the_signer(home, capsys):
    answer = asked(capsys, "verify", home / "out")

    assert answer["documents"] == 11
    assert asked(capsys, "verify", home / "out", "--signer", answer["signer"])["trust"].startswith("signed with the")
    error = asked(capsys, "verify", home / "out", "--signer", "0" * 64, code=3)["error"]
    assert error["code"] == "PHX-I028"


@pytest.mark.parametrize("name", ["report.json", "account/text.jsonl.zst", "tokenizer.json", "shards/index/table"])
def test_verify_names_a_file_with_one_changed_byte(home, capsys, name):
    path = home / "out" / name
    content = path.read_bytes()
    try:
        path.write_bytes(bytes([content[0] ^ 1]) + content[1:])

        error = asked(capsys, "verify", home / "out", code=3)["error"]
    finally:
        path.write_bytes(content)

    assert name in error["message"]


def test_sample_decodes_whole_documents(home, capsys):
    found = asked(capsys, "sample", home / "out", "--count", "3", "--seed", "1")["documents"]

    assert len({one["document"] for one in found}) == 3
    assert all(one["text"].startswith("Text number ") and one["text"].endswith("else. ") for one in found)
    assert all(one["source"] == "text" and one["tokens"] > 9 for one in found)
    assert found == asked(capsys, "sample", home / "out", "--count", "3", "--seed", "1")["documents"]


def test_diff_says_which_threshold_and_which_documents_changed(home, capsys):
    assert (
        run_command(
            [
                "data",
                "build",
                str(home / "recipe.toml"),
                "--out",
                str(home / "all"),
                "--workers",
                "1",
                "--set",
                "steps=[]",
            ]
        )
        == 0
    )

    answer = asked(capsys, "diff", home / "out", home / "all")

    assert answer["documents"] == {"before": 11, "after": 12, "removed": 0, "added": 1}
    changed = {one["what"]: (one["before"], one["after"]) for one in answer["changed"]}
    assert changed["steps.length.settings.least"] == (40, "-")
    assert [one["change"] for one in answer["named"]] == ["added"]
    assert asked(capsys, "diff", home / "out", home / "out")["same"] is True


def test_report_is_one_page_that_fetches_nothing_and_shows_the_account(home, capsys):
    path = home / "out" / "report.html"
    path.unlink()

    answer = asked(capsys, "report", home / "out")

    assert answer["report"] == str(path)
    page = path.read_text()
    assert "default-src &#x27;none&#x27;" in page
    assert "width=device-width" in page
    assert "&lt;b&gt;short&lt;/b&gt;" in page
    assert "<b>short</b>" not in page
    assert "dropped by length" in page


@pytest.mark.parametrize(
    ("override", "message", "code"),
    [
        ("tokenizer.vocab_sise=9", "did you mean 'vocab_size'?", 2),
        ('sources=[{kind="text",path="nowhere"}]', "nowhere: not found", 3),
        ("tokenizer.vocab_size=30000", "lower vocab_size", 3),
        ('steps=[{kind="length",least=100000}]', "no document of the sources is left", 3),
    ],
)
def test_a_mistake_is_told_with_what_to_do(home, capsys, override, message, code):
    answer = asked(
        capsys, "build", home / "recipe.toml", "--out", home / "wrong", "--workers", "1", "--set", override, code=code
    )

    assert message in answer["error"]["message"]
    assert not (home / "wrong" / "dataset.json").exists()
