"""The selective forward pass: log-probs of the tokens that a pass updates, prompts computed once."""
