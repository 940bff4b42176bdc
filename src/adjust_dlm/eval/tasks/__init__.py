"""Downstream tasks, one file each, and what they share."""
