"""A run from outside: its driver, its processes' heartbeats, its signals and its end."""
