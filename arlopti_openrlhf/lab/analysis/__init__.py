"""Compute and draw the paper's figures for your own models, data and runs: what `cli.analyze` calls."""
