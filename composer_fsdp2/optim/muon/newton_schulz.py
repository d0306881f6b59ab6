"""Computes nearly the nearest orthogonal matrix by products of matrices alone: Newton-Schulz.

Source: Keller Jordan, Muon: An optimizer for hidden layers in neural networks,
https://kellerjordan.github.io/posts/muon/; learning rates of Liu et al., Muon is Scalable for LLM
Training, arXiv 2502.16982, and of Jeremy Bernstein, Deriving Muon. The names are those of
`torch.optim.Muon`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["ADJUSTMENTS", "MatrixLayout", "lr_ratio", "orthogonalise"]

ADJUSTMENTS = ("original", "match_rms_adamw", "spectral_unclamped")
"""names of the ways in which the shape of a matrix changes its learning rate"""


@dataclass(frozen=True, slots=True)
class MatrixLayout:
    """How a parameter holds matrices `(out, in)`; one of three dimensions is a list of them."""

    blocks: tuple[int, ...] | None = None
    """sizes along the outputs of matrices that are joined there, such as query, key and value"""
    transposed: bool = False
    """whether it is stored `(in, out)`"""
    turns: int = 1
    """turns that the blocks take along the outputs, with a part of each block, such as a head"""

    @property
    def axis(self) -> int:
        """The dimension of the outputs, from the end."""
        return -1 if self.transposed else -2

    def outputs(self, shape: Sequence[int]) -> list[Tensor]:
        """Returns the positions along `axis` of each matrix in a parameter of this shape."""
        turns = torch.arange(shape[self.axis]).view(self.turns, -1)
        sizes = [size // self.turns for size in self.blocks or (shape[self.axis],)]
        return [part.flatten() for part in turns.split(sizes, dim=1)]


def orthogonalise(
    matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """Returns a new, nearly orthogonal matrix; of a list of matrices, a list of them.

    Matrices go one by one: a product of several at once may round another way, and how many a rank
    has depends on the number of ranks.

    Args:
        matrix: (outputs, inputs) or transposed, or (matrices, outputs, inputs).
        coefficients: factors of x, x x^T x and (x x^T)^2 x.
        steps: iterations.
        eps: least norm that the matrix is divided by.
    """
    if matrix.ndim > 2:
        return torch.stack([orthogonalise(single, coefficients, steps, eps) for single in matrix])
    a, b, c = coefficients
    x = matrix.clone(memory_format=torch.contiguous_format)
    tall = x.size(0) > x.size(1)
    if tall:
        x = x.T
    x.div_(x.norm().clamp(min=eps))
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def lr_ratio(name: str, outputs: int, inputs: int) -> float:
    """Returns the factor of the learning rate of a matrix `(outputs, inputs)`."""
    match name:
        case "match_rms_adamw":
            return 0.2 * math.sqrt(max(outputs, inputs))
        case "spectral_unclamped":
            return math.sqrt(outputs / inputs)
        case _:
            return math.sqrt(max(1, outputs / inputs))
