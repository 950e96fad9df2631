"""QuantMLA: low-bit KV caches for Multi-head Latent Attention."""

__version__ = "0.1.0"
