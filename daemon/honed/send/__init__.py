"""honed-send: delivery of metrics, predictions, notices and wandb runs.

What is still to be sent?                   send/outbox.py
"""
