"""phalanx join, for the parties of a split: keys, the run file as the terms, a client's file, and then to work."""

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import print_line
from phalanx.cli.files import write_text
from phalanx.cli.parties.joined import Setting, change_file, has_joined, note_joined

if TYPE_CHECKING:
    from phalanx.security.invite import JoinToken

ENCLAVE = "enclave"
RUN, CLIENT = "run.toml", "client.toml"


@dataclass(frozen=True)
class ClientOptions:
    """What a client says on the command line.

    Attributes:
        allow_insecure_sim: It takes evidence that proves nothing.
    """

    train: Path | None = None
    test: Path | None = None
    policy: Path | None = None
    allow_insecure_sim: bool = False
    attester: str | None = None
    tpm: str | None = None

    @property
    def file_settings(self) -> dict[str, Setting]:
        """What was given, as keys of a client's file; the newer word on which enclave it trusts replaces the older."""
        paths = {"train": self.train, "test": self.test, "policy": self.policy}
        settings: dict[str, Setting] = {name: str(path.resolve()) for name, path in paths.items() if path is not None}
        settings |= {name: word for name in ("attester", "tpm") if (word := getattr(self, name)) is not None}
        if self.policy is not None:
            settings["allow_insecure_sim"] = None
        if self.allow_insecure_sim:
            settings["allow_insecure_sim"] = True
            settings.setdefault("policy", None)
        return settings

    def file_text(self, home: Path) -> str:
        """Return the text of a client's file."""
        from phalanx.errors import ConfigError

        if self.train is None or self.test is None:
            raise ConfigError("--train and --test: a client needs both files of its own texts").with_facts(
                code="PHX-C002", key="--train" if self.train is None else "--test", do="give both files"
            )
        paths = {"run": home / RUN, "identity": home, "train": self.train, "test": self.test}
        paths |= {} if self.policy is None else {"policy": self.policy}
        settings = {name: str(path.resolve()) for name, path in paths.items()}
        settings |= {name: word for name in ("attester", "tpm") if (word := getattr(self, name)) is not None}
        lines = [f"{name} = {json.dumps(word, ensure_ascii=False)}" for name, word in settings.items()]
        lines += ["allow_insecure_sim = true  # the enclave proves nothing"] if self.allow_insecure_sim else []
        return "\n".join(lines) + "\n"


def join_split(token: "JoinToken", home: Path, words: ClientOptions, *, serve: bool) -> Answer:
    """Be certified as the enclave or a client of a split, and take part."""
    from phalanx.security.invite import enrol_machine
    from phalanx.train.parties.client_file import read_client
    from phalanx.train.parties.invited import check_terms

    is_enclave, run_file, client_file = token.name == ENCLAVE, home / RUN, home / CLIENT
    if has_joined(token, home, run_file):
        typer.echo(f"{home}: already has keys, certificate and run file")
        _change_client_file(client_file, words)
    else:
        has_file = is_enclave or client_file.exists()
        client_text = "" if has_file else words.file_text(home)
        enrolment = enrol_machine(token, home)
        check_terms(token.name, enrolment.run)
        _keep_old_file(run_file, enrolment.run)
        typer.echo(f"certified as {token.name}; the keys are in {home} and stay there")
        for asked in enrolment.asks:
            typer.echo(f"your task: {asked}")
        if client_text:
            write_text(client_file, client_text)
        else:
            _change_client_file(client_file, words)
        write_text(run_file, enrolment.run)
        note_joined(token, home)
    if is_enclave:
        status = _serve_enclave(run_file, home) if serve else "not served"
    else:
        config, run, name = read_client(client_file)
        if serve:
            from phalanx.train.parties.client_process import run_client

            run_client(config, run, name, print_line)
        status = "complete" if serve else "not served"
    return Answer({"name": token.name, "directory": home, "run_file": run_file, "status": status})


def _change_client_file(client_file: Path, words: ClientOptions) -> None:
    """Write options that were given into the file of a client that has joined before."""
    if client_file.exists():
        for change in change_file(client_file, words.file_settings):
            typer.echo(change)


def _keep_old_file(run_file: Path, text: str) -> None:
    """Keep the run file of an earlier run beside the file that replaces it."""
    from phalanx.cli.files import read_file

    older = read_file(run_file).decode("utf-8", errors="replace") if run_file.exists() else text
    if older == text:
        return
    number = next(number for number in itertools.count(1) if not run_file.with_name(f"run-{number}.toml").exists())
    older_file = run_file.with_name(f"run-{number}.toml")
    write_text(older_file, older)
    typer.echo(f"{run_file}: the token is for another run; the previous file is saved as {older_file}")


def _serve_enclave(run_file: Path, home: Path) -> str:
    from phalanx.train.parties.enclave_process import EnclaveStart, read_enclave_run, serve_enclave

    start = EnclaveStart(home, home / "state")
    serve_enclave(read_enclave_run(run_file, start), start, print_line)
    return "complete"
