"""The homomorphic sums of a round: the owner forwards parts that it cannot read and joins the keepers' opened sums."""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.errors import AggregationError
from phalanx.federated.carriers import messages as m
from phalanx.federated.rounds.fleet import Fleet
from phalanx.federated.rounds.journal import ReleasedSum, RoundJournal, RoundRecord
from phalanx.federated.rounds.keepers import (
    Item,
    SiteNames,
    SumPlace,
    pack_items,
    read_key,
    read_part,
    sum_terms,
    unpack_items,
)
from phalanx.federated.rounds.terms import RunTerms
from phalanx.federated.rounds.walk import Exclude, SumWalk
from phalanx.security.aggregate import SumRefusal
from phalanx.security.crypto import digest_hex
from phalanx.security.homomorphic import MODULUS, join_sums

_WORD_BYTES = 4


class KeeperSumMaker:
    """Makes one update of the trained sites' updates, by the keys of keepers among them.

    Args:
        journal: Gives each sum a number, and remembers which sites keepers were asked to open a sum of.
    """

    def __init__(self, terms: RunTerms, fleet: Fleet, journal: RoundJournal, length: int) -> None:
        self._terms, self._fleet, self._journal, self._length = terms, fleet, journal, length

    def make_update(self, record: RoundRecord, model: str, exclude: Exclude) -> Tensor:
        """Sum the updates of the round's shares; sites without an accepted part are moved to the excluded ones."""
        del exclude
        number = self._journal.next_sum()
        record.sums = (*record.sums, number)
        walk = SumWalk(self._fleet, record, (model, number), self._terms.config.deadline_s)
        keys = self._collect_keys(walk)
        parts = self._collect_parts(record, SumPlace(record.number, model, number), walk, keys)
        parts = self._accepted_parts(record, model, walk, parts)
        members = tuple(sorted(parts))
        self._journal.note_releasing(record.number, model, ReleasedSum(members, members))
        sums = self._open_sums(walk, members)
        for site in [site for site in record.shares if site not in parts]:
            del record.shares[site]
            record.left_out.setdefault(site, "left the sum")
        terms = sum_terms(self._terms, record.number, digest_hex(next(iter(keys.values()))[1]), self._length)
        return torch.from_numpy(join_sums(terms, members, sums).mean)

    def _collect_keys(self, walk: SumWalk) -> dict[str, Item]:
        keys: dict[str, Item] = {}
        keepers = self._terms.config.keepers

        def take(site: str, reply: m.SumReply, payload: bytes) -> str:
            (item,) = unpack_items(payload, 1)
            read_key(self._terms, site, item)
            keys[site] = item
            return site

        walk.run_phase("key", dict.fromkeys(keepers, b""), take)
        self._check_all(keys, "gave no key")
        return {keeper: keys[keeper] for keeper in keepers}

    def _collect_parts(
        self, record: RoundRecord, place: SumPlace, walk: SumWalk, keys: Mapping[str, Item]
    ) -> dict[str, dict[str, Item]]:
        """Return each site's part for each keeper; the owner cannot read it."""
        sums = self._journal.released_sums(place.round, place.model)
        asked = [site for site in sorted(record.shares) if not sums or site in sums[0].members]
        parts_by_site: dict[str, dict[str, Item]] = {}

        def take(site: str, reply: m.SumReply, payload: bytes) -> str:
            items = unpack_items(payload, len(keys))
            if len(items) != len(keys):
                raise AggregationError(SumRefusal.MALFORMED, f"{site}: {len(items)} parts for {len(keys)} keepers")
            parts = dict(zip(keys, items, strict=True))
            for keeper, item in parts.items():
                read_part(self._terms, place, digest_hex(keys[keeper][1]), site, item)
            parts_by_site[site] = parts
            return site

        walk.run_phase("encrypt", dict.fromkeys(asked, pack_items(list(keys.values()))), take)
        return parts_by_site

    def _accepted_parts(
        self, record: RoundRecord, model: str, walk: SumWalk, parts: Mapping[str, dict[str, Item]]
    ) -> dict[str, dict[str, Item]]:
        """Return the parts that every keeper finds fit; a site with one that is not is in no sum."""
        keepers, fit_by_keeper = self._terms.config.keepers, dict[str, tuple[str, ...]]()

        def take(site: str, reply: m.SumReply, payload: bytes) -> str:
            fit_by_keeper[site] = SiteNames.names_from_bytes(payload)
            return site

        due = {keeper: pack_items([parts[site][keeper] for site in sorted(parts)]) for keeper in keepers}
        walk.run_phase("check", due, take)
        self._check_all(fit_by_keeper, "checked nothing")
        fit = {
            site: items for site, items in parts.items() if all(site in accepted for accepted in fit_by_keeper.values())
        }
        for site in parts.keys() - fit.keys():
            unfit = [keeper for keeper in keepers if site not in fit_by_keeper[keeper]]
            record.left_out[site] = f"unfit for {', '.join(unfit)}"
        sums = self._journal.released_sums(record.number, model)
        if gone := sorted({site for released in sums for site in released.members} - fit.keys()):
            raise AggregationError(
                SumRefusal.TOO_FEW,
                f"{', '.join(gone)}: in a sum of this round that was not finished; keepers open no second sum "
                "without it: restart that site",
            )
        if len(fit) < self._terms.config.min_cohort:
            raise AggregationError(
                SumRefusal.TOO_FEW,
                f"sum: {len(fit)} sites with valid parts, expected {self._terms.config.min_cohort} at least",
            )
        return fit

    def _open_sums(self, walk: SumWalk, members: tuple[str, ...]) -> list[NDArray[np.int64]]:
        opened: dict[str, NDArray[np.int64]] = {}
        keepers = self._terms.config.keepers

        def take(site: str, reply: m.SumReply, payload: bytes) -> str:
            if len(payload) != _WORD_BYTES * self._length:
                raise AggregationError(SumRefusal.MALFORMED, f"{site}: opened {len(payload)} bytes")
            numbers = np.frombuffer(payload, "<u4").astype(np.int64)
            if (numbers >= MODULUS).any():
                raise AggregationError(SumRefusal.MALFORMED, f"{site}: opened a number beyond the modulus")
            opened[site] = numbers
            return site

        walk.run_phase("open", dict.fromkeys(keepers, SiteNames(sites=members).to_bytes()), take)
        self._check_all(opened, "opened nothing")
        return [opened[keeper] for keeper in keepers]

    def _check_all(self, parts: Mapping[str, object], what: str) -> None:
        if missing := [keeper for keeper in self._terms.config.keepers if keeper not in parts]:
            raise AggregationError(
                SumRefusal.TOO_FEW, f"{', '.join(missing)}: {what}; a sum is opened by all keepers or not at all"
            )
