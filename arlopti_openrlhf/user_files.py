"""Loads the Python files that a user names: rewards, token methods, agents."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load(path: str | Path, name: str) -> ModuleType:
    """Run a file as the module `name`, and return it.

    `sys.modules` has it under that name. So `multiprocessing` can pickle its functions for processes that it forks.

    Raises:
        FileNotFoundError, and whatever the file raises.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no such file: {path}")
    find_modules_beside(path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader  # the path ends in .py
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def find_modules_beside(path: str | Path) -> None:
    """Let this process find modules in the file's folder, too, after all other places. So they hide no package.

    Files of this package import one another by their whole names.
    """
    folder = Path(path).absolute().parent
    if str(folder) not in sys.path and not folder.is_relative_to(Path(__file__).parent):
        sys.path.append(str(folder))
