"""Which figures follow from the records? What `summary.json` holds."""
