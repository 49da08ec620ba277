"""Look after any OpenRLHF run: its start, processes, rollouts, checkpoints, health and end."""
