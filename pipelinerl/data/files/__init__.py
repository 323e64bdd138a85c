"""Problems in files: discovery of files, parsing of rows, and the source that makes problems from rows."""
