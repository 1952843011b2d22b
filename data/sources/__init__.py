"""One file per dataset, or per kind of files."""
