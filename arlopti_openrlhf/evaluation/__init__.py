"""Accuracy by scores, in training and offline."""
