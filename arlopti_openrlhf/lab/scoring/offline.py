"""Evaluate a model with vLLM offline: answer every problem, grade the answers, estimate every measure by source.

Responses are written as they come, so an evaluation that was interrupted continues where it stopped.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from arlopti_openrlhf import cpu
from arlopti_openrlhf.evaluation.measures import Response, estimate_source
from arlopti_openrlhf.evaluation.sampling import Sampling, samplings_of
from arlopti_openrlhf.grading import sources
from arlopti_openrlhf.grading.reward_answers import Grade
from arlopti_openrlhf.lab.scoring.inputs import Row, encode, natural_key
from arlopti_openrlhf.lab.scoring.own_reward import OwnReward
from arlopti_openrlhf.lab.scoring.waiting import quiet

_CHUNK = 4096  # responses that are generated before they are written


class ScoringSettings(NamedTuple):
    """How every model is asked."""

    sampling: Sequence[Sampling]  # a default, then those that were given: the last pattern that matches counts
    greedy: bool  # whether every problem is also answered once at temperature 0
    max_new_tokens: int
    seed: int
    template: Mapping[str, Any] = {}  # arguments of the chat template


class Job(NamedTuple):
    """One problem to answer, and how."""

    row: int
    n: int  # responses
    temperature: float


def evaluate(
    name: str, model: str, rows: Sequence[Row], settings: ScoringSettings, out: Path, reward: OwnReward | None = None
) -> None:
    """Answer and grade every row that `arlopti data` wrote, with the model of that name.

    The folder gets NAME.responses.jsonl, with every response, and NAME.json, with the measures. Without a reward, the
    rule of each row's source grades.
    """
    # One job per row, and one more where a greedy answer is asked for in addition to the samples.
    path = out / f"{name}.responses.jsonl"
    jobs = []
    for i, row in enumerate(rows):
        ways = samplings_of(row["datasource"], settings.sampling)
        jobs += [Job(i, way.n, way.temperature) for way in ways]
        if settings.greedy and all(way.temperature for way in ways):
            jobs.append(Job(i, 1, 0.0))
    version = [version_of(model), settings.max_new_tokens, settings.seed, dict(settings.template)]
    version += [reward.version if reward else None]
    keys = {job: _key(rows[job.row], job, version) for job in jobs}

    # What an earlier run with the same model and settings has answered is kept.
    done = {record["key"]: record for record in kept_records(path)}
    open_jobs = [job for job in jobs if keys[job] not in done]
    if done:
        print(f"{name}: {len(jobs) - len(open_jobs)} of {len(jobs)} problems are answered already", flush=True)
    # Generate in chunks. Every chunk is graded and written before the next one begins.
    with quiet():
        engine = load_engine(model, settings.seed) if open_jobs else None
        while open_jobs:
            totals = accumulate(job.n for job in open_jobs)
            size = next((i for i, total in enumerate(totals, start=1) if total >= _CHUNK), len(open_jobs))
            chunk, open_jobs = open_jobs[:size], open_jobs[size:]
            prompts = [rows[job.row]["prompt"] for job in chunk]
            asked = [(job.n, job.temperature) for job in chunk]
            answered = generate(engine, prompts, asked, settings.max_new_tokens, bool(reward), settings.template)
            texts = [(prompt, [response.text for response in output.outputs]) for prompt, output in answered]
            grades = grade_all([rows[job.row] for job in chunk], texts, reward)
            with open(path, "a", encoding="utf-8") as file:
                for job, (prompt, output), graded in zip(chunk, answered, grades, strict=True):
                    record = _record(rows[job.row], job, prompt, output.outputs, graded) | {"key": keys[job]}
                    done[record["key"]] = record
                    file.write(json.dumps(record, ensure_ascii=False, default=str) + "\n")
        del engine  # whose end is logged too

    # The measures are those of all jobs, answered now or earlier.
    records = [(job, done[keys[job]]) for job in jobs]
    measured = {"model": model, "sources": _estimates(records, settings)}
    (out / f"{name}.json").write_text(json.dumps(measured, indent=1) + "\n", "utf-8")


def _estimates(records: Sequence[tuple[Job, dict]], settings: ScoringSettings) -> dict[str, dict]:
    """Return the measures by source. Ways of sampling it after the first have their own, as `SOURCE@n=N,t=T`."""
    groups: dict[tuple[str, int, float], dict[tuple[str, str], list]] = defaultdict(lambda: defaultdict(list))
    without_scores = set()
    for job, record in records:
        source = record["datasource"]
        groups[source, job.n, job.temperature][record["prompt"], str(record["label"])].append(responses_of(record))
        without_scores |= {source} if record.get("scores_are_rewards") else set()
    result: dict[str, dict] = {}
    for source in sorted({source for source, *_ in groups}, key=natural_key):
        ways = samplings_of(source, settings.sampling)
        for way in ways:
            sampled = groups[source, way.n, way.temperature]
            key = f"{source}@n={way.n},t={way.temperature:g}" if source in result else source
            result[key] = {"n": len(sampled), "samples": way.n, "temperature": way.temperature}
            measures = estimate_source(sampled)
            if source in without_scores:  # rewards do not say what is right
                rest = {
                    name: e
                    for name, e in measures.items()
                    if name not in ("accuracy", "score") and not name.startswith("pass@")
                }
                measures = {"reward": next(iter(measures.values()))} | rest
            result[key] |= {name: e._asdict() for name, e in measures.items()}
        if settings.greedy and all(way.temperature for way in ways):
            result[source]["greedy"] = next(iter(estimate_source(groups[source, 1, 0.0]).values()))._asdict()
    return result


def grade_all(
    rows: Sequence[Row], answered: Sequence[tuple[str, Sequence[str]]], reward: OwnReward | None
) -> list[list[Grade]]:
    """Grade the responses to each row's prompt, which are given with its final text."""
    if reward is None:
        return [
            sources.grade(row["datasource"], prompt, texts, row["label"])
            for row, (prompt, texts) in zip(rows, answered, strict=True)
        ]
    samples = [
        (prompt + text, prompt, row["label"])
        for row, (prompt, texts) in zip(rows, answered, strict=True)
        for text in texts
    ]
    grades = iter(reward.grade(samples))
    return [[next(grades) for _ in texts] for _, texts in answered]


def _record(row: Row, job: Job, prompt: str, outputs: Sequence[Any], grades: Sequence[Grade]) -> dict:
    responses = []
    for output, result in zip(outputs, grades, strict=True):
        responses.append(
            {
                "text": output.text,
                "score": result.reward if result.score is None else result.score,
                "well_formed": result.well_formed,
                "tokens": len(output.token_ids),
                "truncated": output.finish_reason == "length",
            }
        )
    asked = {"datasource": row["datasource"], "prompt": prompt, "label": row["label"], "temperature": job.temperature}
    without_scores = {"scores_are_rewards": True} if any(grade.score is None for grade in grades) else {}
    return asked | without_scores | {"responses": responses}


def responses_of(record: dict) -> list[Response]:
    """Return the responses of one line of a NAME.responses.jsonl."""
    return [Response(r["score"], r["well_formed"], r["tokens"], r["truncated"]) for r in record["responses"]]


def kept_records(path: Path) -> list[dict]:
    """Return what an earlier run wrote. What it did not finish, or a power loss has spoilt, is cut off."""
    if not path.exists():
        return []
    lines, records = path.read_text(encoding="utf-8", errors="replace").split("\n"), []
    for line in lines[:-1]:
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    if lines[len(records) :] != [""]:
        path.write_text("".join(line + "\n" for line in lines[: len(records)]), encoding="utf-8")
    return records


def _key(row: Row, job: Job, version: list) -> str:
    """Return a hash of all that an answer depends on."""
    text = json.dumps([row["prompt"], row["label"], row["datasource"], *job, version], default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def version_of(model: str) -> list:
    """Return the model and, for a directory, sizes and times of its files: other weights there are another model."""
    files = sorted(Path(model).glob("*")) if Path(model).is_dir() else []
    return [model, [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]]


def load_engine(model: str, seed: int):
    """Return vLLM's `LLM` of `model`, a Hugging Face directory or name.

    An engine does not give back all the memory that it holds, so several models take a process each.
    """
    cpu.enable()  # which may say a line
    print(f"vLLM loads {model}, which usually takes up to a minute", flush=True)
    from vllm import LLM

    # Few CPUs have bf16 instructions, so float32 is the fast type there.
    dtype = "float32" if cpu.uses_cpu() else "auto"
    return LLM(model, seed=seed, enforce_eager=cpu.uses_cpu(), dtype=dtype, max_num_seqs=1024)


def generate(
    engine,
    prompts: Sequence[str | list[dict]],
    sampling: Sequence[tuple[int, float]],
    max_new_tokens: int,
    with_end: bool = False,
    template: Mapping[str, Any] | None = None,
) -> list[tuple[str, Any]]:
    """Return the final text of each prompt and vLLM's `RequestOutput`, in the order of the prompts.

    `sampling` has, for each prompt, the number of responses and their temperature. With `with_end` the text of a
    response has the token that ends it, as in what a training's reward gets. `template` has arguments of the chat
    template.
    """
    from vllm import SamplingParams

    texts, token_ids = encode(engine.get_tokenizer(), prompts, template)
    inputs = [{"prompt_token_ids": ids} for ids in token_ids]
    parameters = [
        SamplingParams(
            n=n,
            temperature=temperature,
            max_tokens=max_new_tokens,
            skip_special_tokens=False,
            include_stop_str_in_output=with_end,
        )
        for n, temperature in sampling
    ]
    return list(zip(texts, engine.generate(inputs, parameters), strict=True))
