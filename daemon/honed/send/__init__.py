"""honed-send: delivery of metrics, predictions, notices and wandb runs."""
