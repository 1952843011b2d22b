"""Tables of files: numbers, categories, and a column to predict."""
