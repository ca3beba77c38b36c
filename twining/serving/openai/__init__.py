"""The OpenAI-compatible endpoints: bodies, preparation, replies, streams."""
