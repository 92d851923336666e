"""Precision, memory and backend of one job, with the reasons."""
