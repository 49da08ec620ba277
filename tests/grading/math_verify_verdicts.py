"""Print what math-verify itself says of pairs of label and answer, as JSON. Its time limit needs a main thread."""

import json
import sys

from math_verify import parse, verify


def is_right(label: str, answer: str) -> bool:
    """Return whether math-verify, as its page has it, takes a boxed answer for a label."""
    try:
        return bool(verify(parse(label if "$" in label else f"${label}$"), parse(f"\\boxed{{{answer}}}")))
    except Exception:  # it raises on some labels
        return False


if __name__ == "__main__":
    print(json.dumps([is_right(*pair) for pair in json.load(sys.stdin)]))
