"""Is it worth compiling a job's steps? What the tasks measure of that, and what follows for all of them."""
