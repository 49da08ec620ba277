"""Make data and a small policy to train: puzzles, published data sets, rows, the warm start."""
