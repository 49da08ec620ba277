"""Read the scalars that a training run wrote to TensorBoard."""

from pathlib import Path

Series = dict[int, float]  # step: value, in the order of the steps


def find_log(folder: str | Path) -> Path:
    """Return the one folder at or below `folder` that holds TensorBoard events.

    Raises:
        ValueError: there is none, or there are several.
    """
    logs = sorted({file.parent for file in Path(folder).rglob("events.out.tfevents.*")})
    if not logs:
        raise ValueError(f"{folder}: no TensorBoard log (events.out.tfevents.*) in it or below")
    if len(logs) > 1:
        raise ValueError(f"{folder}: several TensorBoard logs, name one: {', '.join(map(str, logs))}")
    return logs[0]


def read_scalars(folder: str | Path) -> dict[str, Series]:
    """Return every scalar of the run logged in `folder` or below, by name.

    Where a step was logged twice, as after a resume, the later value counts.

    Raises:
        ValueError: there is no log, or there are several.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # By default TensorBoard keeps a sample of 10,000 steps; 0 keeps all.
    events = EventAccumulator(str(find_log(folder)), size_guidance={"scalars": 0})
    events.Reload()
    return {name: {e.step: e.value for e in events.Scalars(name)} for name in events.Tags()["scalars"]}
