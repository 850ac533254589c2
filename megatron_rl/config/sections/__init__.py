"""The sections of a configuration: their keys, what these mean, and rules between few of them."""
