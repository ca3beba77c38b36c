"""EXL3 trellis weights: decoding, the cache codec, the quantiser and whole-model conversion."""
