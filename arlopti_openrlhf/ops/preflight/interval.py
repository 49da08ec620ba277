"""Reads ranges of numbers as flags and checks name them, with a bracket where the end belongs to it: "(0, 1]"."""


def contains(interval: str, value: float) -> bool:
    """Return whether the value is in the interval. NaN is in none."""
    low, high = (float(end) for end in interval[1:-1].split(","))
    is_above = value >= low if interval[0] == "[" else value > low
    is_below = value <= high if interval[-1] == "]" else value < high
    return is_above and is_below
