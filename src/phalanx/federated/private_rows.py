"""Differential privacy of the training rows of one site: its own draws, noise, ledger and budget."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from phalanx.data import IGNORE, Batch
from phalanx.data.batch import ignore_repeats
from phalanx.errors import AuditLogError, ConfigError, DiskError
from phalanx.federated.local import SpentRows
from phalanx.federated.site_trainer import SiteData, SiteSchedule, StepGradient, WholeModel
from phalanx.parallel.privacy.row_gradients import RowGradients
from phalanx.security.audit import AuditLog, KnownHead, read_head
from phalanx.security.audit.line import read_entries
from phalanx.security.crypto import Identity
from phalanx.security.privacy import (
    SEED_BYTES,
    BudgetLedger,
    PastCharges,
    PrivacyConfig,
    SecureStream,
    gaussian_noise,
    poisson_sample,
)

LEDGER_FILE, _HEAD_FILE = "events.jsonl", "audit.head"


def open_site_ledger(directory: Path, identity: Identity) -> tuple[AuditLog, PastCharges]:
    """Open the ledger of a site, which all runs of its directory share, and read its charges."""
    path, head_file, run = directory / LEDGER_FILE, directory / _HEAD_FILE, f"rows of {identity.name}"
    heads = []
    try:
        if head_file.exists():
            heads = [
                KnownHead(
                    read_head(json.loads(head_file.read_bytes()), identity.public, run, str(head_file)), str(head_file)
                )
            ]
    except (OSError, ValueError, RecursionError) as exc:
        raise AuditLogError(f"{head_file}: cannot be read, so a truncated ledger could not be detected") from exc
    log, past = AuditLog(path, identity, run, known=heads, kept_at=head_file), PastCharges()
    try:
        with path.open("rb") as file:
            for entry in read_entries(file, path, identity.public, run):
                past.read_entry(entry.kind, entry.body)
    except OSError as exc:
        raise DiskError(f"{path}: cannot be read ({exc.strerror})") from exc
    return log, past


class SiteRows:
    """The training rows of one site, of which each step draws some and is charged first.

    Args:
        key: Secret; with the number of a charge it decides the rows.

    Guarantees:
        No row is drawn that was not charged to the ledger, and charges are on the disk by then. A round that the
        budget does not pay for whole is not begun. Numbers of charges, and so draws, never come again.
    """

    def __init__(self, data: SiteData, settings: PrivacyConfig, ledger: BudgetLedger, key: bytes) -> None:
        self.settings, self.ledger = settings, ledger
        self._data, self._key = data, key

    def draw_batches(self, number: int, steps: int, batch_size: int) -> Iterator[Batch | None]:
        """Charge the steps of a round, then yield the batch of each; None where no row was drawn."""
        charges = self.ledger.charge_batches(steps)
        if self.settings.sampling == "order":
            # a row that was there twice would move the sum by twice the clip
            yield from map(ignore_repeats, self._data.round_batches(number, steps, batch_size))
            return
        for charge in charges:
            rows = poisson_sample(self._key, charge, self._data.num_sequences, batch_size).tolist()
            yield self._data.pick(rows) if rows else None

    def close(self) -> None:
        """Let go of the ledger."""
        self.ledger.log.close()


class PrivateSteps:
    """The gradients of a site's steps: sums of rows' clipped gradients, with noise, over the rows of a mean batch.

    Args:
        fresh: Draws random bytes; another one than the system's generator is for tests.

    Guarantees:
        Noise and dropout of a step are drawn from the system's generator when they are due, stored nowhere, and never
        the same again; so a row's gradient does not depend on which other rows were drawn. The number of drawn rows
        divides nothing, and no loss leaves.
    """

    def __init__(
        self, model: WholeModel, rows: SiteRows, schedule: SiteSchedule, fresh: Callable[[int], bytes] = os.urandom
    ) -> None:
        self._model, self._rows, self._schedule, self._fresh = model, rows, schedule, fresh
        if getattr(model.torch_module.hub_config, "output_router_logits", False):
            raise ConfigError(
                "[privacy] adds no losses of routers: each is of all rows of a microbatch together; set "
                "output_router_logits = false in the model's config"
            )
        self._gradients = RowGradients(model.torch_module, rows.settings)
        self._deviation = rows.ledger.step.noise_multiplier * rows.settings.clip_norm

    @property
    def spent_rows(self) -> SpentRows:
        """As `PrivateGradients` says."""
        ledger = self._rows.ledger
        return SpentRows(ledger.epsilon_bound, ledger.num_left // self._schedule.steps)

    def round_gradients(self, number: int) -> Iterator[StepGradient]:
        """As `PrivateGradients` says."""
        schedule = self._schedule
        for batch in self._rows.draw_batches(number, schedule.steps, schedule.batch_size):
            torch.default_generator.manual_seed(int.from_bytes(self._fresh(7), "big"))
            total = self._gradients.zero_total()
            if batch is not None:
                self._add_rows(batch, total)
            stream = SecureStream(self._fresh(SEED_BYTES))
            for tensor in total:
                noise = gaussian_noise(stream, tensor.numel(), self._deviation)
                tensor.add_(torch.from_numpy(noise).view_as(tensor)).div_(self._schedule.batch_size)
            self._gradients.set_gradients(total)
            yield self._model.take_gradients(), 0.0, 0

    def _add_rows(self, batch: Batch, total: list[Tensor]) -> None:
        ids, labels = batch.input_ids, batch.labels

        def losses(numbers: Tensor) -> Tensor:
            extras = {name: rows[numbers] for name, rows in batch.extras.items()}
            return self._model.row_losses(ids[numbers], labels[numbers], extras)

        for part in (labels != IGNORE).any(1).nonzero().flatten().chunk(self._schedule.microbatches):
            if len(part):
                self._gradients.add_rows(losses, part, total)
