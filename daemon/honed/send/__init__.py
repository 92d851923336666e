"""honed-send: metrics, predictions, notices and wandb runs on their way out."""
