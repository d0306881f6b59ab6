"""Newton-Schulz: the nearest orthogonal matrix, nearly, by products of matrices alone.

Source: Keller Jordan, Muon: An optimizer for hidden layers in neural networks,
https://kellerjordan.github.io/posts/muon/; learning rates of Liu et al., Muon is Scalable for LLM
Training, arXiv 2502.16982, and of Jeremy Bernstein, Deriving Muon. The names are those of
`torch.optim.Muon`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["ADJUSTMENTS", "Iteration", "Layout", "iterate", "lr_ratio", "work"]

ADJUSTMENTS = ("original", "match_rms_adamw", "spectral_unclamped")
"""names of the ways in which the shape of a matrix changes its learning rate"""


@dataclass(frozen=True, slots=True)
class Layout:
    """How a parameter holds matrices `(out, in)`; one of three dimensions is a list of them."""

    blocks: tuple[int, ...] | None = None
    """sizes along the outputs of matrices that are joined there, such as query, key and value"""
    transposed: bool = False
    """whether it is stored `(in, out)`"""
    turns: int = 1
    """how many turns the blocks take there, with a part of each in every turn, such as a head"""

    @property
    def axis(self) -> int:
        """The dimension of the outputs, from the end."""
        return -1 if self.transposed else -2

    def sizes(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the outputs of each matrix in a parameter of this shape."""
        return self.blocks or (shape[self.axis],)

    def parts(self, shape: Sequence[int]) -> list[tuple[int, int]]:
        """Returns the outputs one after the other: number of the matrix, and how many are of it."""
        sizes = self.sizes(shape)
        return [(n, size // self.turns) for _ in range(self.turns) for n, size in enumerate(sizes)]

    def divide(self, whole: Tensor) -> Sequence[Tensor]:
        """Returns the matrices that are joined in a parameter of two dimensions."""
        dim, sizes = self.axis % 2, self.sizes(whole.shape)
        if self.turns == 1:
            return whole.split(sizes, dim=dim)
        in_turns = whole.unflatten(dim, (self.turns, -1))
        cut = in_turns.split([size // self.turns for size in sizes], dim=dim + 1)
        return [part.flatten(dim, dim + 1) for part in cut]

    def join(self, matrices: Iterable[Tensor]) -> Tensor:
        """Returns the parameter that `divide` has divided."""
        dim = self.axis % 2
        if self.turns == 1:
            return torch.cat(list(matrices), dim=dim)
        in_turns = [matrix.unflatten(dim, (self.turns, -1)) for matrix in matrices]
        return torch.cat(in_turns, dim=dim + 1).flatten(dim, dim + 1)


@dataclass(frozen=True, slots=True)
class Iteration:
    """Settings of Newton-Schulz."""

    coefficients: tuple[float, float, float]
    steps: int
    eps: float
    dtype: torch.dtype


def iterate(whole: Tensor, layout: Layout, how: Iteration) -> Tensor:
    """Orthogonalises each matrix of a parameter; the result has the dtype of the iteration.

    Matrices go one by one: a product of several at once may round another way, and how many a rank
    has depends on the number of ranks.
    """
    if whole.ndim > 2:
        return torch.stack([iterate(matrix, layout, how) for matrix in whole.unbind()])
    if layout.blocks is None:
        return _orthogonalise(whole, how)
    return layout.join(_orthogonalise(matrix, how) for matrix in layout.divide(whole))


def _orthogonalise(matrix: Tensor, how: Iteration) -> Tensor:
    a, b, c = how.coefficients
    # A copy in any case: what is given may be the momentum itself.
    x = matrix.to(how.dtype, copy=True)
    tall = x.size(0) > x.size(1)
    if tall:
        x = x.T
    x.div_(x.norm().clamp(min=how.eps))
    for _ in range(how.steps):
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


def work(shape: Sequence[int], layout: Layout) -> int:
    """Returns what a parameter costs: `rows * columns * min(rows, columns)` of its matrices."""
    inputs = shape[-2] if layout.transposed else shape[-1]
    each = sum(size * inputs * min(size, inputs) for size in layout.sizes(shape))
    return each * math.prod(shape[:-2])
