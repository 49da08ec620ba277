r"""The math reward against the labels of the public sets' kinds, and against what keeps sympy busy."""

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from arlopti_openrlhf.grading import math_boxed_reward, math_reward
from arlopti_openrlhf.grading.math_reward import grade, last_box, reward_func
from arlopti_openrlhf.grading.runner import Died, TimedOut

PUBLISHED = Path(__file__).parents[3] / "shared" / "data" / "math"
REWARD_FILES = [math_reward.__file__, str(Path(__file__).parents[2] / "rewards" / "math_reward.py")]

HOSTILE = [
    "9^{9^{9^9}}",
    "9^{9^{9^{9^{9}}}} > 9^{9^{9^{9^{8}}}}",
    "\\sqrt{" * 400 + "2" + "}" * 400,
    "(" * 900 + "1" + ")" * 900,
    "{" * 1_000_000,
    "}" * 1_000_000,
    "\\boxed{" * 100_000,
    "\\frac{" * 300 + "1" + "}{2}" * 300,
    "\\sum_{k=1}^{10^{12}} \\frac{\\sin k}{k^3}",
    "\\int_0^{\\infty} \\frac{\\sin(x^{x^x})}{x^{x^x}} dx",
    "1000000!!!!",
    "10^{10^{10}}!",
    "x^{1000000} + (x+1)^{100000}",
    "\\begin{pmatrix}" + "1 & " * 400 + "1\\end{pmatrix}",
    "__import__('os').system('touch pwned')",
    "1" * 1_900,
    "\x00\ud800\u202e",
    "",
]


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    "label, answer",
    [
        (142.0, "142"),
        (-4.0, "-4"),
        (0.5, "\\frac{1}{2}"),
        (2, "2.0"),
        ("9.6\n", "9.6"),
        (["0.01\n", "0.02\n"], "0.02"),
    ],
)
def test_labels_of_the_public_sets_kinds(label, answer):
    assert grade(f"So it is \\boxed{{{answer}}}.", label) == (1.0, True, False)


def near_misses() -> list[tuple[str, str, str, str]]:
    """Return kind, verdict, label and answer of each row of the table."""
    lines = Path(__file__).with_name("near_misses.tsv").read_text("utf-8").splitlines()
    return [tuple(line.split("\t")) for line in lines[1:]]


@pytest.mark.long
@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("kind", sorted({kind for kind, *_ in near_misses()}))
def test_near_misses(kind):
    rows = [(verdict, label, answer) for found, verdict, label, answer in near_misses() if found == kind]
    with ThreadPoolExecutor(math_reward.WORKERS) as threads:
        grades = list(threads.map(lambda row: grade(f"\\boxed{{{row[2]}}}", row[1]), rows))
    due = [(float(verdict == "right"), False) for verdict, *_ in rows]
    assert not [row for row, g, score in zip(rows, grades, due, strict=True) if (g.score, g.timed_out) != score]
    assert {verdict for verdict, *_ in rows} == {"right", "wrong"}


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    "label, text",
    [
        ("15", "The answer is 15n."),
        ("15", "The answer is $15 n$."),
        ("3", "The answer is 2x + 3."),
        ("3", "So the answer is x + 3."),
        ("42 \\text{ mm}", "So the width is **42 cm**"),
        ("17", "The answer is 17 thousand."),
        ("17", "The answer is $17$ million."),
        ("8 \\text{ cm}", "The answer is $8 \\text{ mm}$."),
        ("101_2", "The answer is $101_3$."),
        ("\\frac{1}{3}", "The answer is $0.\\overline{4}$."),
        ("\\pi(R^2-r^2)", "The answer is $\\pi(r^2-R^2)$."),
    ],
)
def test_near_misses_without_a_box(label, text):
    assert grade(text, label) == (0.0, False, False)


@pytest.mark.usefixtures("patient")
def test_spellings_of_one_label():
    label = "\\frac{3}{56}"
    for text in ("\\boxed{%s}", "\\boxed{ %s }", "$\\boxed{%s}$", "\\[\\boxed{%s}\\]", "\\boxed{$%s$}", "\\fbox{%s}"):
        assert grade(text % label, label) == (1.0, True, False), text
    for text in ("The final answer is $%s$.", "**Answer:** \\(%s\\)", "Thus\n\\[ x = %s \\]"):
        assert grade(text % label, label) == (1.0, False, False), text
    for text in (label, f"${label}$", f"\\boxed{{{label}}}", f"$\\boxed{{{label}}}$", [label], [f"${label}$", "1"]):
        assert grade("\\boxed{3/56}", text).score == 1, text


@pytest.mark.parametrize(
    "text, content",
    [
        ("\\boxed{1} then \\boxed{2}", "2"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{\\boxed{5}}", "\\boxed{5}"),
        ("\\boxed{1} and \\boxed{2", "1"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("} \\boxed {3} {", "3"),
        ("no box", None),
        ("\\boxed{", ""),
        ("\\boxed 5", None),
    ],
)
def test_the_last_closed_box(text, content):
    assert last_box(text) == content


@pytest.mark.parametrize("piece", ["{", "}", "\\boxed{", "\\", "\\boxed{1} "])
def test_a_response_of_16_mib_is_graded_in_time(piece):
    math_reward.worker_pool().start()  # whose time does not count
    start = time.monotonic()
    assert grade("\\boxed{" + piece * (2**24 // len(piece)), "42").score == 0
    assert time.monotonic() - start < math_reward.TIMEOUT


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("label", "answer"),
    [
        ("Therefore, the answer is: 180.", "180"),
        ("The answer is 5", "5"),
        ("She sold 48/2 = 24 clips in May.\nShe sold 72 in all.\n#### 72", "72"),
        ("Answer: C", "C"),
        ("The cube root of 64 is $\\sqrt[3]{64}=4$. The difference is $8-4=\\boxed{4}$.", "4"),
        ("By symmetry, the answer is 24. We want half of it, i.e. \\boxed{12}.", "12"),
        ("Therefore, $\\boxed{14{,}916}$ is our answer.", "14916"),
        ("Each correct answer is worth 3 points, so 5*3=<<5*3=15>>15 points.\n#### 15", "15"),
        ("So the answer is 24 for now. Then come 3 more.\n#### 1,027", "1027"),
    ],
)
def test_a_label_that_is_a_whole_solution_is_its_final_answer(label, answer):
    """As data sets have them: open-r1 issue 628, GSM8K, MATH (lm-evaluation-harness issue 3643)."""
    assert grade(f"\\boxed{{{answer}}}", label).score == 1
    assert grade("\\boxed{24}", label).score == 0


def test_what_stands_between_two_boxes_takes_linear_time():
    start = time.monotonic()
    for piece in ("\n", " ", "$", "\\quad", ", "):
        assert grade(f"\\boxed{{5}}{piece * 50_000}no \\boxed{{6}}", "6").score == 1
    assert time.monotonic() - start < math_reward.TIMEOUT


@pytest.mark.usefixtures("patient")
def test_words_in_tags_or_announced_are_an_answer_as_in_a_box():
    for label in ("New York", "no solution", "3 hours 20 minutes", "San José"):
        assert all(grade(text % label, label).score for text in ("<answer>%s</answer>", "The answer is %s."))
    for said in ("(C) the mitochondria", "C: the mitochondria", "option C"):
        assert grade(f"The answer is {said}.", "C").score == 1
    for said, label in (("A or B", "A"), ("not C", "C"), ("New York or Boston", "New York"), ("C, or maybe B", "C")):
        assert grade(f"The answer is {said}.", label).score == 0


@pytest.mark.usefixtures("patient")
def test_units_of_other_languages():
    for unit in ("元", "个", "円", "рублей", "años", "pièces", "Äpfel"):
        assert grade(f"\\boxed{{5\\text{{ {unit}}}}}", "5").score == 1, unit
    for answer in ("5€", "€5", "£5", "\\pounds 5", "5 ₹"):
        assert grade(f"\\boxed{{{answer}}}", "5").score == 1, answer
    for number in ("万", "万元", "тысяч", "миллионов"):
        assert grade(f"\\boxed{{5\\text{{ {number}}}}}", "5").score == 0, number


@pytest.mark.usefixtures("patient")
def test_without_a_box_the_library_extracts():
    for text, label in (("答案是5。", "5"), ("The answer is \\$100.", "100"), ("<answer>C: 36</answer>", "C")):
        assert grade(text, label) == (1.0, False, False), text
    assert grade("The answer is -1 + sqrt(3).", "\\sqrt{3} - 1") == (1.0, False, False)
    assert grade("We get x = 3. The answer is 42.", "42") == (1.0, False, False)
    assert grade("The answer is 1/2", "0.5") == (1.0, False, False)
    for text in ("The final answer is $4.5e33$.", "Thus \\[ 4.5 \\times 10^{33} \\]", "So the answer is 4.5E+33."):
        assert grade(text, "4.5e33") == (1.0, False, False), text
    assert grade("I do not know.", "42") == (0.0, False, False)
    # A number is looked for beside a formula that does not parse, and not in it.
    assert grade("The answer is 10. $\\foo$", "10") == (1.0, False, False)
    assert grade("The answer is $10^{1000000}!\\left($", "10") == (0.0, False, False)
    assert grade("The answer is $42 \\text{ maybe}$.", "42") == (0.0, False, False)
    for end in ("<|im_end|>", "<|im_end|>\n", "<|endoftext|><|endoftext|>", "</s>", ".<|eot_id|>"):
        assert grade(f"The answer is 1/2{end}", "0.5") == (1.0, False, False), end
        assert grade(f"It is \\boxed{{1/2}}{end}", "0.5") == (1.0, True, False), end


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    "score, response",
    [
        (1, "<think>\\boxed{41}</think> So \\boxed{42}.<|im_end|>"),
        (1, "<think>so \\boxed{41}</think> The answer is 42."),
        (0, "<think>so \\boxed{42}</think> The answer is 41."),
        (0, "<think>so \\boxed{42}</think> I do not know."),
        (0, "so \\boxed{42}</think> The answer is 41."),  # the template began the thought
        (0, "<think>maybe \\boxed{42}, let me check again"),
        (0, "<think>a</think> hm <think>maybe \\boxed{42}"),
        (0, "so \\boxed{42}</think>\n<|im_end|>"),  # nothing follows the thought
        (0, "<think>so \\boxed{42}</think>"),
        (0, "It is 42, so \\boxed{42"),
        (1, "so \\boxed{42}"),
    ],
)
def test_thoughts_hold_no_answer(score, response):
    assert grade(response, "42").score == score


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("prefill", ["<think>", "<think>\n", "<think>\n\n</think>\n\n", "</think>", ""])
def test_a_thought_that_the_template_began_need_not_end(prefill):
    prompt = f"<|im_start|>assistant\n{prefill}"
    assert reward_func([f"{prompt}It is \\boxed{{42}}"], [prompt], ["42"])["rewards"].item() == 1


@pytest.mark.parametrize("label", [None, "", "  ", [], [""], True, {"a": 1}, '{"inputs": ["3\\n"]}', [["1"]]])
def test_a_label_that_is_none(label):
    with pytest.raises(ValueError, match="label"):
        grade("\\boxed{1}", label)


@pytest.mark.long
@pytest.mark.parametrize("form", ["\\boxed{%s}", "The answer is $%s$"])
def test_hostile_answers_are_wrong_in_bounded_time(form, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def score_and_seconds(answer):
        start = time.monotonic()
        return grade(form % answer, "42").score, time.monotonic() - start

    graded = {answer: score_and_seconds(answer) for answer in HOSTILE}  # one by one: none waits for another
    # Without a limit, they are busy for hours.
    bad = {answer[:20]: outcome for answer, outcome in graded.items() if outcome >= (0, math_reward.TIMEOUT + 8)}
    assert not bad and not list(tmp_path.iterdir())


@pytest.mark.long
def test_the_next_answer_after_a_hostile_one():
    math_reward._finished.cache_clear()
    hostile = "9^{9^{9^{9}}} + x^{1000000} (x+1)^{100000}"
    with ThreadPoolExecutor(16) as threads:
        grades = list(threads.map(grade, [f"\\boxed{{{hostile}}}", "\\boxed{1/2}"] * 4, ["y^{99999}", "0.5"] * 4))
    assert [g.score for g in grades] == [0.0, 1.0] * 4


def test_a_comparison_that_was_not_finished_is_made_again(monkeypatch):
    """The machine may have been slow. What is finished is compared once."""
    math_reward._finished.cache_clear()
    outcomes = iter([TimedOut, Died, True])

    class Pool:
        def call(self, *args):
            outcome = next(outcomes)
            if outcome is True:
                return True
            raise outcome

    monkeypatch.setattr(math_reward, "worker_pool", Pool)
    grades = [grade("\\boxed{1/2}", "0.5") for _ in range(4)]
    assert grades == [(0.0, True, True), (0.0, True, True), (1.0, True, False), (1.0, True, False)]
    math_reward._finished.cache_clear()


def test_openrlhfs_contract(tmp_path):
    """`SingleTurnAgentExecutor` loads a file by path and calls it in threads, here in a folder with our names."""
    folder = tmp_path / "working directory"
    for package in ("rewards", "math_verify", "arlopti_openrlhf"):
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").write_text("raise ImportError('the user's own')")
    script = tmp_path / "script.py"
    script.write_text(f"""
import asyncio, importlib.util

async def graded(path):
    spec = importlib.util.spec_from_file_location("reward_func", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    answers = [str(i) for i in range(8)]
    tasks = [asyncio.to_thread(module.reward_func, ["Q \\\\boxed{{%s}}" % a], ["Q "], ["3"]) for a in answers]
    return [r["rewards"].item() for r in await asyncio.gather(*tasks)]

print([asyncio.run(graded(path)) for path in {REWARD_FILES!r}])
""")
    result = subprocess.run([sys.executable, script], cwd=folder, capture_output=True, text=True, timeout=120)
    assert result.stdout.strip() == str([[0.0] * 3 + [1.0] + [0.0] * 4] * 2), result.stderr


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("label", "right", "wrong"),
    [
        ("Yes", ["<answer>Yes</answer>", "The answer is Yes.", "\\boxed{\\text{Yes}}"], ["<answer>No</answer>"]),
        ("True", ["<answer>True</answer>"], ["<answer>False</answer>", "<answer>not True</answer>"]),
        ("(C) 36", ["\\boxed{36}", "\\boxed{C}", "\\boxed{(C) 36}"], ["\\boxed{(A) 36}", "\\boxed{35}", "\\boxed{A}"]),
        (r"\textbf{(C) }\frac12", ["\\boxed{1/2}", "\\boxed{0.5}", "\\boxed{C}"], ["\\boxed{(B) 1/2}", "\\boxed{2}"]),
    ],
)
def test_words_in_tags_and_labels_with_the_letter_of_a_choice(label, right, wrong):
    assert [grade(response, label).score for response in right + wrong] == [1] * len(right) + [0] * len(wrong)


def test_batches():
    prompts = ["<|im_start|>user\nWrite \\boxed{8}<|im_end|>\n<|im_start|>assistant\n"] * 3
    result = reward_func(
        [p + a for p, a in zip(prompts, ("\\boxed{7}", "7", "none"), strict=True)], prompts, ["7"] * 3
    )
    for values, expected in (
        (result["rewards"], [1, 1, 0]),
        (result["scores"], [1, 1, 0]),
        (result["extra_logs"]["well_formed"], [1, 0, 0]),
        (result["extra_logs"]["timed_out"], [0, 0, 0]),
    ):
        assert torch.equal(values, torch.tensor(expected, dtype=torch.float32))
    with pytest.raises(ValueError, match="equally long"):
        reward_func(["a"], ["b"], [])


@pytest.mark.usefixtures("patient")
@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the published sets are not here")
@pytest.mark.parametrize("name", ["aime", "amc", "math500", "minerva", "olympiad_bench"])
def test_every_published_label_equals_itself(name):
    import pandas as pd

    labels = [row["ground_truth"] for row in pd.read_parquet(PUBLISHED / f"{name}.parquet")["reward_model"]]
    labels = [label.tolist() if hasattr(label, "tolist") else label for label in labels]

    def is_right(label) -> bool:
        text = str(label[0] if isinstance(label, list) else label).strip()
        bare = text.strip("$")
        responses = (f"\\boxed{{{text}}}", f"\\boxed{{{bare}}}", f"$\\boxed{{{bare}}}$.", f"\\boxed{{ {bare} }}")
        labels = (label, json.dumps(label)) if isinstance(label, list) else (label, str(label), f"${bare}$")
        return all(grade(response, form).score == 1 for response in responses for form in labels)

    with ThreadPoolExecutor(math_reward.WORKERS) as threads:
        wrong = [label for label, right in zip(labels, threads.map(is_right, labels), strict=True) if not right]
    assert not wrong


@pytest.mark.parametrize("label", [1.2345678901234568e22, -(2.0**53)])
def test_a_label_that_was_rounded_when_it_was_read(label):
    """No answer would be right. A smaller number, or a whole one, is exact."""
    with pytest.raises(ValueError, match="write it as text"):
        math_reward.label_text(label)
    assert math_reward.label_text(2.0**53 - 1) == "9007199254740991"
    assert math_reward.label_text(10**30) == "1" + "0" * 30


@pytest.mark.parametrize(
    "question, label, answer, score",
    [
        # What SmolLM2-135M-Instruct learned to say in 20 steps, when the question's own arithmetic earned the reward.
        ("Calculate 12 * 12.", "144", "To calculate 12 * 12, we need to isolate the product on one side of the", 0),
        ("Calculate 5 - 1.", "4", "To calculate 5 - 1, we need to find the difference between those two", 0),
        ("Calculate 1 + 9.", "10", "To calculate 1 + 9, we need to combine them by adding them both. This is", 0),
        ("Calculate 12 * 4.", "48", "To calculate 12 * 4, it's a multiplicative conversion problem.", 0),
        # What it said before.
        ("Calculate 6 - 5.", "1", "To calculate 6 - 5, we need to subtract 5 from 6. \n\n6 - 5 =", 0),
        ("Calculate 1 + 9.", "10", "1 + 9 = 10\n\nThis is a classic example of a mathematical identity", 1),
        # Declared as the answer.
        ("Calculate 12 * 12.", "144", "12 * 12", 0),
        ("Calculate 12 * 12.", "144", "The answer is 12 * 12.", 0),
        ("Calculate 12 * 12.", "144", r"\boxed{12*12}", 0),
        ("What is $2^{10}$?", "1024", r"$$\boxed{2^{10}}$$", 0),
        ("How many subsets has a set of ten?", "1024", r"\boxed{2^{10}}", 1),
        ("Write 1024 as a power of 2: $2^{10}$ or $2^{11}$?", "$2^{10}$", r"\boxed{2^{10}}", 1),
        (r"Which is larger, $\frac{3}{4}$ or $\frac{2}{3}$?", "0.75", r"\boxed{\frac{3}{4}}", 1),
        ("Which is larger, 3/4 or 2/3?", "0.75", "It is 3/4.", 1),
        ("Calculate 36/4.", "9", r"\boxed{36/4}", 0),
        ("Calculate 7 * 8.", "56", r"\boxed{7 \times 8}", 0),
        ("Calculate 7 * 8.", "56", "The answer is 8 × 7.", 0),
        ("Calculate 17 - 5.", "12", r"\boxed{17 – 5}", 0),
        ("Calculate 7 * 8.", "56.", r"\boxed{7(8)}", 0),
        (r"What is $\frac{56}{8}$?", "7", r"\boxed{\dfrac{56}{8}}", 0),
        (r"What is $\sqrt{144}$?", "12", r"\boxed{\sqrt{144}}", 0),
        ("Which of 6/3, 5/4 and 7/2 is a whole number?", "6/3", r"\boxed{6/3}", 1),
        ("How heavy?", "4500000", r"\boxed{4.5 \times 10^{6}}", 1),
        ("How many boxes?", "12", r"He needs 12, since $3 \times 4 = 12$.", 1),
        ("What share is left?", "50", "So 50% is left.", 1),
        ("How long?", "3", "It takes 2-3 days, so 3.", 1),
    ],
)
@pytest.mark.usefixtures("patient")
def test_arithmetic_that_is_left_to_do_is_no_answer(question, label, answer, score):
    prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    graded = reward_func([f"{prompt}{answer}<|im_end|>"], [prompt], [label])
    assert graded["scores"].tolist() == [score]


def test_math_boxed_gives_nothing_without_a_box():
    queries = ["\\boxed{42}", "The answer is 42.", "\\boxed{41}"]
    answer = math_boxed_reward.reward_func(queries, [None] * 3, ["42"] * 3)
    assert answer["rewards"].tolist() == answer["scores"].tolist() == [1, 0, 0]
    assert answer["extra_logs"]["well_formed"].tolist() == [1, 0, 1]
    assert math_reward.reward_func(queries, [None] * 3, ["42"] * 3)["rewards"].tolist() == [1, 1, 0]
