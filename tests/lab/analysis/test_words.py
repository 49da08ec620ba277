"""Table 5's words count in their inflected forms, and their frequency is correlated with the reward."""

import pytest

from arlopti_openrlhf.lab.analysis import words


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Let us analyze it. Analyzing, she analyzed; he ANALYZES.", {"Analysis": 4}),
        ("Look at this; he looked at that, looks at me, and looks away.", {"Analysis": 3}),
        ("We consider, check and examine; considered, checked, examined.", {"Analysis": 6}),
        ("Zoey's statement and Liam\N{RIGHT SINGLE QUOTATION MARK}s statements", {"Statement": 2}),
        ("the statement of Zoey", {}),
        ("Since it is due to them, because, given that", {"Causal indicator": 4}),
        ("they give that away", {}),  # only nouns and verbs of the table are inflected, and `given that` is neither
        ("So, thus; hence. As a result, consequently, therefore", {"Conclusion indicator": 6}),
        ("also, some sofa", {}),  # whole words only
        ("Assume so. Assumed, assuming, assumes", {"Assumption": 4, "Conclusion indicator": 1}),
        ("If Zoey is a knight, then Liam lies.", {"Assumption": 1}),
        ("If Zoey is a knight. Then Liam lies.", {}),  # another sentence
        ("It must be so: must   be definite.", {"Assertion": 3, "Conclusion indicator": 1}),
        ("", {}),
    ],
)
def test_count(text, expected):
    counts, _ = words.count(text)
    assert {name: number for name, number in counts.items() if number} == expected


def test_count_of_words():
    assert words.count("Zoey's statement: it's (1) Zoey is a knight")[1] == 7


def test_frequency_and_correlation():
    # Frequencies per 1000 words: 500, 500, 0, 0, against rewards 3, 3, -1, -1: a correlation of exactly 1.
    texts = ["so yes", "so no", "well then", "well now"] * 5
    result = words.analyze(texts, [3.0, 3.0, -1.0, -1.0] * 5, [i // 4 for i in range(20)])["Conclusion indicator"]
    assert result["per_1000_words"] == 250 and result["responses"] == 0.5
    assert result["by_reward"] == {"-1": 0.0, "3": 500.0}
    assert result["correlation"] == pytest.approx(1) and result["low"] == pytest.approx(1)


def test_correlation_is_none_where_nothing_varies():
    result = words.analyze(["so", "so"], [1.0, 1.0], [0, 1])["Conclusion indicator"]
    assert (result["correlation"], result["low"], result["high"]) == (None, None, None)
    tenths = words.analyze(["so", "yes", "so"], [0.1] * 3, [0, 1, 2])["Conclusion indicator"]  # whose mean is rounded
    assert tenths["correlation"] is None


def test_one_prompt_has_no_interval():
    result = words.analyze(["so yes", "well"], [3.0, -1.0], [0, 0])["Conclusion indicator"]
    assert result["correlation"] == pytest.approx(1) and (result["low"], result["high"]) == (None, None)
