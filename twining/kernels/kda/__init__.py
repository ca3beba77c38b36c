"""Kimi delta attention: gates, recurrence, chunked form."""
