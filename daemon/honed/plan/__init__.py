"""Precision, memory and backend of one job, with the reasons.

Where is the memory of a job estimated?     plan/memory.py, activations in plan/activation.py
"""
