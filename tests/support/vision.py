"""Small image models and data, for the algorithms that are about images."""

from __future__ import annotations

from typing import Any

import torch
from composer.models import ComposerClassifier
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

CLASSES = 4


class TinyConv(ComposerClassifier):
    """Convolutions, three kinds of norms, dropout and a head; a batch is (images, targets)."""

    def __init__(self, batch_norm: bool = True) -> None:
        body = nn.Sequential(
            nn.Conv2d(3, 7, 3, padding=1),
            nn.BatchNorm2d(7) if batch_norm else nn.Identity(),
            nn.ReLU(),
            nn.MaxPool2d(2, stride=2),
            nn.Conv2d(7, 6, 3, stride=2),
            nn.GroupNorm(2, 6),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Dropout(0.1),
            nn.Linear(6, CLASSES),
        )
        super().__init__(body, num_classes=CLASSES)

    def loss(self, outputs: Any, batch: Any, **kwargs: Any) -> torch.Tensor:
        """Takes indices, the distributions MixUp makes of them, and a `reduction`."""
        return F.cross_entropy(outputs, batch[1], **kwargs)


def images(count: int, size: int = 16, classes: int = CLASSES) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    pixels = torch.rand(count, 3, size, size, generator=generator)
    return TensorDataset(pixels, torch.randint(classes, (count,), generator=generator))
