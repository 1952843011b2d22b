"""Messages of driver, agents and tasks."""
