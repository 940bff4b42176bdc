"""Scores of decoded text: likelihood under an autoregressive judge, MAUVE, diversity, downstream tasks."""
