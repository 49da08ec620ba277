"""A run from outside: its driver, what it reports, its signals and its end."""
