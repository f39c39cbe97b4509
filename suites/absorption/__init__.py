"""Conformance tests of absorption: queries into the latent space, outputs out of it."""
