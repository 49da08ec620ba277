"""What README.md and the pages say of the code is so: names in tables, the tree of files, commands and flags."""

import argparse
import ast
import csv
import importlib.util
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from openrlhf.models import PolicyLoss

from arlopti_openrlhf.cli import main, train_ppo_ray
from arlopti_openrlhf.cli.flags import TABLES
from arlopti_openrlhf.grading.reward_answers import normalise
from arlopti_openrlhf.token_update import advantage_weights

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "benchmarks/README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]
PROGRAM = r"python -m (?P<module>[\w.]+)|python (?P<file>[\w/]+\.py)|arlopti (?P<word>\w+)"
COMMAND = re.compile(rf"^(?:\w+=\S+ )*(?:{PROGRAM})(?P<flags>.*)$", re.M)


def text_of(page: str) -> str:
    return (ROOT / page).read_text("utf-8")


def section(page: str, title: str) -> str:
    """Return the text of a page below a heading, up to the next one."""
    return text_of(page).split(f"\n## {title}\n")[1].split("\n## ")[0]


def located(path: str) -> Path:
    """Return where a path leads. The table leaves out the package's name."""
    return next((base / path for base in (ROOT, ROOT / "arlopti_openrlhf") if (base / path).exists()), ROOT / path)


def names_in_rows(table: str) -> list[tuple[str, str]]:
    """Return (file, name) for every name in a row of the table: a name belongs to the file before it."""
    pairs = []
    for row in re.findall(r"^\|.*\|$", table, re.M):
        file = None
        for code in re.findall(r"`([^`]+)`", row):
            if re.fullmatch(r"[\w/]+\.(?:py|sh)", code):
                file = code
            elif file and re.fullmatch(r"[A-Za-z_][\w.]*", code):
                pairs.append((file, code))
    return pairs


def defined_names(file: Path) -> set[str]:
    """Return what a module defines: functions, classes, constants, and methods as `Class.method`."""
    names = set()
    for node in ast.parse(file.read_text("utf-8")).body:
        if isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
            names |= {f"{node.name}.{n.name}" for n in ast.iter_child_nodes(node) if isinstance(n, ast.FunctionDef)}
    return names


def tree_paths(tree: str) -> list[str]:
    """Return the paths in a tree of files, by indentation: two blanks for each folder."""
    paths, folders = [], []
    for line in tree.splitlines():
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        folders[depth:] = [name]
        paths.append("".join(folders))
    return paths


def blocks(page: str, language: str) -> list[str]:
    """Return the blocks of code of a page."""
    return re.findall(rf"```{language}\n(.*?)```", text_of(page), re.DOTALL)


def commands(page: str) -> list[tuple[str, list[str]]]:
    """Return (module or file, arguments) for each Python command in the blocks of shell code of a page."""
    lines = "\n".join(blocks(page, "bash")).replace("\\\n", " ")
    found = []
    for match in COMMAND.finditer(lines):
        module = f"arlopti_openrlhf.cli.{main.COMMANDS[match['word']][0]}" if match["word"] else match["module"]
        found.append((module or match["file"], shlex.split(match["flags"], comments=True)))
    return found


def test_the_readmes_results_are_the_studys():
    rows = re.findall(r"^\| ([^|]+) \| (\d\.\d+ ± .*) \|$", section("README.md", "Results"), re.M)
    assert len(rows) == 5
    study = section("docs/results.md", "AR and Lopti").split("\n###")[0]
    for name, values in rows:
        accuracy, greedy, passed, *difference = [cell.strip() for cell in values.split("|")]
        assert f"| {name} | {accuracy} | {greedy} | {passed} | {''.join(difference)} |" in study, name


def test_the_results_of_the_page_are_those_of_the_csv_files():
    """Each number is in a line of a CSV file with the row's name, or its name minus GRPO."""
    files = [path for path in (ROOT / "study/results").glob("*.csv") if not path.name.startswith("by_structure")]
    lines = [line for path in files for line in csv.reader(path.read_text("utf-8").splitlines())]
    found = [row.strip("| ").split(" | ") for row in re.findall(r"^\|.* ± .*\|$", text_of("docs/results.md"), re.M)]
    assert len(found) == 27
    for row in found:
        names = {row[0], *(cell for cell in row if not re.match(r"[-+<]? ?\d|$", cell))}
        known = [set(line) for line in lines if names <= {cell.removesuffix(" minus GRPO") for cell in line}]
        assert known and {*row} - {*names, ""} <= set().union(*known), row


def test_the_readmes_first_screen():
    """The idea as code, the flags and the engine with its figures, in 200 words, then what is shown and not."""
    first = text_of("README.md").split("![")[0]
    words = re.sub(r"```.*?```", "", first.split("- **Shown")[0], flags=re.DOTALL).split()
    assert len(words) <= 200 and len(first.splitlines()) < 45
    assert re.findall(r"^- \*\*(.+?)\.\*\*", first, re.M) == ["Shown", "Not shown"]
    costs = dict(re.findall(r"^\| ([\w +]+) \| (0\.\d\d) \|", section("docs/costs.md", "Time"), re.M))
    engine = first.split("**Without a method**")[1].split("\n- ")[0]
    assert "--actor.update selective" in engine and "one optimizer step" in " ".join(engine.split())
    assert re.findall(r"0\.\d\d", engine) == [costs["GRPO"], costs["AR + Lopti"]]


def test_the_readmes_lines_have_the_updates_gradients():
    """Of both passes, by the tokens' log-probs, where the policy has moved and some tokens are clipped."""
    (code,) = blocks("README.md", "python")
    generator = torch.Generator().manual_seed(0)
    old = (0.02 + 0.97 * torch.rand(1, 48, generator=generator)).log()
    theta = (old + 0.4 * torch.randn(1, 48, generator=generator)).requires_grad_()
    advantages, found = torch.randn(1, 48, generator=generator), []
    optimizer = SimpleNamespace(
        zero_grad=lambda: setattr(theta, "grad", None), step=lambda: found.append(theta.grad.clone())
    )
    names = dict(torch=torch, log_probs=lambda batch: theta, optimizer=optimizer, alpha=0.3, eta=0.5, eps=0.2)
    exec(code, names | {"mini_batches": [SimpleNamespace(old_log_probs=old, advantages=advantages)]})
    weights, low, mask = advantage_weights(old, 0.3), old.exp() < 0.5, torch.ones(1, 48, dtype=torch.long)
    for gradient, group in zip(found, (low, ~low), strict=True):
        log_probs = theta.detach().clone().requires_grad_()
        held = torch.where(group, log_probs, old)
        loss, *_ = PolicyLoss(0.2, 0.2)(held, old, advantages * weights * group, action_mask=mask)
        loss.backward()
        torch.testing.assert_close(gradient, log_probs.grad)


def test_every_name_from_the_paper_to_the_code_exists():
    pairs = names_in_rows(text_of("docs/paper_to_code.md"))
    assert len(pairs) >= 15
    missing = [f"{file}: {name}" for file, name in pairs if name not in defined_names(located(file))]
    assert not missing, f"paper_to_code.md names {', '.join(missing)}"


def test_the_tree_of_files_is_there():
    paths = tree_paths(re.search(r"```\n(.*?)```", section("docs/architecture.md", "The house"), re.DOTALL)[1])
    assert "arlopti_openrlhf/update/loss.py" in paths
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert not missing, f"the tree has {', '.join(missing)}"
    rooms = {path.parent.name for path in (ROOT / "arlopti_openrlhf").glob("*/__init__.py")}
    shown = {Path(path).name for path in paths if re.fullmatch(r"arlopti_openrlhf/(\w+/)?", path)}
    assert shown == rooms | {"arlopti_openrlhf"}


@pytest.mark.parametrize("page", PAGES)
def test_commands_parse(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_reward.py").touch()  # the reader's own
    for name, flags in commands(page):
        if name.startswith("openrlhf."):
            continue  # upstream's own
        path = ROOT / (name if name.endswith(".py") else name.replace(".", "/") + ".py")
        assert path.exists(), f"{page} runs {name}"
        if name == "arlopti_openrlhf.cli.train_ppo_ray":  # "...your flags..." stand for what the parser needs
            assert {flag for flag in flags if flag.startswith("--")} <= flags_of(train_ppo_ray.make_parser())
        elif "make_parser" in defined_names(path):
            parser = importlib.import_module(name).make_parser()
            parser.parse_args(flags)
            assert {flag for flag in flags if flag.startswith("--")} <= flags_of(parser)  # not abbreviated
        else:
            source = path.read_text("utf-8")
            assert all(f'"{flag}"' in source for flag in flags if flag.startswith("--")), f"{page}: {name} {flags}"


def test_commands_are_found():
    """Most pages have some, over several lines and with variables too."""
    assert {name for page in PAGES for name, _ in commands(page)} > {
        "arlopti_openrlhf.cli.train_ppo_ray",
        "arlopti_openrlhf.cli.evaluate",
        "benchmarks/update_phase.py",
        "study.replicate",
    }
    assert sum(bool(commands(page)) for page in PAGES) > 9
    words = {word for page in PAGES for word in re.findall(r"`arlopti (\w+)", text_of(page))}
    assert words and words <= main.COMMANDS.keys()


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    return {flag for action in parser._actions for flag in action.option_strings}


def test_every_training_flag_is_known_and_ours_are_explained():
    named = {flag for page in PAGES for flag in re.findall(r"--[a-z]+(?:\.\w+)+(?!\w|\.\*)", text_of(page))}
    known = flags_of(train_ppo_ray.make_parser())
    ours = {flag for table in TABLES.values() for flag, *_ in table}
    assert len(named) > 40 and named <= known, f"the pages name {', '.join(sorted(named - known))}"
    explained = set(re.findall(r"^\| `(--[\w.-]+)`", text_of("docs/flags.md"), re.M))
    explained -= {"--reward.remote_url"}  # OpenRLHF's own, which takes two values more
    assert explained == ours, explained ^ ours


def test_the_reward_of_the_guide_rewards():
    code, _ = blocks("docs/rewards.md", "python")
    names: dict = {}
    exec(code, names)
    queries, prompts = ["What is 1 + 1?\nIt is 2", "What is 1 + 1?\nIt is 3"], ["What is 1 + 1?\n"] * 2
    answer = normalise(names["reward_func"](queries, prompts, ["2", "2"]), 2)
    assert (answer["rewards"], answer["scores"]) == ([1.0, -1.0], [1.0, 0.0])
    assert answer["extra_logs"] == {"response_chars": [7.0, 7.0]}


def constants(node: ast.AST) -> list[str]:
    """Return the texts in a piece of code. Those of one f-string are joined, with … for what it fills in."""
    if isinstance(node, ast.JoinedStr):
        filled_in = [part.value for part in node.values if isinstance(part, ast.FormattedValue)]
        inner = [text for value in filled_in for text in constants(value)]
        return inner + ["".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)]
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    return [text for child in ast.iter_child_nodes(node) for text in constants(child)]


def test_troubleshooting_quotes_what_the_command_prints():
    """`…` stands for what differs. Findings join a problem and a remedy by "; ", so the pieces are looked for."""
    files = (ROOT / "arlopti_openrlhf").rglob("*.py")
    printed = "\n".join(text for file in files for text in constants(ast.parse(file.read_text("utf-8"))))
    lines = "".join(blocks("docs/troubleshooting.md", "text")).splitlines()
    assert len(lines) > 30
    for line in lines:
        pieces = [piece.strip(" .") for piece in re.split(r"^alarm \w+: |…|; |: |(?:error|warning): ", line)]
        long = [piece for piece in pieces if len(piece) > 9]
        assert long, line
        assert all(piece in printed for piece in long), f"{line}: {[p for p in long if p not in printed]}"


def test_every_metric_of_the_page_is_logged():
    """By us, or by OpenRLHF. A metric's name is put together from parts, so its last one is looked for."""
    upstream = Path(importlib.util.find_spec("openrlhf").origin).parent
    code = "".join(
        f.read_text("utf-8") for folder in (ROOT / "arlopti_openrlhf", upstream) for f in folder.rglob("*.py")
    )
    table = re.findall(r"^\| (`.*?) \|", text_of("docs/metrics.md"), re.M)
    names = {name.split("/")[-1] for cell in table for name in re.findall(r"`([\w/]+)`", cell)}
    assert len(names) > 20
    # An f-string may fill in the last word of a name.
    missing = [n for n in names if not re.search(rf"""["'/]({n}["'/]|{n.rpartition("_")[0] or "-"}_{{)""", code)]
    assert not missing
