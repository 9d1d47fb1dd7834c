"""A small network from hidden state to token, trained on the host's own text.

It begins as the linear map, knows how common each token is, and learns what both miss.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from phalanx.redteam.inversion.linear_map import LinearMap

_BATCH = 256
_LR = 1e-3
_SHARPNESS = 50.0
_SEEN_ELSEWHERE = 0.1
"""Occurrences that a token counts as having which the host's text lacks."""


class TrainedInverter:
    """A residual network beside the linear map, with a cross-entropy over the tokens of the host's text.

    Sees: activations of one cut, also of text that it knows, under the same guard. Wins: the tokens.

    Args:
        embedding: The public table, ``[vocab, features]``.
        steps: Number of training steps, 256 positions each.
        seed: Seed of its first weights and its batches.

    Source: Song and Raghunathan 2020 (white-box inversion by a learnt mapping); Morris et al. 2023 (text embeddings).
    """

    def __init__(self, embedding: Tensor, steps: int = 60, width: int = 512, seed: int = 0) -> None:
        self._linear = LinearMap(embedding)
        self._steps, self._width = steps, width
        self._generator = torch.Generator().manual_seed(seed)
        self._net: _InverterNet | None = None
        self._directions = self._prior = torch.zeros(0)

    def fit_states(self, states: Tensor, ids: Tensor) -> None:
        """As `Inverter` says."""
        self._linear.fit_states(states, ids)
        x, tokens = self._linear.standardise_states(states).flatten(0, 1), ids.flatten()
        vocab = len(self._linear.embedding)
        counts = tokens.bincount(minlength=vocab).float() + _SEEN_ELSEWHERE
        self._prior = (counts / counts.sum()).log()
        self._directions = functional.normalize(self._linear.embedding - self._linear.centre, dim=-1)
        unique_ids, places = torch.unique(tokens, return_inverse=True)
        # in units of the embedding: where nothing can be learnt the map's answers are short, and the prior decides
        length = (self._linear.embedding[tokens] - self._linear.centre).norm(dim=-1).mean().clamp_min(1e-6)
        net = _InverterNet(self._linear.map_weight / length, self._width, self._generator)
        self._train_net(net, x, places, unique_ids)
        self._net = net

    def _train_net(self, net: "_InverterNet", x: Tensor, places: Tensor, known: Tensor) -> None:
        directions, prior = self._directions[known], self._prior[known]
        optimizer = torch.optim.AdamW(net.parameters(), lr=_LR, weight_decay=0.01)
        for step in range(self._steps):
            for group in optimizer.param_groups:
                group["lr"] = _LR * (1.0 - step / self._steps)
            rows = torch.randint(0, len(x), (_BATCH,), generator=self._generator)
            loss = functional.cross_entropy(net(x[rows]) @ directions.T + prior, places[rows])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    def rank_tokens(self, states: Tensor, count: int) -> Tensor:
        """As `Inverter` says."""
        if self._net is None:
            raise RuntimeError("trained inverter: call fit first")
        flat = self._linear.standardise_states(states).flatten(0, 1)
        with torch.inference_mode():
            best = [
                (self._net(part) @ self._directions.T + self._prior).topk(count, dim=-1).indices
                for part in torch.split(flat, _BATCH)
            ]
        return torch.cat(best).clone().reshape(*states.shape[:-1], count)


class _InverterNet(nn.Module):
    """A linear map and a hidden layer beside it that begins with zero; gives a direction times a learnt sharpness."""

    def __init__(self, weight: Tensor, width: int, generator: torch.Generator) -> None:
        super().__init__()
        dim, features = weight.shape
        self.linear = nn.Parameter(weight.clone())
        self.inner = nn.Parameter(torch.randn((dim, width), generator=generator) * dim**-0.5)
        self.bias = nn.Parameter(torch.zeros(width))
        self.outer = nn.Parameter(torch.zeros((width, features)))
        self.sharpness = nn.Parameter(torch.tensor(_SHARPNESS))

    def forward(self, x: Tensor) -> Tensor:
        directions: Tensor = x @ self.linear + functional.gelu(x @ self.inner + self.bias) @ self.outer
        return directions * self.sharpness
