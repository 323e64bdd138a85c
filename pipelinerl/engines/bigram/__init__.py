"""The engine of the numpy bigram model, which tests above this floor use in place of mocks."""
