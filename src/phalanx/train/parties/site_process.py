"""The process of a site: ``python -m phalanx.train.parties.site_process SITE.toml``. It loads its model once."""

import os
import sys
from pathlib import Path

from phalanx.child import PARENT, die_with_parent
from phalanx.config import load_config
from phalanx.errors import PhalanxError
from phalanx.federated.carriers.loopback_site import OwnerCall, serve_owner
from phalanx.federated.rounds.site import Site
from phalanx.federated.site_trainer import SiteSchedule, SiteTrainer
from phalanx.models import open_model
from phalanx.pipeline import keep_freed_memory
from phalanx.security.aggregate import RoundFile
from phalanx.security.crypto import Identity, load_identity, make_private_directory, peer_from_certificate
from phalanx.train.batches.site_data import SharedTexts, whole_model
from phalanx.train.config import RunConfig, load_run
from phalanx.train.sessions.site_file import SiteFile, session_prefix, terms_of
from phalanx.train.setup.preflight import load_own_code
from phalanx.train.setup.process import deterministic


def run_site(file: SiteFile) -> None:
    """Be a site until the owner ends the run.

    Raises:
        PhalanxError: Keys, texts or model are unusable, or the owner is not what it should be.
    """
    run = load_run(file.run)
    identity = load_identity(Path(file.identity))
    load_own_code(run)
    keep_freed_memory()
    make_private_directory(file.own)
    with deterministic(run.train.threads):
        site = _site(file, run, identity)
        owner = peer_from_certificate(file.owner_certificate.encode("ascii"), identity.authority_pem)
        call = OwnerCall(identity, owner, file.owner, session_prefix(run), file.transport, file.join_timeout_s)
        serve_owner(call, site.answer, lambda line: print(line, flush=True))  # noqa: T201 - its log


def _site(file: SiteFile, run: RunConfig, identity: Identity) -> Site:
    terms = terms_of(run, identity, file.owner_certificate.encode("ascii"), file.certificates)
    cache = Path(file.cache)
    source = open_model(run.model, cache / "models", run.train.seed)
    texts = SharedTexts(run, source, cache / "data", lambda phase, count: None)
    trainer = SiteTrainer(
        whole_model(run, source, texts.num_classes),
        texts.of(identity.name),
        SiteSchedule(
            run.optimizer, terms.config.local_steps, run.train.batch_size, run.train.microbatches, run.train.seed
        ),
        file.own,
    )
    return Site(identity, terms, trainer, RoundFile(file.own), file.own)


def main(path: str) -> int:
    """Be the site of a file and return an exit code."""
    if PARENT in os.environ:
        die_with_parent()
    try:
        run_site(load_config(Path(path), SiteFile))
    except PhalanxError as exc:
        sys.stderr.write(f"site: {exc}\n")
        return exc.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
