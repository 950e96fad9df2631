"""Changes of basis of the two cached paths that fold exactly into the weights."""
