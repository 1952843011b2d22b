"""Does a backend train as all the others do? A suite for pytest that third parties subclass for theirs; needs the package pytest."""
