"""Runs what surrounds the update: the controller, the rewards, the advantages and the evaluation."""
