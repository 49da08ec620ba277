"""Puzzles, published data sets, and the tiny policy."""
