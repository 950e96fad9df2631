"""Round to nearest: no transform, and the published quantiser, without page centring."""

from quantmla.method.identity import CALIBRATION, Options, fit, why_not_fused

__all__ = ["CALIBRATION", "PUBLISHED_FORMAT", "Options", "fit", "why_not_fused"]

PUBLISHED_FORMAT = True
