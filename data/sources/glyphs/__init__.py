"""How are the images of the glyph datasets drawn? A dataset that is rendered, not downloaded."""
