"""A run file becomes frozen data, or one error that names file, key, value and choices."""

from pathlib import Path
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, ValidationError

from phalanx.config import StrictModel, dump_toml, load_config, parse_override
from phalanx.errors import ConfigError


class Train(StrictModel):
    steps: int = Field(gt=0)
    batch_size: int = 4
    precision: Literal["fp32", "bf16"] = "fp32"


class Recompute(StrictModel):
    kind: Literal["recompute"] = "recompute"
    rtol: float = 1e-3


class Screen(StrictModel):
    kind: Literal["screen"] = "screen"
    window: int = 16


class Run(StrictModel):
    name: str = "run"
    train: Train
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    note: str | None = None
    verifiers: tuple[Annotated[Recompute | Screen, Field(discriminator="kind")], ...] = ()


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def refused(tmp_path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text), Run, overrides)
    return str(caught.value)


def test_a_well_formed_file_becomes_frozen_data(tmp_path: Path) -> None:
    path = write(tmp_path, 'betas = [0.8, 0.9]\n[train]\nsteps = 3\n[[verifiers]]\nkind = "screen"\nwindow = 2\n')

    run = load_config(path, Run)

    assert run.train.steps == 3
    assert run.betas == (0.8, 0.9)
    assert run.verifiers == (Screen(window=2),)
    with pytest.raises(ValidationError, match="frozen"):
        run.train.steps = 4


def test_a_file_as_windows_writes_it_is_the_same(tmp_path: Path) -> None:
    text = "[train]\nsteps = 3\n"

    assert load_config(write(tmp_path, "\ufeff" + text.replace("\n", "\r\n")), Run) == load_config(
        write(tmp_path, text), Run
    )


def test_an_unknown_key_is_named_with_a_suggestion_and_the_choices(tmp_path: Path) -> None:
    message = refused(tmp_path, "[train]\nsteps = 3\nbatch_sise = 8\n")

    assert message == (
        f"{tmp_path}/run.toml: train.batch_sise: unknown key; did you mean 'batch_size'? "
        "choices: batch_size, precision, steps"
    )


def test_an_unknown_key_far_from_every_choice_gets_no_suggestion(tmp_path: Path) -> None:
    message = refused(tmp_path, "[train]\nsteps = 3\nzzz = 8\n")

    assert "unknown key; choices: batch_size, precision, steps" in message


def test_an_unknown_key_in_a_variant_names_the_choices_of_that_variant_only(tmp_path: Path) -> None:
    message = refused(tmp_path, '[train]\nsteps = 3\n[[verifiers]]\nkind = "recompute"\nrtoll = 1.0\n')

    assert "did you mean 'rtol'? choices: kind, rtol" in message
    assert "window" not in message


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('steps = "3"', "train.steps: found '3'; should be a valid integer"),
        ("steps = 3.0", "train.steps: found 3.0; should be a valid integer"),
        ("steps = true", "train.steps: found True; should be a valid integer"),
        ("steps = 0", "train.steps: found 0; should be greater than 0"),
        ('steps = 1\nprecision = "fp8"', "train.precision: found 'fp8'; should be 'fp32' or 'bf16'"),
        (
            "steps = 2026-01-01",
            'train.steps: found the date or time 2026-01-01; write it as text: "2026-01-01"',
        ),
    ],
)
def test_a_wrong_value_is_named_with_what_was_expected(tmp_path: Path, line: str, expected: str) -> None:
    message = refused(tmp_path, f"[train]\n{line}\n")

    assert message == f"{tmp_path}/run.toml: {expected}"


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_number_that_is_not_finite_is_refused(tmp_path: Path, value: str) -> None:
    message = refused(tmp_path, f"lr = {value}\n[train]\nsteps = 1\n")

    assert "lr: found" in message
    assert "finite" in message


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    assert refused(tmp_path, "[train]\n") == f"{tmp_path}/run.toml: train.steps: missing; add it"


def test_several_mistakes_are_reported_together(tmp_path: Path) -> None:
    message = refused(tmp_path, 'name = 7\n[train]\nsteps = "x"\nbatch_sise = 8\n')

    assert [line.split(": ")[1] for line in message.splitlines()] == [
        "name",
        "train.steps",
        "train.batch_sise",
    ]


def test_a_long_value_is_cut_in_the_message(tmp_path: Path) -> None:
    message = refused(tmp_path, f'[train]\nsteps = "{"x" * 5000}"\n')

    assert len(message) < 300 + len(str(tmp_path))


@pytest.mark.parametrize(
    "content",
    [b"[train\n", b"a = 1\na = 2\n", b"\xff\xfe", b"a = " + b"9" * 5000, b"a = " + b"[" * 5000],
    ids=["syntax", "double key", "encoding", "huge integer", "deep nesting"],
)
def test_bytes_that_are_not_toml_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(content)

    with pytest.raises(ConfigError, match=r"run\.toml: is not valid TOML"):
        load_config(path, Run)


@pytest.mark.parametrize("name", ["missing.toml", "."])
def test_a_path_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read .*; give the path of a TOML file"):
        load_config(tmp_path / name, Run)


def test_overrides_win_over_the_file_and_reach_nested_and_new_keys(tmp_path: Path) -> None:
    path = write(tmp_path, "[train]\nsteps = 3\n")
    overrides = ("train.steps=9", "train.precision=bf16", "lr=2e-4", "betas=[0.5, 0.6]", "note=two words")

    run = load_config(path, Run, overrides)

    assert (run.train.steps, run.train.precision, run.lr) == (9, "bf16", 2e-4)
    assert (run.betas, run.note) == ((0.5, 0.6), "two words")


def test_the_last_of_two_overrides_of_one_key_wins(tmp_path: Path) -> None:
    run = load_config(write(tmp_path, "[train]\nsteps = 3\n"), Run, ("train.steps=4", "train.steps=5"))

    assert run.train.steps == 5


def test_an_override_of_an_unknown_key_is_refused_like_one_in_the_file(tmp_path: Path) -> None:
    assert "train.stepps: unknown key; did you mean 'steps'?" in refused(
        tmp_path, "[train]\nsteps = 3\n", "train.stepps=4"
    )


def test_an_override_below_a_value_is_refused(tmp_path: Path) -> None:
    message = refused(tmp_path, "name = 'x'\n[train]\nsteps = 3\n", "name.first=y")

    assert message == "--set 'name.first=y': 'name' is a value, not a section"


@pytest.mark.parametrize("text", ["train.steps", "=3", "train.=3", ".steps=3", ""])
def test_an_override_without_key_or_value_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"expected section\.key=value"):
        parse_override(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a=1", 1),
        ("a=1e-3", 1e-3),
        ("a=true", True),
        ("a=sign_flip", "sign_flip"),
        ('a="7"', "7"),
        ("a=", ""),
        ("a=b=c", "b=c"),
        ("a= spaced ", "spaced"),
        ("a=1\nb = 2", "1\nb = 2"),
    ],
)
def test_an_override_value_is_toml_or_else_plain_text(text: str, value: object) -> None:
    assert parse_override(text) == (["a"], value)


def test_a_key_or_a_section_is_taken_out_before_another_is_set(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("name = 'x'\nnote = 'gone'\n[train]\nsteps = 3\nbatch_size = 7\n")

    run = load_config(path, Run, ["note-", "train.batch_size-", "train.steps=4"])

    assert (run.note, run.train) == (None, Train(steps=4))
    assert "train: missing; add it" in refused(tmp_path, "name = 'x'\n[train]\nsteps = 3\n", "train-")


@pytest.mark.parametrize(
    ("override", "written"),
    [
        ("train.batch_size-", "; written there: steps"),
        ("train.steps.deep-", ""),
        ("verifier-", "; written there: train"),
        ("-", "; written there: train"),
    ],
)
def test_a_key_that_is_not_written_cannot_be_taken_out(tmp_path: Path, override: str, written: str) -> None:
    message = refused(tmp_path, "[train]\nsteps = 3\n", override)

    assert message == f"--unset {override[:-1]}: {tmp_path / 'run.toml'} does not write it{written}; remove the option"


@given(st.text())
def test_any_override_text_gives_a_value_or_our_error(text: str) -> None:
    try:
        keys, _ = parse_override(text)
    except ConfigError:
        return
    assert all(keys)


def test_a_written_config_reads_back_equal(tmp_path: Path) -> None:
    run = Run(train=Train(steps=3), note='quotes " and\nlines', verifiers=(Screen(), Recompute(rtol=0.5)))

    assert load_config(write(tmp_path, dump_toml(run)), Run) == run
