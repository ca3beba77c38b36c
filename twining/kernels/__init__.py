"""One folder per operation: the plain-torch reference that defines it, and its faster forms."""
