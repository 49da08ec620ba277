"""Small tools for changing other packages' objects and classes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# The base of a class that is put before one of upstream's (`bindings`), which is the next base then.
Upstream: Any = object


@contextmanager
def replaced_attribute(instance: object, name: str, value: object) -> Iterator[None]:
    """Put `value` in place of an instance's attribute or method while the context lasts."""
    own = {name: vars(instance)[name]} if name in vars(instance) else {}
    setattr(instance, name, value)
    try:
        yield
    finally:
        vars(instance).pop(name)
        vars(instance).update(own)


def plain_class(actor_class: Any) -> Any:
    """Return the class behind a Ray actor class, to derive from. Ray itself refuses to be derived from."""
    return actor_class.__ray_metadata__.modified_class.__ray_actor_class__
