"""Benchmarks: each prints what it measured beside what was asked or computed."""
