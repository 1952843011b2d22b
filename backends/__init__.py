"""How a framework executes the commands; the only code that runs one."""
