"""A pretend accelerator: a device of torch in CPU memory, for tests of what depends on the device.

`device.cpp` and `memory.h` are the device; they are compiled once for each version of torch. Ranks
of a pool whose backend is `BACKEND` have it, and no other process has.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import types
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch

from tests.support.pool import PRETEND as BACKEND

__all__ = ["BACKEND", "NAME", "build", "held", "limited_memory", "missing", "register", "waits"]

NAME = "pretend"
SOURCES = [Path(__file__).with_name(name) for name in ("device.cpp", "memory.h")]
COMPILER = os.environ.get("CXX", "c++")


def missing() -> str | None:
    """Returns what this machine lacks to compile the device, in the words of a skip."""
    if shutil.which(COMPILER) is None:
        return "needs a C++ compiler"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "needs a C++ compiler and the headers of Python"
    return None


def _library() -> Path:
    """Returns where the compiled device is; git ignores the folder."""
    key = [torch.__version__, sysconfig.get_config_var("SOABI"), *(s.read_text() for s in SOURCES)]
    name = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
    return Path(__file__).parents[2] / "build" / "accelerator" / f"{NAME}-{name}.so"


def build() -> Path:
    """Compiles the device, if nobody did."""
    from torch.utils import cpp_extension

    library = _library()
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    includes = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    paths = cpp_extension.library_paths()
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder, library.name)
        command = [COMPILER, "-shared", "-fPIC", "-O0", "-w", "-std=c++20", str(SOURCES[0])]
        command += ["-o", str(made), *(f"-I{path}" for path in includes)]
        command += [*(f"-L{path}" for path in paths), "-ltorch_cpu", "-ltorch", "-lc10"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the pretend accelerator does not compile:\n{done.stderr[-4000:]}")
        made.replace(library)
    return library


def register() -> None:
    """Gives this process the device, before it joins a process group of `BACKEND`."""
    spec = importlib.util.spec_from_file_location(NAME, _library())
    assert spec is not None
    assert spec.loader is not None
    global _device
    _device = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(_device)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    torch.Tensor.data = property(torch._C.TensorBase.data.__get__, _set_data)  # pyright: ignore
    _register_fsdp_operators()
    _kernels.impl("histc", _histc, "PrivateUse1")


_device: Any = None


def _module() -> types.ModuleType:
    """Returns `torch.pretend`, which is to this device what `torch.cuda` is to a GPU."""
    module: Any = types.ModuleType(f"torch.{NAME}")
    module.Stream = lambda device=None, priority=0: torch.Stream(NAME, priority=priority)
    module.Event = lambda **options: torch.Event(NAME)
    module.stream = _stream
    module.current_stream = lambda device=None: torch.accelerator.current_stream()
    module.synchronize = lambda device=None: torch.accelerator.synchronize()
    module.current_device = lambda: 0
    module.device_count = lambda: 1
    module.set_device = lambda device: None
    module.device = lambda device: contextlib.nullcontext()
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.empty_cache = module._lazy_init = lambda: None
    # It draws as the CPU does. Its own state shows who seeds it and who puts it back.
    own = torch.zeros(16, dtype=torch.uint8, device="cpu")
    module.manual_seed = module.manual_seed_all = lambda seed: own.view(torch.int64).fill_(seed)
    module.get_rng_state = lambda device=None: own.clone()
    module.set_rng_state = lambda state, device=None: own.copy_(state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return module


@contextlib.contextmanager
def _stream(stream: torch.Stream | None) -> Generator[None]:
    before = torch.accelerator.current_stream()
    torch.accelerator.set_stream(stream or before)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def _set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Takes a value of the other device too, which torch allows between the CPU and a GPU alone."""
    own: Any = torch._C.TensorBase.data
    if tensor.device == value.device:
        own.__set__(tensor, value)
        return
    moved = value.detach()
    if isinstance(tensor, torch.nn.Parameter):
        moved = torch.nn.Parameter(moved, tensor.requires_grad)
    attributes = dict(tensor.__dict__)
    torch.utils.swap_tensors(tensor, moved)
    tensor.__dict__.update(attributes)


def _register_fsdp_operators() -> None:
    """Gives the device FSDP2's copies: torch 2.7 has them for kinds of devices by name."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as own

    for name in ("all_gather_copy_in", "split_with_sizes_copy", "chunk_cat"):
        for_cuda = getattr(own, f"{name}_cuda", None) or getattr(own, name)
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"fsdp::{name}", "PrivateUse1"):
            own.lib.impl(name, for_cuda, "PrivateUse1")


_kernels = torch.library.Library("aten", "IMPL")


def _histc(values: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
    """Counts integers too, as a GPU does: the CPU's kernel, which the device has else, does not."""
    inside = (values >= min) & (values <= max)
    index = ((values - min) * bins / (max - min)).long().clamp(0, bins - 1)
    return torch.zeros(bins, dtype=values.dtype, device=values.device).scatter_add_(
        0, index, inside.to(values.dtype)
    )


def held() -> int:
    """Returns the bytes that are allocated now."""
    return _device.held()


@contextlib.contextmanager
def limited_memory(more_bytes: int) -> Generator[None]:
    """Lets memory run out once that much more than now is allocated."""
    _device.set_limit(held() + more_bytes)
    try:
        yield
    finally:
        _device.set_limit(0)


@contextlib.contextmanager
def waits() -> Generator[Counter[str]]:
    """Counts where the host waits for the device: what it reads, and the function that asks."""
    found = Counter[str]()
    _device.on_wait(lambda kind: found.update([f"{kind} in {_caller()}"]))
    try:
        yield found
    finally:
        _device.on_wait(None)


def _caller() -> str:
    """Returns the innermost function on the stack that is not torch's, as `module.function`."""
    frame, own = sys._getframe(2), ("torch.", "contextlib", __name__)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(own):
        frame = frame.f_back
    return f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}"
