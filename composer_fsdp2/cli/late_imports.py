"""Imports packages late: when something in them is used, not when their names are imported.

LLM Foundry, Composer and torchmetrics import mlflow, scikit-learn, SciPy, matplotlib and others at
their first line, whether the run needs them or not. That is most of the time `doctor` takes.

[Note: late imports] Inside `late_imports()` an import of a listed package finds the package on
disk and gives an empty module in place of it. A name taken from that module stands for the real
one: calling it, taking it as a base class or asking `isinstance` imports the package first, the
way `lazy import` of PEP 810 does. After the block every import is an ordinary one again. A
package that is missing is found as ever; one that is there but broken is not, which is why
`doctor --verbose` does without.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, Union  # pyright: ignore[reportDeprecated]

__all__ = ["LATE", "late_imports"]

LATE = (
    "boto3",
    "databricks",
    "datasets",
    "git",
    "matplotlib",
    "mcli",
    "mlflow",
    "pandas",
    "paramiko",
    "scipy",
    "sklearn",
    "streaming.vision",
    "torchao",
    "torchmetrics.utilities.plot",
    "torchvision",
)
"""packages that are imported for every run and used by few"""


@contextmanager
def late_imports(packages: Sequence[str] = LATE) -> Generator[None]:
    """Imports `packages` late for the duration of a block; see [Note: late imports].

    Packages that are imported already stay as they are.
    """
    finder = _Finder({name for name in packages if name not in sys.modules})
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        finder.end()
        sys.meta_path.remove(finder)


class _Finder(Loader, MetaPathFinder):
    """Finds modules of the listed packages, and gives late ones in their place."""

    def __init__(self, packages: set[str]) -> None:
        self._packages = packages

    def package_of(self, name: str) -> str | None:
        """Returns the listed package that a module belongs to, unless it has been imported."""
        found = (one for one in self._packages if name == one or name.startswith(f"{one}."))
        return next(found, None)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the specification of a late module; `None` leaves it to the next finder."""
        if self.package_of(name) is None:
            return None
        real = PathFinder.find_spec(name, path, target)
        if real is None:
            return None
        spec = ModuleSpec(name, self, origin=real.origin)
        spec.submodule_search_locations = real.submodule_search_locations
        spec.has_location = real.has_location
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Returns a module that imports the real one when that is needed."""
        return _LateModule(spec.name, self)

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing: that is the point."""

    def release(self, name: str) -> None:
        """Makes the next import of a module an ordinary one, and of all in its package."""
        package = self.package_of(name)
        if package is None:
            return
        self._packages.discard(package)
        for other, module in list(sys.modules.items()):
            if isinstance(module, _LateModule) and (other + ".").startswith(f"{package}."):
                del sys.modules[other]

    def end(self) -> None:
        """Makes every import an ordinary one."""
        for package in list(self._packages):
            self.release(package)


class _LateModule(ModuleType):
    """A module that has not been imported yet."""

    def __init__(self, name: str, finder: _Finder) -> None:
        super().__init__(name)
        self.__dict__["_finder"] = finder

    def real(self) -> ModuleType:
        """Imports it."""
        self.__dict__["_finder"].release(self.__name__)
        return importlib.import_module(self.__name__)

    def __getattr__(self, name: str) -> Any:
        if name in ("__version__", "__all__"):
            return getattr(self.real(), name)
        if name.startswith("__"):
            # `inspect` asks every module for its file; none of that is a use.
            raise AttributeError(name)
        if self.__dict__["_finder"].package_of(self.__name__) is None:
            return _take(self.real(), name)
        return _LateName(self, name)


def _take(owner: Any, name: str) -> Any:
    """Returns an attribute; one of a module may be a module that nobody has imported."""
    if isinstance(owner, ModuleType) and not hasattr(owner, name):
        try:
            return importlib.import_module(f"{owner.__name__}.{name}")
        except ModuleNotFoundError:
            pass  # the next line says it as Python does
    return getattr(owner, name)


class _LateName:
    """A name in a late module, or in another late name. Any use imports what it is from."""

    def __init__(self, owner: _LateModule | _LateName, name: str) -> None:
        self._owner = owner
        self._name = name

    def real(self) -> Any:
        """Returns what the name stands for."""
        return _take(self._owner.real(), self._name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _LateName(self, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.real()(*args, **kwargs)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self.real(),)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, self.real())

    def __subclasscheck__(self, subclass: type) -> bool:
        return issubclass(subclass, self.real())

    def __getitem__(self, item: Any) -> Any:
        return self.real()[item]

    def __iter__(self) -> Any:
        return iter(self.real())

    def __bool__(self) -> bool:
        return bool(self.real())

    # As part of an annotation a name is not used.
    def __or__(self, other: Any) -> Any:
        return Union[self, other]  # noqa: UP007  # pyright: ignore[reportDeprecated]

    def __ror__(self, other: Any) -> Any:
        return Union[other, self]  # noqa: UP007  # pyright: ignore[reportDeprecated]
