"""Cache planes of running sequences, addressed by logical position through page tables."""
