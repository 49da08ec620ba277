"""A Knights-and-Knaves agent that gets one correction: it answers, hears that it was wrong, and answers again.

    arlopti train --train.agent_func_path examples/kk_agent.py ...

OpenRLHF loads this file in each vLLM engine, and makes one `Puzzle` for each sample. The policy is trained on the
tokens of both turns, and not on the words between them. The reward is Logic-RL's for the last turn, less a point where
there are two. A turn ends with the policy's end of text, or where the whole sample has --data.max_len tokens.
"""

import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

from arlopti_openrlhf.grading.kk_reward import grade

# In the chat template of Qwen, whose turns end with <|im_end|>.
CORRECTION = "\n<|im_start|>user\nThat is wrong. Try again.<|im_end|>\n<|im_start|>assistant\n"
SECOND_TURN = 1.0  # what it costs


class Puzzle(AgentInstanceBase):
    """Grades a sample's turns, and asks for a second one where the first is wrong."""

    def __init__(self) -> None:
        self.turns, self.earned = 0, 0.0

    async def step(self, state_dict: dict, **kwargs) -> dict:
        """Grade the turn `action_text` by the solution `label`, and say how it goes on."""
        self.turns += 1
        begun = "<think>" if state_dict["observation_text"].rstrip().endswith("<think>") else ""
        result = grade(begun + state_dict["action_text"], state_dict["label"])
        done = result.score == 1 or self.turns == 2
        # OpenRLHF adds up the turns' rewards. A sample without room for a second turn keeps what the first one earned.
        value = result.reward - SECOND_TURN * (self.turns - 1)
        reward, self.earned = value - self.earned, value
        return {
            "rewards": torch.tensor(reward),
            "scores": torch.tensor(result.score),
            "environment_feedback": "" if done else CORRECTION + begun,
            "done": done,
            "sampling_params": state_dict["sampling_params"],
            "extra_logs": {"turns": torch.tensor(float(self.turns))},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    """The name that OpenRLHF looks for."""

    def __init__(self) -> None:
        super().__init__(Puzzle)
