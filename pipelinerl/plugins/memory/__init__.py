"""Prediction of device memory per process, from the recipe and the model's sizes alone."""
