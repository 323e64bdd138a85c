"""The engine of the numpy bigram model, which tests of higher layers use in place of mocks."""
