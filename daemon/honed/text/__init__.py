"""Conversations as text: chat templates, the places of turns, the independent check of a mask. No torch.

Where does a row become tokens?             text/chat.py; all rows of a job, worker/rows/encoder.py
What checks the mask?                       text/maskcheck.py
"""
