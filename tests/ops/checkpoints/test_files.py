"""Which checkpoint is whole, which is resumed from, which goes: on folders as a run leaves them."""

import errno
import json
import os
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import distributed as dist

from arlopti_openrlhf.ops.checkpoints import files, unpickling
from arlopti_openrlhf.ops.checkpoints.files import folders_of
from arlopti_openrlhf.ops.checkpoints.saving import NoWholeCheckpoint, newest_whole


def write(folder: Path, tag: str, size: int = 100, is_zip: bool = False) -> Path:
    """Write a whole checkpoint."""
    writing = folder / f"{files.WRITING}{tag}"
    files.begin(writing, print)
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        (writing / name).write_bytes(bytes(size))
        if is_zip:
            torch.save(0, writing / name)
    files.publish(writing)
    return folder / tag


def test_a_published_checkpoint_is_whole_and_named_in_latest(tmp_path):
    write(tmp_path, "global_step2", size=10)
    checkpoint = write(tmp_path, "global_step2", size=20)  # replaces the one of its name
    assert files.problems(checkpoint) == [] and files.size_of(checkpoint) > 40
    assert json.loads((checkpoint / files.MANIFEST).read_text())["serial"] == 2
    assert (tmp_path / "latest").read_text() == "global_step2"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step2", "latest"]
    # One that was saved after DeepSpeed's tool had made a universal one comes first. Else each start would go back.
    assert not files.is_past_universal(tmp_path)
    for step in (2, 3):
        (tmp_path / "latest_universal").write_text(f"global_step{step}_universal")
        assert not files.is_past_universal(tmp_path)
        write(tmp_path, f"global_step{step + 1}")
        assert files.is_past_universal(tmp_path)


def cut(path: Path) -> None:
    os.truncate(path, 50)


def flip(path: Path, bit: int) -> None:
    """Flip a bit of a file, whose size stays."""
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def test_a_single_flipped_bit_is_found_by_the_rank_whose_file_it_is(tmp_path):
    """Of a zip some bytes mean nothing, such as dates and what fills it up. There the content is what it was."""
    names = ("mp_rank_00_model_states.pt", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "process_rank_1.pt")
    state = {"weights": torch.arange(100.0), "step": 3, "names": ["a", "b"]}
    for name in names:
        torch.save(state, tmp_path / name)
    assert unpickling.damages(tmp_path, 0, 2) == unpickling.damages(tmp_path, 1, 2) == []
    bits, found = random.Random(0), 0
    for i in range(300):
        path = tmp_path / names[i % 3]
        whole = path.read_bytes()
        flip(path, bits.randrange(8 * len(whole)))
        damages = [unpickling.damages(tmp_path, rank, 2) for rank in (0, 1)]
        assert unpickling.damages(tmp_path, 0, 1) == sum(damages, [])  # as a critic on one rank finds it
        assert damages[i % 3 == 0] == []  # the other rank's
        if damages[i % 3 != 0]:
            found += 1
            assert path.name in damages[i % 3 != 0][0]
        else:
            again = torch.load(path, weights_only=True)
            assert str(again) == str(state) and torch.equal(again["weights"], state["weights"])
        path.write_bytes(whole)
    assert found > 200


def rename_in_manifest(path: Path, name: str) -> None:
    manifest = json.loads(path.with_name(files.MANIFEST).read_text())
    manifest["files"][name] = manifest["files"].pop(path.name)
    path.with_name(files.MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (cut, "had 100 bytes when it was written, and has 50 now"),
        (os.remove, "is missing"),
        (lambda path: path.with_name(files.MANIFEST).write_text('{"serial": 1, "fi'), "cannot be read"),
        (lambda path: path.with_name(files.MANIFEST).write_text('{"serial": 9, "files": {}}'), "it names no files"),
        (lambda path: path.with_name(files.MANIFEST).write_text('{"serial": 1, "files": "abc"}'), "it names no files"),
        (lambda path: path.with_name(files.MANIFEST).write_text('{"serial": 1e999, "files": {"a": {}}}'), "serial"),
        (lambda path: path.with_name(files.MANIFEST).write_text("[" * 200_000), "manifest.json cannot be read"),
        (lambda path: rename_in_manifest(path, "a\0b"), "cannot be read: embedded null byte"),
        (lambda path: path.with_name(files.MANIFEST).unlink(), "torn, or from a run of OpenRLHF's own command"),
        (lambda path: path.parent.rename(path.parents[1] / "elsewhere"), "it is not there"),
    ],
)
def test_every_damage_is_named(damage, reason, tmp_path):
    damage(write(tmp_path, "global_step2") / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    [found] = files.problems(tmp_path / "global_step2")
    assert reason in found


def test_the_newest_is_what_was_written_last(tmp_path):
    for tag in ("global_step40", "global_step2", "best_global_step2", "global_step4"):
        write(tmp_path, tag)
    (tmp_path / "notes").mkdir()
    assert files.newest_first([tmp_path]) == ["global_step4", "best_global_step2", "global_step2", "global_step40"]
    (tmp_path / "global_step40" / files.MANIFEST).write_text("{")  # it comes first, so that it is named
    for torn in ('{"serial": 9, "files": {}}', '{"serial": 9, "files": [1]}', '{"serial": 1e999, "files": {"a": {}}}'):
        (tmp_path / "global_step2" / files.MANIFEST).write_text(torn)
        assert files.newest_published([tmp_path]) == "global_step4"
    (tmp_path / "global_step1").mkdir()  # emptied
    assert files.newest_first([tmp_path])[:3] == ["global_step40", "global_step2", "global_step1"]
    assert files.newest_published([tmp_path]) == "global_step4"
    assert files.newest_first([tmp_path / "nothing"]) == []


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_actor_and_critic_resume_from_the_newest_that_is_whole_in_both(one_rank, tmp_path, capsys):
    model = SimpleNamespace(model_name_or_path="model")
    actor, critic = folders = folders_of(tmp_path, SimpleNamespace(critic=model))
    assert newest_whole(folders) is None
    for step in (2, 3, 4, 6, 8):
        for folder in folders[: 1 if step == 8 else 2]:
            write(folder, f"global_step{step}", is_zip=True)
    cut(critic / "global_step6" / "mp_rank_00_model_states.pt")
    optimizer = critic / "global_step4" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    flip(optimizer, 8 * optimizer.read_bytes().index(b"\x80\x02K\0"))  # the pickled number
    capsys.readouterr()
    assert newest_whole(folders) == "global_step3"
    passed_over, also, damaged, chosen = capsys.readouterr().out.splitlines()
    assert passed_over.endswith("passed over checkpoint global_step8 is not whole (_critic: it is not there)")
    assert "global_step6 is not whole (_critic: mp_rank_00_model_states.pt had " in also
    assert "global_step4 is not whole (_critic: zero_pp_rank_0_mp_rank_00_optim_states.pt is damaged in " in damaged
    assert "resumes from" in chosen and "_actor/global_step3" in chosen
    for step in (2, 3):
        (actor / f"global_step{step}" / "mp_rank_00_model_states.pt").unlink()
    with pytest.raises(NoWholeCheckpoint, match=r"global_step2 is not whole \(_actor: .* is missing\)"):
        newest_whole(folders)
    assert folders_of(tmp_path, SimpleNamespace(critic=SimpleNamespace(model_name_or_path=None))) == [actor]


def test_leftovers_of_killed_processes_go_and_a_whole_one_gets_its_name(tmp_path):
    write(tmp_path, "global_step2").rename(tmp_path / f"{files.WRITING}global_step2")
    (tmp_path / f"{files.WRITING}global_step4").mkdir()
    (tmp_path / f"{files.WRITING}global_step4" / files.MANIFEST).touch()  # as a power loss leaves it
    (tmp_path / f"{files.REMOVING}global_step1").mkdir()
    lines = files.clear_leftovers(tmp_path)
    assert "left of" in lines[0] and "global_step2 had been written" in lines[1] and "left of" in lines[2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step2", "latest"]


def test_of_a_checkpoint_that_is_linked_the_link_goes(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    write(tmp_path, "global_step2").rename(tmp_path / "elsewhere" / "global_step2")
    (tmp_path / "global_step2").symlink_to(tmp_path / "elsewhere" / "global_step2")
    write(tmp_path, "global_step4")
    assert rotated([tmp_path], "global_step4", 1, {}) == ["global_step4"]
    assert files.problems(tmp_path / "elsewhere" / "global_step2") == [] and files.clear_leftovers(tmp_path) == []


def test_what_cannot_be_removed_is_not_said_to_be(tmp_path, monkeypatch):
    (tmp_path / f"{files.REMOVING}global_step2").mkdir()
    monkeypatch.setattr(files.shutil, "rmtree", lambda path, ignore_errors: None)
    assert files.clear_leftovers(tmp_path) == [f"cannot remove {tmp_path / files.REMOVING}global_step2"]


def test_a_small_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """After a power loss the name would have an empty file."""
    flushed, flush = [], os.fsync

    def note(descriptor: int) -> None:
        flushed.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")).name, (tmp_path / "run.json").exists()))
        flush(descriptor)

    monkeypatch.setattr(files.os, "fsync", note)
    files.write(tmp_path / "run.json", "{}")
    assert flushed == [(".run.json", False), (tmp_path.name, True)]


def rotated(folders: list[Path], newest: str, max_num: int, metrics: dict, max_gib: float = 1000) -> list[str]:
    """Return the checkpoints that stay in the first folder."""
    list(files.rotate(folders, newest, max_num, max_gib, metrics.get))
    return files.tags(folders[0])


def test_the_worst_go_and_the_newest_and_the_best_stay(tmp_path):
    """OpenRLHF deletes the worst before it writes, which may be the newest that is there."""
    metrics = {"global_step2": 0.9, "global_step4": 0.8, "global_step6": 0.7, "global_step8": 0.6}
    for tag in ("best_global_step2", *metrics):
        write(tmp_path, tag)
    left = rotated([tmp_path], "global_step8", 3, metrics)
    assert left == ["best_global_step2", "global_step2", "global_step4", "global_step8"]
    assert rotated([tmp_path], "global_step8", 1, metrics) == ["best_global_step2", "global_step8"]
    write(tmp_path, "best_global_step9")
    assert rotated([tmp_path], "best_global_step9", 1, metrics) == ["best_global_step9", "global_step8"]


def test_without_metrics_the_oldest_go(tmp_path):
    for step in (2, 10, 4):
        write(tmp_path, f"global_step{step}")
    assert rotated([tmp_path], "global_step4", 2, {}) == ["global_step10", "global_step4"]
    assert rotated([tmp_path], "global_step4", 0, {}) == ["global_step4"]


def test_the_limit_of_memory_leaves_the_newest(tmp_path):
    for step in (2, 4, 6):
        write(tmp_path, f"global_step{step}", size=1 << 19)  # 1 MiB each
    assert rotated([tmp_path], "global_step6", 9, {}, 2.5 / 1024) == ["global_step4", "global_step6"]
    assert rotated([tmp_path], "global_step6", 9, {}, 0.1 / 1024) == ["global_step6"]


def test_actor_and_critic_rotate_together_once_both_are_whole(tmp_path):
    folders = [tmp_path / "_actor", tmp_path / "_critic"]
    for folder in folders:
        write(folder, "global_step2")
    write(folders[0], "global_step4")
    assert rotated(folders, "global_step4", 1, {}) == ["global_step2", "global_step4"]
    write(folders[1], "global_step4")
    assert rotated(folders, "global_step4", 1, {}) == ["global_step4"]
    assert files.tags(folders[1]) == ["global_step4"]
    # One that lacks its critic goes before a whole one, whatever its metric is.
    write(folders[0], "global_step6")
    for folder in folders:
        write(folder, "global_step8")
    assert rotated(folders, "global_step8", 2, {"global_step6": 1.0}) == ["global_step4", "global_step8"]


def test_without_room_for_as_much_as_the_last_one_took_nothing_is_written(tmp_path, monkeypatch):
    write(tmp_path, "global_step2", size=1000)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda folder: SimpleNamespace(free=2000))
    with pytest.raises(OSError, match="No space left on device"):
        files.begin(tmp_path / f"{files.WRITING}global_step4", print)


def test_a_writer_that_names_no_cause_is_asked_again(tmp_path):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/x/y")
    assert files.cause_of(full, tmp_path) == "OSError: [Errno 28] No space left on device: '/x/y'"
    silent = RuntimeError("basic_ios::clear: iostream error")
    assert files.cause_of(silent, tmp_path) == "RuntimeError: basic_ios::clear: iostream error"
    assert "No such file or directory" in files.cause_of(silent, tmp_path / "gone")
    assert not list(tmp_path.iterdir())
