"""A process that torchrun started: it keeps the owner, or one worker.

torchrun starts the whole group again when one of its processes fails. The owner's keeper fails with its owner, so the
run goes on from its last checkpoint. A worker's keeper does not fail with its worker: the run survives that by itself.
"""

import os
import time

import typer

from phalanx.child import die_with_parent
from phalanx.errors import ConfigError
from phalanx.launch.child import TerminationNotice, exit_code
from phalanx.launch.owner import OwnerProcess, is_worth_another
from phalanx.launch.rendezvous import Rendezvous, open_rendezvous
from phalanx.launch.request import Launch, ProcessSlot
from phalanx.launch.worker_slot import LOOK_EVERY_S, LocalWorkerHost, Substitutes, Supervisor, watch_owner
from phalanx.pipeline import OWNER


def is_rank() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "LOCAL_RANK" in os.environ


def run_rank(launch: Launch) -> int:
    """Play the part of this process until the run is over.

    Returns:
        Exit code; 0 from a worker's keeper even if its worker is gone.
    """
    parts, started = launch.process_slots, int(os.environ["LOCAL_WORLD_SIZE"])
    if len(parts) != started:
        raise ConfigError(
            f"torchrun started {started} processes here, but {len(parts)} parties run here "
            f"({', '.join(part.name for part in parts)}); set --nproc-per-node to {len(parts)}"
        )
    # torchrun leaves its processes behind when it is killed
    die_with_parent()
    part = parts[int(os.environ["LOCAL_RANK"])]
    rendezvous = open_rendezvous(launch.owner)
    with TerminationNotice() as notice:
        if part.name == OWNER:
            return _supervise_owner(OwnerProcess(launch), rendezvous, notice)
        return _supervise_worker(launch, part, rendezvous, notice)


def _supervise_owner(owner: OwnerProcess, rendezvous: Rendezvous, notice: TerminationNotice) -> int:
    published: str | None = None

    def publish(address: str | None) -> None:
        nonlocal published
        if address != published:
            rendezvous.publish_address(address)
            published = address

    try:
        code = watch_owner(owner, notice, publish)
        if code:
            typer.echo(f"launch: the owner ended with exit code {exit_code(code)}", err=True)
        if is_worth_another(code):
            return exit_code(code)
        # torchrun starts again whatever fails, also what will fail in the same way
        return 0 if rendezvous.announce_end(code) else code
    finally:
        owner.kill()
        # workers that are told to end now have no owner to hand over to
        rendezvous.publish_address(None)


def _supervise_worker(launch: Launch, part: ProcessSlot, rendezvous: Rendezvous, notice: TerminationNotice) -> int:
    host = LocalWorkerHost()
    keeper = Supervisor(part.name, Substitutes(part.substitutes), host, launch.worker_config)
    try:
        while not notice.notice_count:
            if rendezvous.has_ended():
                host.end()
                return 0
            keeper.check_worker(rendezvous.read_address())
            if launch.owner is not None and keeper.name is None:
                return exit_code(keeper.code or 0)
            time.sleep(LOOK_EVERY_S)
        host.ask_to_leave()
        while keeper.name is not None and host.poll(keeper.name) is None:
            if notice.notice_count > 1 or rendezvous.read_address() is None:
                break
            time.sleep(LOOK_EVERY_S)
        return 0
    finally:
        host.kill()
