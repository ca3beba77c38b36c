"""Training data of the demo model, made on the fly: corpus text, generated conversations, packing
into rows."""
