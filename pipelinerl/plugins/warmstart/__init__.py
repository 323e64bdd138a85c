"""`pipelinerl sft` and `pipelinerl warmstart`: supervised training before RL, of a recipe's model or a new tiny one."""
