"""Conversations as text: chat templates, the places of turns, the independent check of a mask. No torch."""
