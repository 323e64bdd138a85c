"""`pipelinerl watch`: a live web page of a run, made from its files; changes are sent to the run's controller."""
