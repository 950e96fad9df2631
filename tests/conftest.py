"""Settings of the whole suite: one thread per worker, and no time limit on property tests."""

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
settings.register_profile(
    "quantmla", deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("quantmla")
