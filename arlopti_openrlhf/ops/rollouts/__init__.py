"""What a run trains on: prompts, samples, rewards, evaluations."""
