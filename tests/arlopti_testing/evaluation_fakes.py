"""Make what the tests of the evaluation share: problems, and an engine that answers them without vLLM."""

from types import SimpleNamespace


def problems() -> list[dict]:
    sums = [{"prompt": f"{i} + {i} = ", "label": str(2 * i), "datasource": "sums"} for i in range(6)]
    label = "(1) Zoey is a knight\n(2) Liam is a knave"
    puzzle = [{"role": "user", "content": "puzzle"}]
    return sums + [{"prompt": puzzle, "label": label, "datasource": "kk_2ppl"} for _ in range(4)]


def engine_that_knows(asked):
    """Return a stand-in for vLLM that answers every sum rightly and lists what it was asked."""

    def engine(model, settings):
        def answer(rows, jobs):
            asked.extend(jobs)
            for job in jobs:
                text = f"\\boxed{{{rows[job.row]['label']}}}"
                output = SimpleNamespace(text=text, token_ids=[1, 2, 3], finish_reason="stop")
                yield job, "prompt", [output] * job.n

        return answer

    return engine
