"""The trainer: checkpoints, evaluation and predictions, room, divergence, trackers."""
