"""The arms in which clients train apart and one update comes of theirs: by a mean, a secure sum, or a robust rule."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from phalanx.aggregators import aggregate_updates
from phalanx.lab.attacks.updates import UPDATE_ATTACKS, AttackerView
from phalanx.lab.reproduce.medical.bench import ArmMaterial, ArmResult, copy_state
from phalanx.lab.reproduce.medical.material import Indices
from phalanx.lab.reproduce.medical.size import DELTA, EPSILON
from phalanx.security.aggregate import MIN_CONTRIBUTORS, CohortMember, ExpectedRound, SumClient, SumServer, SumTerms
from phalanx.security.crypto import Identity
from phalanx.security.privacy.accountant import PoissonGaussian, check_rate, min_noise_multiplier
from phalanx.security.privacy.noise import SecureStream, gaussian_noise, poisson_sample
from phalanx.split import BackTrainer

State = Mapping[str, Tensor]
Join = Callable[[Tensor, Sequence[float]], Tensor]
"""One update of the clients' ``[clients, values]`` and their shares of all texts."""
Epoch = Callable[[BackTrainer, int, int], tuple[float, int]]
"""A client's pass in a round, given client and round: the last step's loss, and how many steps it made."""

_CLIP = 1.0
"""Bound of one text's gradient, of which the noise is a multiple."""
_NORM = 8.0
"""The norm up to which an update is admitted and a secure sum encodes it; an honest one is shorter."""
_LIE = "inner_product"
"""What one liar sends, of five sites with the four clients."""


def fedavg_plain(bench: ArmMaterial) -> ArmResult:
    """Rounds of one local pass each; then adapters and head are averaged by the clients' numbers of texts.

    A and B are averaged apart, as FedAvg does with parameters, and each round begins with fresh moments.

    Source: McMahan et al. 2017, algorithm 1.
    """
    return _run_rounds(bench, _weighted_mean)


def fedavg_secure(bench: ArmMaterial) -> ArmResult:
    """The same rounds with the protocol of secure sums: the server sees no client's update."""
    return _run_rounds(bench, _secure_mean)


def fedavg_private(bench: ArmMaterial) -> ArmResult:
    """The same rounds by steps of DP-SGD: each text's gradient is clipped, and noise is added.

    A client's texts are in a step by chance, Poisson's. A client spends at most `EPSILON` over all rounds for each of
    its texts, against an adversary that sees the weights; keys follow from the seed here, which in a run are secret.
    """
    clients, rows = bench.material.clients, bench.size.rows
    counts = [max(1, len(indices) // rows) for indices in clients]
    total = [count * bench.size.epochs for count in counts]
    rates = [check_rate(len(indices), rows, DELTA) for indices in clients]
    noise = [min_noise_multiplier(EPSILON, DELTA, rate, steps) for rate, steps in zip(rates, total, strict=True)]

    def epoch(trainer: BackTrainer, client: int, number: int) -> tuple[float, int]:
        last = 0.0
        for step in range(counts[client]):
            charge = number * counts[client] + step
            last = _private_step(bench, trainer, client, charge, noise[client])
        return last, counts[client]

    spent = [
        PoissonGaussian(noise_scale, rate).epsilon_after(steps, DELTA)
        for noise_scale, rate, steps in zip(noise, rates, total, strict=True)
    ]
    outcome = _run_rounds(bench, _weighted_mean, epoch)
    return ArmResult(
        outcome.scores,
        outcome.steps,
        outcome.loss_last,
        outcome.digest,
        {**outcome.more, "epsilon": max(spent), "noise": noise},
    )


def fedavg_attacked(bench: ArmMaterial) -> ArmResult:
    """The plain mean with one site more, which lies: it turns the mean of the others round."""
    return _run_rounds(bench, _attacked_mean)


def fedavg_robust(bench: ArmMaterial) -> ArmResult:
    """The same liar before the norm of the door, nearest neighbour mixing and a trimmed mean."""
    return _run_rounds(bench, _robust_mean)


def _run_rounds(bench: ArmMaterial, join: Join, epoch: Epoch | None = None) -> ArmResult:
    trainer, clients = bench.make_trainer(), bench.material.clients
    common = copy_state(trainer.state_tensors())
    shares = [len(indices) / sum(map(len, clients)) for indices in clients]
    epoch = epoch or _plain_epoch(bench)
    loss = steps = 0.0
    for number in range(bench.size.epochs):
        loss, updates = 0.0, []
        for client, share in enumerate(shares):
            trainer.load_state(common, 0)
            last, count = epoch(trainer, client, number)
            loss, steps = loss + share * last, steps + share * count
            updates.append(_flatten_weights(trainer.state_tensors()) - _flatten_weights(common))
        update = join(torch.stack(updates), shares)
        place = 0
        for value in _weight_tensors(common):
            value.add_(update[place : place + value.numel()].view_as(value))
            place += value.numel()
    trainer.load_state(common, 0)
    return bench.make_result(trainer, bench.front, round(steps), loss, {"rounds": bench.size.epochs})


def _plain_epoch(bench: ArmMaterial) -> Epoch:
    dealt: list[Iterator[Indices]] = [
        bench.deal_microbatches(indices, client) for client, indices in enumerate(bench.material.clients)
    ]

    def epoch(trainer: BackTrainer, client: int, number: int) -> tuple[float, int]:
        count, last = max(1, len(bench.material.clients[client]) // bench.size.rows), 0.0
        for _ in range(count):
            last = bench.learn_step(trainer, [next(dealt[client])])
        return last, count

    return epoch


def _private_step(bench: ArmMaterial, trainer: BackTrainer, client: int, charge: int, noise: float) -> float:
    indices, rows = bench.material.clients[client], bench.size.rows
    key = f"{bench.seed}/{client}".encode().ljust(32, b"\0")
    sample = [indices[int(place)] for place in poisson_sample(key, charge, len(indices), rows)]
    total = {name: torch.zeros_like(value) for name, value in trainer.trained_parameters.items()}
    loss = 0.0
    for index in sample:
        loss += trainer.learn_microbatch(*bench.hidden_and_labels((index,)))[0]
        gradients = {name: value.grad for name, value in trainer.trained_parameters.items() if value.grad is not None}
        norm = math.sqrt(sum(float(value.square().sum()) for value in gradients.values()))
        for name, value in gradients.items():
            total[name].add_(value, alpha=min(1.0, _CLIP / max(norm, 1e-12)))
        trainer.drop_microbatches()
    stream = SecureStream(f"{bench.seed}/{client}/{charge}".encode().ljust(32, b"\0"))
    for name, value in trainer.trained_parameters.items():
        drawn = torch.from_numpy(gaussian_noise(stream, value.numel(), noise * _CLIP))
        value.grad = total[name] + drawn.view_as(value)
    # by the number that is drawn in the mean: how many were is not told
    trainer.num_targets = rows
    trainer.step()
    return loss / max(1, len(sample))


def _weighted_mean(updates: Tensor, shares: Sequence[float]) -> Tensor:
    return torch.tensor(shares, dtype=updates.dtype) @ updates


def _with_liar(updates: Tensor) -> Tensor:
    nothing = torch.zeros_like(updates[0])
    chance = torch.Generator().manual_seed(0)
    lie = UPDATE_ATTACKS[_LIE].lie(AttackerView(updates, updates[0], nothing, nothing, chance))
    return torch.cat((updates, lie.unsqueeze(0)))


def _attacked_mean(updates: Tensor, shares: Sequence[float]) -> Tensor:
    return _with_liar(updates).mean(0)


def _robust_mean(updates: Tensor, shares: Sequence[float]) -> Tensor:
    lying = _with_liar(updates)
    return aggregate_updates(lying[lying.norm(dim=1) <= _NORM], "trimmed_mean", 1, ("nnm",))


def _secure_mean(updates: Tensor, shares: Sequence[float]) -> Tensor:
    """Walk the protocol with all sides in this process; clients have as many texts each, so they weigh the same."""
    owner = Identity.without_certificate("owner")
    identities = [Identity.without_certificate(f"client-{number}") for number in range(len(updates))]
    cohort = tuple(CohortMember(name=identity.name, key=identity.public.public_key.hex()) for identity in identities)
    length = updates.shape[1]
    terms = SumTerms(
        run="medical",
        run_digest="1" * 64,
        model_digest="2" * 64,
        round=1,
        cohort=cohort,
        length=length,
        clip=_NORM,
        minimum=MIN_CONTRIBUTORS,
    )
    roster = {identity.name: identity.public for identity in identities}
    expected = ExpectedRound("medical", "1" * 64, "2" * 64, length, owner.public, roster, MIN_CONTRIBUTORS)
    server, clients = (
        SumServer(terms, owner),
        {identity.name: SumClient(identity, expected, _AnyRound()) for identity in identities},
    )
    for client in clients.values():
        server.take_advert(client.join_round(server.invitation))
    adverts = server.close_adverts()
    for client in clients.values():
        server.take_boxes(client.share_secrets(adverts))
    deliveries = server.close_boxes()
    for values, (name, client) in zip(updates, clients.items(), strict=True):
        deposit = client.mask_values(deliveries[name], values.numpy())
        server.take_deposit(deposit.message, deposit.values)
    deposits = server.close_deposits()
    for client in clients.values():
        server.take_consent(client.sign_consent(deposits))
    consents = server.close_consents()
    for client in clients.values():
        server.take_release(client.release_shares(consents))
    return torch.from_numpy(server.unmask_sum().mean_values())


class _AnyRound:
    """A book of rounds for parties that live for one."""

    def enter_round(self, run: str, number: int) -> None:
        """Let it in."""


def _weight_tensors(state: State) -> Iterator[Tensor]:
    return (value for name, value in state.items() if name.startswith("weight/"))


def _flatten_weights(state: State) -> Tensor:
    return torch.cat([value.flatten() for value in _weight_tensors(state)])
