"""Which ranks compute one batch together is asked in every batch."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from composer_fsdp2.parallel.batch_group import batch_group_of


class Asked(nn.Linear):
    """Counts the questions that torch answers slowest: attributes a module does not have."""

    missed: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        Asked.missed.append(name)
        return super().__getattr__(name)


def test_no_module_is_asked_for_what_it_lacks():
    model = nn.Sequential(nn.Sequential(Asked(2, 2)), Asked(2, 2))
    Asked.missed.clear()
    assert batch_group_of(model) is None
    assert Asked.missed == []
