"""Requirements of `communication.symmetric_memory` on NCCL: version and variables. Pure.

[Note: symmetric memory] NCCL maps such a buffer on every rank at the same offset, and has kernels
that read and write the others' directly. The memory has to be that of `cuMemCreate`, the buffer is
registered as a window, and GPUs have to reach each other. Its reductions are sums alone. Between
the GPUs of one NVLink domain all-gathers can go through copy engines and leave all multiprocessors
to the computation; NCCL does that if it was told to use none of them: `NCCL_CTA_POLICY=2`, or
`cta_policy` in the options of the process group, which Composer does not set.

Source: NCCL's notes on 2.27 (windows, https://github.com/NVIDIA/nccl/releases/tag/v2.27.3-1) and
2.28 (copy engines, https://github.com/NVIDIA/nccl/pull/1811), and the docstring of torch's
`FSDPModule.set_symm_mem_for_comm`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from composer_fsdp2.config.placement import Communication

__all__ = ["VARIABLES", "Missing", "missing_for"]

_SWITCHED_OFF = {
    "NCCL_CUMEM_ENABLE": ("0", "memory that can be mapped on other ranks"),
    "NCCL_WIN_ENABLE": ("0", "the registration of windows"),
    "NCCL_P2P_DISABLE": ("1", "access from one GPU to another"),
}
"""variables, the value that switches something off, and the name of that thing"""
_POLICY = "NCCL_CTA_POLICY"
VARIABLES = (_POLICY, *_SWITCHED_OFF)
"""all that are read here"""

_WINDOWS, _COPY_ENGINES = (2, 27), (2, 28)
_ZERO = frozenset({"2", "ZERO"})


@dataclass(frozen=True, slots=True)
class Missing:
    """Names something that NCCL lacks here, and a cure."""

    what: str
    advice: str
    needed: bool
    """otherwise it is only slower"""


def missing_for(
    settings: Communication,
    environment: Mapping[str, str],
    nccl: tuple[int, ...] | None,
    *,
    one_node: bool = True,
) -> list[Missing]:
    """Returns what NCCL lacks for these settings; things they cannot do without come first.

    Args:
        settings: of the run.
        environment: at least those of `VARIABLES` that are set.
        nccl: its version; `None` where nobody knows.
        one_node: whether the shards of a copy are on one node; copy engines reach no further.
    """
    if not settings.symmetric_memory:
        return []
    found = [*_needed(environment, nccl)]
    if one_node:
        found += _for_copy_engines(environment, nccl)
    return found


def _needed(environment: Mapping[str, str], nccl: tuple[int, ...] | None) -> Iterator[Missing]:
    if nccl is not None and nccl < _WINDOWS:
        version = ".".join(map(str, nccl))
        yield Missing(
            f"'communication.symmetric_memory' is set, and torch has NCCL {version} here. The "
            "first gather would fail, because symmetric memory came with NCCL 2.27",
            "Take it out, or install a newer torch.",
            needed=True,
        )
    for name, (value, taken) in _SWITCHED_OFF.items():
        if environment.get(name) == value:
            yield Missing(
                f"'communication.symmetric_memory' is set, and {name}={value} takes {taken} away. "
                "The first gather would fail",
                f"unset {name}, or take 'symmetric_memory' out.",
                needed=True,
            )


def _for_copy_engines(
    environment: Mapping[str, str], nccl: tuple[int, ...] | None
) -> Iterator[Missing]:
    if nccl is not None and _WINDOWS <= nccl < _COPY_ENGINES:
        version = ".".join(map(str, nccl))
        yield Missing(
            f"'communication.symmetric_memory' is set, and NCCL {version} has no gathers through "
            "copy engines: they take multiprocessors from the computation",
            "Install a torch with NCCL 2.28 or newer to free them.",
            needed=False,
        )
    elif environment.get(_POLICY, "").upper() not in _ZERO:
        yield Missing(
            f"'communication.symmetric_memory' is set, and {_POLICY} is not 2. Gathers take "
            "multiprocessors from the computation; with it, they go through copy engines within a "
            "node",
            f"export {_POLICY}=2 on every node before the run starts.",
            needed=False,
        )
