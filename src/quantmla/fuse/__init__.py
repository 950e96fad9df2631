"""Folding of transforms into weights, and into whole checkpoints."""
