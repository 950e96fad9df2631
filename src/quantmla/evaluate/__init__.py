"""What a cache format costs: teacher-forced evaluation, divergence, recall, comparison."""
