"""The packed row: what it holds, and that attention over its segments is that of the separate sequences."""

import pytest
import torch

from arlopti_openrlhf.forward.shared_prompt import Segment, pack


def padded(rows: list[list[int]], left: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    length = max(map(len, rows))
    sequences, mask = torch.zeros(2, len(rows), length, dtype=torch.long).unbind()
    for i, row in enumerate(rows):
        place = slice(length - len(row), None) if left else slice(len(row))
        sequences[i, place], mask[i, place] = torch.tensor(row), 1
    return sequences, mask


@pytest.mark.parametrize("left", [False, True])
def test_a_prompt_is_packed_once_and_a_sequence_cut_after_its_last_selected_token(left):
    """Two responses to prompt 7 8 9, one to 5 6; rows shuffled. Token 13 is the last one wanted of the first."""
    sequences, attention_mask = padded([[7, 8, 9, 11, 12, 13, 14], [5, 6, 21, 22], [7, 8, 9, 31, 32]], left)
    action_mask = torch.zeros(3, 6, dtype=torch.long)
    for row, tokens in enumerate([(11, 13), (21, 22), (31,)]):
        for token in tokens:
            action_mask[row, (sequences[row, 1:] == token).nonzero()[0]] = 1
    packed = pack(sequences, attention_mask, action_mask)
    assert packed.tokens.tolist() == [[5, 6, 21, 7, 8, 9, 11, 12]]
    assert packed.positions.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]]
    assert packed.segments == [Segment(3, None), Segment(3, None), Segment(2, 1)]
    # 11 and 31 are predicted by the 9 they share, 13 by 12, 21 by 6, 22 by 21.
    predicted_by = dict(zip(packed.targets.tolist(), packed.tokens[0, packed.rows].tolist(), strict=True))
    assert predicted_by == {11: 9, 13: 12, 21: 6, 22: 21, 31: 9}
    assert torch.equal(packed.places, action_mask.flatten().nonzero()[:, 0])


def test_without_sharing_every_token_is_packed():
    sequences, attention_mask = padded([[7, 8, 9, 11], [7, 8]])
    packed = pack(sequences, attention_mask, torch.tensor([[0, 1, 0], [0, 0, 0]]), share=False)
    assert packed.tokens.tolist() == [[7, 8, 9, 11, 7, 8]] and packed.positions.tolist() == [[0, 1, 2, 3, 0, 1]]
    assert packed.rows.tolist() == [1] and packed.targets.tolist() == [9]


@pytest.mark.parametrize("actions", [0, 3])
def test_nothing_selected_leaves_one_token(actions):
    sequences, attention_mask = padded([[7, 8, 9, 11], [7, 8]])
    packed = pack(sequences, attention_mask, torch.zeros(2, actions, dtype=torch.long))
    assert packed.tokens.tolist() == [[7]] and len(packed.rows) == 0


def test_the_groups_are_those_that_save_most():
    """A system prompt common to all is not worth more than the prompts of three groups."""
    system = [1, 2]
    rows = [system + [10 * group] * 5 + [100 + i] for group in (1, 2, 3) for i in range(3)] + [system]
    sequences, attention_mask = padded(rows)
    packed = pack(sequences, attention_mask, attention_mask[:, 1:])
    # 3 prompts of 7 tokens; the last tokens predict nothing, and of [1, 2] only the 1 is needed.
    assert packed.tokens.shape[1] == 3 * 7 + 1
