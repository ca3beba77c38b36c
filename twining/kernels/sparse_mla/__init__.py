"""Absorbed multi-head latent attention over a selected set of positions."""
