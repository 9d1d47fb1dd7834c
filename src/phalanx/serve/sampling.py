"""How tokens are drawn, and the completion that results."""

from typing import Any, Literal

from pydantic import Field

from phalanx.config import StrictModel


class SamplingRule(StrictModel):
    """The rule by which the next token is chosen.

    Attributes:
        max_new_tokens: At most so many; fewer where the model's window is full or a text ends.
        temperature: Temperature of the draw; 0 takes the likeliest token.
        top_k: Draw from so many likeliest tokens; 0 for all.
        top_p: Draw from the likeliest tokens that have this share together.
        repetition_penalty: Above 1 makes tokens that were there less likely (Keskar et al. 2019).
        seed: Seed of the draw: the same seed, model and prompt give the same text on one machine.
    """

    max_new_tokens: int = Field(default=128, ge=1, le=1 << 20)
    temperature: float = Field(default=0.8, ge=0.0, le=100.0, allow_inf_nan=False)
    top_k: int = Field(default=0, ge=0)
    top_p: float = Field(default=0.95, gt=0.0, le=1.0, allow_inf_nan=False)
    repetition_penalty: float = Field(default=1.0, gt=0.0, le=10.0, allow_inf_nan=False)
    seed: int = Field(default=0, ge=0, lt=1 << 63)

    def generate_arguments(self) -> dict[str, Any]:
        """What transformers' ``generate`` is told."""
        chosen: dict[str, Any] = {"repetition_penalty": self.repetition_penalty}
        if self.temperature == 0.0:
            return {**chosen, "do_sample": False, "temperature": None, "top_k": None, "top_p": None}
        drawn = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        return {**chosen, **drawn, "do_sample": True}


class Completion(StrictModel):
    """What the model wrote.

    Attributes:
        tokens: Tokens that were written, the end of text included.
        finish: ``stop`` where the text ended, ``length`` where no further token was allowed.
    """

    text: str
    prompt_tokens: int
    tokens: int
    finish: Literal["stop", "length"]
