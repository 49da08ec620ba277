"""The selective forward pass computes log-probs of the tokens that a pass updates, and each prompt once."""
