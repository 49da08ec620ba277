"""The kinds of entries. Each compares source text alone with what is expected there.

An entry is `(kind, module, name, expected, who)`:

- kind: `signature` where we call or override a function, `text` where we count on a statement, `fields` where we count
  on a class's fields, `body` where we restate a function.
- module, name: the function or class, as in "Class.method". An empty name is the whole module.
- who: what of ours depends on it, as `module.Class.method` without the package's name, and after a colon how.
"""

import ast
import functools

from arlopti_openrlhf.ops.preflight.upstream import Function, digest, find, find_source


def signature(module: str, name: str, expected: str) -> None:
    """Expects the names of a function's parameters, in their order."""
    found = parameters(find_function(module, name))
    assert found == expected, f"takes ({found}), not ({expected})"


def text(module: str, name: str, expected: str) -> None:
    """Expects a text in the source. White space does not count."""
    source = find_source(module).read_text("utf-8")
    if name:
        node = find_node(module, name)
        source = "\n".join(source.splitlines()[node.lineno - 1 : node.end_lineno])
    assert squeeze(expected) in squeeze(source), f"no longer holds `{expected}`"


def fields(module: str, name: str, expected: str) -> None:
    """Expects the annotated fields of a class, in their order."""
    found = [ast.unparse(node.target) for node in find_node(module, name).body if isinstance(node, ast.AnnAssign)]
    assert found == expected.split(), f"has the fields ({' '.join(found)}), not ({expected})"


def body(module: str, name: str, expected: str) -> None:
    """Expects the digest of a function's body. After a change there, change ours alike, and then the digest."""
    found = digest(find_function(module, name))
    assert found == expected, f"has another body ({found}, not {expected})"


@functools.cache
def parsed(module: str) -> ast.Module:
    return ast.parse(find_source(module).read_text("utf-8"))


def find_node(module: str, name: str) -> ast.ClassDef | Function:
    node = find(parsed(module), name)
    assert node, "is gone"
    return node


def find_function(module: str, name: str) -> Function:
    node = find_node(module, name)
    assert isinstance(node, Function), "is no function"
    return node


def parameters(function: Function) -> str:
    """Return the names of a function's parameters, with `*` and `**` as Python writes them."""
    a = function.args
    names = [arg.arg for arg in a.posonlyargs + a.args]
    names += [f"*{a.vararg.arg}"] if a.vararg else ["*,"] if a.kwonlyargs else []
    return " ".join([*names, *(arg.arg for arg in a.kwonlyargs), *([f"**{a.kwarg.arg}"] if a.kwarg else [])])


def squeeze(text: str) -> str:
    """Return the text without white space."""
    return "".join(text.split())
