"""What surrounds the update in a training run: the controller, the evaluation, the rewards."""
