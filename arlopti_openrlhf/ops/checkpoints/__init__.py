"""Checkpoints that are whole or not there, and what a resumed run needs to be the same run."""
