"""RMSNorm, LayerNorm and L2 normalisation over the last dimension."""
