"""Rows as tensors: encoding, masks, media, batches."""
