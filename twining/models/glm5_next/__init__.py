"""GLM-5.3-Flash-class models (glm5_next): text trunk, MTP block, vision tower."""
