"""Seeing what the blocks are and what they do."""
