"""The kinds of entries. Each compares a module's source alone with what is expected there.

An entry is `(kind, module, name, expected, who)`:

- kind: `signature` where we call or override a function, `text` where we count on statements, `fields` where we count
  on a class's fields, `body` where we restate a function, its parameters included.
- module, name: the function or class, as in "Class.method". An empty name is the whole module.
- expected: what the kind says. "…" stands for anything.
- who: what of ours depends on it, as `module.Class.method` without the package's name, and after a colon how.
"""

import ast
import functools

from arlopti_openrlhf.upstream import Function, digest, find

parsed = functools.cache(ast.parse)


def signature(source: str, name: str, expected: str) -> None:
    """Expects the names of a function's parameters, in their order. " …" at the end stands for any with defaults."""
    function = find_function(source, name)
    found = parameters(function).split()
    if expected.endswith(" …"):
        needed = len(found) - len(function.args.defaults)
        found[max(needed, len(expected.split()) - 1) :] = "…"
    assert found == expected.split(), f"takes ({' '.join(found)}), not ({expected})"


def text(source: str, name: str, expected: str) -> None:
    """Expects each of the texts between " … " in the source, in any order. White space does not count."""
    if name:
        node = find_node(source, name)
        source = "\n".join(source.splitlines()[node.lineno - 1 : node.end_lineno])
    for part in expected.split(" … "):
        assert squeeze(part) in squeeze(source), f"no longer holds `{part}`"


def fields(source: str, name: str, expected: str) -> None:
    """Expects the annotated fields of a class, in their order."""
    found = [ast.unparse(node.target) for node in find_node(source, name).body if isinstance(node, ast.AnnAssign)]
    assert found == expected.split(), f"has the fields ({' '.join(found)}), not ({expected})"


def body(source: str, name: str, expected: str) -> None:
    """Expects the digest of a function. After a change there, change ours alike, and then the digest."""
    found = digest(source, find_function(source, name))
    assert found == expected, f"is another function ({found}, not {expected})"


def find_node(source: str, name: str) -> ast.ClassDef | Function:
    node = find(parsed(source), name)
    assert node, "is gone"
    return node


def find_function(source: str, name: str) -> Function:
    node = find_node(source, name)
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
