"""Command line tools; the scripts in tools/ start them."""
