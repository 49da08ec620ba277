"""Train and test stay apart, a larger count continues a smaller one, and what is written is read again."""

from arlopti_openrlhf.lab.data.preparation import convert_rows, generate_rows, write_rows


def test_train_and_test_share_no_puzzle_and_no_row_twice():
    train = [row["prompt"][1]["content"] for row in generate_rows([2], 2000, held_out=False, seed=0)]
    test = [row["prompt"][1]["content"] for row in generate_rows([2], 500, held_out=True, seed=1)]
    assert len(set(train)) == 2000 and len(set(test)) == 500
    assert not set(train) & set(test)


def test_more_rows_continue_fewer():
    assert generate_rows([3], 20, held_out=True, seed=5)[:8] == generate_rows([3], 8, held_out=True, seed=5)
    assert generate_rows([3], 8, held_out=True, seed=6) != generate_rows([3], 8, held_out=True, seed=5)


def test_a_line_separator_in_a_prompt_ends_no_row(tmp_path):
    row = {"prompt": "One\u2028line?", "label": "1", "datasource": "aime"}
    write_rows([row], tmp_path / "rows.jsonl")
    assert convert_rows(tmp_path / "rows.jsonl", prompt_format="text") == [row]
