"""What a model's own attention sees on calibration tokens, one decoder layer in memory at a time."""
