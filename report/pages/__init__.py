"""Pages, charts and files of runs, also of one in progress."""
