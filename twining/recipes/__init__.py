"""Community recipe documents: read, check, resolve into settings, publish. No torch."""
