"""A packed latent cache on the host side: which token is read how, and where its bytes lie."""
