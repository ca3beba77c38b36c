"""Linear layers over fixed blocks of rows."""
