"""Problems in files: which files there are, what their rows hold, and the source that makes problems of rows."""
