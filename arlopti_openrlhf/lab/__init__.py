"""What is done outside of training: figures, offline evaluation, puzzles, the tiny policy, the quickstart."""
