"""``phalanx incident``: take a model or key out of service, go back to a certified checkpoint, report, exercise."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import print_figures, print_rows
from phalanx.cli.serving.keys import AccessDir, OperatorHome
from phalanx.errors import ConfigError, VerificationError

if TYPE_CHECKING:
    from phalanx.serve.incident import IncidentCase

incident_app = typer.Typer(
    no_args_is_help=True,
    help="Take a model or key out of service at once, go back to a certified checkpoint, report it, and exercise that.",
)
IncidentId = Annotated[
    str | None, typer.Option("--incident", metavar="ID", help="Default: the newest one that is open.")
]
KeyId = Annotated[str | None, typer.Option("--key", metavar="KEY", help="Id of a key, as phalanx keys list shows it.")]
ModelId = Annotated[str | None, typer.Option("--model", metavar="NAME", help="Id of a model, as clients name it.")]


@incident_app.command("open", epilog="Example: phalanx incident open --title 'key of alice leaked' --access access")
def open_incident(
    title: Annotated[str, typer.Option(help="What happened, in one line.")],
    access: AccessDir = Path("access"),
    operator_home: OperatorHome = None,
) -> Answer:
    """Open an incident: every further act is recorded in its own signed log."""
    from phalanx.serve.incident import IncidentCase

    case = IncidentCase.begin(access, title, operator_home)
    facts = {"incident": case.incident, "directory": case.directory}
    print_figures(facts)
    return Answer(facts)


@incident_app.command(
    epilog="Example: phalanx incident quarantine --key k7x2mq3zt5ab\n\n"
    "Example: phalanx incident quarantine --model small --access access"
)
def quarantine(
    key: KeyId = None,
    model: ModelId = None,
    *,
    incident: IncidentId = None,
    access: AccessDir = Path("access"),
    operator_home: OperatorHome = None,
) -> Answer:
    """Take a key or model out of service: the next request is refused, and answers that are being sent end.

    It holds for every server and gateway on the access directory, at once and after a restart.
    """
    _check_one(key, model)
    case = _open_case(access, incident, operator_home, f"quarantine of {key or model}")
    if key is not None:
        case.quarantine_key(key)
    if model is not None:
        case.quarantine_model(model)
    return _answer(case, {"quarantined": key or model})


@incident_app.command(
    epilog="Example: phalanx incident release --key k7x2mq3zt5ab\n\nExample: phalanx incident release --model small"
)
def release(
    key: KeyId = None,
    model: ModelId = None,
    *,
    incident: IncidentId = None,
    access: AccessDir = Path("access"),
    operator_home: OperatorHome = None,
) -> Answer:
    """Put a key or model into service again; a revoked key stays revoked."""
    _check_one(key, model)
    case = _open_case(access, incident, operator_home, f"release of {key or model}")
    if key is not None:
        case.release_key(key)
    if model is not None:
        case.release_model(model)
    return _answer(case, {"released": key or model})


@incident_app.command(
    epilog="Example: phalanx incident rollback runs/first --model first\n\n"
    "Example: phalanx incident rollback runs/first --model first --before 400 --certificate pinned/owner.pem"
)
def rollback(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Run directory of the model.")],
    model: Annotated[str, typer.Option("--model", metavar="NAME", help="Id of the model, as clients name it.")],
    *,
    before: Annotated[
        int | None, typer.Option("--before", min=1, metavar="STEP", help="Only checkpoints before this step.")
    ] = None,
    certificate: Annotated[
        Path | None, typer.Option("--certificate", metavar="FILE", help="Copy of the owner's that you keep.")
    ] = None,
    incident: IncidentId = None,
    access: AccessDir = Path("access"),
    operator_home: OperatorHome = None,
    own_code: Annotated[bool, typer.Option("--own-code", help="Run the code in RUN_DIR/code: read it.")] = False,
) -> Answer:
    """Go back to the newest checkpoint of a run that its signed log certifies and no convicted party's work is in.

    A server that runs opens the checkpoint by itself and refuses the model until then; one that starts begins with it.
    """
    from phalanx.serve.incident import find_certified

    certified = find_certified(run_dir, certificate, before=before, own_code=own_code)
    case = _open_case(access, incident, operator_home, f"rollback of {model}")
    case.roll_back(model, certified)
    facts: dict[str, Any] = {"model": model, "checkpoint": certified.checkpoint, "step": certified.step}
    facts |= {"digest": certified.digests[0], "proves": certified.proof, "skipped": list(certified.skipped)}
    return _answer(case, facts)


@incident_app.command(epilog="Example: phalanx incident close --note 'key revoked, owner told'")
def close(
    note: Annotated[str, typer.Option(help="How it ended, in one line.")],
    incident: IncidentId = None,
    access: AccessDir = Path("access"),
    operator_home: OperatorHome = None,
) -> Answer:
    """Close an incident; keys and models that are out of service stay so."""
    from phalanx.config import printable_text
    from phalanx.serve.incident.case import CLOSED

    case = _require_case(access, incident, operator_home)
    case.record_action(CLOSED, {"note": printable_text(note, 200)})
    return _answer(case, {"closed": True})


@incident_app.command(
    epilog="Example: phalanx incident report --access access\n\nExample: phalanx incident report --json"
)
def report(
    incident: IncidentId = None,
    *,
    access: AccessDir = Path("access"),
    operator_home: OperatorHome = None,
    hours: Annotated[
        int, typer.Option(min=0, max=8760, help="Hours before the incident at which the report begins.")
    ] = 24,
    check: Annotated[
        Path | None, typer.Option("--check", metavar="FILE", help="Check the signature of a report, and write none.")
    ] = None,
) -> Answer:
    """Write the signed report: the acts, and the time line of the signed log of requests around them."""
    from phalanx.serve.incident import verify_report, write_report
    from phalanx.serve.incident.case import operator_of
    from phalanx.serve.incident.report import PAGE_FILE, REPORT_FILE

    if check is not None:
        statement = verify_report(check, operator_of(access))
        print_figures({"verdict": "signed by the operator, and unchanged", "incident": statement["incident"]})
        return Answer({"incident": statement["incident"], "title": statement["title"]})
    case = _require_case(access, incident, operator_home)
    statement = write_report(case, hours)
    facts: dict[str, Any] = {"incident": case.incident, "report": case.directory / REPORT_FILE}
    facts |= {"page": case.directory / PAGE_FILE, "entries": len(statement["time_line"])}
    print_figures(facts)
    return Answer(facts)


@incident_app.command(
    epilog="Example: phalanx incident exercise leaked_key models/small\n\n"
    "Example: phalanx incident exercise bad_model runs/first --json\n\nExample: phalanx incident exercise"
)
def exercise(
    playbook: Annotated[
        str | None, typer.Argument(metavar="PLAYBOOK", help="A name, or a .toml file; none lists the names.")
    ] = None,
    where: Annotated[
        Path | None, typer.Argument(metavar="RUN_DIR|DIR", help="What the server of the exercise serves.")
    ] = None,
) -> Answer:
    """Run a playbook against a server process of its own and say what worked; your servers and keys are not touched."""
    from dataclasses import asdict

    from phalanx.serve.incident.playbook import list_playbooks, read_playbook

    if playbook is None:
        rows = [{"playbook": name, "title": read_playbook(name).title} for name in list_playbooks()]
        print_rows(rows)
        return Answer({"playbooks": rows})
    steps = read_playbook(playbook)
    if where is None:
        rows = [step.model_dump() for step in steps.steps]
        print_rows(rows)
        return Answer({"playbook": playbook, "title": steps.title, "signs": steps.signs, "steps": rows})
    from phalanx.cli.serving.options import require_server
    from phalanx.serve.place import check_place

    check_place(where)
    require_server()
    from phalanx.serve.incident import exercise_playbook

    results = [asdict(result) for result in exercise_playbook(steps, where)]
    print_rows([{"outcome": row["outcome"], "step": row["say"], "seen": row["detail"]} for row in results])
    failed = [row["do"] for row in results if row["outcome"] == "failed"]
    error = VerificationError(f"exercise {playbook}: did not work: {', '.join(failed)}") if failed else None
    return Answer({"playbook": playbook, "title": steps.title, "steps": results, "failed": failed}, error=error)


def _check_one(key: str | None, model: str | None) -> None:
    if (key is None) == (model is None):
        raise ConfigError("expected one of --key and --model")


def _find_case(access: Path, incident: str | None, operator_home: Path | None) -> "IncidentCase | None":
    from phalanx.serve.incident import IncidentCase, newest_case

    return newest_case(access, operator_home) if incident is None else IncidentCase(access, incident, operator_home)


def _open_case(access: Path, incident: str | None, operator_home: Path | None, title: str) -> "IncidentCase":
    """Return the incident that was named or opened last; where there is none, open one."""
    from phalanx.serve.incident import IncidentCase

    return _find_case(access, incident, operator_home) or IncidentCase.begin(access, title, operator_home)


def _require_case(access: Path, incident: str | None, operator_home: Path | None) -> "IncidentCase":
    case = _find_case(access, incident, operator_home)
    if case is None:
        raise ConfigError(
            f"{access}: has no open incident; name one by --incident, or begin one: phalanx incident open"
        )
    return case


def _answer(case: "IncidentCase", facts: dict[str, Any]) -> Answer:
    print_figures({"incident": case.incident, **facts})
    return Answer({"incident": case.incident, **facts})
