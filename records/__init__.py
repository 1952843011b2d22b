"""What did a run do, in figures? Records, the run directory, and the summary made from it."""
