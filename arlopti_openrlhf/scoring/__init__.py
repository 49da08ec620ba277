"""Accuracy with its intervals, sampling specifications, and responses from vLLM."""
