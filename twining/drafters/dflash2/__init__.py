"""DFlash2: a block drafter that reads the target's layer states (spec/dflash2.md)."""
