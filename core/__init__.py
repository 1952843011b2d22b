"""Jobs, their settings, and the tasks that execute them."""
