"""Rule-based rewards, each file with OpenRLHF's `reward_func(queries, prompts, labels, **kwargs)`."""
