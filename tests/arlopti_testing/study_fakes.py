"""Make what the tests of the study share: the log and the result of a run that nobody trained."""

from study import runs
from study.summary import MEASURES, Scalars, summarize


def of_name(name: str) -> runs.Run:
    return next(r for r in (*runs.STUDY, *runs.FAMILY) if r.name == name)


def scalars(reward=(1.0, 1.0, 2.0, 2.0), **more) -> Scalars:
    """Return what a run logs, with accuracies 0.25 before and 0.5 after, and `more`."""
    found = {"train/rollout/reward_mean": reward, "train/rollout/response_length_mean": [30.0] * len(reward)}
    found |= {f"train/timing/{name}": [9.0, 1.0, 2.0, 3.0] for name in ("step_total", "generation", "ppo_train")}
    found |= more or {"train/actor_grad_norm": [0.5, 1.5, 0.5, 0.5]}
    for people in runs.PEOPLE:
        names = [f"kk_{people}ppl/{measure}" for measure in MEASURES] + [f"kk_{people}ppl_greedy/accuracy"]
        for name in names:
            found |= {f"eval/{name}": [0.25, 0.5], f"eval/{name}/low": [0.2, 0.4], f"eval/{name}/high": [0.3, 0.6]}
    return {name: dict(enumerate(values)) for name, values in found.items()}


def result(of: runs.Run, accuracy: float = 0.5) -> dict:
    made = summarize(of, scalars())
    for source in made["after"].values():
        source["accuracy"] = [accuracy, accuracy - 0.03, accuracy + 0.03]
    return made | {
        "seconds": {"run": 120.0, "warm_start": 60.0, "step": 2.0, "generation": 1.0, "update": 0.5},
        "machine": {"cpu": "some CPU", "cores": 2, "parallel": 1},
        "warm_start_sha256": "a",
        "commit": "c",
    }
