"""What does the driver do, the process that the user started? It starts the tasks, trains, records, and ends them."""
