"""Playbooks: what to do in an incident, step by step, as files that an exercise can run."""

from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from phalanx.config import StrictModel, load_config
from phalanx.errors import ConfigError

_FOLDER = "playbooks"
Verb = Literal[
    "open_incident",
    "open_stream",
    "quarantine_key",
    "release_key",
    "revoke_key",
    "quarantine_model",
    "release_model",
    "roll_back",
    "expect_stream_ends",
    "expect_key_refused",
    "expect_model_refused",
    "expect_answer",
    "expect_others_served",
    "expect_certified_model",
    "write_report",
]
"""What an exercise can do and look at."""


class PlaybookStep(StrictModel):
    """One step.

    Attributes:
        do: What an exercise does or looks at; empty for what only people can do.
        say: The step for people, one sentence.
        command: The command that does it, as one types it.
    """

    say: Annotated[str, Field(min_length=10, max_length=500)]
    do: Verb | Literal[""] = ""
    command: Annotated[str, Field(max_length=300)] = ""


class Playbook(StrictModel):
    """What to do in one kind of incident.

    Attributes:
        signs: How one notices it; names of alerts among them.
    """

    title: Annotated[str, Field(min_length=3, max_length=200)]
    signs: Annotated[tuple[str, ...], Field(min_length=1, max_length=20)]
    steps: Annotated[tuple[PlaybookStep, ...], Field(min_length=1, max_length=50)]


def list_playbooks() -> list[str]:
    """Return the names of the playbooks that are in the package."""
    folder = files("phalanx.serve.incident").joinpath(_FOLDER)
    return sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml"))


def read_playbook(name: str) -> Playbook:
    """Read a playbook.

    Args:
        name: One of `list_playbooks`, or the path of a file that ends with ``.toml``.

    Raises:
        ConfigError: There is none of this name, or it is malformed.
    """
    if name.endswith(".toml"):
        return load_config(Path(name), Playbook)
    if name not in list_playbooks():
        raise ConfigError(
            f"{name[:80]!r}: is no playbook; choose one of {', '.join(list_playbooks())}, or a .toml file"
        )
    return load_config(Path(str(files("phalanx.serve.incident").joinpath(_FOLDER, f"{name}.toml"))), Playbook)
