"""Run candidate tokens through the front and keep the token that reproduces the observed state.

The front is causal, so the state at a position depends on the tokens up to it alone, and different tokens give
different states. An inverter proposes, and so does the public model, which says what usually follows; the front, run on
what is recovered so far, confirms whole stretches at once, and tells proposals apart at the first position that does
not match. First tokens are looked up: there is nothing before them, so their states can be made once for all.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from phalanx.redteam.inversion.front import Front
from phalanx.redteam.inversion.inverter import Inverter


@dataclass
class CandidateSearch:
    """Recovers sequences from the first token on.

    Sees: plaintext activations of one cut; has the public front, and text of its own for the proposals. Wins: the
    tokens.

    Source: Nikolaou et al. 2025 (SipIt); proposals take the place of the whole vocabulary here.

    Attributes:
        openings: States of a first token at the cut, for tokens from 0 on, ``[number, dim]``.
        widths: Numbers of proposals to try at a position, in order; the next number where no earlier proposal matches.
        tolerance: Root mean square distance, in standard deviations of each column, up to which two states are the
            same: bfloat16 moves a number by 0.4 % at most.
        loose: The same behind a token that was not found, which moves all states after it.
        patience: Positions without a match after which it gives up, if there never was one.
    """

    front: Front
    depth: int
    proposer: Inverter
    openings: Tensor
    widths: tuple[int, ...] = (16, 64, 192)
    tolerance: float = 0.06
    loose: float = 0.3
    patience: int = 1
    _scale: Tensor = field(default_factory=lambda: torch.ones(1), init=False, repr=False)

    def fit_scale(self, states: Tensor, ids: Tensor) -> None:
        """Learn how far states of different tokens are apart in each column, but for first tokens, which are unlike."""
        del ids
        self._scale = states[:, 1:].flatten(0, 1).std(dim=0).clamp_min(1e-6)

    def recover_tokens(self, states: Tensor) -> Tensor:
        """Return the tokens.

        Args:
            states: Observed states, ``[batch, seq, dim]``.

        Returns:
            ``[batch, seq]``; where nothing matches, the proposer's own answer.
        """
        vocab = self.front.vocab_size
        proposals = self.proposer.rank_tokens(states, min(max(self.widths), vocab))
        return torch.stack([self._recover_sequence(*pair) for pair in zip(states, proposals, strict=True)])

    def _recover_sequence(self, seen: Tensor, proposals: Tensor) -> Tensor:
        ids, place, misses, matches = proposals[:, 0].clone(), 0, 0, 0
        while place < len(ids):
            off = self._scaled_distance(self.front.states_at_depth(ids[None], self.depth)[0], seen)
            allowed = self.loose if misses else self.tolerance
            wrong = next((p for p in range(place, len(ids)) if not off[p] <= allowed), len(ids))
            matches += wrong - place
            if wrong == len(ids):
                break
            ids[wrong], distance = self._best_proposal(ids[:wrong], proposals[wrong], seen[wrong], is_clean=misses == 0)
            hit = distance <= allowed
            matches, misses = matches + hit, misses + (not hit)
            if misses > self.patience and not matches:
                return proposals[:, 0]
            place = wrong + 1
        return ids

    def _best_proposal(
        self, before: Tensor, proposals: Tensor, seen: Tensor, *, is_clean: bool
    ) -> tuple[Tensor, float]:
        """The best proposal at the position after `before`; behind a mistake only the first few are tried."""
        if not len(before):
            off = self._scaled_distance(self.openings, seen)
            return off.argmin(), float(off.min())
        proposals = self._add_predicted(before, proposals)
        best, distance, start = proposals[0], float("inf"), 0
        for width in self.widths if is_clean else self.widths[:1]:
            tried = proposals[start:width]
            if not len(tried):
                break
            rows = torch.cat([before.expand(len(tried), -1), tried[:, None]], dim=1)
            off = self._scaled_distance(self.front.states_at_depth(rows, self.depth)[:, -1], seen)
            if float(off.min()) < distance:
                best, distance = tried[off.argmin()], float(off.min())
            if distance <= self.tolerance:
                break
            start = width
        return best, distance

    def _add_predicted(self, before: Tensor, proposals: Tensor) -> Tensor:
        predicted = self.front.next_tokens(before, len(proposals))
        return torch.tensor(list(dict.fromkeys(torch.stack([proposals, predicted], dim=1).flatten().tolist())))

    def _scaled_distance(self, ran: Tensor, seen: Tensor) -> Tensor:
        return ((ran - seen) / self._scale).square().mean(dim=-1).sqrt()
