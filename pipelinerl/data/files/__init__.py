"""Problems in files: finding the files, parsing their rows, and the source that turns rows into problems."""
