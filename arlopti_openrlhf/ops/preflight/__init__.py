"""Checks in seconds, before anything starts, what would otherwise fail after minutes or in the tenth hour."""
