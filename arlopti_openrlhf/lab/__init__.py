"""What is done beside training: figures, offline evaluation, puzzles, the tiny policy, the quickstart."""
