"""Elementwise functions that treat every row alike."""
