"""Prompts, corpora, trajectories and their store."""
