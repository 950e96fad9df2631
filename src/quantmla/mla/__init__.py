"""The mathematics of Multi-head Latent Attention; imports torch and nothing else."""
