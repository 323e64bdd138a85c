"""Training backends, each an implementation of `trainer_contract.trainer.Trainer`."""
