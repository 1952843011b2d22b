"""How are the glyphs drawn? A dataset that is rendered, not downloaded."""
