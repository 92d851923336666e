"""The trainer: checkpoints, evaluation and predictions, disk space, divergence, trackers."""
