"""The place of a rollout's draw: a public function of seed, step, prompt, sample and position is its key."""

from dataclasses import dataclass

from blake3 import blake3

from phalanx.config import canonical_json
from phalanx.models.token_draw import KEY_BYTES, row_key
from phalanx.security.crypto import in_domain

_DOMAIN = "rollout-draw/1"


@dataclass(frozen=True)
class DrawPlace:
    """The place of a text: with a position in it, the key of a draw."""

    seed: int
    step: int
    prompt: int
    sample: int

    def draw_key(self, position: int) -> tuple[int, int]:
        """Two signed 64-bit numbers."""
        place = [self.seed, self.step, self.prompt, self.sample, position]
        return row_key(blake3(in_domain(_DOMAIN, canonical_json(place))).digest(KEY_BYTES))
