"""The oracle for numerics, and Composer's Trainer on the same global batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
import torch
from composer import Trainer
from composer.core import Precision
from composer.models import ComposerModel
from composer.utils import dist
from composer.utils.parallelism import FSDP2Config as ComposerFSDP2Config
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.support.models import batches
from tests.support.parity import autocast, device_for, full, rounded

Samples = TensorDataset


def samples_of(steps: int, size: int, seed: int = 7) -> Samples:
    """(ids, targets) of `steps` global batches of `size` samples, one after the other.

    Composer's sampler deals sample `i` to rank `i % world_size`, so the ranks' k-th batches
    together are the k-th `size` samples.
    """
    ids, targets = zip(*batches(steps, size, seed=seed), strict=True)
    return TensorDataset(torch.cat(ids), torch.cat(targets))


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Six ready tokens a sample, labelled with themselves."""

    def __init__(self, samples: int) -> None:
        self.ids = torch.randint(31, (samples, 6), generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def built(make: Callable[[], ComposerModel], seed: int = 0) -> ComposerModel:
    """A model whose weights depend on the seed alone."""
    torch.manual_seed(seed)
    return make()


def loader_of(samples: Samples, batch: int) -> DataLoader[Any]:
    """Batches of `batch` samples for this rank."""
    return DataLoader(samples, batch_size=batch, sampler=dist.get_sampler(samples, shuffle=False))


def composers_own(**values: Any) -> ComposerFSDP2Config:
    """Composer's own config, which says of itself that it is experimental."""
    with pytest.warns(UserWarning, match="experimental"):
        return ComposerFSDP2Config(**values)


@contextlib.contextmanager
def autocast_on_the_cpu() -> Generator[None]:
    """Has Composer's Trainer compute under autocast here, as it does on a GPU alone."""

    def context(precision: Any, *_args: Any, **_kwargs: Any) -> torch.autocast:
        return autocast(Precision(precision).value)

    with pytest.MonkeyPatch.context() as patch:
        for module in ("composer.trainer.trainer", "composer.callbacks.generate"):
            patch.setattr(f"{module}.get_precision_context", context)
        yield


def trainer_for(
    model: ComposerModel,
    optimizer: torch.optim.Optimizer | None,
    samples: Samples,
    fsdp2: Any = None,
    *,
    batch: int = 4,
    **kwargs: Any,
) -> Trainer:
    """A Trainer on this rank's CPU; `batch` samples per rank and step, one epoch."""
    settings: dict[str, Any] = {
        "parallelism_config": {"fsdp2": fsdp2 or {}},
        "max_duration": "1ep",
        "device": device_for(kwargs.get("precision", "fp32")),
        "precision": "fp32",
        "progress_bar": False,
        "train_dataloader": loader_of(samples, batch),
    }
    return Trainer(model=model, optimizers=optimizer, **(settings | kwargs))


def train_alone(
    model: ComposerModel,
    optimizer: torch.optim.Optimizer,
    samples: Samples,
    size: int,
    *,
    change_gradients: Callable[[list[nn.Parameter]], object] = len,
    after_step: Callable[[], object] = int,
    precision: str = "fp32",
    microbatch: int | None = None,
) -> list[float]:
    """Trains an unsharded model on the global batches of `size`; returns the losses.

    Under autocast it computes in microbatches what each rank would, with parameters of bf16.
    """
    exact, losses = precision == "fp32", list[float]()
    for start in range(0, len(samples), size):
        batch = samples[start : start + size]
        losses.append(0.0)
        for part in [batch] if exact else _shares(batch, microbatch):
            with autocast(precision), contextlib.nullcontext() if exact else rounded(model):
                loss = model.loss(model(part), part) * (len(part[0]) / size)
            loss.backward()
            losses[-1] += loss.item()
        change_gradients(list(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
        after_step()
    return losses


def _shares(batch: Any, microbatch: int | None) -> Iterator[Any]:
    """Returns the microbatches of each rank, to which Composer's sampler deals in turn."""
    ranks = dist.get_world_size()
    for rank in range(ranks):
        own = [part[rank::ranks] for part in batch]
        yield from zip(*(part.split(microbatch or len(part)) for part in own), strict=True)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all weights and buffers under their plain names. Collective: yes."""
    return {name: full(value).clone() for name, value in model.state_dict().items()}


def largest_difference(
    found: dict[str, torch.Tensor] | nn.Module, expected: dict[str, torch.Tensor] | nn.Module
) -> float:
    """The largest difference between equally named weights. Collective: yes."""
    a = weights(found) if isinstance(found, nn.Module) else found
    b = weights(expected) if isinstance(expected, nn.Module) else expected
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)
