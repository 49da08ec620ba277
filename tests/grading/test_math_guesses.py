r"""An answer that lists guesses is wrong, however it joins them, and one that is right is so in each of its frames."""

from fractions import Fraction

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from arlopti_openrlhf.grading.math_reward import grade

# ruff: noqa: E501, UP031
# Relations, words, commas, arrows and what else may stand between two values.
JOINERS = r"""
 = | \approx | \equiv | \simeq | \cong | \sim | \triangleq | := | == | ~= | \overset{?}{=} | \stackrel{!}{=} | = x = | = f(1) =
 = \text{total} = | , | ; | \text{ or } | \text{ and } | \text{, or equivalently } | \text{ i.e. } | \text{ vs } | \text{ = }
 \implies | \Rightarrow | \iff | \to | \therefore | \leftrightarrow | \propto | \lor | \vee | \pm | \ne | < | \le | \cup | \quad
 / | \mid | \cdots | : | or | and | & | \\ | → | ,\; | ,\quad
""".replace("\n", "|")
JOINERS = sorted({joiner.strip() for joiner in JOINERS.split("|")} - {""})
# Values are written in these ways, with v for an integer and w for its neighbour below.
INTEGERS = [
    "{v}", "|{v}|", "{v}.0", r"\frac{{{twice}}}{{2}}", "{w}+1", r"\lfloor {v}.5 \rfloor", r"{v}^\circ", r"\text{{{v}}}",
    r"\mathbf{{{v}}}", r"\max({w},{v})", r"\binom{{{v}}}{{1}}", r"{v}\text{{ cm}}", r"\${v}", "({v})", r"{v}\cos(0)",
    r"\sqrt{{{square}}}", r"{v}\%",
]  # fmt: skip
AROUND = [
    "%s", "x = %s", "= %s", r"\{%s\}", "(%s)", "[%s]", r"x \in \{%s\}", r"\text{answer: } %s", r"\textbf{%s}", r"\boxed{%s}",
    r"\begin{cases} %s \end{cases}", r"\begin{pmatrix} %s \end{pmatrix}", r"%s \pmod{7}", r"%s \text{ cm}", "f(x) = %s",
]  # fmt: skip
FRAMES = [
    r"\boxed{%s}",
    r"So it is $\boxed{%s}$.",
    "The answer is $%s$.",
    "<answer>%s</answer>",
    "**%s**",
    "So it is **%s**",
    r"\[ %s \]",
]
BETWEEN_BOXES = [", ", "; ", " or ", " and ", " = ", r" \approx ", "$, $", "$ or $", "$ and $", r" \text{ or } ", " "]


pytestmark = pytest.mark.usefixtures("patient")


def as_latex(value: Fraction) -> str:
    return str(value) if value.denominator == 1 else f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


@st.composite
def written(draw, value):
    if value.denominator == 1:
        v = int(value)
        form = draw(st.sampled_from(INTEGERS))
        return form.format(v=v, w=v - 1, twice=2 * v, square=v * v)
    return draw(st.sampled_from([as_latex(value), str(value), f"{value.numerator}:{value.denominator}"]))


@st.composite
def guesses(draw):
    """Return a label and a response with its value and two others or more, each at 2% from it or farther."""
    values = st.one_of(
        st.integers(1, 200).map(Fraction), st.fractions(Fraction(1, 9), 60, max_denominator=9).filter(bool)
    )
    value = draw(values)
    others = draw(st.lists(values, min_size=2, max_size=5, unique=True))
    assume(all(abs(other - value) > value / 50 for other in others))
    guessed = draw(st.permutations([value, *others]))
    texts = [draw(written(guess)) for guess in guessed]
    if draw(st.integers(0, 4)) == 0:
        return as_latex(value), "$%s$" % draw(st.sampled_from(BETWEEN_BOXES)).join("\\boxed{%s}" % x for x in texts)
    joiners = st.sampled_from(JOINERS)
    one = draw(joiners)
    is_mixed = draw(st.booleans())
    answer = texts[0]
    for text in texts[1:]:
        answer += f" {draw(joiners) if is_mixed else one} {text}"
    return as_latex(value), draw(st.sampled_from(FRAMES)) % (draw(st.sampled_from(AROUND)) % answer)


@settings(max_examples=settings().max_examples, suppress_health_check=list(HealthCheck))
@given(guesses())
def test_an_answer_that_lists_guesses_is_wrong(drawn):
    label, response = drawn
    assert grade(response, label).score == 0


@settings(max_examples=settings().max_examples // 4, suppress_health_check=list(HealthCheck))
@given(
    st.integers(-300, 300), st.integers(1, 12), st.sampled_from(["%s", "x = %s", r"%s\text{ cm}", "n = 2 - 2 + %s"])
)
def test_a_right_answer_is_right_in_each_frame(numerator, denominator, around):
    label = as_latex(Fraction(numerator, denominator))
    for frame in [*FRAMES, "The answer is **%s**.", "Answer:%s", "**Answer:** $%s$", "答案：%s", "It is\n\n$$%s$$"]:
        assert grade(frame % (around % label), label).score == 1, frame


@pytest.mark.parametrize(
    "response",
    [
        "<answer>42</answer>", "<think>1 or 2</think><answer> $42$ </answer>", "**42**", "The answer is **42**.",
        "**The answer is 42**", "**Answer:** 42", "Final answer: **42**", "Answer:42", "Answer:42.", "The answer is \\$42",
        "\\textbf{42}", "The answer is \\textbf{42}.", "答案：42", "答案是42。", "The answer is `42`.", "#### 42", "So\n\n42",
        "Put it into \\boxed{}. The answer is 42.", "It is \\boxed{42}, in \\boxed{}.", "\\boxed{42}\n\n\\boxed{42}",
        "The answer is \\(x = 42\\)", "So\n\n\\[x = 42\\]",
        "So **42**", "Thus the result is **42**.", "So ***42***", "It is\n* the result, **42.**", "So it is **x = 42**",
        "\\boxed{41}\n\nNo: \\boxed{42}", "x = \\boxed{42} = \\boxed{42}", "\\boxed{42} and \\boxed{\\text{ }}",
    ],
)  # fmt: skip
def test_frames_of_a_right_answer(response):
    assert grade(response, "42").score == 1
    assert grade(response, "41").score == 0


@pytest.mark.parametrize(
    "label, response",
    [
        ("1", "The answer is 1⁄2."), ("1", "1⁄2"), ("2", "The answer is 2^{10}."), ("2", "It is 2^{10}"), ("5", "5!"),
        ("5", "The answer is 5!"), ("12", "The answer is 12\u00a0345."), ("12", "12\u202f345"), ("1", "The answer is 1 or 2."),
        ("2", "The answer is 1, 2, or 3."), ("1", "The answer is 1 OR 2."), ("3", "\\boxed{1}, \\boxed{2} and \\boxed{3}"), ("5", "\\boxed{\\phantom{5}}"),
        ("3", "Thus the result is **-3**"), ("2", "Thus **Step 2**"), ("2", "So **2**3**"), ("2", "It is x**2"), ("3", "a\n* 3 b"),
        ("43", "So 42 or **43**"), ("43", "So **42**, **43**"), ("43", "Either $x$ or **43**"), ("3", "So x + **3**"),
        ("17", "\\boxed{17 \\cdot 1.0^{99} = 42}"), ("42", "\\boxed{17 \\cdot 1.0^{99} = 42}"), ("4", "The answer is $3 \\times 1.0^{99} = 4$."),
        ("3", "$\\boxed{1} = \\boxed{2} = \\boxed{3}$"), ("3", "\\boxed{\\boxed{1}, \\boxed{3}}"),
    ],
)  # fmt: skip
def test_responses_that_hold_the_label_and_are_wrong(label, response):
    assert grade(response, label).score == 0


def test_boxes_of_one_list():
    assert grade("\\boxed{2} and \\boxed{3}", "2, 3").score == 1
    assert grade("$\\boxed{3}$, $\\boxed{2}$", "2, 3").score == 1
    assert not grade("\\boxed{}", "42").boxed and not grade("\\boxed{ \\phantom{4} }", "42").boxed
