"""Downstream tasks through lm-eval, with every key read as the packed cache gives it."""
