"""Count Table 5's six categories of inference-related words, and correlate their frequency with the reward."""

import re
from collections.abc import Sequence
from itertools import takewhile

import numpy
from simplemma import lemmatize

# A lemma in angle brackets stands for its inflected forms (nouns and verbs, as in the table). The rest is literal.
CATEGORIES = {
    "Analysis": ("<analyze>", "<consider>", "<look> at", "<check>", "<examine>"),
    "Statement": ("'s <statement>",),
    "Causal indicator": ("since", "because", "due to", "given that"),
    "Conclusion indicator": ("so", "thus", "hence", "as a result", "consequently", "therefore"),
    "Assumption": ("<assume>", "if ... then"),
    "Assertion": ("must be", "definite"),
}
_WORD = re.compile(r"'s\b|[^\W\d_]+|[.!?\n]")
_RESAMPLES = 400


def count(text: str) -> tuple[dict[str, int], int]:
    """Count the occurrences of each category in a response, and its words. Letter case is ignored."""
    tokens = _WORD.findall(text.lower().replace("\N{RIGHT SINGLE QUOTATION MARK}", "'"))
    is_word = [token not in ".!?\n" and token != "'s" for token in tokens]
    lemmas = [
        f"<{lemmatize(token, lang='en')}>" if word else token for token, word in zip(tokens, is_word, strict=True)
    ]
    counts = {
        name: sum(_occurrences(p.split(), tokens, lemmas) for p in patterns) for name, patterns in CATEGORIES.items()
    }
    return counts, sum(is_word)


def _occurrences(pattern: list[str], tokens: list[str], lemmas: list[str]) -> int:
    starts = range(len(tokens) - len(pattern) + 1)
    if "..." not in pattern:
        return sum(all(part in (tokens[i + j], lemmas[i + j]) for j, part in enumerate(pattern)) for i in starts)
    # The last word has to come before the sentence ends.
    first, last = pattern[0], pattern[-1]
    starts_of_first = (i for i, token in enumerate(tokens) if token == first)
    return sum(last in takewhile(lambda token: token not in ".!?\n", tokens[i + 1 :]) for i in starts_of_first)


def analyze(texts: Sequence[str], rewards: Sequence[float], prompts: Sequence[int]) -> dict[str, dict]:
    """Return how often each category occurs, and how its frequency correlates with the reward (Fig. 5).

    All are (B,). `prompts` has the number of each response's prompt, by which the intervals are clustered.

    Returns:
        For each category: `per_1000_words` over all responses; `responses`, the share of responses in which it occurs;
        `by_reward`, its frequency per 1000 words among the responses of each reward; `correlation`, Pearson's r of
        frequency and reward over responses; `low` and `high`, its 95% interval by resampling prompts. The last three
        are None where nothing varies. One prompt has no interval.
    """
    counted = [count(text) for text in texts]
    words = numpy.array([total for _, total in counted], dtype=float)
    reward, prompt = numpy.asarray(rewards, dtype=float), numpy.asarray(prompts)
    # Resample prompts, not responses, because the responses to one prompt are alike. One draw serves all categories.
    groups = [numpy.flatnonzero(prompt == p) for p in numpy.unique(prompt)]
    generator = numpy.random.default_rng(0)
    draws = [generator.integers(len(groups), size=len(groups)) for _ in range(_RESAMPLES if len(groups) > 1 else 0)]
    resampled = [numpy.concatenate([groups[i] for i in draw]) for draw in draws]
    results = {}
    for name in CATEGORIES:
        occurrences = numpy.array([counts[name] for counts, _ in counted], dtype=float)
        frequency = 1000 * occurrences / numpy.maximum(words, 1)

        def per_1000_words(chosen: numpy.ndarray, occurrences=occurrences) -> float:
            return float(1000 * occurrences[chosen].sum() / max(words[chosen].sum(), 1))

        correlations = [c for c in (_pearson(frequency[i], reward[i]) for i in resampled) if c is not None]
        low, high = (float(numpy.quantile(correlations, q)) if correlations else None for q in (0.025, 0.975))
        results[name] = {
            "per_1000_words": per_1000_words(words >= 0),
            "responses": float((occurrences > 0).mean()),
            "by_reward": {f"{value:g}": per_1000_words(reward == value) for value in numpy.unique(reward)},
            "correlation": _pearson(frequency, reward),
            "low": low,
            "high": high,
        }
    return results


def _pearson(x: numpy.ndarray, y: numpy.ndarray) -> float | None:
    return float(numpy.corrcoef(x, y)[0, 1]) if (x != x[0]).any() and (y != y[0]).any() else None
