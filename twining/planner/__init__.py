"""What fits where, before anything is loaded: bytes, splits, largest context, floors. No torch."""
