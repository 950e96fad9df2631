"""What a model's own attention sees on calibration tokens, with one decoder layer in memory."""
