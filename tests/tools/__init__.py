"""Tests of the repository's tools."""
