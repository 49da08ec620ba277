"""The kinds of seams. Each finds out from source text alone whether its seam is where it was."""

import ast
import hashlib
import importlib.util
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Moved(Exception):
    """Says which seam is not where it was."""


class Module:
    """Reads the source of an installed module, without importing it or its parents.

    Raises:
        Moved: there is no such module.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        top, *inner = name.split(".")
        spec = importlib.util.find_spec(top)
        if spec is None or not spec.submodule_search_locations:
            raise Moved(f"{top} is not installed")
        path = Path(spec.submodule_search_locations[0]).joinpath(*inner)
        self.path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if not self.path.is_file():
            raise Moved(f"{name} is gone")

    @cached_property
    def text(self) -> str:
        """The module's source."""
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def lines(self) -> list[str]:
        """The module's lines."""
        return self.text.splitlines()

    @cached_property
    def tree(self) -> ast.Module:
        """The module's syntax tree."""
        return ast.parse(self.text)

    def find(self, name: str) -> ast.ClassDef | Function:
        """Return the class or function `name`, as in "Class.method".

        Raises:
            Moved: there is none.
        """
        body: list[ast.stmt] = self.tree.body
        for part in name.split("."):
            inner = [node for node in body if isinstance(node, (ast.ClassDef, Function)) and node.name == part]
            if not inner:
                raise Moved(f"{self.name}.{name} is gone")
            body = inner[-1].body
        return inner[-1]

    def find_function(self, name: str) -> Function:
        """Return the function `name`.

        Raises:
            Moved: there is none.
        """
        node = self.find(name)
        if not isinstance(node, Function):
            raise Moved(f"{self.name}.{name} is no function")
        return node

    def text_of(self, name: str) -> str:
        """Return the source of the class or function `name`, or of the whole module where it is empty.

        Raises:
            Moved: there is none.
        """
        if not name:
            return self.text
        node = self.find(name)
        return "\n".join(self.lines[node.lineno - 1 : node.end_lineno])


class Source:
    """Reads each module once."""

    def __init__(self) -> None:
        self._modules: dict[str, Module] = {}

    def __getitem__(self, name: str) -> Module:
        if name not in self._modules:
            self._modules[name] = Module(name)
        return self._modules[name]


@dataclass(frozen=True)
class Seam(ABC):
    """A name of upstream's that we lean on.

    Attributes:
        module: the module, as it is imported.
        name: the class or function in it, as in "Class.method". Empty for the whole module.
        expected: what is expected there.
        leans: what of ours leans on it, and how, after a colon.
    """

    module: str
    name: str
    expected: str
    leans: str

    @abstractmethod
    def check(self, source: Source) -> None:
        """Compare what is installed with what is expected.

        Raises:
            Moved: it differs. The message says in what.
        """

    def __str__(self) -> str:
        return ".".join(filter(None, (self.module, self.name)))


class Signature(Seam):
    """Expects the names of a function's parameters, in their order."""

    def check(self, source: Source) -> None:
        found = parameters(source[self.module].find_function(self.name))
        if found != self.expected:
            raise Moved(f"{self} takes ({found}), not ({self.expected})")


class Text(Seam):
    """Expects a text in the source. White space does not count."""

    def check(self, source: Source) -> None:
        if squeeze(self.expected) not in squeeze(source[self.module].text_of(self.name)):
            raise Moved(f"{self} no longer holds `{self.expected}`")


class Fields(Seam):
    """Expects the annotated fields of a class, in their order."""

    def check(self, source: Source) -> None:
        body = source[self.module].find(self.name).body
        found = [ast.unparse(node.target) for node in body if isinstance(node, ast.AnnAssign)]
        if found != self.expected.split():
            raise Moved(f"{self} has the fields ({' '.join(found)}), not ({self.expected})")


class Body(Seam):
    """Expects the digest of a function's body, which we restate, and a test of ours compares with ours.

    After a change there, change ours alike, and then the digest.
    """

    def check(self, source: Source) -> None:
        found = digest(source[self.module].find_function(self.name))
        if found != self.expected:
            raise Moved(f"{self} has another body ({found}, not {self.expected})")


def parameters(function: Function) -> str:
    """Return the names of a function's parameters, with `*` and `**` as Python writes them."""
    a = function.args
    names = [arg.arg for arg in a.posonlyargs + a.args]
    names += [f"*{a.vararg.arg}"] if a.vararg else ["*,"] if a.kwonlyargs else []
    return " ".join([*names, *(arg.arg for arg in a.kwonlyargs), *([f"**{a.kwarg.arg}"] if a.kwarg else [])])


def squeeze(text: str) -> str:
    """Return the text without white space."""
    return "".join(text.split())


def digest(function: Function) -> str:
    """Return a digest of a function's statements, which its comments, its docstring and its layout do not change."""
    statements = function.body[1:] if ast.get_docstring(function) else function.body
    return hashlib.sha256("\n".join(map(ast.unparse, statements)).encode()).hexdigest()[:16]
