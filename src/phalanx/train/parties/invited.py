"""What an invited machine is asked to do, and where it is certified: a worker, a client or an enclave; no torch."""

import tomllib
from collections.abc import Callable
from pathlib import Path

from phalanx.config import digest_config, own_references, printable_text
from phalanx.errors import ConfigError
from phalanx.rollouts import RolloutsConfig
from phalanx.security.invite import JoinTerms
from phalanx.split.config import ENCLAVE
from phalanx.train.config import DomainRun, PipelineRun, SplitRun, load_run

PORT = 7070
"""Where an owner listens for those that it has invited, if the run says nothing else."""
_EVERYWHERE = "0.0.0.0"  # noqa: S104 - other machines are to reach it
_MASKED = "multiply masked numbers, of which you see sizes and times, for the enclave, which awaits you"
_MAX_BYTES = 12 * 1024
"""Of a run file that is sent with a certificate; an answer has 16 KiB."""


def invited_to(
    target: Path, names: list[str], port: int | None, of_workers: Callable[[PipelineRun], JoinTerms]
) -> tuple[Path, str, JoinTerms]:
    """Return the pki directory, the address to listen on, and what invited machines are told.

    Args:
        port: Port for invited parties; the run's when left out.
        of_workers: Returns the terms of a pipeline's workers, for which the model is opened.
    """
    if target.is_dir():
        return target, _EVERYWHERE, JoinTerms(port or PORT)
    run = load_run(target)
    if isinstance(run, SplitRun):
        return _split_terms(run, target, names, port)
    if isinstance(run, DomainRun | PipelineRun) and run.rollouts is not None:
        writers = set(run.rollouts.remote_workers)
        if writers and (names or not run.certified_elsewhere) and writers.issuperset(names):
            return _writer_terms(run, run.rollouts, target)
    if not isinstance(run, PipelineRun):
        raise ConfigError(
            f"{target}: has no parties to invite; those of [pipeline] and [split] and the workers of [rollouts] can be"
        )
    missing = [] if run.pipeline.transport.port else ["a fixed pipeline.transport.port"]
    unknown = [name for name in names if name not in run.certified_elsewhere]
    missing += [f"{name} in pipeline.remote_workers or pipeline.may_join" for name in unknown]
    if run.pki is None:
        missing.insert(0, "pipeline.pki, the directory of the authority")
    if run.pki is None or missing:
        raise ConfigError(f"{target}: does not have {'; nor '.join(missing)}; add it to invite machines").with_facts(
            file=str(target), key="pipeline", found="none", expected=missing[0], do="add it to invite machines"
        )
    return Path(run.pki), run.pipeline.transport.bind, of_workers(run)


def _writer_terms(run: DomainRun | PipelineRun, settings: RolloutsConfig, target: Path) -> tuple[Path, str, JoinTerms]:
    """Return what workers are told that are to write texts; they join with ``--writer``."""
    if settings.pki is None or not settings.transport.port:
        raise ConfigError(f"{target}: needs rollouts.pki and a fixed rollouts.transport.port to invite workers")
    asks = (
        f"write texts for {run.train.length_text}, with the weights of the whole model, which the owner sends; join "
        "with --writer",
        "sign each answer; the owner reads a drawn share again and names a worker whose texts do not follow from the "
        "weights and public seeds",
        "see the prompts, the weights and the texts; stop at any time with Ctrl-C or SIGTERM",
    )
    return Path(settings.pki), settings.transport.bind, JoinTerms(settings.transport.port, asks)


def check_terms(name: str, text: str) -> None:
    """Refuse, for an invited party, a text that is no run file of a split, or one that names unread code.

    Args:
        text: Text that came with its certificate; empty for a worker.
    """
    if not text:
        raise ConfigError(f"token: belongs to a worker of a pipeline; join as {name} without texts")
    try:
        named = own_references(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, RecursionError) as exc:
        raise ConfigError(f"received run file: is not valid TOML ({exc}); tell the owner") from exc
    if named:
        what, do = ", ".join(map(printable_text, named)), "get run file and code from the owner, and read them"
        raise ConfigError(
            f"received run file: names code ({what}), which an invitation never transfers; {do}; then `phalanx "
            "client` or `phalanx enclave serve`"
        ).with_facts(code="PHX-C019", found=what, do=do)


def _split_terms(run: SplitRun, target: Path, names: list[str], port: int | None) -> tuple[Path, str, JoinTerms]:
    split = run.split
    workers = split.masked_workers if split.masked.address else ()
    unknown = [name for name in names if name not in (ENCLAVE, *split.remote_clients, *workers)]
    if split.pki is None or split.remote_enclave is None or unknown:
        raise ConfigError(
            f"{target}: needs split.pki, split.remote_enclave and split.remote_clients with "
            f"{', '.join(unknown) or 'its clients'}; the enclave is invited as {ENCLAVE!r}"
        )
    text = target.read_text(encoding="utf-8")
    if len(text.encode()) > _MAX_BYTES:
        raise ConfigError(
            f"{target}: has more than {_MAX_BYTES:,} bytes, above the limit of invitations; shorten comments"
        )
    clients = ", ".join(split.remote_clients)
    proving = ", ".join(split.client_policies)
    evidence = f"as {proving}: give evidence of your machine that meets your policy in run.toml"
    asks = (
        f"agree to run {digest_config(run)[:16]}, whose file is run.toml beside the keys: {run.train.length_text} "
        f"with {clients}, an enclave of tier {split.tier} at {split.remote_enclave}",
        f"as a client: compute {split.cut} layers of the model; texts and labels stay on your machine, messages are "
        f"sealed for the enclave, and the owner of the run gets sums over {split.clients} clients",
        *((evidence,) if proving else ()),
        f"as the enclave: listen on {split.remote_enclave} and train the layers behind them",
        *((f"as {' or '.join(workers)}: {_MASKED} at {split.masked.address}; join with --masked",) if workers else ()),
        "stay until the owner ends the run; Ctrl-C stops, and the same command continues",
    )
    return Path(split.pki), _EVERYWHERE, JoinTerms(port or PORT, asks, run=text)
