"""A run that is resumed with other flags is refused if its place would be wrong."""

from fractions import Fraction
from pathlib import Path

import pytest
import torch

from arlopti_openrlhf import __version__
from arlopti_openrlhf.cli import command_line, config_file, same_run
from arlopti_openrlhf.ops.checkpoints import files as checkpoint_files
from arlopti_openrlhf.ops.preflight.finding import Finding

FLAGS = (
    "--actor.model_name_or_path m --algo.ar.alpha 0.3 --rollout.batch_size 8 --rollout.n_samples_per_prompt 4 "
    "--train.batch_size 16 --actor.adam.lr 1e-6 --actor.num_gpus_per_node 2 --ckpt.load_enable"
)
CRITIC = "--critic.model_name_or_path m --critic.num_gpus_per_node 2"


def flat(flags: str, *folder):
    return command_line.parse([*flags.split(), *(["--ckpt.path", str(folder[0])] if folder else [])])


@pytest.fixture
def resumed(tmp_path):
    """Return resumed(flags, had), the findings about a run with both that had only the second ones before."""

    def of(flags: str, had: str = FLAGS) -> list[Finding]:
        (tmp_path / "_actor" / "global_step2").mkdir(parents=True, exist_ok=True)
        config_file.keep(flat(had, tmp_path), tmp_path)
        now = flat(f"{had} {flags}", tmp_path)
        return same_run.check(now, command_line.hierarchize(now))

    return of


def test_what_a_run_can_go_on_with_needs_no_line(resumed, tmp_path):
    """Its own file gives the same flags."""
    assert resumed("--ckpt.output_dir x --algo.ar.alpha 0.1 --train.num_episodes 5 --ds.packing_samples") == []
    again = flat(f"--config {tmp_path}/config.yaml")
    assert same_run.check(again, command_line.hierarchize(again)) == []


def test_a_run_is_compared_with_what_its_checkpoint_was_written_by(tmp_path):
    """A user edits the file and gives it, or a start that failed has written other flags there."""
    config_file.keep(flat(FLAGS, tmp_path), tmp_path)
    write_checkpoint(tmp_path / "_actor", __version__, 0, (tmp_path / "config.yaml").read_text())
    text = (tmp_path / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(
        text.replace("batch_size: 16", "batch_size: 8").replace("node: 2", "node: 4")
    )
    edited = flat(f"--config {tmp_path}/config.yaml")
    found = same_run.check(edited, command_line.hierarchize(edited))
    assert [finding.flag for finding in found if finding.is_fatal] == [
        "--actor.num_gpus_per_node",
        "--train.batch_size",
    ]
    again = flat(FLAGS, tmp_path)
    assert same_run.check(again, command_line.hierarchize(again)) == []


def test_a_run_whose_folder_was_moved_does_not_start_anew_in_its_old_place(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    (old / "_actor" / "global_step2").mkdir(parents=True)
    config_file.keep(flat(FLAGS, old), old)
    old.rename(new)
    for more, is_refused in (("", True), (f"--ckpt.path {new}", False), (f"--ckpt.path {tmp_path}/other", False)):
        moved = flat(f"--config {new}/config.yaml {more}")
        found = same_run.check(moved, command_line.hierarchize(moved))
        assert [finding.flag for finding in found] == ["--ckpt.path"] * is_refused
        assert not is_refused or f"give --ckpt.path {new}" in str(found[0])


def test_an_optimizers_value_is_the_checkpoints(resumed, tmp_path):
    (finding,) = resumed("--actor.adam.lr 1e-5")
    assert finding.flag == "--actor.adam.lr" and not finding.is_fatal
    assert "1.0e-05: the run that is resumed had 1.0e-06; it goes on with 1.0e-06, which its chec" in str(finding)
    assert same_run.stored(command_line.hierarchize(flat(FLAGS, tmp_path)))["actor.adam.lr"] == "1.0e-06"


@pytest.mark.parametrize(
    "flags",
    [
        "--rollout.n_samples_per_prompt 2",
        "--rollout.batch_size 4",
        "--train.batch_size 32",
        "--train.max_epochs 2",
        "--train.seed 7",
        "--algo.lopti.eta 0.5",
        "--algo.lopti.quantile 0.5",
        "--algo.token_method lopti",
    ],
)
def test_what_the_place_counts_in_is_refused_unless_it_is_asked_for(resumed, flags):
    (finding,) = resumed(flags)
    assert finding.is_fatal and finding.flag == flags.split()[0]
    assert "place in the prompts or in the learning rate's schedule" in finding.problem
    assert "or add --ckpt.load_changed" in finding.remedy
    assert resumed(f"{flags} --ckpt.load_changed") == []


def test_another_threshold_of_lopti_takes_as_many_steps(resumed):
    assert resumed("--algo.lopti.eta 0.3", f"{FLAGS} --algo.lopti.eta 0.5") == []
    groups, order = "--algo.lopti.groups low", "--algo.lopti.eta 0.5"
    (finding,) = resumed(groups, f"{FLAGS} {order}")
    assert finding.is_fatal and finding.flag == "--algo.lopti.groups"


@pytest.mark.parametrize(
    "flags", ["--actor.num_gpus_per_node 4", "--ds.zero_stage 3", "--ds.ring_attn_size 2", "--critic.num_nodes 2"]
)
def test_another_layout_needs_a_universal_checkpoint(resumed, flags):
    had = f"{FLAGS} {CRITIC}"
    for more in ("", " --ckpt.load_changed"):
        (finding,) = resumed(flags + more, had)
        assert finding.is_fatal and "DeepSpeed cannot load its checkpoints otherwise" in finding.problem
        assert "--ds.use_universal_ckpt" in finding.remedy
    assert resumed(f"{flags} --ds.use_universal_ckpt", had) == []


def test_as_many_ranks_on_other_nodes_are_the_same_layout(resumed):
    ranks = "--actor.num_nodes 2 --actor.num_gpus_per_node 1 --critic.num_nodes 3"
    other = "--algo.advantage.estimator group_norm"
    assert resumed(f"{ranks} {other}", f"{FLAGS} {other}") == []  # there is no critic
    (finding,) = resumed(ranks)  # GAE's critic is made of the policy
    assert finding.is_fatal and finding.flag == "--critic.num_nodes"


def write_checkpoint(folder: Path, version: str, state: object, flags: str | None = None) -> None:
    writing = folder / f"{checkpoint_files.WRITING}global_step2"
    checkpoint_files.begin(writing, print)
    torch.save(state, writing / "mp_rank_00_model_states.pt")
    checkpoint_files.publish(writing, flags)
    manifest = folder / "global_step2" / checkpoint_files.MANIFEST
    manifest.write_text(manifest.read_text().replace(__version__, version))


@pytest.mark.parametrize(
    ("version", "state", "problem"),
    [
        (__version__, {"a": torch.ones(1)}, None),
        ("0.0.1", {"a": torch.ones(1)}, None),
        ("no version", {"a": torch.ones(1)}, None),
        (
            "999.0",
            {"a": torch.ones(1)},
            f"version 999.0 of arlopti_openrlhf has written global_step2, and this is {__version__}",
        ),
        (__version__, {"a": Fraction}, "on loading it would call fractions.Fraction, which no run's checkpoint does"),
    ],
)
def test_a_checkpoint_that_cannot_be_loaded_is_refused_beforehand(version, state, problem, tmp_path):
    write_checkpoint(tmp_path / "_actor", version, state)
    found = list(same_run.check_checkpoint(command_line.hierarchize(flat(FLAGS, tmp_path))))
    assert [finding.problem for finding in found] == [problem][: bool(problem)]
    torn = tmp_path / "_actor" / "global_step2" / "mp_rank_00_model_states.pt"
    torn.write_bytes(torn.read_bytes()[:-1])  # it is passed over
    found = list(same_run.check_checkpoint(command_line.hierarchize(flat(FLAGS, tmp_path))))
    assert bool(found) == (version == "999.0")


@pytest.mark.parametrize("torn", ["actor.num_gpus_per_node:", "x: [[1], [2]]"])
def test_flags_that_a_torn_file_does_not_tell_are_a_warning(torn, resumed, tmp_path):
    resumed("")
    (tmp_path / "config.yaml").write_text(torn)
    now = flat(FLAGS, tmp_path)
    [found] = same_run.check(now, command_line.hierarchize(now))
    assert not found.is_fatal and "the flags of the run that is resumed cannot be read (" in str(found)


def test_nothing_to_compare(resumed, tmp_path):
    now = flat(FLAGS, tmp_path / "new")
    assert same_run.check(now, command_line.hierarchize(now)) == []  # no checkpoint yet
    assert not any(f.is_fatal for f in resumed(""))
    now = flat(FLAGS, tmp_path)
    (tmp_path / "config.yaml").write_text("a: [")
    (finding,) = same_run.check(now, command_line.hierarchize(now))
    assert not finding.is_fatal and "cannot be read (no YAML" in finding.problem
    (tmp_path / "config.yaml").unlink()  # a run of OpenRLHF's own
    (finding,) = same_run.check(now, command_line.hierarchize(now))
    assert not finding.is_fatal and "cannot be read" in finding.problem
    new_run = flat(FLAGS.replace("--ckpt.load_enable", ""), tmp_path)
    assert same_run.check(new_run, command_line.hierarchize(new_run)) == []
