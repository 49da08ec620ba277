"""One rollout batch becomes optimizer steps."""
