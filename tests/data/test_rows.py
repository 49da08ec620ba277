"""New rows: train and test stay apart, and a larger count continues a smaller one."""

from arlopti_openrlhf.data.rows import generate_rows


def test_train_and_test_share_no_puzzle_and_no_row_twice():
    train = [row["prompt"][1]["content"] for row in generate_rows([2], 2000, held_out=False, seed=0)]
    test = [row["prompt"][1]["content"] for row in generate_rows([2], 500, held_out=True, seed=1)]
    assert len(set(train)) == 2000 and len(set(test)) == 500
    assert not set(train) & set(test)


def test_more_rows_continue_fewer():
    assert generate_rows([3], 20, held_out=True, seed=5)[:8] == generate_rows([3], 8, held_out=True, seed=5)
    assert generate_rows([3], 8, held_out=True, seed=6) != generate_rows([3], 8, held_out=True, seed=5)
