"""Score models: sampling specifications, vLLM offline, accuracy with its intervals, tables."""
