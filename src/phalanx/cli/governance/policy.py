"""``phalanx policy``: sign a policy, compare a run with it, approve a release."""

from pathlib import Path
from typing import Annotated

import typer

from phalanx.access_gate import require_approvals
from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import print_line

policy_app = typer.Typer(no_args_is_help=True, help="Sign a policy, compare runs with it, approve a release.")

RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Run directory.")]
Key = Annotated[
    str | None,
    typer.Option("--key", metavar="KEY", help="FILE, tpm:ADDRESS or pkcs11:...; default: PHALANX_KEY, or your key."),
]
Certificate = Annotated[
    Path | None, typer.Option("--certificate", metavar="FILE", help="Copy of the owner's certificate that you keep.")
]


@policy_app.command("sign", epilog="Example: phalanx policy sign policy.toml --key keys/steward.key")
def sign_file(
    policy: Annotated[Path, typer.Argument(metavar="POLICY.toml", help="Policy file to sign.")], key: Key = None
) -> Answer:
    """Sign a policy; the signature is written beside it, and run files name the fingerprint that is printed."""
    from phalanx.governance.acts import name_target
    from phalanx.policy import default_reference, open_person_signer, sign_policy, signature_file

    require_approvals("policy_change", lambda: name_target("policy_change", policy), policy)
    with open_person_signer(key or default_reference()) as signer:
        signed = sign_policy(policy, signer)
    facts = {"policy": signed.name, "digest": signed.digest, "signer": signer.fingerprint}
    print_line(f"{signature_file(policy)}: policy {signed.name} signed by {facts['signer']}")
    return Answer(facts)


@policy_app.command(
    "check",
    epilog="Example: phalanx policy check runs/first\n\n"
    "Example: phalanx policy check runs/first --policy ours.toml --signer 9c2f... --certificate pinned/owner.pem\n\n"
    "Exit codes: 0 every clause holds, 5 one is broken.",
)
def check_run_directory(
    run_dir: RunDir,
    *,
    policy: Annotated[
        Path | None, typer.Option("--policy", metavar="FILE", help="Another policy than the run's.")
    ] = None,
    signer: Annotated[str | None, typer.Option("--signer", help="Key that must have signed that policy.")] = None,
    evaluation: Annotated[
        list[Path] | None,
        typer.Option("--evaluation", metavar="FILE", help="Result of eval --out; default: RUN_DIR/evaluation*.json."),
    ] = None,
    certificate: Certificate = None,
) -> Answer:
    """Compare a run with a policy, clause by clause, as export and server do."""
    from phalanx.errors import ConfigError, PolicyError
    from phalanx.governance.release import check_run
    from phalanx.policy import read_policy
    from phalanx.train import PastRun

    if (policy is None) != (signer is None):
        raise ConfigError("--policy and --signer belong together: a policy that anybody signed says nothing")
    reader_policy = None if policy is None or signer is None else read_policy(policy, signer).policy
    used, breaches = check_run(PastRun(run_dir, certificate), reader_policy, evaluation or ())
    facts = {
        "policy": used.name,
        "digest": used.digest,
        "breaches": [vars(breach) for breach in breaches],
    }
    for breach in breaches:
        print_line(str(breach))
    if breaches:
        return Answer(facts, error=PolicyError(f"{run_dir}: breaks {len(breaches)} clauses of policy {used.name}"))
    print_line(f"{run_dir}: keeps every clause of policy {used.name}")
    return Answer(facts)


@policy_app.command("approve", epilog="Example: phalanx policy approve runs/first --key keys/alice.key")
def approve_run_directory(run_dir: RunDir, key: Key = None, certificate: Certificate = None) -> Answer:
    """Approve the release of a run's final weights, as a person whom its policy names."""
    from phalanx.governance.release import approve_run
    from phalanx.policy import default_reference, open_person_signer
    from phalanx.train import PastRun

    with open_person_signer(key or default_reference()) as signer:
        person = approve_run(PastRun(run_dir, certificate), signer)
    print_line(f"{run_dir}: release approved by {person}")
    return Answer({"person": person})
