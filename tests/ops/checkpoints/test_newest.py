"""Actor and critic resume from one checkpoint: the newest that is whole in both."""

from types import SimpleNamespace

import pytest
from torch import distributed as dist

from arlopti_openrlhf.ops.checkpoints import files
from arlopti_openrlhf.ops.checkpoints.newest import NoWholeCheckpoint, newest_whole, parts_of


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_both_parts_have_to_be_whole(one_rank, tmp_path, capsys):
    model = SimpleNamespace(num_nodes=1, num_gpus_per_node=2, model_name_or_path="model")
    parts = parts_of(tmp_path / "_critic", SimpleNamespace(actor=model, critic=model))
    actor, critic = (part.folder for part in parts)
    assert [part.ranks for part in parts] == [2, 2]
    assert newest_whole(parts) is None
    for step in (2, 4, 6, 8):
        for folder in (actor, critic)[: 1 if step == 8 else 2]:
            writing = folder / f"{files.WRITING}global_step{step}"
            files.begin(writing, print)
            (writing / "mp_rank_00_model_states.pt").write_bytes(bytes(100))
            files.publish(writing, files.describe(writing, files.names_in(writing)))
    (critic / "global_step6" / "mp_rank_00_model_states.pt").write_bytes(b"\x7f" * 100)
    capsys.readouterr()
    assert newest_whole(parts) == "global_step4"
    passed_over, also, chosen = capsys.readouterr().out.splitlines()
    assert passed_over.endswith("passed over checkpoint global_step8 is not whole (_critic: it is not there)")
    assert "global_step6 is not whole (_critic: mp_rank_00_model_states.pt has changed since" in also
    assert "resumes from" in chosen and "_actor/global_step4, verified in" in chosen
    for step in (2, 4):
        (actor / f"global_step{step}" / "mp_rank_00_model_states.pt").unlink()
    with pytest.raises(NoWholeCheckpoint, match=r"global_step2 is not whole \(_actor: .* is missing\)"):
        newest_whole(parts)
    assert parts_of(actor, SimpleNamespace(actor=model, critic=SimpleNamespace(model_name_or_path=None))) == parts[:1]
