"""``phalanx keys``: who may ask a server or gateway for what, made and taken back by files alone."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.answers.answer import Answer, for_programs
from phalanx.cli.console import print_figures, print_rows

if TYPE_CHECKING:
    from phalanx.security.audit import LogEntry
    from phalanx.serve.access import KeyRecord, KeyTerms

_DAY_S = 86_400

keys_app = typer.Typer(
    no_args_is_help=True,
    help="Make, list, limit and revoke the API keys of a server or gateway, and see what each has used.",
)
AccessDir = Annotated[
    Path, typer.Option("--access", metavar="DIR", help="Directory of keys, budgets and log; the server gets it too.")
]
OperatorHome = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Directory of the key that signs; default: operator in --access."),
]


@keys_app.command(
    epilog="Example: phalanx keys create --owner alice\n\n"
    "Example: phalanx keys create --owner batch-jobs --model small --tokens-per-month 1000000 --network 10.0.0.0/8\n\n"
    "Example: phalanx keys create --owner ops --role operator --days 7 --secret-file ops.key"
)
def create(
    *,
    owner: Annotated[str, typer.Option(help="Holder of the key, as lists, usage and the log name it.")],
    access: AccessDir = Path("access"),
    role: Annotated[str, typer.Option(help="user, or operator, who may read metrics and control the server.")] = "user",
    model: Annotated[list[str] | None, typer.Option(help="Model that it may use; may be repeated. None: all.")] = None,
    network: Annotated[
        list[str] | None, typer.Option(help="Client addresses that may use it, such as 10.0.0.0/8; may be repeated.")
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=3650, help="Days until it expires.")] = 90,
    requests_per_minute: Annotated[
        int | None, typer.Option(min=0, help="Limit in any 60 seconds; default: 60.")
    ] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(min=0, help="Limit in any 60 seconds; default: 100000.")
    ] = None,
    requests_per_month: Annotated[
        int | None, typer.Option(min=0, help="Limit in a calendar month, UTC; default: 100000.")
    ] = None,
    tokens_per_month: Annotated[
        int | None, typer.Option(min=0, help="Limit in a calendar month, UTC; default: 10000000.")
    ] = None,
    concurrency: Annotated[int | None, typer.Option(min=0, help="Requests at the same time; default: 8.")] = None,
    may_skip_mark: Annotated[bool, typer.Option(help="Allow requests for text without a mark.")] = False,
    secret_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="New file, readable by you only, instead of the terminal.")
    ] = None,
    operator_home: OperatorHome = None,
) -> Answer:
    """Make a key and show its secret this one time; the first key makes the directory and the operator's key.

    Servers that run on the directory know the key from the next request on.
    """
    from phalanx.security.crypto import write_private
    from phalanx.serve.access import KEYS_FILE, KeyStore

    limits = (requests_per_minute, tokens_per_minute, requests_per_month, tokens_per_month, concurrency)
    terms = _make_terms(
        {
            "owner": owner,
            "role": role,
            "models": model or None,
            "networks": network or [],
            "expires": int(datetime.now(UTC).timestamp()) + days * _DAY_S,
            "limits": _name_limits(limits),
            "may_skip_mark": may_skip_mark,
        },
        "create",
    )
    is_new = not (access / KEYS_FILE).exists()
    make_store = KeyStore.create if is_new else KeyStore.open
    store = make_store(access, operator_home=operator_home)
    key_id, secret = store.create_key(terms)
    facts: dict[str, Any] = {"key": key_id, "owner": owner, "expires": _day_of(terms.expires)}
    if secret_file is not None:
        write_private(secret_file, secret.encode() + b"\n")
        facts["secret_file"] = secret_file
    print_figures(facts)
    if secret_file is None:
        facts["secret"] = secret
        if not for_programs():
            typer.echo(f"\n{secret}\n\nThis is the only time that the secret is shown; nothing here holds it.")
    return Answer(facts)


@keys_app.command("list", epilog="Example: phalanx keys list --access access")
def list_keys(access: AccessDir = Path("access")) -> Answer:
    """List all keys, revoked and expired ones too, after the file's signature was checked."""
    from phalanx.serve.access import KeyStore

    now = datetime.now(UTC).timestamp()
    rows = [_describe_key(record, now) for record in KeyStore.open(access).list_keys()]
    print_rows([{name: value for name, value in row.items() if name not in {"limits", "networks"}} for row in rows])
    return Answer({"keys": rows})


@keys_app.command(
    epilog="Example: phalanx keys limit k7x2mq3zt5ab --tokens-per-month 1000000\n\n"
    "Example: phalanx keys limit k7x2mq3zt5ab --days 30"
)
def limit(
    key: Annotated[str, typer.Argument(metavar="KEY", help="Id of the key, as list shows it.")],
    *,
    access: AccessDir = Path("access"),
    days: Annotated[int | None, typer.Option(min=1, max=3650, help="Days from now until it expires.")] = None,
    requests_per_minute: Annotated[int | None, typer.Option(min=0, help="Limit in any 60 seconds.")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(min=0, help="Limit in any 60 seconds.")] = None,
    requests_per_month: Annotated[int | None, typer.Option(min=0, help="Limit in a calendar month, UTC.")] = None,
    tokens_per_month: Annotated[int | None, typer.Option(min=0, help="Limit in a calendar month, UTC.")] = None,
    concurrency: Annotated[int | None, typer.Option(min=0, help="Requests at the same time.")] = None,
    operator_home: OperatorHome = None,
) -> Answer:
    """Change budgets or the end of a key while servers run: they follow from the next request on.

    Budgets that are not named stay, and used tokens stay used.
    """
    from phalanx.errors import ConfigError
    from phalanx.serve.access import KeyStore

    limits = (requests_per_minute, tokens_per_minute, requests_per_month, tokens_per_month, concurrency)
    named = _name_limits(limits)
    if not named and days is None:
        raise ConfigError("phalanx keys limit: names nothing to change; phalanx keys limit --help lists the options")
    expires = None if days is None else int(datetime.now(UTC).timestamp()) + days * _DAY_S

    def change(terms: "KeyTerms") -> "KeyTerms":
        values = terms.model_dump(mode="json")
        values["expires"] = values["expires"] if expires is None else expires
        return _make_terms({**values, "limits": {**values["limits"], **named}}, "limit")

    record = KeyStore.open(access, operator_home=operator_home).change_terms(key, change)
    facts = {"key": record.key_id, "owner": record.terms.owner, "expires": _day_of(record.terms.expires)}
    limits_now = record.terms.limits.model_dump()
    print_figures({**facts, **limits_now})
    return Answer({**facts, "limits": limits_now})


@keys_app.command(epilog="Example: phalanx keys revoke k7x2mq3zt5ab --access access")
def revoke(
    key: Annotated[str, typer.Argument(metavar="KEY", help="Id of the key, as list shows it.")],
    access: AccessDir = Path("access"),
    operator_home: OperatorHome = None,
) -> Answer:
    """Revoke a key for good: the next request with it is refused, and answers that are being sent end."""
    from phalanx.serve.access import KeyStore

    record = KeyStore.open(access, operator_home=operator_home).revoke_key(key)
    facts = {"key": record.key_id, "owner": record.terms.owner, "revoked": _moment_of(record.revoked or 0)}
    print_figures(facts)
    return Answer(facts)


@keys_app.command(
    epilog="Example: phalanx keys usage --access access\n\nExample: phalanx keys usage --key k7x2mq3zt5ab --json"
)
def usage(
    access: AccessDir = Path("access"),
    key: Annotated[str | None, typer.Option(help="Show this key alone.")] = None,
) -> Answer:
    """Show requests and tokens by key and day (UTC), while a server runs too.

    A request that is not finished counts with the most that it may use, and so does one that a crash cut off.
    """
    from phalanx.serve.access import BUDGETS_FILE, KeyStore, read_usage_by_day

    records = {record.key_id: record for record in KeyStore.open(access).list_keys()}
    rows = [
        {
            "key": key_id,
            "owner": records[key_id].terms.owner if key_id in records else None,
            "day": day,
            "requests": counts.requests,
            "prompt_tokens": counts.prompt_tokens,
            "completion_tokens": counts.completion_tokens,
        }
        for (key_id, day), counts in sorted(read_usage_by_day(access / BUDGETS_FILE).items())
        if key in {None, key_id}
    ]
    print_rows(rows)
    return Answer({"usage": rows})


@keys_app.command("log", epilog="Example: phalanx keys log --access access")
def check_log(access: AccessDir = Path("access")) -> Answer:
    """Check signature and chain of every line of the log of requests, and count its lines by kind.

    The server's key is the one in the directory: whoever has exchanged key and log together is not found.
    """
    from phalanx.security.crypto import read_public_signer
    from phalanx.serve.access import LOG_FOLDER, SERVER_FILE, verify_request_log

    server = read_public_signer(access / SERVER_FILE)
    kinds = verify_request_log(access / LOG_FOLDER, server)
    print_figures({"verdict": "every line is signed, in order and unchanged", **dict(sorted(kinds.items()))})
    return Answer({"lines": sum(kinds.values()), "kinds": kinds, "server_key": server.public_key.hex()})


@keys_app.command("text-key", epilog="Example: phalanx keys text-key auditor.key")
def make_text_key(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="New file, readable by you only.")],
) -> Answer:
    """Make a key that opens texts which servers seal in their logs, and its public half FILE.pub for these servers."""
    from phalanx.serve.access import make_reader_key

    public = make_reader_key(file)
    print_figures({"private": file, "public": public})
    return Answer({"private": file, "public": public})


@keys_app.command("texts", epilog="Example: phalanx keys texts auditor.key --access access --key k7x2mq3zt5ab")
def show_texts(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The private key of text-key.")],
    access: AccessDir = Path("access"),
    key: Annotated[str | None, typer.Option(help="Show texts of this API key alone.")] = None,
) -> Answer:
    """Check the log of requests, and show the texts that are sealed in it.

    In a project with roles this is a decryption, which a second person approves.
    """
    from phalanx.config import escape_controls
    from phalanx.security.crypto import read_public_signer
    from phalanx.serve.access import LOG_FOLDER, SERVER_FILE, open_texts, verify_request_log

    lines: list[LogEntry] = []

    def visit(line: "LogEntry") -> None:
        if key is None or line.body.get("key") == key:
            lines.append(line)

    verify_request_log(access / LOG_FOLDER, read_public_signer(access / SERVER_FILE), visit)
    rows = [
        {"time": line.time, "key": line.body["key"], "route": line.body["route"], **texts}
        for line, texts in open_texts(lines, file, access)
    ]
    if not for_programs():
        for row in rows:
            typer.echo(escape_controls(json.dumps(row, ensure_ascii=False)))
    return Answer({"texts": rows})


def _name_limits(limits: tuple[int | None, int | None, int | None, int | None, int | None]) -> dict[str, int]:
    """Return the limits that were named, in the order of `KeyLimits`."""
    from phalanx.serve.access import KeyLimits

    pairs = zip(KeyLimits.model_fields, limits, strict=True)
    return {name: value for name, value in pairs if value is not None}


def _make_terms(values: dict[str, Any], verb: str) -> "KeyTerms":
    from phalanx.config import config_of
    from phalanx.serve.access import KeyTerms

    return config_of(values, Path(f"phalanx keys {verb}"), KeyTerms)


def _describe_key(record: "KeyRecord", now: float) -> dict[str, Any]:
    terms = record.terms
    state = "revoked" if record.revoked is not None else "active" if record.is_active(now) else "expired"
    if state == "expired" and record.quarantined is not None:
        state = "quarantined"
    return {
        "key": record.key_id,
        "owner": terms.owner,
        "role": terms.role,
        "state": state,
        "created": _day_of(record.created),
        "expires": _day_of(terms.expires),
        "models": None if terms.models is None else list(terms.models),
        "networks": list(terms.networks),
        "limits": terms.limits.model_dump(),
    }


def _day_of(second: int) -> str:
    return f"{datetime.fromtimestamp(second, UTC):%Y-%m-%d}"


def _moment_of(second: int) -> str:
    return f"{datetime.fromtimestamp(second, UTC):%Y-%m-%dT%H:%M:%SZ}"
