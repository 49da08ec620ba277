"""Stand-ins for packages that OpenRLHF imports beside its trainer, where they are not installed.

What times or checks an update on one device needs none of them. OpenRLHF's trainer class does not come without the
imports of its neighbours, though: Ray's actors, and vLLM's engines.
"""

import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

NOT_NEEDED = ("ray", "vllm", "aiohttp")


def missing(packages: Iterable[str]) -> list[str]:
    """Return those of the packages that are not installed."""
    return [package for package in packages if importlib.util.find_spec(package) is None]


@contextmanager
def stand_ins() -> Iterator[list[str]]:
    """Let packages of NOT_NEEDED be imported although they are not installed. Yields their names.

    Their contents raise ModuleNotFoundError when they are called. Afterwards the packages cannot be imported any more,
    as a lasting entry in `sys.modules` would tell other libraries that they are installed.
    """
    absent = missing(NOT_NEEDED)
    finder = _Finder(absent)
    sys.meta_path.insert(0, finder)
    try:
        yield absent
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, _StandIn)]:
            del sys.modules[name]


class _StandIn(types.ModuleType):
    """A module in which every name is there: a class that raises when it is called."""

    __path__: list[str] = []

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "remote":  # a decorator of classes, which runs at import
            return _leave_as_it_is
        package = self.__name__.split(".")[0]

        def refuse(*args, **kwargs):
            raise ModuleNotFoundError(f"{self.__name__}.{name} was called, and {package} is not installed")

        return type(name, (), {"__new__": refuse})


def _leave_as_it_is(*args, **kwargs):
    return args[0] if args else _leave_as_it_is


class _Finder:
    """Finds the packages that are absent, and all of their submodules."""

    def __init__(self, packages: list[str]) -> None:
        self.packages = packages

    def find_spec(self, name: str, path=None, target=None):
        if name.split(".")[0] in self.packages:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec) -> _StandIn:
        return _StandIn(spec.name)

    def exec_module(self, module) -> None:
        pass
