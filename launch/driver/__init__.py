"""Who decides? The process that the user started: it starts the tasks, trains, records, and ends them."""
