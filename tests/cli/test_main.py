"""The console command `arlopti`."""

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from arlopti_openrlhf.cli import main as console


def arlopti(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "arlopti_openrlhf", *words], capture_output=True, text=True)


def test_help_names_every_command_and_no_word_is_a_mistake():
    result = arlopti("--help")
    assert result.returncode == 0 and all(f"  {word}" in result.stdout for word in console.COMMANDS)
    nothing = arlopti()
    assert (nothing.returncode, nothing.stdout, nothing.stderr) == (2, "", result.stdout)


def test_version():
    result = arlopti("--version")
    assert result.returncode == 0
    packages = ("arlopti_openrlhf", "openrlhf", "vllm(-cpu)?", "ray", "transformers", "deepspeed")
    assert re.fullmatch(", ".join(rf"{name} \d+\.\d+\.\d+\S*" for name in packages) + "\n", result.stdout)


def test_a_file_named_as_a_module_of_python_breaks_no_command(tmp_path):
    for name in ("math", "random", "types"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('imported')")
    code = "from arlopti_openrlhf.cli.main import main; main()"
    for word in console.COMMANDS:
        command = [sys.executable, "-P", "-c", code, word, "--help"]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("word", "hint"), [("trian", "did you mean train?"), ("x", "the commands are train, evaluate")]
)
def test_a_word_that_is_no_command(word, hint):
    result = arlopti(word)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith(f"arlopti: error: {word} is no command; {hint}") and result.stderr.count("\n") == 1


def test_a_command_gets_its_own_words_and_its_status_is_passed_on():
    result = arlopti("data", "--generate", "--people", "1")
    assert result.returncode == 2 and "--people" in result.stderr
    result = arlopti("train", "--algo.ar.alpha", "7", "--dry-run")
    assert result.returncode == 2 and "--algo.ar.alpha" in result.stderr
    assert "--algo.ar.alpha" in arlopti("train", "--help").stdout


def test_train_without_flags_says_what_is_missing():
    result = arlopti("train")
    assert result.returncode == 2 and "there is no source of rewards" in result.stderr
    assert "AttributeError" not in result.stderr


HELPER_BESIDE = "import in_the_working_folder\nimport next_to_the_file\n"


@pytest.mark.parametrize("command", [["-m", "arlopti_openrlhf.cli.train_ppo_ray"], ["bin/arlopti", "train"]])
@pytest.mark.long
def test_both_ways_to_start_a_training_find_the_same_modules(tmp_path, command):
    """The script's own folder is on its path, and the working folder is not, unless the command puts it there."""
    for name, text in {
        "bin/arlopti": "from arlopti_openrlhf.cli.main import main\nmain()",
        "in_the_working_folder.py": "",
        "files/next_to_the_file.py": "",
        "files/reward.py": f"{HELPER_BESIDE}def reward_func(queries, prompts, labels): return 1.0",
        "files/method.py": f"{HELPER_BESIDE}def weigh(tokens): return tokens.mask.float()",
        "data.jsonl": '{"input": "A puzzle."}\n',
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    flags = "--data.prompt_dataset data.jsonl --reward.remote_url files/reward.py --algo.token_method files/method.py"
    words = [*command, *flags.split(), "--vllm.num_engines", "1", "--actor.model_name_or_path", "nowhere", "--dry-run"]
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True)
    assert "nowhere" in done.stderr and done.returncode == 2  # all checks have run
    assert not re.search("No module named|--reward.remote_url|--algo.token_method", done.stderr), done.stderr


def test_every_command_has_a_main_and_every_command_of_the_package_is_there():
    modules = {module for module, _ in console.COMMANDS.values()}
    assert all(callable(import_module(f"arlopti_openrlhf.cli.{module}").main) for module in modules)
    folder = Path(console.__file__).parent
    with_main = {path.stem for path in folder.glob("*.py") if "\ndef main(" in path.read_text()}
    assert with_main - {"main"} == modules
