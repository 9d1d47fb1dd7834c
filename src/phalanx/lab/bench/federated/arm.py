"""One arm of this package in a process of its own: an owner with its processes of sites, or the training alone."""

import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from phalanx.config import dump_toml
from phalanx.errors import PeerLostError
from phalanx.federated.algorithms import PlainRule
from phalanx.federated.carriers.loopback import LoopbackCarrier
from phalanx.federated.rounds.coordinator import RoundCoordinator
from phalanx.federated.rounds.fleet import Fleet
from phalanx.federated.rounds.journal import RoundJournal
from phalanx.federated.site_trainer import SiteSchedule, SiteTrainer
from phalanx.lab.bench.federated.plan import FederatedSpec, RoundsReport, RoundsRequest, SiteReport
from phalanx.lab.bench.measure.harness import parse_message, send_message, serve_bench, serve_orders
from phalanx.models import open_model
from phalanx.pipeline import keep_freed_memory
from phalanx.train.batches.site_data import SharedTexts
from phalanx.train.config import FederatedRun
from phalanx.train.records.run_directory import RunDirectory
from phalanx.train.sessions.site_file import SiteFile, session_prefix, terms_of
from phalanx.train.sessions.site_processes import LocalSites, new_session
from phalanx.train.setup.process import deterministic_kernels
from phalanx.train.setup.whole_model import load_whole_model

RoundRunner = Callable[[int], dict[str, SiteReport]]
Loads = Callable[[], set[tuple[str, int]]]
ALONE = "alone"
_JOIN_S = 300.0


def main(path: Path, arm: str, orders: IO[str], answers: IO[str]) -> None:
    """Serve orders until there are no more."""
    keep_freed_memory()
    spec = parse_message(FederatedSpec, path.read_text(encoding="utf-8"))
    cache, loaded = Path(os.environ["PHALANX_CACHE"]), set[tuple[str, int]]()
    opened = training_alone(spec.run, cache) if arm == ALONE else rounds_of(spec.run, Path(spec.directory))
    with deterministic_kernels(1), opened as (run_round, loads):
        numbers = itertools.count(1)

        def act(order: RoundsRequest) -> RoundsReport:
            lines: dict[str, list[SiteReport]] = {site: [] for site in spec.sites}
            for number in itertools.islice(numbers, order.rounds):
                for site, report in run_round(number).items():
                    lines[site].append(report)
            for site, process in loads() - loaded:
                lines[site].append(SiteReport(load=1))
                loaded.add((site, process))
            return RoundsReport(sites={site: tuple(reports) for site, reports in lines.items()})

        send_message(answers, RoundsReport(version="phalanx"))
        serve_orders(RoundsRequest, orders, answers, act)


@contextlib.contextmanager
def rounds_of(run: FederatedRun, directory: Path) -> Iterator[tuple[RoundRunner, Loads]]:
    """Let processes of sites train, as `phalanx train` does; each loads its model when it begins."""
    section = run.federated
    with contextlib.ExitStack() as stack:
        home = stack.enter_context(RunDirectory(directory / "run", run, resume=False))
        (home.path / "config.toml").write_text(dump_toml(run), encoding="utf-8")
        source = open_model(run.model, home.cache_directory / "models", run.train.seed)
        weights = load_whole_model(run, source, 0).copy_weights()
        session, transport = new_session(session_prefix(run)), section.transport
        carrier = LoopbackCarrier(home.owner, session, section.sites, transport, dict, lambda line: None)
        stack.callback(carrier.close)
        files = {
            site: SiteFile(
                run=str((home.path / "config.toml").resolve()),
                identity=str((home.pki_directory / site).resolve()),
                certificates=str(home.pki_directory.resolve()),
                directory=str((home.path / "sites" / site).resolve()),
                owner=carrier.listen_address,
                cache=str(home.cache_directory.resolve()),
            )
            for site in section.sites
        }
        sites = LocalSites(home.path / "sites", files, 1, 0)
        stack.callback(sites.kill_sites)
        carrier.watch_processes(sites)
        sites.start_sites()
        fleet = Fleet(carrier)
        terms = terms_of(run, home.owner, home.pki_directory)
        owner = RoundCoordinator(terms, home.owner, fleet, RoundJournal(home.path / "rounds"), weights)
        if len(carrier.await_sites(len(section.sites), _JOIN_S)) < len(section.sites):
            raise PeerLostError(f"bench: a site has not called; see {home.path / 'sites'}")

        def run_round(number: int) -> dict[str, SiteReport]:
            record = owner.run_round(number, run.optimizer.lr)
            return {
                site: SiteReport(
                    round=number,
                    loss=share.loss,
                    train_s=share.train_s,
                    bytes=record.bytes[f"owner>{site}"] + record.bytes[f"{site}>owner"],
                )
                for site, share in record.shares.items()
            }

        yield run_round, lambda: set(sites.process_ids.items())
        fleet.end_sites()


@contextlib.contextmanager
def training_alone(run: FederatedRun, cache: Path) -> Iterator[tuple[RoundRunner, Loads]]:
    """Let one process make the local steps of all sites, one after another, and no rounds: all start from the same."""
    source = open_model(run.model, cache / "models", run.train.seed)
    texts = SharedTexts(run, source, cache / "data", lambda phase, count: None)
    model, train, section = load_whole_model(run, source, 0), run.train, run.federated
    start = model.copy_weights()
    schedule = SiteSchedule(run.optimizer, section.local_steps, train.batch_size, train.microbatches, train.seed)
    trainers = {site: SiteTrainer(model, texts.share_of(site), schedule) for site in section.sites}

    def run_round(number: int) -> dict[str, SiteReport]:
        rule = PlainRule(None, start)
        for trainer in trainers.values():
            trainer.train_round(number, start, run.optimizer.lr, rule)
        return {}

    yield run_round, set


if __name__ == "__main__":
    with serve_bench() as pipes:
        main(Path(sys.argv[1]), sys.argv[2], *pipes)
