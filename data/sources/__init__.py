"""Where do datasets come from? One file a dataset, or a kind of files."""
