"""The saved activations of a block, by where they lie."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SavedPerToken:
    """Numbers that one block keeps for each token.

    Attributes:
        stream: Inputs of norms, in the precision of the residual stream.
        whole: Outputs of norms, which every tensor parallel rank has unless it is sequence parallel.
        split: What lies between the matrix products, shared by the tensor parallel ranks.
        scores: Attention's probabilities, shared likewise; 0 with a fused kernel.
    """

    stream: int
    whole: int
    split: int
    scores: int
