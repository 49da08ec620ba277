"""What README.md says of the code is so: names in its table, the tree of files, commands and flags."""

import ast
import importlib
import re
import shlex
from pathlib import Path

import pytest

from arlopti_openrlhf.cli import command_line, train_ppo_ray

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
WITH_COMMANDS = ("README.md", "benchmarks/README.md", "docs/study.md", "docs/study_family.md")
COMMAND = re.compile(r"^(?:\w+=\S+ )*python (?:-m (?P<module>[\w.]+)|(?P<file>[\w/]+\.py))(?P<flags>.*)$", re.M)


def section(title: str) -> str:
    """Return the text below a heading, up to the next one."""
    return README.split(f"\n## {title}\n")[1].split("\n## ")[0]


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


def commands(document: str) -> list[tuple[str, list[str]]]:
    """Return (module or file, arguments) for each Python command in the blocks of shell code of a document."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / document).read_text("utf-8"), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ")
    return [
        (found["module"] or found["file"], shlex.split(found["flags"], comments=True))
        for found in COMMAND.finditer(lines)
    ]


def test_every_name_from_the_paper_to_the_code_exists():
    pairs = names_in_rows(section("From the paper to the code"))
    assert len(pairs) >= 15
    missing = [f"{file}: {name}" for file, name in pairs if name not in defined_names(located(file))]
    assert not missing, f"README.md names {', '.join(missing)}"


def test_the_tree_of_files_is_there():
    paths = tree_paths(re.search(r"```\n(.*?)```", section("Files"), re.DOTALL)[1])
    assert "arlopti_openrlhf/update/micro_batch.py" in paths
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert not missing, f"README.md's tree has {', '.join(missing)}"
    rooms = {path.parent.name for path in (ROOT / "arlopti_openrlhf").glob("*/__init__.py")}
    shown = {Path(path).name for path in paths if path.endswith("/") and path.startswith("arlopti_openrlhf/")}
    assert shown == rooms | {"arlopti_openrlhf"}


@pytest.mark.parametrize("document", WITH_COMMANDS)
def test_commands_parse(document, tmp_path, monkeypatch):
    found = commands(document)
    assert found
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_reward.py").touch()  # the reader's own
    for name, flags in found:
        path = ROOT / (name if name.endswith(".py") else name.replace(".", "/") + ".py")
        assert path.exists(), f"{document} runs {name}"
        if name == "arlopti_openrlhf.cli.train_ppo_ray":  # "...your flags..." stand for what the parser needs
            assert {flag for flag in flags if flag.startswith("--")} <= training_flags()
        elif "make_parser" in defined_names(path):
            importlib.import_module(name).make_parser().parse_args(flags)
        else:
            source = path.read_text("utf-8")
            assert all(f'"{flag}"' in source for flag in flags if flag.startswith("--")), f"{document}: {name} {flags}"


def training_flags() -> set[str]:
    """Return the flags of the training command's real parser."""
    flags: set[str] = set()

    def collect(parser) -> None:
        train_ppo_ray.add_flags(parser)
        flags.update(flag for action in parser._actions for flag in action.option_strings)

    command_line.parse([], collect)
    return flags


def test_every_training_flag_is_known():
    named = set(re.findall(r"--[a-z]+(?:\.\w+)+", README))
    known = training_flags()
    assert len(named) > 10 and named <= known, f"README.md names {', '.join(sorted(named - known))}"


def test_what_the_readme_names_is_found():
    """Names follow their file, methods are `Class.method`, and a tree's folders go on until it leaves them."""
    assert names_in_rows("| Eq. 4 | `a.py`, `f`, `C.m`, by `b/c.py` |\n| x | `--flag low`, `high` |") == [
        ("a.py", "f"),
        ("a.py", "C.m"),
    ]
    assert tree_paths("a/   x\n  b/\n    c.py  y\n  d.py\ne/f.txt") == ["a/", "a/b/", "a/b/c.py", "a/d.py", "e/f.txt"]
    assert defined_names(ROOT / "arlopti_openrlhf/update/trainer.py") >= {
        "TokenUpdateTrainer",
        "TokenUpdateTrainer.ppo_train",
    }
